"""Facts of execution that imported traces of a GPU tell: what launches cost, what compute loses beside collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Hardware, launch_units
from stepsight.dataset.imported.busy_time import covered
from stepsight.dataset.imported.device_graph import is_wait
from stepsight.dataset.imported.rank_graph import COLLECTIVE, HOST, OP, WHY_NUMBER, RankGraph
from stepsight.dataset.overhead import USUAL_PER_EVENT_S
from stepsight.dataset.program import Dependency

Floats = NDArray[np.float64]

FEWEST_LAUNCHES = 20  # of a kind that tell what one costs
FEWEST_BESIDE, LEAST_BESIDE_S = 50, 1e-3  # ops beside collectives, and their time, that tell what overlap costs
_STALL = 5.0  # times the median of a kind: the host waited for something
_LEAST_S = 5e-7  # that any launch takes
_BESIDE, _ALONE = 0.5, 0.02  # part of an op that runs beside a collective


@dataclass(frozen=True)
class Overlap:
    """What compute loses beside collectives.

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
    """The hardware with launches and overlap as traces say, and a source that says so."""
    changes: dict[str, Any] = {}
    if launches:
        kinds = {**hardware.host_kinds_s, **launches}
        changes = {"host_kinds_s": kinds, "host_op_s": hardware.host_op_s or float(np.median(list(kinds.values())))}
    if overlap is not None:
        changes["comm_compute_share"] = overlap.share
    told = " and ".join(name for key, name in _NAMED.items() if key in changes)
    return replace(hardware, **changes, source=f"{hardware.source}; {told} by imported traces") if changes else hardware


_NAMED = {"host_kinds_s": "launches", "comm_compute_share": "overlap"}


def overlap_of(graphs: Sequence[RankGraph]) -> Overlap | None:
    """What compute loses beside collectives, None where the traces do not tell."""
    lost, beside_s, count, alone_s = 0.0, 0.0, 0, 0.0
    for graph in graphs:
        kinds = graph.nodes["kind"]
        ops, others = np.flatnonzero(kinds == OP), np.flatnonzero(kinds == COLLECTIVE)
        if not len(others) or not len(ops):
            continue
        start, end = graph.start_s, graph.end_s
        beside = covered(start[others], end[others], start[ops], end[ops])
        duration = graph.duration_s[ops]
        part = beside / np.maximum(duration, 1e-9)
        keys = graph.nodes["work"][ops] * (len(graph.names) + 1) + graph.nodes["name"][ops]
        usual = _medians(keys, duration, part <= _ALONE)
        alone = np.array([usual.get(key, np.nan) for key in keys.tolist()])
        chosen = (part >= _BESIDE) & ~np.isnan(alone)
        lost += float((duration - alone)[chosen].sum())
        beside_s += float(beside[chosen].sum())
        alone_s += float(alone[chosen].sum())
        count += int(chosen.sum())
    if count < FEWEST_BESIDE or beside_s < LEAST_BESIDE_S:
        return None
    return Overlap(float(np.clip(lost / beside_s, 0.0, 1.0)), count, beside_s, 1.0 + lost / alone_s if alone_s else 1.0)


def _medians(keys: NDArray[np.int64], values: Floats, chosen: NDArray[np.bool_]) -> dict[int, float]:
    """Median value of each key, of those chosen."""
    keys, values = keys[chosen], values[chosen]
    order = np.lexsort((values, keys))
    distinct, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    return dict(zip(distinct.tolist(), values[order][first + counts // 2].tolist(), strict=True))


def launch_seconds(graphs: Sequence[RankGraph]) -> dict[str, float]:
    """Seconds that the host takes to launch an op or collective of each kind that was launched often enough.

    From one launch of a thread to the next, less what the profiler takes for the calls that it records between.
    """
    found: dict[str, list[float]] = {}
    for graph in graphs:
        if graph.device == "cpu":
            continue
        for kind, seconds in _launches(graph).items():
            found.setdefault(kind, []).extend(seconds)
    out = {}
    for kind, values in sorted(found.items()):
        if len(values) >= FEWEST_LAUNCHES:
            spent = np.array(values)
            out[kind] = max(float(spent[spent <= _STALL * np.median(spent)].mean()), _LEAST_S)
    return out


def _launches(graph: RankGraph) -> dict[str, list[float]]:
    """Host seconds of each call that launched something, by kind of what it launched."""
    own = _host_seconds(graph)
    edges = np.flatnonzero(graph.edges["why"] == WHY_NUMBER[Dependency.LAUNCH])
    source, target = graph.edges["source"][edges], graph.edges["target"][edges]
    recorded = max(graph.events - int(graph.on_device.sum()), 0) / max(len(np.unique(source)), 1)
    profiled = USUAL_PER_EVENT_S * recorded
    calls: dict[tuple[int, int], list[int]] = {}
    for host, node in zip(source.tolist(), target.tolist(), strict=True):
        call, work = int(graph.nodes["call"][node]), int(graph.nodes["work"][node])
        if work >= 0 and graph.nodes["step"][node] >= 0:
            calls.setdefault((call if call >= 0 else -2 - node, work), []).append(host)
    found: dict[str, list[float]] = {}
    for (_, number), hosts in calls.items():
        spent = own[np.unique(hosts)]
        if not np.isnan(spent).any():
            launched, less = graph.works[number], min(profiled * len(spent), 0.5 * float(spent.sum()))
            found.setdefault(launched.kind, []).append((float(spent.sum()) - less) / launch_units(launched))
    return found


def _host_seconds(graph: RankGraph) -> Floats:
    """``(n,)``: what each call of the host takes, with the host's work since the call before it on its thread; NaN for
    the first, for calls that wait for the device, and after loading data."""
    out = np.full(len(graph), np.nan)
    waits = np.array([is_wait(name) for name in graph.names], dtype=np.bool_)[graph.nodes["name"]]
    host = graph.nodes["kind"] == HOST
    for stream in np.unique(graph.nodes["stream"][host]).tolist():
        nodes = np.flatnonzero(host & (graph.nodes["stream"] == stream))
        marked = np.array([graph.names[name] == "step" for name in graph.nodes["name"][nodes]], dtype=np.bool_)
        nodes = nodes[~marked]
        out[nodes[1:]] = graph.end_s[nodes[1:]] - graph.end_s[nodes[:-1]]
    out[waits] = np.nan
    for begin, until in graph.loading_s.tolist():
        out[(graph.start_s >= begin) & (graph.start_s - out <= until)] = np.nan
    return out
