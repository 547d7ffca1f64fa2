"""From a job to its sizes: groups and where they lie, the shape of a rank, parts of the model, and its replicas.

Ranks are numbered along the axes of ``ParallelSpec.order``, the first fastest.  With Megatron's default,
``tp-cp-dp-pp``::

    rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * stage))

so tensor-parallel groups fill nodes first and pipeline neighbours are furthest apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached, hashed_once
from stepsight.dataset.job.execution import ExecutionSemantics, KernelSemantics, semantics_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding import Ranks, RankTables, ShardingSpec, placements_of, rank_tables
from stepsight.dataset.job.specs import ModelSpec, OtherDevices
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective
from stepsight.simulator.blocks.family import LayerKinds, find_family, layer_kinds
from stepsight.simulator.blocks.step import Group, RankShape

Strides = tuple[tuple[int, int], ...]  # (stride, size) of each axis of a group, fastest first


@hashed_once
@dataclass(frozen=True)
class Layout:
    """Numbers of the ranks of a job: name and degree of each axis, fastest first; nodes are filled in this order."""

    axes: tuple[tuple[str, int], ...]
    devices_per_node: int

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.axes)

    def stride(self, axis: str) -> int:
        """Distance between neighbours along an axis."""
        names = [name for name, _ in self.axes]
        return prod(size for _, size in self.axes[: names.index(axis)])

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def group(self, *axes: str) -> Group:
        return self.part_of(axes, 1, prod(self.size(axis) for axis in axes))

    def part_of(self, axes: tuple[str, ...], inner: int, size: int) -> Group:
        """A group of ``size`` ranks that skips ``inner`` ranks of the group along some axes at a time, as seen by the
        one that spans the most nodes.

        Expert- and hybrid-sharded groups divide the data-parallel one: ``inner`` 1 takes neighbours.
        """
        strides: list[tuple[int, int]] = []
        for _, stride, ranks in self._taken(axes, inner, size):
            if strides and prod(strides[-1]) == stride:  # one axis continues the other
                strides[-1] = strides[-1][0], strides[-1][1] * ranks
            elif ranks > 1:
                strides.append((stride, ranks))
        size = prod(ranks for _, ranks in strides)
        if size == 1:
            return Group()
        return Group(size, _per_node(tuple(strides), size, self.num_ranks, self.devices_per_node))

    def together(self, axes: tuple[str, ...], size: int, axis: str) -> int:
        """Neighbours along an axis that are in one ``part_of(axes, 1, size)``."""
        return {name: ranks for name, _, ranks in self._taken(axes, 1, size)}.get(axis, 1)

    def _taken(self, axes: tuple[str, ...], inner: int, size: int) -> Iterator[tuple[str, int, int]]:
        """Axes of such a group, the distance between its neighbours along each, and their number."""
        for name, degree in self.axes:
            if name in axes:
                skipped = gcd(degree, inner)
                ranks = gcd(degree // skipped, size)
                inner, size = inner // skipped, size // ranks
                yield name, self.stride(name) * skipped, ranks

    def pipeline_neighbours(self, stage: int, other: int) -> int:
        """2 if all pairs of ranks that exchange messages between two stages share a node, else 1."""
        return _neighbours(self, min(stage, other), abs(other - stage) * self.stride("pp"))

    def coordinates(self, axis: str) -> NDArray[np.int64]:
        return np.arange(self.num_ranks, dtype=np.int64) // self.stride(axis) % self.size(axis)

    def ranks_of_stage(self, stage: int) -> NDArray[np.int64]:
        """Numbers of the ranks of a pipeline stage."""
        return np.flatnonzero(self.coordinates("pp") == stage)

    @property
    def nodes(self) -> NDArray[np.int64]:
        """Node of each rank, shape ``(num_ranks,)``."""
        return np.arange(self.num_ranks, dtype=np.int64) // self.devices_per_node

    def mixed_kinds(self, mixed: Sequence[OtherDevices]) -> NDArray[np.int64]:
        """Kind of each rank's device: 0, or ``n + 1`` for ``ClusterSpec.mixed[n]``; shape ``(num_ranks,)``."""
        kind = np.zeros(self.num_ranks, dtype=np.int64)
        for number, other in enumerate(mixed):
            kind[np.isin(self.nodes, other.nodes)] = number + 1
        return kind


