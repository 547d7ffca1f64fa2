"""The graph of a rank that computes on its host: its ops, calls of its threads in order, and awaited collectives."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.columns import Flags, Floats, HostRecord, Ints, Span, merge, overlap
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, Dependency, Program
from stepsight.dataset.graph.rank_trace import Placement, Rendezvous, is_message
from stepsight.dataset.kinds import c10d_calls, gloo_spans
from stepsight.dataset.kinds.op import OP_KINDS, Collective, Op
from stepsight.dataset.kinds.op_kinds import count
from stepsight.dataset.traces import classify, host_calls
from stepsight.dataset.traces.assembly import MICROSECOND, Assembly, Edges
from stepsight.dataset.traces.classify import NAMES, annotated_op, intern_op, parse_annotation
from stepsight.dataset.traces.event_columns import Annotation, Interned, RankEvents, Table
from stepsight.dataset.traces.host_calls import CallTree, Steps, call_tree
from stepsight.dataset.traces.kernel_kinds import KernelKinds, named_kind

Wait = tuple[int, float, float]  # number of a collective for which the main thread waits, begin and end; microseconds

_MOST_AT_ONCE = 64  # collectives of one stream that may be in flight
_FUSED = "kind=fused_loops"  # in the annotation of a compiled function
_COMPILED = "## Call CompiledFxGraph"  # what Inductor calls its functions in traces
_OF_COMPILED = (
    "the step calls functions of torch.compile: calls of libraries within them are ops, and the time of fused "
    "kernels counts as the host's, since no trace of a CPU has them"
)
_LAST = 2**62  # larger than the number of any collective
_MOST_EARLY_US = 1000.0  # clock error by which a wait may end before the awaited call
_WEIGHTLESS = frozenset([f"aten::{word}" for word in NAMES["weightless"].split()] + NAMES["weightless_others"].split())
_WRAPPERS = frozenset(f"aten::{word}" for word in NAMES["wrappers"].split())
# Runtime calls that put something on a device; all others are the host's own.
_LAUNCHES = ("Launch", "Memcpy", "Memset", "EventRecord", "WaitEvent")
_BOOKKEEPING = ("autograd::", "torch::", "c10d::", "profiler::", "gloo:", "nccl:", "torch.distributed", "record_param")
_OP, _COLLECTIVE = "stepsight::op ", "stepsight::collective "  # our annotations of calls
_NOWHERE, _COMMUNICATION = -1, -2  # where a call lies, unless within a work


def host_graph(events: RankEvents, tree: CallTree, world_size: int, placement: Placement, rank: int) -> Program:
    """The graph of a rank without device events."""
    host = HostWorks(events)
    configured = (events.header.get("distributedInfo") or {}).get("pg_config") or []
    groups = [list(range(world_size)), *(each.get("ranks") or [] for each in configured if isinstance(each, dict))]
    largest = max(((len(ranks), tuple(ranks)) for ranks in groups if rank in ranks), default=(0, ()))[1]
    replicas = placement.data_parallel_group(rank) or largest
    collectives, waits = _Collectives(host, replicas, placement, host_calls.segment_spans(events, 0.0)).found()
    if not host.ops and not collectives:
        raise TraceError(f"a trace must hold at least one op or collective, got none in {events.path}")
    steps, names = host_calls.find_steps(events, tree, np.zeros(0)), Interned()
    calls, first = _calls(host, collectives, steps, names), len(host.ops)
    issues = np.argsort(calls["row"])[first : first + len(collectives)]
    source, target, delay = host_calls.chain(calls, events)
    waited = overlap(merge([wait[1:] for wait in waits]), calls.end[source], calls.start[target])
    edges = [(source, target, Dependency.HOST_ORDER, np.maximum(delay - waited, 0.0))]
    edges += [*_in_streams(collectives, calls, issues), _ends(collectives, waits, calls, host.main)]
    start = np.concatenate([calls.start, [work.start for work in collectives]])
    built = Assembly(
        start=start,
        end=np.concatenate([calls.end, [max(work.end, work.start) for work in collectives]]),
        key=start,
        issued=np.concatenate([calls.start, [work.issue for work in collectives]]),
        edges=edges,
        steps=steps,
        names=names,
        streams=Interned(compute=0),
    )
    works = [*(host.ops[row] if row < first else None for row in calls["row"].tolist()), *collectives]
    _fill(built, events, tree, calls["name"], works)
    graph = built.graph("cpu", "cpu", events.num_events)
    record = HostRecord(
        spans=host_calls.segment_spans(events, graph.origin_us),
        calls_s=(host_call_starts(events, host.main) - graph.origin_us) * MICROSECOND,
        own_s=np.array([0.0 if work is None else work.own for work in works])[built.order] * MICROSECOND,
        waits_s=(np.array([wait[1:] for wait in waits]).reshape(-1, 2) - graph.origin_us) * MICROSECOND,
        awaited=built.place[np.array([len(calls) + wait[0] for wait in waits], dtype=np.int64)],
    )
    told = [*events.names, *(mark.name for mark in events.annotations)]
    compiled = any(name.startswith(_COMPILED) for name in told) and not any(_FUSED in name for name in told)
    warnings = dict.fromkeys([*events.warnings, *steps.warnings, *([_OF_COMPILED] if compiled else [])])
    return graph.replace(record=record, warnings=tuple(warnings))


def _calls(host: HostWorks, collectives: list[Work], steps: Steps, names: Interned) -> Table:
    """Ops, issues of collectives and bounds of steps as calls, whose rows number them in this order."""
    marks = sorted({moment for bounds in steps.bounds for moment in bounds})
    streams = {"compute": host.main}
    for work in host.ops:
        streams.setdefault(work.stream, -len(streams))
    moments = [*(work.issue for work in collectives), *marks]
    start = np.array([*(work.start for work in host.ops), *moments], dtype=np.float64)
    end = np.array([*(work.end for work in host.ops), *moments], dtype=np.float64)
    thread = [*(streams[work.stream] for work in host.ops), *([host.main] * len(moments))]
    issues = (f"issue {work.name}" for work in collectives)
    name = [names[each] for each in (*(work.name for work in host.ops), *issues, *(["step"] * len(marks)))]
    return host_calls.in_order(start, end, thread, np.arange(len(start)), name)


def _in_streams(collectives: list[Work], calls: Table, issues: Ints) -> Iterator[Edges]:
    """Launches of collectives by the calls that issue them, and the order on their streams; they follow the calls."""
    base, everyone = len(calls), np.arange(len(collectives), dtype=np.int64)
    launches, ordered = list[float](), list[tuple[int, int, float]]()
    ended: dict[Any, list[tuple[float, int]]] = {}  # by stream: ends of the newest collectives before, in order
    for number, work in enumerate(collectives):
        before = ended.setdefault(work.stream, [])
        place = bisect_left(before, (work.start, _LAST)) - 1  # several are sent at once: the queue is for a free thread
        queued = place >= 0 and before[place][0] > work.issue
        if place >= 0:
            end, other = before[place]
            ordered.append((base + other, base + number, work.start - end if queued else 0.0))
        launches.append(0.0 if queued else work.start - float(calls.end[issues[number]]))
        insort(before, (work.end, number))
        del before[:-_MOST_AT_ONCE]
    yield issues, base + everyone, Dependency.LAUNCH, np.array(launches, dtype=np.float64)
    yield _columns(ordered, Dependency.STREAM_ORDER)


def _ends(collectives: list[Work], waits: list[Wait], calls: Table, main: int) -> Edges:
    """Ends of waits for collectives: the next call of the main thread depends on them."""
    found: dict[int, dict[int, float]] = {}  # by what waits: delays after the awaited work
    mains = np.flatnonzero(calls["thread"] == main)
    starts = calls.start[mains].tolist()
    for number, begin, end in waits:
        place, work = bisect_left(starts, end - 1e-3), collectives[number]
        if place < len(mains) and work.start <= starts[place]:
            held = work.end > begin or end > begin  # otherwise it had ended before the wait
            delay = starts[place] - work.end if held else 0.0
            if delay > -_MOST_EARLY_US:
                found.setdefault(int(mains[place]), {})[number] = delay
    ends: list[tuple[int, int, float]] = []
    for target, delays in found.items():
        last = max(delays, key=lambda number: collectives[number].end)  # the others had ended
        ends += [(len(calls) + number, target, delay if number == last else 0.0) for number, delay in delays.items()]
    return _columns(ends, Dependency.SYNCHRONISATION)


def _columns(edges: list[tuple[int, int, float]], why: Dependency) -> Edges:
    source, target, delay = np.array(edges, dtype=np.float64).reshape(-1, 3).T
    return source.astype(np.int64), target.astype(np.int64), why, delay


def _fill(built: Assembly, events: RankEvents, tree: CallTree, names: Ints, works: list[Work | None]) -> None:
    """Set the columns of calls, whose names are given, and of the collectives after them; no work: a host call."""
    nodes, base = built.columns, len(names)
    nodes["known"][:], nodes["name"][:base] = 1, names
    rows = np.searchsorted(events.ops.start, built.start[:base] - 1e-6)
    for node, work in enumerate(works):
        nodes["kind"][node] = HOST if work is None else OP if node < base else COLLECTIVE
        nodes["stream"][node] = built.streams["compute" if work is None else str(work.stream)]
        if work is None:
            continue
        if node >= base:
            nodes["work"][node], nodes["name"][node] = built.works[work.work], built.names[work.name]
            built.meet(node, work.meets)
            continue
        op = work.work
        nodes["recorded"][node] = work.recorded
        known = None if work.known else named_kind(work.name)
        if known is not None and isinstance(op, Op):
            count = len(OP_KINDS[known].dim_names)
            op = intern_op(known, op.dims if count == len(op.dims) else (0,) * count, op.dtype)
        nodes["work"][node], nodes["known"][node] = built.works[op], int(work.known or known is not None)
        if rows[node] < len(events.ops) and abs(events.ops.start[rows[node]] - built.start[node]) < 1e-3:
            nodes["call"][node] = rows[node]
    called = nodes["call"] >= 0
    nodes["phase"][called] = tree.phase[nodes["call"][called]]
    unnamed = (nodes["kind"] != HOST) & ~called  # without a framework call: collectives, ops that sleep
    nodes["phase"][unnamed] = host_calls.annotated_phases(events.annotations, built.issued)[unnamed]


class _Collectives:
    """Finds the collectives of a host that computes; ``replicas``: of those that name no ranks, which are DDP's."""

    def __init__(
        self, host: HostWorks, replicas: tuple[int, ...], placement: Placement, segments: Sequence[Span]
    ) -> None:
        self._host, self._replicas, self._placement, self._segments = host, replicas, placement, segments
        self._numbers: dict[tuple[str, ...], int] = {}
        self._free: dict[tuple[str, ...], float] = {}  # when a stand-in's links are
        self._workers: dict[str, list[tuple[float, float]]] = {}  # spans by kind, each taken once
        for kind, start, end in sorted(host.workers, key=lambda worker: -worker[1]):
            self._workers.setdefault(kind, []).append((start, end))

    def found(self) -> tuple[list[Work], list[Wait]]:
        """Collectives in order of issue, and waits for them."""
        works, waits, implicit = list[Work](), list[Wait](), list[int]()
        by_key: dict[tuple[str, str], int] = {}
        for call in sorted(self._host.calls, key=lambda call: call.start):
            work = self._work(call)
            if work is None:
                continue
            if call.args.get("async", "0") == "0":
                waits.append((len(works), call.start, call.end))
            elif "seq" in call.args:
                by_key[call.args["group"], call.args["seq"]] = len(works)
            else:
                implicit.append(len(works))
            works.append(work)
        for wait in sorted(self._host.waits, key=lambda wait: wait.start):
            number = by_key.get((wait.args.get("group", ""), wait.args.get("seq", "")))
            if number is not None:
                waits.append((number, wait.start, wait.end))
                awaited = works[number]
                if awaited.end > wait.end or awaited.end == awaited.start:
                    awaited.end, awaited.own = wait.end, max(wait.end - awaited.start, 0.0)
        known = {wait[0] for wait in waits}  # a communication hook of DDP is waited for where nothing records it
        implicit += [each for each in by_key.values() if each not in known and not is_message(works[each].work)]
        for work in [works[number] for number in implicit]:
            # DDP's end with their segment: it hands back gradients that are reduced
            inside = (1e6 * each.end_s for each in self._segments if each.start_s <= 1e-6 * work.issue < each.end_s)
            work.end = max(min(work.end, min(inside, default=work.end)), work.start)
            work.own = work.end - work.start
        return works, waits + _invisible_waits({number: works[number] for number in implicit}, self._host.top)

    def _work(self, call: Annotation) -> Work | None:
        """The collective of a call; None if it joins no ranks."""
        values = call.args
        ranks = tuple(map(int, values["ranks"].split(","))) if "ranks" in values else self._replicas
        group = self._placement.axis(ranks) or values.get("group", "dp")
        direction = values.get("direction", "")
        blocks = values.get("async", "0") == "0"
        carrier = self._carrier(direction or values["kind"], call)
        if len(ranks) < 2:
            return None
        start, end = (call.start, call.end) if blocks else carrier or (call.start, call.end)
        if "seconds" in values and not blocks:  # nobody but its annotation tells when it was over
            link = (group, direction and values["ranks"], direction)
            start = max(call.start, self._free.get(link, 0.0))
            end = self._free[link] = start + 1e6 * float(values["seconds"])
        per_node = self._placement.ranks_per_node(ranks, len(ranks))
        collective = Collective(values["kind"], int(values["num_bytes"]), len(ranks), per_node)
        # A message is met by its number between two ranks, everything else by its number in the group.
        key = (group, direction and values.get("ranks", ""), values["kind"] if "seq" not in values else "")
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        meets = Rendezvous(f"{group}:{values['ranks']}" if direction else group, number, ranks)
        name = f"{values['kind']}.{direction}" if direction else values["kind"]
        return Work(collective, name, call.start, start, end, end - start, group, meets=meets)

    def _carrier(self, kind: str, call: Annotation) -> tuple[float, float] | None:
        """The worker's span of a call: the first of those of a kind that is not taken."""
        best: list[tuple[float, float]] | None = None
        for name in gloo_spans(kind):
            queue = self._workers.get(name, [])
            while queue and queue[-1][0] < call.start:  # older than the call: it belongs to none
                queue.pop()
            if queue and (best is None or queue[-1] < best[-1]):
                best = queue
        return best.pop() if best else None


