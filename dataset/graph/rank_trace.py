"""Times of one rank's program: a view of its graph, its segments, and its place in the job.

On a CPU every op of the graph is a node, and the thread that carries the segments is the ``compute`` stream.  On a
device a node is what one call launched on one stream; the busiest stream is ``compute``.  Host calls are no nodes.
Collectives lie on a stream of their own, named by their group.

Dependencies are stream order, which a program implies, and *synchronisation*: a collective starts when the compute
stream has come to it, and what follows its wait needs it.

Ranks whose traces were read together have collectives in common, which tell how far their clocks are apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from stepsight.dataset.graph.columns import Flags, Floats, HostRecord, Intervals, Ints, Span, merge, overlap
from stepsight.dataset.graph.program import COLLECTIVE, OP, WHY_NUMBER, Dependency, Node, Program
from stepsight.dataset.kinds.op import Collective, Op

_MOST_GAP_NS = 3000.0  # that a device leaves between kernels on its own account
_COPIES = ("copy", "fill", "from_host", "to_host")  # what a call may launch beside its own kernels
# By which ends of one collective may differ after clocks are aligned: seconds, or parts of its duration.  A host may
# run something else before a rank comes back from it.
_MOST_APART = {"cuda": (2e-4, 0.1), "cpu": (0.1, 1.0)}
Meeting = dict[int, int]  # node by place of the rank


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Identity of a collective across ranks: the group and the sequence number."""

    group: str
    seq: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """One rank's program with its times; ``n`` nodes."""

    rank: int  # which rank
    program: Program  # ops and collectives in issue order
    start_s: Floats  # (n,), on the rank's clock
    duration_s: Floats  # (n,), own time
    # (n,), in-context time: for a compute node on CPU its own time plus the host gap before it on its stream, waits for
    # collectives excluded; for others the own time
    slot_s: Floats
    wait_s: Floats  # (n,), time that the node's stream waited for collectives just before the node
    span: Ints  # (n,), index into spans, -1 outside of all
    spans: tuple[Span, ...] = ()  # segments in order of time
    # (len(spans),), wait of the compute stream after the last node of each segment
    tail_s: Floats = field(default_factory=lambda: np.zeros(0))
    meets: Mapping[int, Rendezvous] = field(default_factory=dict)  # rendezvous of collective nodes, by node index
    # (n,), calls that the profiler recorded in the slot: what its overhead grows with
    num_events: Floats = field(default_factory=lambda: np.zeros(0))
    # (n,), of what a device runs in a segment: host time from the launch before to its own, and of a step's last one to
    # the step's end; else 0
    launch_s: Floats = field(default_factory=lambda: np.zeros(0))
    # (n,), calls that the profiler recorded in that time
    launch_events: Floats = field(default_factory=lambda: np.zeros(0))
    step_s: tuple[float, ...] = ()  # floats of each whole step, profiled
    events_per_step: float = 0.0  # recorded calls that a step's time passes through
    waited_share: float = 0.0  # part of a step that the compute stream waited for others
    unclassified_s: float = 0.0  # time in ops of no known kind (they count as elementwise)

    @cached_property
    def is_compute(self) -> Flags:
        """``(n,)``: which nodes are ops of the ``compute`` stream."""
        nodes = self.program.nodes
        return np.array([isinstance(node.work, Op) and node.stream == "compute" for node in nodes], dtype=np.bool_)


