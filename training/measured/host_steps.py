"""Steps of scripts whose ops the host runs itself, without what the profiler added to them.

A profiler takes time for every call that it records, within ops and between them: a step of many small ops is twice as
long with it.  Steps that were timed without it say how much of that is taken off (``dataset.overhead``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.imported.imported_run import ImportedRun
from stepsight.dataset.imported.rank_graph import OP, PHASES, RankGraph
from stepsight.dataset.op import Op
from stepsight.dataset.overhead import profiling_correction, without_overhead

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HostStep:
    """What one rank's host does in one step.

    Shapes: ``n`` ops in order.

    Attributes:
        name: Of the run.
        ops: ``(n,)`` signatures.
        calls: ``(n,)`` names of the framework's calls.
        phase: ``(n,)``: index of ``PHASES``.
        op_s: ``(n,)``: seconds without a profiler, the median over traced steps.
        step_s: Median seconds of a step that was timed without a profiler.
    """

    name: str
    ops: tuple[Op, ...]
    calls: tuple[str, ...]
    phase: Ints
    op_s: Floats
    step_s: float

    def counts(self) -> Floats:
        """Number of ops by phase, shape ``(len(PHASES),)``."""
        return np.bincount(self.phase, minlength=len(PHASES)).astype(np.float64)


def host_step(run: ImportedRun) -> HostStep | None:
    """The step of an imported run of one rank that computes on its host; None where it is none, or was not timed."""
    graphs = run.graphs()
    steps = [seconds for each in run.rounds for seconds in each]
    if len(graphs) != 1 or graphs[0].device != "cpu" or not steps or not len(graphs[0].steps_s):
        return None
    graph, step_s = graphs[0], float(np.median(steps))
    nodes = graph.nodes
    inside = np.flatnonzero((nodes["kind"] == OP) & (nodes["step"] >= 0))
    by_step = [inside[nodes["step"][inside] == step] for step in range(len(graph.steps_s))]
    alike = _alike(graph, by_step)
    if not alike:
        return None
    lengths = graph.steps_s[:, 1] - graph.steps_s[:, 0]
    profiled = float(np.median([lengths[step] for step in alike]))
    recorded = graph.events / len(graph.steps_s)
    correction = profiling_correction(step_s, profiled, recorded, 0.0)
    seconds = np.median(
        [
            correction.drift
            * without_overhead(
                graph.duration_s[by_step[step]],
                nodes["recorded"][by_step[step]].astype(np.float64),
                correction.per_event_s,
            )
            for step in alike
        ],
        axis=0,
    )
    first = by_step[alike[0]]
    works = [graph.works[work] for work in nodes["work"][first].tolist()]
    ops = tuple(work for work in works if isinstance(work, Op))
    calls = tuple(graph.names[name] for name in nodes["name"][first].tolist())
    phase = np.maximum(nodes["phase"][first], 0)
    return HostStep(run.name, ops, calls, phase, seconds, step_s)


def _alike(graph: RankGraph, by_step: Sequence[Ints]) -> list[int]:
    """Steps that run the same ops as most do; the last one, which another observer slows, only where it is alone."""
    works = [tuple(graph.nodes["work"][nodes].tolist()) for nodes in by_step]
    told = works[:-1] or works
    usual = max(set(told), key=told.count, default=())
    return [step for step, each in enumerate(told) if each == usual and usual]