def layout_of(job: Job) -> Layout:
    p = job.parallel
    return _layout(p.order, (p.tp, p.cp, p.dp, p.pp), job.cluster.devices_per_node)


@cached(4096)
def _layout(order: str, degrees: tuple[int, int, int, int], devices_per_node: int) -> Layout:
    """Return one object for equal layouts, because they are keys of caches."""
    size = dict(zip(("tp", "cp", "dp", "pp"), degrees, strict=True))
    return Layout(tuple([(axis, size[axis]) for axis in order.split("-")]), devices_per_node)


@cached(4096)
def _per_node(strides: Strides, size: int, num_ranks: int, devices_per_node: int) -> int:
    """``ceil(size / nodes)`` of the worst group, such that ``Collective.num_nodes`` is the number of nodes it spans."""
    if len(strides) == 1:
        stride = strides[0][0]
        if stride % devices_per_node == 0:
            return 1
        if devices_per_node % stride == 0:
            fits = devices_per_node // stride
            if fits % size == 0:
                return size
            if size % fits == 0:
                return fits
    offsets = np.zeros(1, dtype=np.int64)
    members = np.arange(num_ranks)  # ranks whose coordinate along the group's axes is 0
    for stride, number in strides:
        offsets = (offsets[:, None] + stride * np.arange(number)).ravel()
        members = members[members // stride % number == 0]
    nodes = np.sort((members[:, None] + offsets) // devices_per_node, axis=1)
    spanned = 1 + int((np.diff(nodes, axis=1) > 0).sum(axis=1).max(initial=0))
    return -(-size // spanned)


@cached(4096)
def _neighbours(layout: Layout, stage: int, distance: int) -> int:
    first = layout.ranks_of_stage(stage)
    return 2 if (first // layout.devices_per_node == (first + distance) // layout.devices_per_node).all() else 1


REPLICAS = ("cp", "dp")  # context-parallel ranks hold the same parameters as replicas


@hashed_once
@dataclass(frozen=True)
class PartShape:
    """Properties that distinguish a part of the model; a pipeline stage has one part, or one per virtual stage."""

    layers: LayerKinds  # kinds of its layers in order, run-length encoded
    # first, last: whether it begins with the embedding, ends with the head
    first: bool = False
    last: bool = False

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)


Parts = HashedTuple[PartShape]  # positions in the model, in order


@hashed_once
@dataclass(frozen=True)
class Groups:
    """Groups over which parameters are replicated or sharded."""

    replicas: Group  # of ordinary parameters: data- and context-parallel ranks
    # shard, replicate: the same in two levels: shard of them share states, replicate such groups agree
    shard: Group
    replicate: Group
    experts: Group  # ranks that hold the same experts; where there are none, the same as replicas
    model: Group  # tensor- and pipeline-parallel ranks: one replica


@cached(4096)
def _rank_tables(model: ModelSpec, sharding: ShardingSpec, ranks: Ranks) -> RankTables:
    return rank_tables(model.tables, placements_of(model.tables, sharding, ranks), ranks, sharding)


def rank_shape(job: Job, compute_share: float = 0.0, semantics: ExecutionSemantics | None = None) -> RankShape:
    """The sizes of a micro-batch on one rank of a job; ``compute_share``: ``comm_compute_share`` of the hardware;
    ``semantics``: those of the job, if they are at hand.
    """
    kernels = (semantics or semantics_of(job)).kernels
    p, batch = job.parallel, job.batch
    overlap = p.overlap_tp if p.tp > 1 else ""
    return _rank_shape(
        (job.model, batch.micro_batch, batch.dtype, kernels),
        layout_of(job),
        p.ep,
        expert_tp=p.experts_tp,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        vocab_parallel=p.vocab_parallel,
        context_parallel=p.context_parallel,
        offload_share=p.offload_activations * (p.offload_layers or job.model.total_layers) / job.model.total_layers,
        scatter_p2p=p.scatter_p2p and p.tp > 1 and p.pp > 1 and p.zero_stage < 3 and not p.sequence_parallel,
        overlap_tp=overlap,
        overlap_ep=p.overlap_ep,
        dispatcher=p.dispatcher if p.ep > 1 else "alltoall",
        recompute_modules=tuple(sorted({*p.recompute_modules} - {"core_attn"})) if p.recompute == "selective" else (),
        compute_share=compute_share if overlap == "backward" else 0.0,  # copy engines transfer the chunks
        tables=_rank_tables(job.model, job.sharding, job.table_ranks) if job.model.tables else None,
    )


@cached(4096)
def _rank_shape(
    sizes: tuple[ModelSpec, int, str, KernelSemantics], layout: Layout, ep: int, *, expert_tp: int, **habits: Any
) -> RankShape:
    """Equal shapes are one object, because they are keys of caches."""
    tp, cp = layout.group("tp"), layout.group("cp")
    group = layout.part_of(REPLICAS if expert_tp == tp.size else ("tp", *REPLICAS), 1, ep)
    return RankShape(*sizes, tp=tp, cp=cp, ep=group, expert_tp=expert_tp, **habits)


def groups_of(job: Job) -> Groups:
    """Groups of a job over which parameters are replicated or sharded."""
    p = job.parallel
    whole = bool(job.model.experts) and p.experts_tp < p.tp  # each tensor-parallel rank has its own experts
    return _groups(layout_of(job), p.shards * p.cp, p.ep, whole)


@cached(4096)
def _groups(layout: Layout, shards: int, ep: int, whole: bool) -> Groups:
    replicas = layout.size("dp") * layout.size("cp")
    with_tp = ("tp", *REPLICAS) if whole else REPLICAS
    holders = replicas * (layout.size("tp") if whole else 1) // ep
    return Groups(
        replicas=layout.group(*REPLICAS),
        shard=layout.part_of(REPLICAS, 1, shards),
        replicate=layout.part_of(REPLICAS, shards, replicas // shards),
        experts=layout.part_of(with_tp, ep, holders),
        model=layout.group("tp", "pp"),
    )


def part_shapes(job: Job) -> Parts:
    """Parts of the model in model order: equal, with the remainder on the earlier ones, or as ``stage_layers`` says."""
    p = job.parallel
    return _part_shapes(job.model, p.pp * p.virtual_stages, p.stage_layers)


@cached(4096)
def _part_shapes(model: ModelSpec, num_parts: int, stage_layers: tuple[int, ...]) -> Parts:
    if not stage_layers:
        each, rest = divmod(model.total_layers, num_parts)
        stage_layers = tuple(each + (i < rest) for i in range(num_parts))
    todo = list(layer_kinds(model))[::-1]
    parts = []
    for index, count in enumerate(stage_layers):
        runs: list[tuple[str, int]] = []
        while count > 0:
            kind, left = todo.pop()
            take = min(left, count)
            runs.append((kind, take))
            count -= take
            if left > take:
                todo.append((kind, left - take))
        parts.append(_part_shape(tuple(runs), index == 0, index == num_parts - 1))
    return Parts(parts)


_part_shape = cached(4096)(PartShape)  # equal parts are one object, because they are keys of caches


@cached(4096)
def boundary_bytes(shape: RankShape, parts: Parts) -> tuple[int, ...]:
    """Bytes of the activation that each part sends to the next one, ``len(parts) - 1`` values."""
    passes, before, out = find_family(shape.model.family).boundary_bytes, 0, []
    for part in parts[:-1]:
        before += part.num_layers
        out.append(passes(shape, before) // (shape.tp.size if shape.scatter_p2p else 1))
    return tuple(out)


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
    casts: bool = False  # whether a rank casts its part before it is gathered (MixedPrecisionPolicy of FSDP2, torchao)


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


def gathering_of(zero: tuple[int, bool], semantics: ExecutionSemantics, *, beside: bool = True) -> Gathering:
    """How a job gathers parameters; ``zero``, ``beside``: as in ``replicas_of``."""
    (zero_stage, pipelined), overlap, kernels = zero, semantics.overlap, semantics.kernels
    return Gathering(
        overlap.prefetch,
        overlap.reshard,
        reduce_once=zero_stage == 3 and pipelined and beside,
        lists=overlap.gathers_lists,
        casts=kernels.casts_parameters or (kernels.fp8_dynamic and kernels.fp8_weights),
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
