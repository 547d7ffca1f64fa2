"""Whole steps of the dataset for training: ops, collectives and their launches, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.trace_graphs.graph_schema import NUMBERS, WORK_TYPES, work_of
from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LAUNCHED = ("log_blocks", "log_threads", "registers", "log_shared_bytes")


@dataclass(frozen=True)
class StepWorks:
    """Ops and collectives of traced steps, one row for each kernel.

    Shapes: ``n`` rows.

    Attributes:
        works: Distinct signatures.
        work: ``(n,)``: index of ``works``.
        kernel: ``(n,)``: number of the signature and how it was launched: equal kernels have equal numbers.
        seconds: ``(n,)``: as traced.
        beside_s: ``(n,)``: of these, beside a collective.
        launch_s: ``(n,)``: of the host, 0 where they are not known.
        launch_events: ``(n,)``: calls recorded in that time.
    """

    works: tuple[Op | Collective, ...]
    work: Ints
    kernel: Ints
    seconds: Floats
    beside_s: Floats
    launch_s: Floats
    launch_events: Floats


def step_works(graphs: TraceGraphs, places: Sequence[int]) -> StepWorks:
    """The work in some graphs of steps, without the collectives of other ranks."""
    names = ("kind", "signature", "x", "y", "beside", "launch", "node")
    parts = [[graphs.column(kind, name, places)[0] for name in names] for kind in WORK_TYPES]
    kind, exact, x, logs, beside, launch, node = (np.concatenate(each) for each in zip(*parts, strict=True))
    own = np.flatnonzero(node >= 0)
    rows = np.concatenate([kind[own, None], exact[own]], axis=1)
    distinct, work = np.unique(rows, axis=0, return_inverse=True)
    works = tuple(work_of(graphs.kinds[row[0]], row[1:]) for row in distinct.tolist())
    work = work.reshape(-1)
    launched = x[own][:, [NUMBERS.index(name) for name in _LAUNCHED]]
    _, kernel = np.unique(np.concatenate([work[:, None], launched], axis=1), axis=0, return_inverse=True)
    seconds = np.exp(logs[own, 1].astype(np.float64))
    return StepWorks(works, work, kernel.reshape(-1), seconds, beside[own], launch[own, 0], launch[own, 1])
