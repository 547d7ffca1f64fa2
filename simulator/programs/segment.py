"""Segments: what one stage runs without interruption, as passages through blocks and the replicas' traffic.

A segment is a list of *events* in the order of issue.  Repeated layers are one event, so its cost grows with the
replicas' messages, not with ops; ``program`` writes all of it out at op level, and takes exactly as long.

A plan is a segment of slots, placeholders for passages and collectives, which the work of one rank fills.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Item
from stepsight.simulator.clock.engine import BLOCK, COMPUTE, DATA, NUM_CLOCKS, ON_HOST, RUN, SECOND, SEND, WAIT
from stepsight.simulator.programs.block_pass import STREAMS, BlockPass, Issue, Work, dependencies, items_pass

CLOCK_STREAMS = ("compute", "dp", "dp2")
BUCKET_NAMES = ("gradients{}", "expert_gradients{}")  # of ordinary parameters, of experts


@dataclass(frozen=True, eq=False)
class Segment:
    """Events of one segment.

        RUN    passage, first node, last node (exclusive), times   | name, number, step
        SEND   collective, clock, event that it follows or -1, 1: early, 2: of the host | name, number, -
        BLOCK  collective, clock, -, -                             | name, number, -
        WAIT   event, -, -, -                                      | -, -, -

    names: For people; in each ``{}`` stands for the event's number, to which every repetition adds ``step``.
    compute_share: Part of a sent collective's time that is taken from the computation.
    joined: Whether it ends only when all of its collectives do.
    """

    label: str  # forward, backward, input, weight or optimizer
    passages: tuple[BlockPass, ...]  # distinct passages that its events run
    sent: tuple[Collective, ...]  # distinct collectives that its events send
    events: NDArray[np.int32]  # shape (num_events, 8), int32; columns by kind::
    names: tuple[str, ...]
    compute_share: float = 0.0
    joined: bool = False

    @property
    def program(self) -> Program:
        """Everything at op level."""
        return self._written[0]

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Distinct signatures in order of first use in ``program``."""
        return tuple(dict.fromkeys(node.work for node in self.program.nodes))

    @cached_property
    def flops(self) -> float:
        """FLOP of one run on one rank: of products and attention alone, a multiply-add as two; causal attention counts
        the half that is computed.
        """
        total = 0.0
        for what, first, last, times in self.events[self.events[:, 0] == RUN, 1:5].tolist():
            works = [node.work for node in self.passages[what].program.nodes[first:last]]
            total += times * sum(w.flops for w in works if isinstance(w, Op) and w.record.bound == "compute")
        return total

    def filled(self, work: Callable[[Slot], Any]) -> Segment:
        """The segment of one rank, if this is a plan: its ``passages`` and ``sent`` are slots, which ``work`` fills."""
        passages, sent = (tuple([work(slot) for slot in slots]) for slots in (self.passages, self.sent))  # type: ignore[arg-type]
        return Segment(self.label, passages, sent, self.events, self.names, self.compute_share, self.joined)

    @cached_property
    def graph(self) -> OpGraph:
        return _graph(self.works, *self._written)

    @cached_property
    def _written(self) -> tuple[Program, list[int], list[int], list[int]]:
        return _write_out(self)


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
    is_op: NDArray[np.bool_]  # whether each node is an op of the device, shape (num_nodes,)
    taken: NDArray[np.bool_]  # whether each node is time that the computation loses to a collective, same shape
    sent: NDArray[np.bool_]  # whether each node is a replica's collective, or time that is lost to one, same shape
    blocks: NDArray[np.bool_]  # whether the computation waits for each node immediately, same shape
    early: NDArray[np.bool_]  # whether each node was issued before the segment began, same shape
    # index into passages.STREAMS of each node of a passage, one more for all others, same shape
    stream: NDArray[np.int8]


