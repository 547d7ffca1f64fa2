"""Traffic between replicas: gradients bucket by bucket, ZeRO's scattered gradients, FSDP's gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.op import DTYPE_BYTES, Collective, Op
from stepsight.dataset.specs import hashed_once
from stepsight.simulator.blocks.shape import Group
from stepsight.simulator.clock.engine import compiled
from stepsight.simulator.lowering.passages import Passage
from stepsight.simulator.lowering.segment import DATA, NUM_COLUMNS, RUN, SECOND, SEND, Segment, SegmentBuilder
from stepsight.simulator.lowering.sizes import Groups

GRADIENT_BYTES = {"fp16": 2}  # by precision: Megatron sums gradients in fp32 but for fp16
FULL_GRADIENT_BYTES = 4
BUCKET_NAMES = ("gradients{}", "expert_gradients{}")  # of others, of experts
_NOBODY = Groups(Group(), Group(), Group(), Group(), Group())


@hashed_once
@dataclass(frozen=True)
class Replicas:
    """How the replicas of a rank agree.

    Attributes:
        groups: Who they are.
        zero_stage: 0 to 3.
        bucket_bytes: A gradient bucket is sent when it holds at least this much.
        beside: Whether their collectives run beside the computation at all (not on CPU under FSDP).
        overlap_gradients: Whether gradients are sent while backward runs, rather than after it.
        overlap_parameters: ZeRO 1 and 2: whether parameters are gathered while the first forward runs.
        prefetch: FSDP: units gathered ahead of their use.
        reshard: FSDP: whether backward gathers again.
        reduce_once: FSDP in a pipeline: gradients are reduced after the last micro-batch alone.
        gradient_bytes: Of each element of a gradient that is sent.
        all_sums: ZeRO 1: whether every rank is sent the sums of all gradients, rather than of its share.
        eager: Eager PyTorch's conventions (fp32): copies into buckets, one ``add`` per tensor to accumulate.
        compute_share: Part of an overlapped collective's time taken from the computation.
    """

    groups: Groups = field(default=_NOBODY)
    zero_stage: int = 0
    bucket_bytes: int = 25 * 2**20
    beside: bool = True
    overlap_gradients: bool = True
    overlap_parameters: bool = False
    prefetch: int = 1
    reshard: bool = True
    reduce_once: bool = False
    gradient_bytes: int = FULL_GRADIENT_BYTES
    all_sums: bool = False
    eager: bool = False
    compute_share: float = 0.0

    @property
    def size(self) -> int:
        """Ranks that hold the same parameters; of experts', where only these are held several times."""
        return max(self.groups.replicas.size, self.groups.experts.size)

    @property
    def fully_sharded(self) -> bool:
        return self.zero_stage == 3 and self.groups.shard.size > 1

    @property
    def shards(self) -> int:
        """Ranks that share optimizer states."""
        return self.groups.shard.size if self.zero_stage else 1

    @property
    def expert_shards(self) -> int:
        """Ranks that share experts' optimizer states."""
        return self.groups.experts.size if self.zero_stage else 1

    @property
    def accumulates_shards(self) -> bool:
        """Whether gradients are reduced, and only then added to those of earlier micro-batches."""
        return self.zero_stage >= 2 and self.size > 1 and not self.reduce_once

    def reduces(self, last: bool) -> bool:
        """Whether the backward of a micro-batch sends gradients, ``last`` saying whether it is the last."""
        if self.size == 1:
            return False
        if self.zero_stage >= 2:
            return last or self.accumulates_shards
        return last and self.overlap_gradients


SILENT = Replicas()


