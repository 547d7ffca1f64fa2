"""The graph of a rank that computes on a device: the host's launches, and the dependencies of each kernel.

Delays of the device's own (from a launch to its kernel, from one kernel to the next, from an event to who waits for
it) are one number each for the whole trace: the mean of those that were seen where nothing else was waited for.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np

from stepsight.dataset.graph.columns import Floats, Ints
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.traces.classify import parse_annotation
from stepsight.dataset.traces.event_columns import Interned, RankEvents, Table, picked
from stepsight.dataset.traces.host_calls import Steps, chain, in_order

LAUNCH_US, GAP_US, EVENT_US = 1.7, 1.2, 2.5  # delays of devices if a trace does not show them
_MOST_OWN_GAP_US = 20.0  # longest usual delay between two kernels
_MOST_LAUNCH_US = 50.0  # longest usual delay from the end of a launch to the kernel on an idle stream
_HELD_US = 10.0  # time by which a kernel may start before its call ends, if the call continues for other reasons
_NEAR_US = 3.0  # deviation from the median up to which delays count as usual
_BLOCKED_US = 10.0  # if its call lasts longer, and until the copy ends, the host waited for the copy
_SPIN = "spin_kernel"  # torch's, by which a stand-in lets the time of a collective pass


@dataclass
class Parts:
    """A graph while it grows: the host's calls first, then the device's events, each in order; microseconds."""

    calls: Table  # of the host
    row: Ints  # ``(d,)``: row of the runtime table that launched each device event, -1: unknown
    launch: Ints  # ``(d,)``: call of that row, -1: unknown
    previous: Ints  # ``(d,)``: event before each on its stream, -1: none
    names: Interned  # of calls
    waits: Ints  # calls of the host that wait for the device
    edges: list[tuple[Ints, Ints, Dependency, Floats]]  # source, target, kind and delay of each dependency
    constants: dict[str, float]  # delays of the device: ``launch``, ``gap`` and ``event``


def is_wait(name: str) -> bool:
    """Whether a call of the runtime waits for the device."""
    return "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy", "cudaMemcpyToSymbol", "cudaFree", "hipFree")


def launch_rows(events: RankEvents) -> Ints:
    """Row of the runtime table that launched each device event, by correlation, else by external id; -1: unknown."""
    device, runtime = events.device, events.runtime
    rows = _matching(device["correlation"], runtime["correlation"])
    return np.where(rows < 0, _matching(device["external"], runtime["external"]), rows)


def with_assumed_launches(events: RankEvents) -> RankEvents:
    """Events with a launch for kernels whose own was not recorded but whose framework call is known: that call."""
    device, ops, runtime = events.device, events.ops, events.runtime
    called = _matching(device["external"], ops["external"])
    absent = (launch_rows(events) < 0) & (called >= 0) & (device["external"] > 0)
    if not absent.any():
        return events
    rows = np.unique(called[absent])
    names = [*events.names, "assumed launch"]
    calls = Table(ops.start[rows], ops.end[rows], {name: ops[name][rows] for name in ("thread", "external")})
    calls.columns |= {"name": np.full(len(rows), len(names) - 1), "correlation": np.full(len(rows), -1)}
    told = f"launches were not recorded for {int(absent.sum())} of {len(device)} kernels: their framework calls count"
    changed = copy(events)
    changed.runtime, changed.names, changed.warnings = runtime.joined(calls), names, [*events.warnings, told]
    return changed


def with_stand_ins(events: RankEvents) -> RankEvents:
    """Events in which the spinning of a stand-in is its collective; what else its call runs meanwhile is left out."""
    calls = [each for each in events.annotations if each.name.startswith("stepsight::collective")]
    modelled = [each for each in events.annotations if each.name.startswith("stepsight::modelled")]
    device, rows, args = events.device, launch_rows(events), dict(events.collective_args)
    if not modelled or not len(events.runtime):
        return events
    spins = np.array([_SPIN in name for _, name, _ in events.kernels], dtype=np.bool_)[device["kernel"]]
    issued, thread = events.runtime.start[rows], np.where(rows >= 0, events.runtime["thread"][rows], -1)
    keep = np.ones(len(device), dtype=np.bool_)
    for call in calls:
        if any(each.thread == call.thread and call.start <= each.start < call.end for each in modelled):
            inside = (thread == call.thread) & (call.start <= issued) & (issued < call.end)
            keep &= spins | ~inside
            args |= dict.fromkeys(np.flatnonzero(inside & spins).tolist(), parse_annotation(call.name))
    place = np.cumsum(keep) - 1
    args = {int(place[row]): said for row, said in args.items() if keep[row]}
    changed = copy(events)
    changed.device, changed.collective_args = device.take(keep), args
    return changed


def _matching(wanted: Ints, given: Ints) -> Ints:
    """Last index of each wanted value among the given ones, -1: none."""
    if not len(given):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(given, kind="stable")
    place = np.searchsorted(given[order], wanted, "right") - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (given[found] == wanted) & (wanted >= 0), found, -1)


def tie(events: RankEvents, steps: Steps, rows: Ints) -> Parts:
    """Connect a rank's host calls and device events by host order, launches and stream order."""
    device, runtime = events.device, events.runtime
    waiting = np.array([is_wait(name) for name in events.names], dtype=np.bool_)[runtime["name"]]
    launching = np.zeros(len(runtime), dtype=np.bool_)
    launching[rows[rows >= 0]] = True
    by_stream = np.argsort(device["stream"], kind="stable")
    previous, same = np.full(len(device), -1, dtype=np.int64), np.diff(device["stream"][by_stream]) == 0
    previous[by_stream[1:][same]] = by_stream[:-1][same]
    names = Interned({name: number for number, name in enumerate(events.names)})
    idle = np.flatnonzero((rows >= 0) & (picked(device.end, previous, -np.inf) < picked(runtime.start, rows, 0.0)))
    staged = dict(zip(rows[idle].tolist(), (device.start[idle] - LAUNCH_US).tolist(), strict=True))
    copies = np.array([category.endswith("memcpy") for category, _, _ in events.kernels], dtype=np.bool_)
    chosen = np.flatnonzero(copies[device["kernel"]] & (rows >= 0))  # copies whose calls return only when they end
    begin, end, until = runtime.start[rows[chosen]], runtime.end[rows[chosen]], device.end[chosen]
    waited = rows[chosen[(end >= until - 1.0) & (until > begin) & (end - begin > _BLOCKED_US)]]
    blocked = {row: staged.get(row, np.nan) for row in np.unique(waited).tolist()}
    calls, first, last = _host_calls(events, steps, np.flatnonzero(waiting | launching), blocked, names)
    waits = np.unique(np.concatenate([last[waiting], last[list(blocked)]]))
    source, target, delay = chain(calls, events)
    edges = [(source, target, Dependency.HOST_ORDER, delay)]
    parts = Parts(calls, rows, picked(first, rows, -1), previous, names, waits, edges, {"event": EVENT_US})
    _add_launches(parts, events)
    known = np.flatnonzero(previous >= 0)
    gaps = np.full(len(known), parts.constants["gap"])
    edges.append((len(calls) + previous[known], len(calls) + known, Dependency.STREAM_ORDER, gaps))
    return parts