def _invisible_waits(works: dict[int, Work], calls: list[tuple[float, float]]) -> list[Wait]:
    """Waits that nothing records: an end of a collective that falls between two calls of the main thread.

    All of a step are awaited at the same place (the end of DDP's backward), so each synchronises there: where the next
    wait that can be seen ends.
    """
    if not calls:
        return []
    starts, ends = np.array(calls).T
    out: list[Wait] = []
    for number, work in works.items():
        at = int(np.searchsorted(starts, work.end, "right")) - 1
        if at >= 0 and ends[at] < work.end:
            begin = max(float(ends[at]), work.issue)
            out.append((number, begin, max(begin, work.end)))
    seen, until = {wait[0] for wait in out}, sorted(wait[2] for wait in out)
    for number, work in works.items():
        place = bisect_left(until, work.end)
        if number not in seen and place < len(until):
            out.append((number, until[place], until[place]))
    return out


@dataclass(slots=True)
class Work:
    """One op or collective while it is being read; microseconds."""

    work: Op | Collective  # signature
    name: str  # call it comes from
    issue: float  # when the host came to it
    start: float  # when it began
    end: float  # when it ended
    own: float  # time within it that is its own
    stream: Any  # host thread or group
    known: bool = True  # false for a call of no known kind
    meets: Rendezvous | None = None  # of a collective
    recorded: int = 1  # calls that a profiler recorded within it, itself included