@dataclass(frozen=True)
class TracedSegment:
    """One segment of one rank and step: what the context model learns from."""

    program: Program  # its nodes and the edges among them; ``program.label`` is the label too
    slot_s: Floats  # ``(n,)``, in-context seconds of each node, profiling overhead removed; NaN where unknown
    label: str  # ``forward``, ``backward`` or ``optimizer``
    rank: int  # which rank
    busy: int  # ranks that compute at the same time on the node
    run: str  # name of the run
    step: int = 0  # which profiled step
    micro_batch: int = 0  # which micro-batch
    stage: int = 0  # which pipeline stage
    # ``(n,)``, host time from the launch before to each node's, of what a device runs, profiled; else 0
    launch_s: Floats = field(default_factory=lambda: np.zeros(0))
    # ``(n,)``, calls that the profiler recorded in that time
    launch_events: Floats = field(default_factory=lambda: np.zeros(0))
    wait_s: float = 0.0  # seconds that the compute stream waited for collectives in all
    span_s: float = 0.0  # seconds from begin to end; compute slots + waits, profiling overhead removed
    # ``(n,)``, when each node ran, on the rank's clock; empty if that is not known
    start_s: Floats = field(default_factory=lambda: np.zeros(0))
    end_s: Floats = field(default_factory=lambda: np.zeros(0))
    # ``(n,)``, measured seconds of each node's signature where nothing ran beside it, NaN where that never was; empty
    # if not looked for
    alone_s: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class Placement:
    """Facts about a rank that its trace does not state."""

    rank: int | None = None  # which rank, None if the trace is to be asked
    devices_per_node: int = 0  # ranks that share a node, filled in rank order; 0: all share one
    # tp, dp: degrees, where known: rank = tp_rank + tp * (dp_rank + dp * stage); 0: not known
    tp: int = 0
    dp: int = 0

    def ranks_per_node(self, ranks: Sequence[int], size: int) -> int:
        """``ceil(size / nodes)`` of a group."""
        if not self.devices_per_node or not ranks:
            return size
        return -(-size // len({rank // self.devices_per_node for rank in ranks}))

    def axis(self, ranks: Sequence[int]) -> str:
        """The parallel axis along which a group lies, "" if the degrees are not known or it is none."""
        if not (self.tp and self.dp) or len(ranks) < 2:
            return ""
        places = [(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)) for rank in ranks]
        varying = [axis for number, axis in enumerate(("tp", "dp", "pp")) if len({each[number] for each in places}) > 1]
        return varying[0] if len(varying) == 1 else ""

    def data_parallel_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shard as this one."""
        if not (self.tp and self.dp):
            return ()
        first = rank - rank // self.tp % self.dp * self.tp
        return tuple(range(first, first + self.tp * self.dp, self.tp))


def rank_trace(graph: Program) -> RankTrace:
    """The program of a rank with the times of its nodes and segments, as its graph and its host's record tell them."""
    return _View(graph).trace()


