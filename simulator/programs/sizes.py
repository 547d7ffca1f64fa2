"""From a job to its sizes: groups, the shape of a rank, parts of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stepsight.dataset.base.caching import HashedTuple, cached, hashed_once
from stepsight.dataset.job.execution import ExecutionSemantics, KernelSemantics, semantics_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import ModelSpec
from stepsight.simulator.blocks.family import LayerKinds, find_family
from stepsight.simulator.blocks.shape import Group, RankShape
from stepsight.simulator.programs.rank_layout import Layout, layout_of

REPLICAS = ("cp", "dp")  # context-parallel ranks hold the same parameters as replicas


@hashed_once
@dataclass(frozen=True)
class PartShape:
    """Properties that distinguish a part of the model; a pipeline stage has one part, or one per virtual stage.

    Attributes:
        layers: Kinds of its layers in order, run-length encoded.
        first, last: Whether it begins with the embedding, ends with the head.
    """

    layers: LayerKinds
    first: bool = False
    last: bool = False

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)


Parts = HashedTuple[PartShape]  # positions in the model, in order


@hashed_once
@dataclass(frozen=True)
class Groups:
    """Groups over which parameters are replicated or sharded.

    Attributes:
        replicas: Of ordinary parameters: data- and context-parallel ranks.
        shard, replicate: The same in two levels: ``shard`` of them share states, ``replicate`` such groups agree.
        experts: Ranks that hold the same experts; where there are none, the same as ``replicas``.
        model: Tensor- and pipeline-parallel ranks: one replica.
    """

    replicas: Group
    shard: Group
    replicate: Group
    experts: Group
    model: Group


class _Split(NamedTuple):
    """How a job's ranks share a micro-batch: the fields of ``RankShape`` except ``ep``, which is a degree."""

    ep: int
    expert_tp: int
    sequence_parallel: bool
    vocab_parallel: bool
    context_parallel: str
    offload_activations: bool
    scatter_p2p: bool
    overlap_tp: str
    overlap_ep: bool
    dispatcher: str
    recompute_modules: tuple[str, ...]
    compute_share: float


def rank_shape(job: Job, compute_share: float = 0.0, semantics: ExecutionSemantics | None = None) -> RankShape:
    """The sizes of a micro-batch on one rank of a job.

    Args:
        job: The job.
        compute_share: ``comm_compute_share`` of the hardware.
        semantics: Those of the job, if they are at hand.
    """
    kernels = (semantics or semantics_of(job)).kernels
    p, batch = job.parallel, job.batch
    overlap = p.overlap_tp if p.tp > 1 else ""
    split = _Split(
        p.ep,
        p.experts_tp,
        p.sequence_parallel and p.tp > 1,
        p.vocab_parallel,
        p.context_parallel,
        p.offload_activations,
        p.scatter_p2p and p.tp > 1 and p.pp > 1 and p.zero_stage < 3 and not p.sequence_parallel,
        overlap,
        p.overlap_ep,
        p.dispatcher if p.ep > 1 else "alltoall",
        tuple(sorted({*p.recompute_modules} - {"core_attn"})) if p.recompute == "selective" else (),
        compute_share if overlap == "backward" else 0.0,  # copy engines transfer the chunks
    )
    return _rank_shape(job.model, batch.micro_batch, batch.dtype, kernels, layout_of(job), split)


@cached(4096)
def _rank_shape(
    model: ModelSpec, micro_batch: int, precision: str, kernels: KernelSemantics, layout: Layout, split: _Split
) -> RankShape:
    tp = layout.group("tp")
    habits = split._asdict()
    ep = layout.part_of(REPLICAS if split.expert_tp == tp.size else ("tp", *REPLICAS), 1, habits.pop("ep"))
    return RankShape(model, micro_batch, precision, kernels, tp=tp, cp=layout.group("cp"), ep=ep, **habits)


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
    todo = list(find_family(model.family).layer_kinds(model))[::-1]
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
