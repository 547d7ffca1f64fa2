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
from stepsight.simulator.clock.engine import BLOCK, DATA, ON_HOST, RUN, SECOND, SEND, WAIT
from stepsight.simulator.programs.block_pass import BlockPass, items_pass
from stepsight.simulator.programs.op_level import Issue, OpGraph, Work, Written, op_graph, write_out

BUCKET_NAMES = ("gradients{}", "expert_gradients{}")  # of ordinary parameters, of experts


class Slot(NamedTuple):
    """A placeholder for a passage or a collective."""

    # run (a unit's own passage); copy_in, copy_out and gather of its parameters, with TWICE where recomputation and
    # backward each gather; grad_in, grad_lists, reduce and add of its gradients
    what: str
    unit: int  # index of the unit, or ROOT
    expert: bool = False  # whether it is for experts' parameters
    second: bool = False  # of two collectives that sum gradients, whether it is the one between hybrid shards
    num_nodes: int = 1  # of a passage


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
        return self.written.program

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Distinct signatures in order of first use in ``program``."""
        return tuple(dict.fromkeys(node.work for node in self.program.nodes))

    @cached_property
    def flops(self) -> float:
        """FLOP of one run on one rank: of products and attention alone, a multiply-add as two; causal attention counts
        the half that is computed.
        """
        return self._sum(lambda op: op.flops if op.record.bound == "compute" else 0.0)

    @cached_property
    def looked_up_bytes(self) -> float:
        """Bytes that lookups in embedding tables read and write in one run on one rank."""
        return self._sum(lambda op: op.num_bytes if op.family == "table_lookup" else 0.0)

    def _sum(self, amount: Callable[[Op], float]) -> float:
        """Sum over the ops of all passages."""
        total = 0.0
        for what, first, last, times in self.events[self.events[:, 0] == RUN, 1:5].tolist():
            works = [node.work for node in self.passages[what].program.nodes[first:last]]
            total += times * sum(amount(work) for work in works if isinstance(work, Op))
        return total

    def filled(self, work: Callable[[Slot], Any]) -> Segment:
        """The segment of one rank, if this is a plan: its ``passages`` and ``sent`` are slots, which ``work`` fills."""
        passages, sent = (tuple([work(slot) for slot in slots]) for slots in (self.passages, self.sent))  # type: ignore[arg-type]
        return Segment(self.label, passages, sent, self.events, self.names, self.compute_share, self.joined)

    @cached_property
    def graph(self) -> OpGraph:
        return op_graph(self.works, self.written)

    @cached_property
    def written(self) -> Written:
        """Everything at op level, and what nodes are."""
        out = Issue(self.label, self.compute_share)
        return write_out(out, self.events, self.names, lambda at, *ends: self.passages[at].between(*ends), self.sent)


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