class _View:
    """Nodes of a rank's program in whole nanoseconds from the graph's begin, so that equal moments are equal numbers.

    Of the ``n`` nodes of the graph, each is part of one of the program (``node``, -1: none).  Of the ``m`` nodes of the
    program, in order of issue, ``place`` is the node of the graph that says what each one is, ``own`` the time of all
    its kernels, ``issue`` when the host came to it, and ``issued`` when it had launched all of it.
    """

    def __init__(self, graph: Program) -> None:
        self.graph, self.record = graph, graph.record or HostRecord()
        self.hosted = graph.device == "cpu"
        nodes, on_device = graph.columns, np.flatnonzero(graph.on_device)
        begin, end = _nanoseconds(graph.start_s), _nanoseconds(graph.end_s)
        issue, launched = begin.copy(), graph.edge_columns["why"] == WHY_NUMBER[Dependency.LAUNCH]
        issue[graph.edge_columns["target"][launched]] = begin[graph.edge_columns["source"][launched]]
        on_device = on_device[np.lexsort((begin[on_device], issue[on_device]))]
        joined = (nodes["kind"][on_device] == OP) & (nodes["call"][on_device] >= 0) & (not self.hosted)
        keys = nodes["call"][on_device] * len(graph.streams) + nodes["stream"][on_device]
        _, seen, label = np.unique(np.where(joined, keys, -1 - on_device), return_index=True, return_inverse=True)
        label = np.argsort(np.argsort(seen))[label]  # in order of issue
        copies = np.array([work.kind in _COPIES for work in graph.works], dtype=np.bool_)[nodes["work"][on_device]]
        order = np.lexsort((copies, label))
        members, first = on_device[order], np.flatnonzero(np.diff(label[order], prepend=-1))
        if not self.hosted:  # consecutive calls may be parts of one op
            in_parts = np.array([isinstance(work, Op) and work.record.in_parts for work in graph.works], dtype=np.bool_)
            work, stream = nodes["work"][members[first]], nodes["stream"][members[first]]
            first = first[np.append(True, (np.diff(work) != 0) | (np.diff(stream) != 0) | ~in_parts[work[1:]])]
        own = self._own(begin, end, issue)
        self.start, self.end, self.own, self.issue, self.issued = (
            of.reduceat(values[members], first)
            for of, values in (
                (np.minimum, begin), (np.maximum, end), (np.add, own), (np.minimum, issue), (np.maximum, issue)
            )
        )  # fmt: skip
        self.place, self.node = members[first], np.full(len(graph), -1, dtype=np.int64)
        self.node[members] = np.searchsorted(first, np.arange(len(members)), "right") - 1
        self.works = [graph.works[number] for number in nodes["work"][self.place].tolist()]
        self.is_op = nodes["kind"][self.place] == OP
        names, numbers = list(graph.streams), nodes["stream"][self.place]
        if not self.hosted:  # a collective's stream is named by its group
            names[int(np.bincount(numbers, self.own * self.is_op, len(names)).argmax())] = "compute"
        groups = np.full(len(numbers), -1) if self.hosted else nodes["group"][self.place]
        listed = zip(numbers.tolist(), groups.tolist(), strict=True)
        self.streams = [graph.groups[group][0] if group >= 0 else names[number] for number, group in listed]
        self.steps, self.calls = _nanoseconds(graph.steps_s), _nanoseconds(self.record.calls_s)
        self.waits, self.awaited = _nanoseconds(self.record.waits_s), self.node[self.record.awaited]
        self.blocks = np.zeros(len(self.place), dtype=np.bool_)  # the host waited from its issue on
        self.blocks[self.awaited[self.waits[:, 0] == self.issue[self.awaited]]] = True

    def _own(self, begin: Floats, end: Floats, issue: Floats) -> Floats:
        """``(n,)``: own time; a short time between two kernels is part of a second that was launched in time."""
        if len(self.record.own_s):
            return _nanoseconds(self.record.own_s)
        own, streams = end - begin, self.graph.columns["stream"]
        if not self.hosted:
            kernels = np.flatnonzero(self.graph.columns["kind"] == OP)
            kernels = kernels[np.argsort(streams[kernels], kind="stable")]
            before, after = kernels[:-1], kernels[1:]
            gap = begin[after] - end[before]
            near = (streams[before] == streams[after]) & (issue[after] < end[before]) & (gap <= _MOST_GAP_NS)
            own[after[near]] += np.maximum(gap[near], 0.0)
        return own

    def trace(self) -> RankTrace:
        graph, nodes, clock_s = self.graph, self.graph.columns, 1e-6 * self.graph.origin_us
        spans = self._spans()
        bounds = np.array([(span.start_s, span.end_s) for span in spans]).reshape(-1, 2)
        inside = np.searchsorted(bounds[:, 0], self.issue, "right") - 1
        inside[(inside >= 0) & (self.issue >= bounds[inside, 1])] = -1
        about = zip(self.works, self.streams, nodes["name"][self.place].tolist(), strict=True)
        program = Program([Node(work, stream, graph.names[name]) for work, stream, name in about], self._edges())
        idle, step_s = merge(self.waits), 1e-9 * np.diff(self.steps).reshape(-1)
        slot, wait, tail, num_events = self._slots(bounds, inside, idle)
        launch, launch_events = self._launches(inside)
        met = np.flatnonzero(~self.is_op)
        numbered = zip(met.tolist(), *(nodes[name][self.place[met]].tolist() for name in ("group", "seq")), strict=True)
        message = np.array([is_message(work) for work in self.works], dtype=np.bool_)
        start, end = self.steps[self.steps[:, 1] > self.steps[:, 0]].T  # nothing can have happened in others
        # calls that a step's time passes through: its own, or its peer's while it waits for a message
        own_share = 1.0 - overlap(merge(self.waits[message[self.awaited]]), start, end) / (end - start)
        passed = float((self._recorded(start, end) / np.maximum(own_share, 0.1)).sum())
        return RankTrace(
            rank=graph.rank,
            program=program,
            start_s=1e-9 * self.start + clock_s,
            duration_s=1e-9 * self.own,
            slot_s=1e-9 * slot,
            wait_s=1e-9 * wait,
            span=inside,
            spans=tuple(
                replace(span, start_s=1e-9 * span.start_s + clock_s, end_s=1e-9 * span.end_s + clock_s)
                for span in spans
            ),
            tail_s=1e-9 * tail,
            meets={node: Rendezvous(graph.groups[of][0], seq, graph.groups[of][1]) for node, of, seq in numbered},
            num_events=num_events,
            launch_s=1e-9 * launch,
            launch_events=launch_events,
            step_s=tuple(step_s.tolist()) if graph.whole else (),
            events_per_step=passed / max(len(self.steps), 1),
            waited_share=float(1e-9 * overlap(idle, *self.steps.T).sum() / step_s.sum()) if step_s.any() else 0.0,
            unclassified_s=1e-9 * float(self.own[nodes["known"][self.place] == 0].sum()),
        )

    def _spans(self) -> list[Span]:
        """Segments in order of time with their step, in nanoseconds; whole steps, or the whole trace, without any."""
        begins = self.steps[:, 0]
        found = [
            replace(each, start_s=float(np.rint(1e9 * each.start_s)), end_s=float(np.rint(1e9 * each.end_s)))
            for each in self.record.spans
            if each.label != "step"
        ]
        step = np.searchsorted(begins, [span.start_s for span in found], "right") - 1
        found = [replace(span, step=max(int(number), 0)) for span, number in zip(found, step, strict=True)]
        if self.graph.observed:  # the segments of steps that are left out
            found = [span for span in found if begins[span.step] <= span.start_s < self.steps[span.step, 1]]
        if not found:
            bounds = self.steps.tolist() or [(self.start.min(), self.end.max())]
            found = [Span("step", begin, end, step) for step, (begin, end) in enumerate(bounds)]
        out = []
        for span, limit in zip(found, [*(span.start_s for span in found[1:]), np.inf], strict=True):
            # pipelining computes the loss between two segments: it is part of the forward one before it
            between = range(*np.searchsorted(self.issue, (span.end_s, limit))) if span.label == "forward" else ()
            losses = [node for node in between if self.works[node].kind == "cross_entropy"]
            ends = [self.end[n] for n in between if losses and n >= losses[0] and not is_message(self.works[n])]
            out.append(replace(span, end_s=max(span.end_s, min(limit, max(ends)))) if ends else span)
        return out

    def _between(self, why: Dependency) -> list[tuple[int, int]]:
        """Edges of the graph of one kind between two nodes of the program."""
        known = self.graph.edge_columns["why"] == WHY_NUMBER[why]
        before, after = (self.node[self.graph.edge_columns[name][known]].tolist() for name in ("source", "target"))
        return sorted({(b, a) for b, a in zip(before, after, strict=True) if 0 <= b < a})

    def _edges(self) -> list[tuple[int, int, Dependency]]:
        """Data dependencies, and synchronisation of a device as its graph tells it, of a host as its thread issues it.

        On a host, the newest awaited work precedes what comes next.
        """
        edges = [] if self.hosted else self._between(Dependency.SYNCHRONISATION)
        ends: dict[int, float] = {}
        for node, end in zip(self.awaited.tolist(), self.waits[:, 1].tolist(), strict=True):
            ends[node] = max(end, ends.get(node, 0.0))
        pending = sorted((end, node) for node, end in ends.items())
        last, awaited, at = -1, [], 0
        for node in range(len(self.place)) if self.hosted else ():
            while at < len(pending) and pending[at][0] <= self.issue[node]:
                awaited.append(pending[at][1])
                at += 1
            if self.is_op[node] and self.streams[node] != "compute":
                continue
            sources = set(awaited) if self.is_op[node] or last < 0 else {*awaited, last}
            edges += [(source, node) for source in sorted(sources) if source < node]
            if self.is_op[node] or self.blocks[node]:
                last, awaited = node, []
        listed = ((Dependency.SYNCHRONISATION, edges), (Dependency.DATA, self._between(Dependency.DATA)))
        return [(before, after, why) for why, pairs in listed for before, after in pairs]

    def _recorded(self, since: Any, upto: Any) -> Any:
        """How many recorded calls started in each ``since <= time < upto``."""
        return np.searchsorted(self.calls, upto) - np.searchsorted(self.calls, since)

    def _slots(self, bounds: Floats, span: Ints, idle: Intervals) -> tuple[Floats, Floats, Floats, Floats]:
        """``slot_s``, ``wait_s``, ``tail_s`` and ``num_events``, in nanoseconds; of a host, a slot without its waits
        for collectives begins where the one before on the compute stream ended.
        """
        (wait, num_events), tail, slot = np.zeros((2, len(self.own))), np.zeros(len(bounds)), self.own.copy()
        if not self.hosted:
            return slot, wait, tail, num_events
        compute = np.flatnonzero(self.is_op & (np.array(self.streams) == "compute"))
        slot[compute] -= overlap(idle, self.start[compute], self.end[compute])
        for index, (begin, end) in enumerate(bounds.tolist()):
            nodes = compute[span[compute] == index]
            if not len(nodes):
                continue
            upto = self.end[nodes]
            upto[-1] = max(upto[-1], end)  # what follows the last node is its own
            since = np.concatenate([[begin], upto[:-1]])
            wait[nodes] = overlap(idle, since, upto)
            slot[nodes] = np.maximum(upto - since - wait[nodes], 0.0)
            tail[index] = overlap(idle, self.end[nodes[-1:]], np.array([end]))[0]
            wait[nodes[-1]] -= tail[index]
            num_events[nodes] = self._recorded(since, upto)
        num_events[self.blocks] = self._recorded(self.start[self.blocks], self.end[self.blocks])
        return slot, wait, tail, num_events

    def _launches(self, span: Ints) -> tuple[Floats, Floats]:
        """The host time of each launch of a device's node, and the calls recorded in it; zeros on a host."""
        launch, launch_events = np.zeros((2, len(self.own)))
        for begin, end in () if self.hosted else self.steps.tolist():
            nodes = np.flatnonzero((self.issued >= begin) & (self.issued < end) & (span >= 0))
            if len(nodes):
                nodes = nodes[np.argsort(self.issued[nodes], kind="stable")]
                bounds = np.concatenate([[begin], self.issued[nodes][:-1], [end]])  # what follows the last is its own
                launch[nodes] = np.diff(bounds)
                launch_events[nodes] = self._recorded(bounds[:-1], bounds[1:])
        return launch, launch_events


