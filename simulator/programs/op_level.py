"""Passes and segments at op level: nodes in the order in which a framework's host thread launches them.

Streams: ``compute``; one for each kind of group (``tp``, ``cp``, ``ep``), for copies to the host (``offload``) and for
traffic between replicas (``dp``, ``dp2``).  An op waits for what the host was told to wait for; a collective starts
when the computation has come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Dependency, Program, ProgramBuilder
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Comm, Item, Join, LostTime, OverlappedOp
from stepsight.simulator.clock.engine import BLOCK, COMPUTE, NUM_CLOCKS, ON_HOST, RUN, SEND, WAIT
from stepsight.simulator.programs.data_flow import ENTERS, DataFlow, Marks

Work = Op | Collective
STREAMS = ("compute", "tp", "cp", "ep", "offload")  # streams of a pass
CLOCK_STREAMS = ("compute", "dp", "dp2")


class Issue:
    """Adds work to a program in the order of issue, with the data edges that its order does not tell."""

    def __init__(self, label: str = "", compute_share: float = 0.0) -> None:
        self._builder = ProgramBuilder(label)
        self._share = compute_share
        self._last: int | None = None  # newest node of the computation: an op, or a collective that blocks
        self._awaited: list[int] = []  # nodes that the next op waits for
        self._newest: dict[str, int] = {}  # by stream: what runs beside the computation until it is joined
        self._taken: dict[int, tuple[Collective, str]] = {}  # messages sent since the last computation was issued
        self.lost: list[int] = []  # nodes of the computation time lost to these messages
        self.entering: list[int] = []  # nodes that read what enters the segment
        self.flow, self._optimizer = DataFlow(), label == "optimizer"

    def program(self) -> Program:
        return self._builder.build()

    def _link(self, reads: Sequence[int], node: int) -> None:
        self.entering += [node] * (ENTERS in reads)
        self._builder.link([each for each in reads if each != ENTERS], node)

    def add(self, item: Item, name: str, flow: Marks = ()) -> None:
        """Add an item of a passage; ``flow``: its marks."""
        if isinstance(item, Op):
            self._reads(self._compute(item, name), name, flow)
        elif isinstance(item, LostTime):
            self._compute(item.work, f"{name} (cores)", item.share)
        elif isinstance(item, Join):
            self.flow.follow(flow)
            if item.stream in self._newest:
                self._awaited.append(self._newest.pop(item.stream))
                if item.stream != "offload":  # the next op also reads what it brings
                    self.flow.newest = [*self.flow.newest, self._awaited[-1]]
        elif isinstance(item, Comm) and not item.beside:
            self._reads(self._block(item.work, item.stream, name), name, flow)
        else:
            assert isinstance(item, Comm | OverlappedOp), item
            self.flow.follow(flow)
            self._newest[item.stream] = node = self._node(item.work, item.stream, name, self._reached())
            self._link(self.flow.newest if isinstance(item, Comm) else (), node)

    def block(self, work: Collective, stream: str, name: str) -> int:
        """A collective of replicas that starts when the computation reaches it, and that the computation waits for."""
        node = self._block(work, stream, name)
        if self._optimizer:
            self._reads(node, name, ())
        else:
            self._link(self.flow.message(node, name), node)
        return node

    def _reads(self, node: int, name: str, flow: Marks) -> None:
        self._link(self.flow.reads(node, name, flow), node)

    def _block(self, work: Collective, stream: str, name: str) -> int:
        self._last = self._node(work, stream, name, self._reached())
        self._newest.pop(stream, None)
        self._awaited = [self._last]
        return self._last

    def send(
        self,
        work: Collective,
        stream: str,
        name: str,
        after: Iterable[int] = (),
        *,
        early: bool = False,
        takes: bool = True,
    ) -> int:
        """A collective that overlaps with the computation; the ops after it lose ``compute_share`` of its time.

        ``early``: it was issued long before, and starts when its stream is free.  ``takes``: False for the host's work.
        """
        index = self._node(work, stream, name, sorted({*([] if early else self._reached()), *after}))
        if isinstance(work, Collective) and not early:
            self._link([*after] or self.flow.message(index, name), index)
        if self._share > 0 and takes:
            self._taken[index] = (work, name)
        return index

    def wait(self, index: int) -> None:
        """Make the next op wait for a node; if no collective overlaps, no time is lost."""
        if index not in self._awaited:
            self._awaited.append(index)
        self._taken.pop(index, None)

    def take_time(self) -> None:
        """The time that the computation loses to messages in flight, before it continues."""
        for work, name in self._taken.values():
            self.lost.append(self._compute(work, f"{name} (cores)", self._share))
        self._taken.clear()

    def _compute(self, work: Work, name: str, share: float = 1.0) -> int:
        self._last = self._node(work, "compute", name, self._awaited, share)
        self._awaited = []
        return self._last

    def _reached(self) -> list[int]:
        return sorted({*self._awaited, *([] if self._last is None else [self._last])})

    def _node(self, work: Work, stream: str, name: str, after: Iterable[int], share: float = 1.0) -> int:
        why = Dependency.SYNCHRONISATION
        return self._builder.add(work, stream, name, after=after, why=why, share=share)


def issue(items: Iterable[tuple[Item, str, Marks]]) -> Program:
    one = Issue()
    for item, name, flow in items:
        one.add(item, name, flow)
    return one.program()


def dependencies(program: Program) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Dependencies of every node in CSR (pointer, before), with stream order, without duplicates."""
    incoming: list[list[int]] = [[] for _ in program.nodes]
    for earlier, later, why in program.all_edges():
        if why is not Dependency.DATA and earlier not in incoming[later]:  # what orders them is listed, too
            incoming[later].append(earlier)
    pointer = np.cumsum([0, *map(len, incoming)], dtype=np.int32)
    return pointer, np.array([need for needs in incoming for need in needs], dtype=np.int32)


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A program as arrays."""

    work: NDArray[np.int32]  # index of each node's signature, shape (num_nodes,)
    share: NDArray[np.float64]  # part of the signature's time, same shape
    clock: NDArray[np.int8]  # the clock of each node's stream, same shape
    # pointer, before: dependencies in CSR, stream order included
    pointer: NDArray[np.int32]
    before: NDArray[np.int32]
    first: NDArray[np.int64]  # the first node of each clock's stream, -1 if none, shape (NUM_CLOCKS,)
    taken: NDArray[np.bool_]  # whether each node is time that the computation loses to a collective, same shape
    sent: NDArray[np.bool_]  # whether each node is a replica's collective, or time that is lost to one, same shape
    blocks: NDArray[np.bool_]  # whether the computation waits for each node immediately, same shape
    early: NDArray[np.bool_]  # whether each node was issued before the segment began, same shape
    # index into passages.STREAMS of each node of a passage, one more for all others, same shape
    stream: NDArray[np.int8]


def op_graph(works: Sequence[Work], written: Written) -> OpGraph:
    """A segment's program as arrays; ``works``: its distinct signatures."""
    program, blocking, early, lost = written[:4]
    place = {work: index for index, work in enumerate(works)}
    clocks = {stream: clock for clock, stream in enumerate(CLOCK_STREAMS)}
    streams = {stream: index for index, stream in enumerate(STREAMS)}
    nodes, numbers = program.nodes, np.arange(len(program.nodes))
    clock = np.array([clocks.get(node.stream, COMPUTE) for node in nodes], dtype=np.int8)
    is_op = np.array([isinstance(node.work, Op) for node in nodes], dtype=np.bool_)
    taken = np.array([node.stream == "compute" for node in nodes], dtype=np.bool_) & ~is_op
    stream = np.array([streams.get(node.stream, len(STREAMS)) for node in nodes], dtype=np.int8)
    stream[[isinstance(node.work, Op) and node.work.record.bound == "host" for node in nodes]] = streams["offload"]
    return OpGraph(
        np.array([place[node.work] for node in nodes], dtype=np.int32),
        np.array([node.share for node in nodes]),
        clock,
        *dependencies(program),
        np.array([np.argmax(clock == c) if (clock == c).any() else -1 for c in range(NUM_CLOCKS)]),
        taken,
        (clock > COMPUTE) | np.isin(numbers, lost),
        np.isin(numbers, blocking),
        np.isin(numbers, early),
        np.where(taken, np.int8(len(STREAMS)), stream),
    )