def _graph(works: Sequence[Work], program: Program, blocking: list[int], early: list[int], lost: list[int]) -> OpGraph:
    """A program as arrays; the rest as ``_write_out`` gives it."""
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
        is_op,
        taken,
        (clock > COMPUTE) | np.isin(numbers, lost),
        np.isin(numbers, blocking),
        np.isin(numbers, early),
        np.where(taken, np.int8(len(STREAMS)), stream),
    )


NUM_COLUMNS = 8
_Row = tuple[int, int, int, int, int, int, int, int]  # as ``Segment.events``


class SegmentBuilder:
    """Records events in the order of issue. ``send`` returns the handle that ``wait`` takes.

    Passages and collectives may be slots (``slots``): then what is built belongs to a plan.
    """

    def __init__(self, label: str, compute_share: float = 0.0, joined: bool = False) -> None:
        self._label = label
        self._share = compute_share
        self._joined = joined
        self._passages: dict[Any, int] = {}
        self._sent: dict[Any, int] = {}
        self._names: dict[str, int] = {}
        self._rows: list[_Row] = []
        self._done: list[NDArray[np.int32]] = []  # events before ``_rows``
        self._before = 0

    @property
    def num_events(self) -> int:
        return self._before + len(self._rows)

    def run(
        self,
        passage: BlockPass | Slot,
        name: str,
        number: int = 0,
        step: int = 1,
        *,
        times: int = 1,
        nodes: tuple[int, int] | None = None,
    ) -> None:
        """Run a passage several times, or some of its nodes once."""
        first, last = nodes or (0, passage.num_nodes)
        if last > first and times:
            at = self._passages.setdefault(passage, len(self._passages))
            label = self._names.setdefault(name, len(self._names))
            self._rows.append((RUN, at, first, last, times, label, number, step))

    def items(self, items: Sequence[Item], name: str, number: int = 0, own: str = "") -> None:
        """Run ops, and collectives of groups other than replicas, as ``name.own``."""
        if items:
            self.run(items_pass(tuple(items), own), name, number)

    def send(
        self, work: Hashable, clock: int, name: str, number: int = 0, *, after: int = -1, early: bool = False
    ) -> int:
        """Start a collective that overlaps with the computation; ``early``: before the computation reaches it."""
        return self._add(SEND, work, (clock, after, int(early)), name, number)

    def host(self, work: Hashable, name: str, number: int = 0) -> int:
        """Start work of the host that overlaps with the computation."""
        return self._add(SEND, work, (SECOND, -1, ON_HOST), name, number)

    def block(self, work: Hashable, clock: int, name: str, number: int = 0) -> int:
        """Run a collective that the computation waits for."""
        return self._add(BLOCK, work, (clock, 0, 0), name, number)

    def reduce(
        self, works: Sequence[Collective | Slot | None], number: int, *, expert: bool = False, wait: bool = False
    ) -> None:
        """Sum one bucket of gradients, with hybrid sharding within a group and then between groups.

        ``works``: what ``bucket_works`` says, or slots for it; ``wait``: whether the computation waits for it.
        """
        name, sent = BUCKET_NAMES[expert], -1
        for work, clock in zip(works, (SECOND if expert else DATA, SECOND), strict=True):
            if work is not None and wait:
                self.block(work, clock, name, number)
            elif work is not None:
                sent = self.send(work, clock, name, number, after=sent)

    def wait(self, event: int) -> None:
        self._rows.append((WAIT, event, 0, 0, 0, self._names.setdefault("", len(self._names)), 0, 0))

    def repeat(self, since: int, times: int, step: int) -> int:
        """Repeat the events since an event; indices advance by ``step``. Return by how many events they are shifted."""
        rows = np.array(self._rows[since - self._before :], dtype=np.int32)
        length = len(rows)
        again = np.tile(rows, (times, 1))
        turn = np.repeat(np.arange(1, times + 1, dtype=np.int32), length)
        kind = again[:, 0]
        again[:, 1] += np.where(kind == WAIT, length * turn, 0)
        again[:, 3] += np.where((kind == SEND) & (again[:, 3] >= 0), length * turn, 0)
        again[:, 6] += np.where(kind == WAIT, 0, step * turn)
        self._done += [*([np.array(self._rows, dtype=np.int32)] if self._rows else []), again]
        self._before += len(self._rows) + len(again)
        self._rows = []
        return length * times

    def build(self) -> Segment:
        rows = _events(tuple(self._rows))
        return Segment(
            self._label,
            tuple(self._passages),
            tuple(self._sent),
            np.concatenate([*self._done, rows]) if self._done else rows,
            tuple(self._names),
            self._share,
            self._joined,
        )

    def _add(self, kind: int, work: Hashable, how: tuple[int, int, int], name: str, number: int) -> int:
        """Record an event of a collective; collectives and names are numbered in the order of first use."""
        at = self._sent.setdefault(work, len(self._sent))
        self._rows.append((kind, at, *how, self._names.setdefault(name, len(self._names)), number, 0))
        return self.num_events - 1