def _nanoseconds(seconds: Floats) -> Floats:
    return np.asarray(np.rint(1e9 * seconds))


def is_message(work: Op | Collective) -> bool:
    """Whether it is a collective that sends a message from one rank to one."""
    return isinstance(work, Collective) and work.record.route == "message"


def meetings(graphs: Sequence[Program]) -> tuple[list[Meeting], list[float]]:
    """Collectives that at least two ranks recorded, and seconds to add to each rank's times to align the clocks.

    A collective is known by its group and its number in the group.  It ends on all ranks at about the same time, which
    aligns the clocks; what then ends apart is not one, because traces that are trimmed count from elsewhere.
    """
    numbered = numbered_alike(graphs)
    offsets = clock_offsets(graphs, numbered)
    least_s, part = _MOST_APART["cpu" if any(graph.device == "cpu" for graph in graphs) else "cuda"]
    found = []
    for members in numbered:
        ends = [float(graphs[place].end_s[node]) + offsets[place] for place, node in members.items()]
        longest = max(float(graphs[place].duration_s[node]) for place, node in members.items())
        if max(ends) - min(ends) <= max(least_s, part * longest):
            found.append(members)
    return found, offsets


def numbered_alike(graphs: Sequence[Program]) -> list[Meeting]:
    """Collectives of one group, number and kind, for each that at least two ranks recorded."""
    found: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
    for place, graph in enumerate(graphs):
        nodes = np.flatnonzero((graph.columns["kind"] == COLLECTIVE) & (graph.columns["group"] >= 0))
        groups, numbers = graph.columns["group"][nodes].tolist(), graph.columns["seq"][nodes].tolist()
        for node, group, number in zip(nodes.tolist(), groups, numbers, strict=True):
            name, ranks = graph.groups[group]
            if not ranks or graph.rank in ranks:
                found.setdefault((name, ranks, number), {})[place] = node
    several = [members for members in found.values() if len(members) > 1]
    # in trimmed traces, equal numbers may name different ones
    return [each for each in several if len({graphs[place].kind_of(node) for place, node in each.items()}) == 1]


def clock_offsets(graphs: Sequence[Program], met: Sequence[Meeting]) -> list[float]:
    """Seconds to add to each rank's times such that collectives end together; otherwise from the files' own clocks."""
    absolute = [graph.origin_us * 1e-6 for graph in graphs]
    base = min(absolute, default=0.0)
    offsets = [each - base for each in absolute]
    pairs: dict[tuple[int, int], list[float]] = {}
    for members in met:
        (place, end), *others = [(each, float(graphs[each].end_s[node])) for each, node in sorted(members.items())]
        for other, ended in others:
            pairs.setdefault((place, other), []).append(end - ended)
    done: set[int] = set()
    for (one, other), differences in sorted(pairs.items()):
        done.add(one)
        if other not in done:
            offsets[other] = offsets[one] + float(np.median(differences))
            done.add(other)
    low = min(offsets, default=0.0)
    return [offset - low for offset in offsets]