class HostWorks:
    """Ops of a host that computes, by start, and what its annotations tell of communication; microseconds.

    ``main`` is the thread of the segments, or that with the most calls; ``top`` are outermost calls of it, from start
    to end.  Raises ``ValueError`` if one of our own annotations is malformed.
    """

    def __init__(self, events: RankEvents) -> None:
        self.calls: list[Annotation] = []  # our annotations of collectives, and c10d calls that none encloses
        self.waits: list[Annotation] = []  # our annotations of waits
        self.workers: list[tuple[str, float, float]] = []  # kind, start and end of gloo's spans
        weighty, threads = ~_weightless(events), events.ops["thread"]
        self.main = int(np.bincount(threads[weighty]).argmax()) if weighty.any() else 0
        for name in {each.name for each in events.annotations if each.name.startswith(_OP)}:
            annotated_op(parse_annotation(name))
        workers = self._read_annotations(events.annotations)
        ops = self._read_ops(events.with_calls((_OP, _COLLECTIVE)))
        names = {self.main: "compute"}
        self.ops = [work for work in ops if work.stream == self.main or work.stream not in workers]
        for work in self.ops:  # what gloo's workers copy is part of their collectives
            work.stream = names.setdefault(work.stream, f"host{len(names)}")
        own, comms = weighty & (threads == self.main), [each for each in events.comms if each.thread == self.main]
        start = np.concatenate([events.ops.start[own], [each.start for each in comms]])
        end = np.concatenate([events.ops.end[own], [each.end for each in comms]])
        order = np.lexsort((-end, start))
        reached = np.maximum.accumulate(np.append(-1.0, end[order]))[:-1]
        self.top = [(start[row], end[row]) for row in order[start[order] >= reached].tolist()]

    def _read_annotations(self, marks: list[Annotation]) -> set[int]:
        """Add what our annotations and gloo's tell; return the threads of gloo's workers."""
        workers: set[int] = set()
        newest: dict[int, Annotation] = {}  # by thread
        for mark in marks:
            word, values = mark.name.split(" ", 1)[0].removeprefix("stepsight::"), parse_annotation(mark.name)
            if mark.name.startswith("gloo:"):
                self.workers.append((mark.name[5:], mark.start, mark.end))
                workers.add(mark.thread)
            elif not mark.name.startswith("stepsight::"):
                continue
            elif word == "segment":
                self.main = mark.thread
            elif word == "collective":
                newest[mark.thread] = replace(mark, args=dict(values))
                self.calls.append(newest[mark.thread])
            elif word == "modelled" and mark.thread in newest and mark.start < newest[mark.thread].end:
                newest[mark.thread].args.update(values)
            elif word == "wait":
                self.waits.append(replace(mark, args=dict(values)))
        return workers

    def _read_ops(self, events: RankEvents) -> list[Work]:
        """Outermost calls of known kinds, and of no known kind if none of a known one is within; add c10d calls."""
        tree, known, communication = call_tree(events), classify.call_table(), c10d_calls()
        kinds, signatures = KernelKinds(events, tree), events.ops["signature"].tolist()
        works: dict[int, Work] = {}
        around, maybe = [_NOWHERE] * len(events.ops), [_NOWHERE] * len(events.ops)
        columns = (tree.parent, events.ops["name"], events.ops["thread"], events.ops.start, events.ops.end)
        for row, (up, number, thread, start, end) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            name = events.names[number]
            around[row], maybe[row] = (around[up], maybe[up]) if up >= 0 else (_NOWHERE, _NOWHERE)
            if around[row] == _COMMUNICATION or name in _WEIGHTLESS:
                continue
            if around[row] >= 0:
                works[around[row]].recorded += not name.startswith((_OP, _COLLECTIVE))
            elif name in known or name.startswith(_OP):
                op = kinds.classified(row)
                if op is not None:
                    works.pop(maybe[row], None)
                    told = f"stepsight::{op.kind}" if name.startswith(_OP) else name
                    works[row] = Work(op, told, start, start, end, end - start, thread)
                    around[row] = row
            elif name in communication or name.startswith(_COLLECTIVE):
                around[row] = _COMMUNICATION
                if name in communication:
                    (kind, index), args = communication[name], events.arguments(signatures[row])
                    shape, dtype = (
                        dict(enumerate(args.get(key) or [])).get(index) for key in ("Input Dims", "Input type")
                    )
                    num_bytes = count(shape or []) * classify.ELEMENT_BYTES.get(dtype or "", 4)
                    said = {"kind": kind, "num_bytes": num_bytes, "async": "1"}
                    self.calls.append(Annotation(name, start, end, thread, said))
            elif maybe[row] < 0 and "::" in name and name not in _WRAPPERS and not name.startswith(_BOOKKEEPING):
                op = classify.classify_unknown(events.arguments(signatures[row]))
                if op is not None:
                    works[row] = Work(op, name, start, start, end, end - start, thread, known=False)
                    maybe[row] = row
        out, last = list[Work](), dict[int, Work]()  # the newest by thread
        for work in (works[row] for row in sorted(works)):  # consecutive calls of a thread may be parts of an op
            before = last.get(work.stream)
            in_parts = isinstance(work.work, Op) and work.work.record.in_parts
            if in_parts and before is not None and before.work == work.work:
                before.end, before.own = work.end, before.own + work.own
                before.recorded += work.recorded
            else:
                out.append(work)
                last[work.stream] = work
        return out


def host_call_starts(events: RankEvents, main: int | None) -> Floats:
    """When recorded calls of a thread (None: of all) started, weightless ones of any thread included, in order."""
    ops, runtime, marks = events.ops, events.runtime, [*events.annotations, *events.comms]
    own = np.ones(len(ops), dtype=np.bool_) if main is None else (ops["thread"] == main) | _weightless(events)
    launching = np.array([any(word in name for word in _LAUNCHES) for name in events.names], dtype=np.bool_)
    called = launching[runtime["name"]] & ((runtime["thread"] == main) | (main is None))
    marked = np.array([each.start for each in marks if main is None or each.thread == main], dtype=np.float64)
    return np.sort(np.concatenate([ops.start[own], runtime.start[called], marked]))


def _weightless(events: RankEvents) -> Flags:
    """``(n,)``: which framework calls move nothing."""
    return np.array([name in _WEIGHTLESS for name in events.names], dtype=np.bool_)[events.ops["name"]]