def _host_calls(
    events: RankEvents, steps: Steps, rows: Ints, blocked: dict[int, float], names: Interned
) -> tuple[Table, Ints, Ints]:
    """Host calls, and for each row of the runtime table the call in which it begins and that in which it ends.

    A copy that the host waits for is two calls: the launch, and the wait.  ``blocked`` holds them by row, with the
    time at which an idle device began the copy: until then the host prepared it.
    """
    runtime = events.runtime
    start, end, thread, name = runtime.start[rows], runtime.end[rows], runtime["thread"][rows], runtime["name"][rows]
    usual = float(np.median(end - start)) if len(rows) else 0.0
    split = np.isin(rows, list(blocked))
    begun = np.array([blocked[row] for row in rows[split].tolist()])
    middle = np.clip(np.where(np.isnan(begun), start[split] + usual, begun), start[split], end[split])
    main = steps.thread if steps.thread >= 0 else int(np.bincount(thread).argmax()) if len(thread) else 0
    marks = sorted({moment for bounds in steps.bounds for moment in bounds})
    begin_s = start[split]
    start[split] = middle
    calls = in_order(
        np.concatenate([start, begin_s, marks]),
        np.concatenate([end, middle, marks]),
        np.concatenate([thread, thread[split], np.full(len(marks), main)]),
        np.concatenate([rows, rows[split], np.full(len(marks), -1)]),
        np.concatenate([name, name[split], np.full(len(marks), names["step"])]),
    )
    first, last = np.full((2, len(runtime)), -1, dtype=np.int64)
    places = np.flatnonzero(calls["row"] >= 0)
    last[calls["row"][places]] = places
    first[calls["row"][places[::-1]]] = places[::-1]
    return calls, first, last


def _usual(delays: Floats, most: float, otherwise: float) -> float:
    """Mean of the delays near their median; ``otherwise`` if there are none, or the median is beyond ``most``."""
    if len(delays) and np.median(delays) > most:  # they waited for something else: short ones may be the device's own
        delays = delays[delays <= most / 4]
    middle = float(np.median(delays)) if len(delays) else 0.0
    near = delays[np.abs(delays - middle) <= max(_NEAR_US, abs(middle))]
    return float(np.mean(near)) if len(near) else otherwise


def _add_launches(parts: Parts, events: RankEvents) -> None:
    """Launch edges, and the constants of the device."""
    device, calls, called = events.device, parts.calls, parts.launch >= 0
    call_start, call_end = (picked(values, parts.launch, np.nan) for values in (calls.start, calls.end))
    before = picked(device.end, parts.previous, -np.inf)
    late, gap = device.start - call_end, device.start - before
    idle = called & (call_start > before + 1.0) & (late > -_MOST_LAUNCH_US)
    queued = (parts.previous >= 0) & (~called | (call_end < before - 2.0)) & (gap >= 0)
    parts.constants["launch"] = _usual(late[idle], _MOST_LAUNCH_US, LAUNCH_US)
    parts.constants["gap"] = _usual(gap[queued], _MOST_OWN_GAP_US, GAP_US)
    rows = np.flatnonzero(called)
    length, late = (call_end - call_start)[rows], late[rows]
    usual = float(np.median(length)) if len(rows) else 0.0
    delay = np.full(len(rows), parts.constants["launch"])
    ahead = delay - late  # how much earlier the kernel starts than the call explains
    early = ahead > 1.0
    held = early & (ahead > usual + _HELD_US)  # the call continued for other reasons than the launch
    delay[held] += np.minimum(usual - length[held], 0.0)
    delay[early] = np.minimum(delay[early], late[early])
    delay[early & ~held] = late[early & ~held]
    parts.edges.append((parts.launch[rows], len(calls) + rows, Dependency.LAUNCH, delay))