@cached(4096)
def _events(rows: tuple[_Row, ...]) -> NDArray[np.int32]:
    """Rows as an array, which segments with the same events share."""
    return np.array(rows, dtype=np.int32).reshape(-1, NUM_COLUMNS)


def _write_out(segment: Segment) -> tuple[Program, list[int], list[int], list[int]]:
    """Nodes of every event with their dependencies; which ones block the computation, are early, or are lost time."""
    out = Issue(segment.label, segment.compute_share)
    nodes: list[int] = []  # of each event, -1 if it has none
    for kind, what, a, b, times, label, number, step in segment.events.tolist():
        name, node = segment.names[label], -1
        if kind == RUN:
            out.take_time()
            for turn in range(times):
                prefix = name.format(number + turn * step)
                for item, own in segment.passages[what].between(a, b):
                    out.add(item, ".".join(filter(None, (prefix, own))))
        elif kind == WAIT:
            out.wait(nodes[what])
        elif kind == BLOCK:
            node = out.block(segment.sent[what], CLOCK_STREAMS[a], name.format(number))
        else:
            after = [nodes[b]] if b >= 0 else []
            takes, early = times != ON_HOST, times == 1
            node = out.send(segment.sent[what], CLOCK_STREAMS[a], name.format(number), after, early=early, takes=takes)
        nodes.append(node)
    rows = list(zip(nodes, segment.events[:, 0].tolist(), segment.events[:, 4].tolist(), strict=True))
    blocking = [node for node, kind, _ in rows if kind == BLOCK]
    return out.program(), blocking, [node for node, kind, soon in rows if kind == SEND and soon == 1], out.lost


TWICE = "_twice"
ROOT = -1  # replaces a unit's index: the units that FSDP wraps with the model itself


class Slot(NamedTuple):
    """A placeholder for a passage or a collective."""

    # run (a unit's own passage); copy_in, copy_out and gather of its parameters, with TWICE where recomputation and
    # backward each gather; grad_in, grad_lists, reduce and add of its gradients
    what: str
    unit: int  # index of the unit, or ROOT
    expert: bool = False  # whether it is for experts' parameters
    second: bool = False  # of two collectives that sum gradients, whether it is the one between hybrid shards
    num_nodes: int = 1  # of a passage


class UnitPattern(NamedTuple):
    """The properties of a unit that the events of a segment depend on."""

    number: int  # position of the unit in its part
    # name, first, times, root: as in Unit
    name: str
    first: int
    times: int
    root: bool
    num_nodes: int  # of its passage
    loss_nodes: int  # of these, the first that belong to the head's loss
    tensors: tuple[int, int]  # number of its parameter tensors, of others and of experts
    # numel, expert_numel: whether it has parameters at all, others' and experts'
    numel: bool
    expert_numel: bool

    @property
    def run(self) -> Slot:
        """The slot of its own passage."""
        return Slot("run", self.number, num_nodes=self.num_nodes)