def bucket_works(replicas: Replicas, numel: int, *, expert: bool) -> tuple[Collective | None, Collective | None]:
    """Collectives that sum one bucket of gradients: of the first group, and between hybrid shards."""
    groups, num_bytes = replicas.groups, numel * replicas.gradient_bytes
    own = groups.experts if expert else groups.shard if replicas.zero_stage else groups.replicas
    first = second = None
    if own.size > 1:
        scattered = replicas.zero_stage and not replicas.all_sums
        first = own.collective("reduce_scatter" if scattered else "all_reduce", num_bytes)
    if replicas.zero_stage and not expert and groups.replicate.size > 1:
        second = groups.replicate.collective("all_reduce", -(-num_bytes // own.size))
    return first, second


def reduce_gradients(
    builder: SegmentBuilder, replicas: Replicas, numel: int, number: int, *, expert: bool = False, wait: bool = False
) -> None:
    """Sum one bucket of gradients over the replicas; with hybrid sharding, within a group and then between groups."""
    first, second = bucket_works(replicas, numel, expert=expert)
    name, sent = BUCKET_NAMES[expert], -1
    for work, clock in ((first, SECOND if expert else DATA), (second, SECOND)):
        if work is None:
            continue
        if wait:
            builder.block(work, clock, name, number)
        else:
            sent = builder.send(work, clock, name, number, after=sent)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A backward passage that runs several times in a row.

    Attributes:
        passage, times: What, and how often.
        name, newest: For people: the first has this number, the others lower ones.
    """

    passage: Passage
    times: int
    name: str
    newest: int


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """A backward pass in which gradients are sent bucket by bucket, whatever the buckets and the replicas.

    Attributes:
        label: Of the segment.
        passages: Distinct ones.
        names: For people: of the passages' blocks, then of the two kinds of buckets.
        places: Of each unit: passage, its nodes, times, name, number, whether it can be cut anywhere; shape ``(u, 6)``.
        tensors: Node, elements and whether an expert's of each gradient of each unit, shape ``(g, 3)``.
        bounds: Gradients of unit ``i`` are ``bounds[i]:bounds[i + 1]``.
        most: No more buckets than this.
    """

    label: str
    passages: tuple[Passage, ...]
    names: tuple[str, ...]
    places: NDArray[np.int64]
    tensors: NDArray[np.int64]
    bounds: NDArray[np.int64]
    most: int

    @classmethod
    def of(cls, label: str, units: Sequence[Repeated]) -> BucketPlan:
        passages = {unit.passage: None for unit in units}
        names = dict.fromkeys([*(unit.name for unit in units), *BUCKET_NAMES])
        index, number = ({key: at for at, key in enumerate(keys)} for keys in (passages, names))
        rows = [
            (index[u.passage], u.passage.num_nodes, u.times, number[u.name], u.newest, u.passage.serial) for u in units
        ]
        tables = [unit.passage.gradient_table for unit in units]
        bounds = np.cumsum([0, *map(len, tables)])
        places = np.array(rows, dtype=np.int64).reshape(-1, 6)
        most = int((np.diff(bounds) * places[:, 2]).sum()) + 2
        tensors = np.concatenate([np.zeros((0, 3), dtype=np.int64), *tables])
        return cls(label, tuple(passages), tuple(names), places, tensors, bounds, most)


def send_buckets(plan: BucketPlan, replicas: Replicas) -> Segment:
    """Run a backward pass; gradients are sent on the way, the last bucket holds what is left."""
    limit = -(-replicas.bucket_bytes // replicas.gradient_bytes)
    cuts, found = np.empty((plan.most, 5), dtype=np.int64), np.zeros(2, dtype=np.int64)
    sizes = np.empty((plan.most, 2), dtype=np.int64)
    cut_buckets(plan.places, plan.tensors, plan.bounds, limit, cuts, sizes, found)
    cuts = cuts[: found[0]]
    sent: dict[Collective, int] = {}
    works = []
    for numel, expert in sizes[: found[1]].tolist():
        pair = bucket_works(replicas, numel, expert=bool(expert))
        works.append([-1 if work is None else sent.setdefault(work, len(sent)) for work in pair])
    if cuts[:, 4].any():  # experts' cuts come after the others'
        cuts = cuts[np.lexsort((cuts[:, 4], cuts[:, 2], cuts[:, 1], cuts[:, 0]))]
    rows = np.empty((5 * len(cuts) + 3 * len(plan.places), NUM_COLUMNS), dtype=np.int32)
    count = np.zeros(1, dtype=np.int64)
    bucket_rows(plan.places, cuts, np.array(works, dtype=np.int64).reshape(-1, 2), len(plan.names) - 2, rows, count)
    return Segment(plan.label, plan.passages, tuple(sent), rows[: count[0]], plan.names, replicas.compute_share)


@compiled
def cut_buckets(
    places: NDArray[np.int64],
    tensors: NDArray[np.int64],
    bounds: NDArray[np.int64],
    limit: int,
    cuts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    found: NDArray[np.int64],
) -> None:
    """Where buckets are full.

    Args:
        places, tensors, bounds: See ``BucketPlan``.
        limit: A bucket is full when it holds this many elements.
        cuts: Filled: unit, turn, node, index into ``sizes``, whether experts'; first the others', then the experts'.
        sizes: Filled: distinct elements, whether experts'.
        found: Filled: how many cuts and sizes.
    """
    at, distinct = 0, 0
    for expert in range(2):
        held, unit, turn, node = 0, -1, 0, 0
        for u in range(len(places) + 1):
            last = u == len(places)
            for t in range(1 if last else places[u, 2]):
                for g in range(0 if last else bounds[u], 1 if last else bounds[u + 1]):
                    if not last:
                        if tensors[g, 2] != expert:
                            continue
                        held += tensors[g, 1]
                        unit, turn = u, t
                        node = tensors[g, 0] if places[u, 5] else places[u, 1]
                    if held >= limit or (last and held > 0):
                        size = distinct
                        for known in range(distinct - 1, -1, -1):
                            if sizes[known, 0] == held and sizes[known, 1] == expert:
                                size = known
                                break
                        if size == distinct:
                            sizes[size, 0], sizes[size, 1] = held, expert
                            distinct += 1
                        cuts[at, 0], cuts[at, 1], cuts[at, 2], cuts[at, 3], cuts[at, 4] = unit, turn, node, size, expert
                        at += 1
                        held = 0
    found[0], found[1] = at, distinct


@compiled
def bucket_rows(
    places: NDArray[np.int64],
    cuts: NDArray[np.int64],
    works: NDArray[np.int64],
    names: int,
    rows: NDArray[np.int32],
    count: NDArray[np.int64],
) -> None:
    """Events of units that are interrupted where buckets are full.

    Args:
        places, cuts: As in ``cut_buckets``, cuts in the order of issue.
        works: The one or two collectives of each size, -1 if none, shape ``(num_sizes, 2)``.
        names: Index of the name of others' buckets; that of experts' follows.
        rows, count: Filled: events, and how many.
    """
    at, cut = 0, 0
    numbers = np.zeros(2, dtype=np.int64)
    for u in range(len(places)):
        passage, nodes, times, name, newest = places[u, 0], places[u, 1], places[u, 2], places[u, 3], places[u, 4]
        turn, node = 0, 0
        while True:
            here = cut < len(cuts) and cuts[cut, 0] == u
            until, stop = (cuts[cut, 1], cuts[cut, 2]) if here else (times, 0)
            if stop == nodes:
                until, stop = until + 1, 0
            if node > 0 and turn < until:
                rows[at, :] = np.array([RUN, passage, node, nodes, 1, name, newest - turn, -1])
                at += 1
                turn, node = turn + 1, 0
            if turn < until:
                rows[at, :] = np.array([RUN, passage, 0, nodes, until - turn, name, newest - turn, -1])
                at += 1
                turn = until
            if stop > node:
                rows[at, :] = np.array([RUN, passage, node, stop, 1, name, newest - turn, -1])
                at += 1
                node = stop
            if not here:
                break
            expert = cuts[cut, 4]
            sent = -1
            for which in range(2):
                if works[cuts[cut, 3], which] >= 0:
                    clock = SECOND if which == 1 or expert == 1 else DATA
                    work, name_at = works[cuts[cut, 3], which], names + expert
                    rows[at, :] = np.array([SEND, work, clock, sent, 0, name_at, numbers[expert], 0])
                    sent = at
                    at += 1
            numbers[expert] += 1
            cut += 1
    count[0] = at


@dataclass(frozen=True, slots=True)
class FullUnit:
    """What FSDP gathers at once.

    Attributes:
        name: For people.
        numel, expert_numel: Elements, others' and experts'.
    """

    name: str
    numel: int
    expert_numel: int = 0


class Gathers:
    """FSDP's all-gathers of parameters, some units ahead of the computation where they overlap.

    Args:
        builder: Where to.
        replicas: Who shares.
        units: What is gathered, in the order of use, each with its number; equal units are one object.
        dtype: Of the parameters that travel.
        ahead: Whether the next unit is asked for early even where that hides nothing (backward on CPU).
        early: Whether all are on their way before the computation begins (parameters that stay, once an iteration).
    """

    def __init__(
        self,
        builder: SegmentBuilder,
        replicas: Replicas,
        units: Sequence[tuple[FullUnit, int]],
        dtype: str,
        *,
        ahead: bool,
        early: bool = False,
    ) -> None:
        self._builder = builder
        self._replicas = replicas
        self._units = units
        self._dtype = dtype
        self._early = early and replicas.beside
        self._ahead = replicas.prefetch if ahead or replicas.beside else 0
        self._asked = self._used = 0
        self._steady = 0  # units in a row that did the same
        self._flying: list[tuple[int, ...]] = []  # events of what was asked for and is not used yet

    def ask(self) -> None:
        """Ask for units ahead of their use."""
        while self._asked < len(self._units) and len(self._flying) < self._ahead:
            self._issue()

    def arrive(self) -> None:
        """Wait for the oldest unit and copy it out into parameters."""
        again = self._used > 0 and self._units[self._used][0] is self._units[self._used - 1][0]
        self._steady = self._steady + 1 if again and len(self._flying) == self._ahead else 0
        if not self._flying:
            self._issue()
        for event in self._flying.pop(0):
            self._builder.wait(event)
        unit, number = self._units[self._used]
        self._used += 1
        numel = unit.numel + unit.expert_numel
        self._builder.items([Op("copy", (numel,), self._dtype)], unit.name, number, "copy_out")

    def alike(self) -> int:
        """How many of the next units do just what the last one did: wait for, and ask for, the same sizes."""
        if self._steady <= self._ahead or len(self._flying) < self._ahead:
            return 0  # what it waited for was not yet asked for by one that is like it
        units, used, asked, count = self._units, self._used, self._asked, 0
        while asked + count < len(units):
            if units[used + count][0] is not units[used - 1][0] or units[asked + count][0] is not units[used - 1][0]:
                break
            count += 1
        return count

    def skip(self, count: int, shift: int) -> None:
        """The last unit's events were repeated so many times, which shifted events by so many."""
        self._used += count
        self._asked += count
        self._flying = [tuple(event + shift for event in events) for events in self._flying]

    def _issue(self) -> None:
        (unit, number), groups = self._units[self._asked], self._replicas.groups
        self._asked += 1
        shard = -(-unit.numel // groups.shard.size) + -(-unit.expert_numel // groups.experts.size)
        self._builder.items([Op("copy", (shard,), self._dtype)], unit.name, number, "copy_in")
        events = []
        for group, numel, clock in ((groups.shard, unit.numel, DATA), (groups.experts, unit.expert_numel, SECOND)):
            if not numel or group.size == 1:
                continue
            gather = group.collective("all_gather", numel * DTYPE_BYTES[self._dtype])
            name = f"{unit.name}.parameters"
            if self._replicas.beside:
                events.append(self._builder.send(gather, clock, name, number, early=self._early))
            else:
                self._builder.block(gather, clock, name, number)
        self._flying.append(tuple(events))
