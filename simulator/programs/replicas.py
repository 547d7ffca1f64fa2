"""The synchronisation of replicas: who they are, their collectives, and the work that fills a plan's slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.dataset.job.execution import ExecutionSemantics
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.simulator.blocks.step import Group
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.programs.block_pass import BlockPass, items_pass
from stepsight.simulator.programs.segment import TWICE, SegmentBuilder, Slot
from stepsight.simulator.programs.sizes import Groups

BUCKET_NAMES = ("gradients{}", "expert_gradients{}")  # of ordinary parameters, of experts
_NOBODY = Groups(Group(), Group(), Group(), Group(), Group())


@hashed_once
@dataclass(frozen=True)
class Gathering:
    """How FSDP gathers parameters that replicas share, in time (``gathers``) and in memory (``memory.part``)."""

    prefetch: int = 1  # units gathered ahead of their use
    reshard: bool = True  # whether a unit is dropped after its forward, and gathered again for its backward
    # whether gradients stay whole until those of the last micro-batch are there (in a pipeline)
    reduce_once: bool = False
    lists: bool = False  # as gathers_lists of OverlapSemantics
    casts: bool = False  # whether a rank casts its part before it is gathered (FSDP2's MixedPrecisionPolicy)


@hashed_once
@dataclass(frozen=True)
class Replicas:
    """The synchronisation of a rank's replicas."""

    groups: Groups = field(default=_NOBODY)  # who they are
    zero_stage: int = 0  # 0 to 3
    bucket_bytes: int = 25 * 2**20  # a gradient bucket is sent when it holds at least this much
    beside: bool = True  # whether their collectives run beside the computation at all (not on CPU under FSDP)
    overlap_gradients: bool = True  # whether gradients are sent while backward runs, rather than after it
    overlap_parameters: bool = False  # ZeRO 1 and 2: whether parameters are gathered while the first forward runs
    gathering: Gathering = field(default=Gathering())  # FSDP: how parameters are gathered
    gradient_bytes: int = 4  # of each element of a gradient that is sent
    all_sums: bool = False  # ZeRO 1: whether every rank is sent the sums of all gradients, rather than of its share
    bucket_copies: bool = False  # as in StateSemantics
    by_rank: bool = False  # ZeRO 1 and 2: whether each rank's share is a message of its own
    compute_share: float = 0.0  # part of an overlapped collective's time taken from the computation

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
        """The replicas with groups of two instead of larger ones: the events of a segment do not depend on the size."""
        groups = [Group(min(getattr(self.groups, field.name).size, 2)) for field in fields(self.groups)]
        return _same(replace(self, groups=Groups(*groups)))

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
    """Sum one bucket of gradients, with hybrid sharding within a group and then between groups.

    ``works``: what ``bucket_works`` says, or slots for it; ``wait``: whether the computation waits for it.
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


def gathering_of(zero: tuple[int, bool], semantics: ExecutionSemantics, *, beside: bool = True) -> Gathering:
    """How a job gathers parameters; ``zero``, ``beside``: as in ``replicas_of``."""
    (zero_stage, pipelined), overlap = zero, semantics.overlap
    return Gathering(
        overlap.prefetch,
        overlap.reshard,
        reduce_once=zero_stage == 3 and pipelined and beside,
        lists=overlap.gathers_lists,
        casts=semantics.kernels.casts_parameters,
    )


@cached(4096)
def replicas_of(
    zero: tuple[int, bool], groups: Groups, semantics: ExecutionSemantics, *, beside: bool, share: float
) -> Replicas:
    """The synchronisation of a rank's replicas.

    ``zero``: the ZeRO stage, and whether there is a pipeline; ``beside``: whether the hardware runs collectives beside
    the computation; ``share``: the part of their time that the computation then loses.
    """
    states, overlap = semantics.states, semantics.overlap
    zero_stage, _ = zero
    return Replicas(
        groups,
        zero_stage,
        int(overlap.bucket_bytes),
        beside,
        overlap.gradients,
        overlap.parameters,
        gathering_of(zero, semantics, beside=beside),
        gradient_bytes=DTYPE_BYTES[states.gradient_dtype],
        all_sums=zero_stage == 1 and not states.scatters_sums,
        bucket_copies=states.bucket_copies,
        by_rank=overlap.by_rank,
        compute_share=share,
    )


# DeepSpeed 0.3: tensors of fewer elements stay on every rank (stage3_param_persistence_threshold), and so do, between
# recomputation and backward, those that are used again before this many elements of others (stage3_max_reuse_distance).
# Each rank's part of a list costs the host a view and a copy.
_STAYS, _REUSED = 100_000, 10**9
_CALLS_PER_PART = 2
Tensors = tuple[tuple[int, ...], tuple[int, ...]]


class _UnitWork:
    """The replicas' work on one unit, each made once; ``tensors``: elements of others' and of experts' parameter
    tensors, in the order in which gradients arrive; ``dtypes``: of activations, and the main one.
    """

    def __init__(self, tensors: Tensors, dtypes: tuple[str, str], replicas: Replicas) -> None:
        self._tensors, (self._dtype, self._main_dtype), self._replicas = tensors, dtypes, replicas
        self._known: dict[tuple[str, bool, bool], BlockPass | Collective | Op] = {}

    def of(self, slot: Slot) -> BlockPass | Collective | Op:
        """The work of a slot of this unit."""
        key = slot.what, slot.expert, slot.second
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def _make(self, what: str, expert: bool, second: bool) -> BlockPass | Collective | Op:
        replicas, tensors, dtype = self._replicas, self._tensors[expert], self._dtype
        if what.removesuffix(TWICE) in ("copy_in", "copy_out", "gather"):
            return self._gathering(what.removesuffix(TWICE), expert, twice=what.endswith(TWICE))
        if what == "grad_lists":  # of every tensor, including those that stay on every rank
            parts = len(self._tensors[False]) * replicas.groups.shard.size
            parts += len(self._tensors[True]) * replicas.groups.experts.size
            return Op("host_calls", (_CALLS_PER_PART * parts,), dtype)
        if what == "grad_in":  # copy gradients into the message, in its type
            kind = "copy" if replicas.gradient_bytes == DTYPE_BYTES[dtype] else "cast"
            return items_pass((Op(kind, (sum(tensors),), dtype),), "copy_in")
        if what == "add":  # add to the sums of earlier micro-batches, tensor by tensor, in the order of declaration
            shards = replicas.expert_shards if expert else replicas.shards
            ops = tuple([Op("add", (-(-tensor // shards),), self._main_dtype) for tensor in reversed(tensors)])
            return items_pass(ops, "accumulate")
        work = bucket_works(replicas, sum(tensors), expert=expert)[second]
        assert work is not None, what
        return work

    def _gathering(self, what: str, expert: bool, *, twice: bool) -> BlockPass | Collective:
        """The ops and collectives that gather parameters: once, or separately for recomputation and backward."""
        groups, dtype, gathering = self._replicas.groups, self._dtype, self._replicas.gathering
        lists = gathering.lists
        others, experts = (_gathered(tensors, lists=lists, twice=twice) for tensors in self._tensors)
        if what == "gather":
            group = groups.experts if expert else groups.shard
            return group.collective("all_gather", sum(experts if expert else others) * DTYPE_BYTES[dtype])
        if what == "copy_out":
            return items_pass((Op("copy", (sum(others) + sum(experts),), dtype),), what)
        shard = -(-sum(others) // groups.shard.size) + -(-sum(experts) // groups.experts.size)
        copy = Op("copy", (shard,), dtype)
        if not lists:
            casts = (Op("cast", (shard,), dtype),) if gathering.casts else ()
            return items_pass((*casts, copy), what)
        parts = len(others) * groups.shard.size + len(experts) * groups.experts.size
        whole = Op("fill", (sum(others) + sum(experts),), dtype)  # torch.zeros, into which the chunks arrive
        return items_pass((whole, Op("host_calls", (_CALLS_PER_PART * parts,), dtype), copy), what)


def _gathered(tensors: tuple[int, ...], *, lists: bool, twice: bool) -> tuple[int, ...]:
    """Gathered elements of some tensors, which are in the order of backward."""
    large = tuple([numel for numel in tensors if numel >= _STAYS]) if lists else ()
    if not large:
        return tensors
    between = [2 * sum(large[:place]) for place in range(len(large))]  # forward and backward of the tensors after it
    again = [numel for numel, others in zip(large, between, strict=True) if others >= _REUSED]
    return (*large, *again) if twice else large


unit_work = cached(8192)(_UnitWork)
