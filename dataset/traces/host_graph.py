"""The graph of a rank that computes on its host: calls of its threads in order, and the collectives they wait for."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.intervals import merge, overlap
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_graph import COLLECTIVE, HOST, OP, RankGraph
from stepsight.dataset.graph.rank_trace import Placement
from stepsight.dataset.kinds.op import OP_KINDS, Collective, Op
from stepsight.dataset.traces.assembly import Assembly, Edges
from stepsight.dataset.traces.call_tree import CallTree, HostCalls, annotated_phases, chain
from stepsight.dataset.traces.classify import intern_op
from stepsight.dataset.traces.event_columns import Interned, RankEvents
from stepsight.dataset.traces.kernel_kinds import named_kind
from stepsight.dataset.traces.kineto_ranks import host_works, main_thread
from stepsight.dataset.traces.rank_works import Wait
from stepsight.dataset.traces.step_bounds import Steps, find_steps
from stepsight.dataset.traces.sweep import Work, sweep

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOST_AT_ONCE = 64  # collectives of one stream that may be in flight
_FUSED = "kind=fused_loops"  # in the annotation of a compiled function
_COMPILED = "## Call CompiledFxGraph"  # what Inductor calls its functions in traces
_LAST = 2**62  # larger than the number of any collective
_MOST_EARLY_US = 1000.0  # clock error by which a wait may end before the awaited call


@dataclass
class _Host:
    """The activity of a host; microseconds. ``works`` has ops, then collectives, each in order of issue."""

    ops: list[Work]
    collectives: list[Work]
    waits: list[Wait]
    main: int


def host_graph(events: RankEvents, tree: CallTree, world_size: int, placement: Placement, rank: int) -> RankGraph:
    """The graph of a rank without device events.

    Raises:
        TraceError: If it holds nothing that could be a node.
    """
    host = _read(events, rank, world_size, placement)
    if not host.ops and not host.collectives:
        raise TraceError(f"a trace must hold at least one op or collective, got none in {events.path}")
    steps = find_steps(events, tree, np.zeros(0))
    names = Interned()
    calls, kind, item = _calls(host, steps, names)
    order = chain(calls, events)
    idle = merge([(wait.start, wait.end) for wait in host.waits])
    waited = overlap(idle, calls.end[order.source], calls.start[order.target])
    delay = np.maximum(order.delay - waited, 0.0)
    edges = [(order.source, order.target, Dependency.HOST_ORDER, delay), *_around(host, calls, kind, item)]
    graph = _assemble(events, tree, steps, host, (calls, kind, item, names), edges)
    graph.warnings = tuple(dict.fromkeys([*events.warnings, *steps.warnings, *_compiled(events)]))
    return graph


def _compiled(events: RankEvents) -> list[str]:
    """What to say of functions that ``torch.compile`` made, where no annotation tells of their fused loops."""
    told = [*events.names, *(mark.name for mark in events.annotations)]
    if not any(name.startswith(_COMPILED) for name in told) or any(_FUSED in name for name in told):
        return []
    return [
        "the step calls functions of torch.compile: calls of libraries within them are ops, and the time of fused "
        "kernels counts as the host's, since no trace of a CPU has them"
    ]


def _read(events: RankEvents, rank: int, world_size: int, placement: Placement) -> _Host:
    swept = sweep(events)
    info = events.header.get("distributedInfo") or {}
    main = main_thread(swept)
    works, waits = host_works(swept, info, rank, world_size, placement)
    ops = [work for work in works if isinstance(work.work, Op)]
    collectives = [work for work in works if isinstance(work.work, Collective)]
    return _Host(ops, collectives, waits, main or 0)


def _calls(host: _Host, steps: Steps, names: Interned) -> tuple[HostCalls, Ints, Ints]:
    """Ops, issues of collectives and bounds of steps as calls; the type of each, and its index within the type."""
    streams = {"compute": host.main}
    for work in host.ops:
        streams.setdefault(work.stream, -len(streams))
    marks = sorted({moment for bounds in steps.bounds for moment in bounds})
    issued = [work.issue for work in host.collectives]
    start = np.array([*(work.start for work in host.ops), *issued, *marks], dtype=np.float64)
    end = np.array([*(work.end for work in host.ops), *issued, *marks], dtype=np.float64)
    thread = [*(streams[work.stream] for work in host.ops), *([host.main] * (len(issued) + len(marks)))]
    name = [names(work.name) for work in host.ops]
    name += [names(f"issue {work.name}") for work in host.collectives] + [names("step")] * len(marks)
    kind = np.repeat([OP, COLLECTIVE, HOST], [len(host.ops), len(issued), len(marks)])
    item = np.concatenate([np.arange(len(each)) for each in (host.ops, issued, marks)]).astype(np.int64)
    calls = HostCalls(start, end, np.array(thread, np.int64), np.arange(len(start)), np.array(name, np.int64)).sorted()
    return calls, kind[calls.row], item[calls.row]


def _around(host: _Host, calls: HostCalls, kind: Ints, item: Ints) -> list[Edges]:
    """Launches of collectives, their order on their streams, and waits for them; collectives follow the calls."""
    base = len(calls)
    issue = np.full(len(host.collectives), -1, dtype=np.int64)
    issues = np.flatnonzero(kind == COLLECTIVE)
    issue[item[issues]] = issues
    launches: list[float] = []
    ordered: list[tuple[int, int, float]] = []
    ended: dict[Any, list[tuple[float, int]]] = {}  # by stream: ends of the newest collectives before, in order
    for number, work in enumerate(host.collectives):
        before = ended.setdefault(work.stream, [])
        place = bisect_left(before, (work.start, _LAST)) - 1  # several are sent at once: the queue is for a free thread
        queued = place >= 0 and before[place][0] > work.issue
        if place >= 0:
            end, other = before[place]
            ordered.append((base + other, base + number, work.start - end if queued else 0.0))
        at = calls.end[issue[number]]
        launches.append(0.0 if queued else work.start - at)
        insort(before, (work.end, number))
        del before[:-_MOST_AT_ONCE]
    found: dict[int, dict[int, float]] = {}  # by what waits: delays after the awaited work
    numbers = {id(work): number for number, work in enumerate(host.collectives)}
    mains = np.flatnonzero(calls.thread == host.main)
    starts = calls.start[mains].tolist()
    for wait in host.waits:
        place = bisect_left(starts, wait.end - 1e-3)
        number = numbers.get(id(wait.work), -1)
        if place < len(mains) and number >= 0:
            target = int(mains[place])
            held = wait.work.end > wait.start or wait.end > wait.start  # otherwise it had ended before the wait
            delay = float(calls.start[target]) - wait.work.end if held else 0.0
            if delay > -_MOST_EARLY_US and host.collectives[number].start <= calls.start[target]:
                found.setdefault(target, {})[base + number] = delay
    waits = [
        (source, target, delay if source == max(delays, key=lambda each: host.collectives[each - base].end) else 0.0)
        for target, delays in found.items()
        for source, delay in delays.items()
    ]  # of several, the last one to end is waited for; the others had ended
    everyone = np.arange(len(host.collectives), dtype=np.int64)
    return [
        (issue, base + everyone, Dependency.LAUNCH, np.array(launches, dtype=np.float64)),
        _columns(ordered, Dependency.STREAM_ORDER),
        _columns(waits, Dependency.SYNCHRONISATION),
    ]


def _columns(edges: list[tuple[int, int, float]], why: Dependency) -> Edges:
    source, target, delay = (np.array([edge[column] for edge in edges]) for column in range(3))
    return source.astype(np.int64), target.astype(np.int64), why, delay.astype(np.float64)


def _assemble(
    events: RankEvents,
    tree: CallTree,
    steps: Steps,
    host: _Host,
    called: tuple[HostCalls, Ints, Ints, Interned],
    edges: list[Edges],
) -> RankGraph:
    calls, kind, item, names = called
    base, joined = len(calls), host.collectives
    start = np.concatenate([calls.start, [work.start for work in joined]])
    built = Assembly(
        start=start,
        end=np.concatenate([calls.end, [max(work.end, work.start) for work in joined]]),
        key=start,
        issued=np.concatenate([calls.start, [work.issue for work in joined]]),
        edges=edges,
        steps=steps,
        names=names,
    )
    nodes = built.columns
    nodes["known"][:] = 1
    nodes["kind"][:base] = np.where(kind == OP, OP, HOST)
    nodes["kind"][base:] = COLLECTIVE
    nodes["name"][:base] = calls.name
    rows = np.searchsorted(events.ops.start, calls.start - 1e-6)
    built.streams("compute")
    for node in range(base):
        stream = "compute"
        if kind[node] == OP:
            work = host.ops[item[node]]
            stream = str(work.stream)
            op = work.work
            nodes["recorded"][node] = work.recorded
            known = named_kind(work.name) if not work.known and isinstance(op, Op) else None
            if known is not None and isinstance(op, Op):
                alike = len(OP_KINDS[known].dim_names) == len(op.dims)
                op = intern_op(known, op.dims if alike else (0,) * len(OP_KINDS[known].dim_names), op.dtype)
            nodes["work"][node], nodes["known"][node] = built.works(op), int(work.known or known is not None)
            if rows[node] < len(events.ops) and abs(events.ops.start[rows[node]] - calls.start[node]) < 1e-3:
                nodes["call"][node] = rows[node]
        nodes["stream"][node] = built.streams(stream)
    for number, work in enumerate(joined):
        node = base + number
        nodes["work"][node], nodes["stream"][node] = built.works(work.work), built.streams(str(work.stream))
        nodes["name"][node] = names(work.name)
        built.meet(node, work.meets)
    called_rows = nodes["call"] >= 0
    nodes["phase"][called_rows] = tree.phase[nodes["call"][called_rows]]
    work = (nodes["kind"] != HOST) & ~called_rows  # without a framework call: collectives, ops that sleep
    nodes["phase"][work] = annotated_phases(events.annotations, built.issued)[work]
    return built.graph("cpu", "cpu", events.num_events)
