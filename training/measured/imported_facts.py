"""Execution facts from imported traces of a GPU: launch times, and the slowdown of compute that overlaps with
collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Hardware, launch_units
from stepsight.dataset.op import Op
from stepsight.dataset.overhead import USUAL_PER_EVENT_S

if TYPE_CHECKING:
    from stepsight.dataset.imported.learning_steps import StepWorks

Floats = NDArray[np.float64]

FEWEST_LAUNCHES = 20  # fewest launches of a kind for its launch time
FEWEST_BESIDE, LEAST_BESIDE_S = 50, 1e-3  # fewest overlapping ops, and least time of them, for the slowdown
_STALL = 5.0  # times the median of a kind: the host waited
_LEAST_S = 5e-7  # least time of any launch
_BESIDE, _ALONE = 0.5, 0.02  # share of an op that overlaps with a collective


@dataclass(frozen=True)
class Overlap:
    """The slowdown of compute that overlaps with collectives.

    Attributes:
        share: Part of the overlapped time that is lost: ``Hardware.comm_compute_share``.
        ops: Overlapped ops that have the same kernel of the same signature without overlap.
        seconds: Overlapped.
        slowdown: How many times as long those ops take together.
    """

    share: float
    ops: int
    seconds: float
    slowdown: float


def with_facts(hardware: Hardware, launches: Mapping[str, float], overlap: Overlap | None) -> Hardware:
    """The hardware with launches and overlap from traces; its source says so."""
    changes: dict[str, Any] = {}
    if launches:
        kinds = {**hardware.host_kinds_s, **launches}
        changes = {"host_kinds_s": kinds, "host_op_s": hardware.host_op_s or float(np.median(list(kinds.values())))}
    if overlap is not None:
        changes["comm_compute_share"] = overlap.share
    told = " and ".join(name for key, name in _NAMED.items() if key in changes)
    return replace(hardware, **changes, source=f"{hardware.source}; {told} by imported traces") if changes else hardware


_NAMED = {"host_kinds_s": "launches", "comm_compute_share": "overlap"}


def overlap_of(steps: Sequence[StepWorks]) -> Overlap | None:
    """The slowdown of compute that overlaps with collectives; None if the traces do not show it."""
    lost, beside_s, count, alone_s = 0.0, 0.0, 0, 0.0
    for step in steps:
        op = np.array([isinstance(work, Op) for work in step.works], dtype=np.bool_)
        part = step.beside_s / np.maximum(step.seconds, 1e-9)
        usual = _medians(step.kernel, step.seconds, op[step.work] & (part <= _ALONE))
        chosen = op[step.work] & (part >= _BESIDE) & ~np.isnan(usual)
        alone = usual[chosen]
        lost += float((step.seconds[chosen] - alone).sum())
        beside_s += float(step.beside_s[chosen].sum())
        alone_s += float(alone.sum())
        count += int(chosen.sum())
    if count < FEWEST_BESIDE or beside_s < LEAST_BESIDE_S:
        return None
    return Overlap(float(np.clip(lost / beside_s, 0.0, 1.0)), count, beside_s, 1.0 + lost / alone_s if alone_s else 1.0)


def _medians(keys: NDArray[np.int64], values: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """``(n,)``: median of the chosen values with each row's key, NaN if there are none."""
    rows = np.flatnonzero(chosen)
    out = np.full(int(keys.max(initial=-1)) + 1, np.nan)
    order = rows[np.lexsort((values[rows], keys[rows]))]
    distinct, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    out[distinct] = values[order[first + counts // 2]]
    return out[keys]


def launch_seconds(steps: Sequence[StepWorks]) -> dict[str, float]:
    """Seconds that the host takes to launch an op or collective of each kind with enough launches.

    From one launch of a thread to the next, less what the profiler takes for the calls that it records between.
    """
    found: dict[str, list[float]] = {}
    for step in steps:
        known = np.flatnonzero(step.launch_s > 0)
        less = np.minimum(USUAL_PER_EVENT_S * step.launch_events, 0.5 * step.launch_s)
        for number, seconds in zip(step.work[known].tolist(), (step.launch_s - less)[known].tolist(), strict=True):
            launched = step.works[number]
            found.setdefault(launched.kind, []).append(seconds / launch_units(launched))
    out = {}
    for kind, values in sorted(found.items()):
        if len(values) >= FEWEST_LAUNCHES:
            spent = np.array(values)
            out[kind] = max(float(spent[spent <= _STALL * np.median(spent)].mean()), _LEAST_S)
    return out
