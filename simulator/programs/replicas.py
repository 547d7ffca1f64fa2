"""The synchronisation of replicas: their groups, and the collectives that sum their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.dataset.job.execution import ExecutionSemantics, OverlapSemantics
from stepsight.dataset.job.specs import ParallelSpec
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective
from stepsight.simulator.blocks.shape import Group
from stepsight.simulator.clock.codes import DATA, SECOND
from stepsight.simulator.programs.segment import SegmentBuilder
from stepsight.simulator.programs.sizes import Groups
from stepsight.simulator.programs.slots import Slot

BUCKET_NAMES = ("gradients{}", "expert_gradients{}")  # of ordinary parameters, of experts
_NOBODY = Groups(Group(), Group(), Group(), Group(), Group())


@hashed_once
@dataclass(frozen=True)
class Gathering:
    """How FSDP gathers parameters that replicas share, in time (``gathers``) and in memory (``memory.part``).

    Attributes:
        prefetch: Units gathered ahead of their use.
        reshard: Whether a unit is dropped after its forward, and gathered again for its backward.
        reduce_once: Whether gradients stay whole until those of the last micro-batch are there (in a pipeline).
        lists: As ``gathers_lists`` of ``OverlapSemantics``.
        casts: Whether a rank casts its part before it is gathered (FSDP2's ``MixedPrecisionPolicy``).
    """

    prefetch: int = 1
    reshard: bool = True
    reduce_once: bool = False
    lists: bool = False
    casts: bool = False


@hashed_once
@dataclass(frozen=True)
class Replicas:
    """The synchronisation of a rank's replicas.

    Attributes:
        groups: Who they are.
        zero_stage: 0 to 3.
        bucket_bytes: A gradient bucket is sent when it holds at least this much.
        beside: Whether their collectives run beside the computation at all (not on CPU under FSDP).
        overlap_gradients: Whether gradients are sent while backward runs, rather than after it.
        overlap_parameters: ZeRO 1 and 2: whether parameters are gathered while the first forward runs.
        gathering: FSDP: how parameters are gathered.
        gradient_bytes: Of each element of a gradient that is sent.
        all_sums: ZeRO 1: whether every rank is sent the sums of all gradients, rather than of its share.
        bucket_copies: As in ``StateSemantics``.
        compute_share: Part of an overlapped collective's time taken from the computation.
    """

    groups: Groups = field(default=_NOBODY)
    zero_stage: int = 0
    bucket_bytes: int = 25 * 2**20
    beside: bool = True
    overlap_gradients: bool = True
    overlap_parameters: bool = False
    gathering: Gathering = field(default=Gathering())
    gradient_bytes: int = 4
    all_sums: bool = False
    bucket_copies: bool = False
    compute_share: float = 0.0

    @property
    def size(self) -> int:
        """Ranks that have the same parameters; the same experts, if only experts are replicated."""
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
        """Whether gradients are reduced before they are added to those of earlier micro-batches."""
        return self.zero_stage >= 2 and self.size > 1 and not self.gathering.reduce_once

    @cached_property
    def pattern(self) -> Replicas:
        """The replicas with groups of two instead of larger ones, because the events of a segment do not depend on the
        size.
        """
        groups = {field.name: _pair(getattr(self.groups, field.name)) for field in fields(self.groups)}
        return _same(replace(self, groups=Groups(**groups)))

    def reduces(self, last: bool) -> bool:
        """Whether the backward of a micro-batch sends gradients; ``last``: whether it is the last one."""
        if self.size == 1:
            return False
        if self.zero_stage >= 2:
            return last or self.accumulates_shards
        return last and self.overlap_gradients


SILENT = Replicas()


@cached(1024)
def _same(replicas: Replicas) -> Replicas:
    """Return one object for equal replicas, because they are keys of caches."""
    return replicas


def _pair(group: Group) -> Group:
    return Group(min(group.size, 2))


@cached(16384)
def bucket_works(replicas: Replicas, numel: int, *, expert: bool) -> tuple[Collective | None, Collective | None]:
    """Collectives that sum one bucket of gradients: in the first group, and between hybrid shards."""
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
    builder: SegmentBuilder,
    works: Sequence[Collective | Slot | None],
    number: int,
    *,
    expert: bool = False,
    wait: bool = False,
) -> None:
    """Sum one bucket of gradients over the replicas; with hybrid sharding, within a group and then between groups.

    Args:
        builder: Where to.
        works: What ``bucket_works`` says, or slots for it.
        number: Of the bucket.
        expert: Whether it holds experts' gradients.
        wait: Whether the computation waits for it.
    """
    first, second = works
    name, sent = BUCKET_NAMES[expert], -1
    for work, clock in ((first, SECOND if expert else DATA), (second, SECOND)):
        if work is None:
            continue
        if wait:
            builder.block(work, clock, name, number)
        else:
            sent = builder.send(work, clock, name, number, after=sent)


def gathering_of(p: ParallelSpec, overlap: OverlapSemantics, *, beside: bool = True) -> Gathering:
    """How a job gathers parameters; ``beside``: whether its collectives overlap with the computation."""
    return Gathering(overlap.prefetch, overlap.reshard, reduce_once=p.zero_stage == 3 and p.pp > 1 and beside)


@cached(4096)
def replicas_of(
    zero: tuple[int, bool], groups: Groups, semantics: ExecutionSemantics, *, beside: bool, share: float
) -> Replicas:
    """The synchronisation of a rank's replicas.

    Args:
        zero: The ZeRO stage, and whether there is a pipeline.
        groups: Who the replicas are.
        semantics: What executes the job.
        beside: Whether the hardware runs collectives beside the computation.
        share: Part of their time that the computation then loses.
    """
    states, overlap = semantics.states, semantics.overlap
    zero_stage, pipelined = zero
    return Replicas(
        groups,
        zero_stage,
        int(overlap.bucket_bytes),
        beside,
        overlap.gradients,
        overlap.parameters,
        Gathering(
            overlap.prefetch,
            overlap.reshard,
            reduce_once=zero_stage == 3 and pipelined and beside,
            lists=overlap.gathers_lists,
            casts=semantics.kernels.casts_parameters,
        ),
        gradient_bytes=DTYPE_BYTES[states.gradient_dtype],
        all_sums=zero_stage == 1 and not states.scatters_sums,
        bucket_copies=states.bucket_copies,
        compute_share=share,
    )