class Written(NamedTuple):
    """A segment at op level; and the nodes that block the computation, are early, are lost time, or read what enters
    the segment; and what it made.
    """

    program: Program
    blocking: list[int]
    early: list[int]
    lost: list[int]
    entering: list[int]
    made: DataFlow


def write_out(
    out: Issue,
    events: NDArray[np.int32],
    names: Sequence[str],
    between: Callable[[int, int, int], Iterable[tuple[Item, str, Marks]]],
    sent: Sequence[Collective],
) -> Written:
    """Issue the nodes of every event of a segment, with their dependencies.

    ``between``: items of a passage, by its number, its first node and the one behind the last; otherwise as ``Segment``
    has them.
    """
    nodes: list[int] = []  # of each event, -1 if it has none
    for kind, what, a, b, times, label, number, step in events.tolist():
        name, node = names[label], -1
        if kind == RUN:
            out.take_time()
            for turn in range(times):
                prefix = name.format(number + turn * step)
                for item, own, flow in between(what, a, b):
                    out.add(item, ".".join(filter(None, (prefix, own))), flow)
        elif kind == WAIT:
            out.wait(nodes[what])
        elif kind == BLOCK:
            node = out.block(sent[what], CLOCK_STREAMS[a], name.format(number))
        else:
            after = [nodes[b]] if b >= 0 else []
            takes, early = times != ON_HOST, times == 1
            node = out.send(sent[what], CLOCK_STREAMS[a], name.format(number), after, early=early, takes=takes)
        nodes.append(node)
    rows = list(zip(nodes, events[:, 0].tolist(), events[:, 4].tolist(), strict=True))
    blocking = [node for node, kind, _ in rows if kind == BLOCK]
    early = [node for node, kind, soon in rows if kind == SEND and soon == 1]
    return Written(out.program(), blocking, early, out.lost, out.entering, out.flow)
