"""Traffic between replicas: gradients bucket by bucket, ZeRO's scattered gradients, FSDP's gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.op import DTYPE_BYTES, Op
from stepsight.simulator.blocks.shape import Group
from stepsight.simulator.parts import Groups
from stepsight.simulator.passages import Passage
from stepsight.simulator.segment import DATA, SECOND, SegmentBuilder

GRADIENT_BYTES = 4
_NOBODY = Groups(Group(), Group(), Group(), Group(), Group())


@dataclass(frozen=True, slots=True)
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
    eager: bool = False
    compute_share: float = 0.0

    @property
    def size(self) -> int:
        return self.groups.replicas.size

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


def reduce_gradients(
    builder: SegmentBuilder, replicas: Replicas, numel: int, name: str, *, expert: bool = False, wait: bool = False
) -> None:
    """Sum one bucket of gradients over the replicas; with hybrid sharding, within a group and then between groups."""
    groups, num_bytes = replicas.groups, numel * GRADIENT_BYTES
    first = groups.experts if expert else groups.shard if replicas.zero_stage else groups.replicas
    clock = SECOND if expert else DATA
    sent = -1
    if first.size > 1:
        kind = "reduce_scatter" if replicas.zero_stage else "all_reduce"
        work = first.collective(kind, num_bytes)
        if wait:
            builder.block(work, clock, name)
        else:
            sent = builder.send(work, clock, name)
    if replicas.zero_stage and not expert and groups.replicate.size > 1:
        work = groups.replicate.collective("all_reduce", -(-num_bytes // first.size))
        if wait:
            builder.block(work, SECOND, f"{name}.replicas")
        else:
            builder.send(work, SECOND, f"{name}.replicas", after=sent)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a bucket is full.

    Attributes:
        unit, turn, node: After so many nodes of the unit's passage in its n-th repetition.
        numel: Elements of the bucket.
        expert: Whose gradients it holds.
    """

    unit: int
    turn: int
    node: int
    numel: int
    expert: bool


def cut_buckets(units: Sequence[tuple[Passage, int]], bucket_bytes: int) -> list[Cut]:
    """Buckets of the gradients of some passages, each repeated, in the order of issue; the rest is the last bucket."""
    cuts = [cut for expert in (False, True) for cut in _cuts(units, bucket_bytes, expert)]
    return sorted(cuts, key=lambda cut: (cut.unit, cut.turn, cut.node, cut.expert))


def _cuts(units: Sequence[tuple[Passage, int]], bucket_bytes: int, expert: bool) -> list[Cut]:
    per_unit = [[g for g in passage.gradients if g.expert == expert] for passage, _ in units]
    if not any(per_unit):
        return []
    sizes = [np.tile([g.numel for g in own], times) for own, (_, times) in zip(per_unit, units, strict=True)]
    bounds = np.cumsum([0, *map(len, sizes)])
    total: NDArray[np.int64] = np.concatenate(sizes).astype(np.int64).cumsum()
    limit, begin, cuts = -(-bucket_bytes // GRADIENT_BYTES), 0, []
    while begin < total[-1]:
        at = min(int(np.searchsorted(total, begin + limit)), len(total) - 1)
        unit = int(np.searchsorted(bounds, at, "right")) - 1
        turn, which = divmod(at - int(bounds[unit]), len(per_unit[unit]))
        gradient, passage = per_unit[unit][which], units[unit][0]
        node = gradient.node if passage.serial else len(passage)
        cuts.append(Cut(unit, turn, node, int(total[at]) - begin, expert))
        begin = int(total[at])
    return cuts


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
        units: What is gathered, in the order of use.
        dtype: Of the parameters that travel.
        ahead: Whether the next unit is asked for early even where that hides nothing (backward on CPU).
    """

    def __init__(
        self, builder: SegmentBuilder, replicas: Replicas, units: Sequence[FullUnit], dtype: str, *, ahead: bool
    ) -> None:
        self._builder = builder
        self._replicas = replicas
        self._todo = list(units[::-1])
        self._dtype = dtype
        self._ahead = replicas.prefetch if ahead or replicas.beside else 0
        self._flying: list[tuple[list[int], FullUnit]] = []

    def ask(self) -> None:
        """Ask for units ahead of their use."""
        while self._todo and len(self._flying) < self._ahead:
            self._issue()

    def arrive(self) -> None:
        """Wait for the oldest unit and copy it out into parameters."""
        if not self._flying:
            self._issue()
        events, unit = self._flying.pop(0)
        for event in events:
            self._builder.wait(event)
        self._builder.items([Op("copy", (unit.numel + unit.expert_numel,), self._dtype)], f"{unit.name}.copy_out")

    def _issue(self) -> None:
        unit, groups = self._todo.pop(), self._replicas.groups
        shard = -(-unit.numel // groups.shard.size) + -(-unit.expert_numel // groups.experts.size)
        self._builder.items([Op("copy", (shard,), self._dtype)], f"{unit.name}.copy_in")
        events = []
        for group, numel, clock in ((groups.shard, unit.numel, DATA), (groups.experts, unit.expert_numel, SECOND)):
            if not numel or group.size == 1:
                continue
            gather = group.collective("all_gather", numel * DTYPE_BYTES[self._dtype])
            name = f"{unit.name}.parameters"
            if self._replicas.beside:
                events.append(self._builder.send(gather, clock, name))
            else:
                self._builder.block(gather, clock, name)
        self._flying.append((events, unit))
