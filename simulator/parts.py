"""From a job to the sizes that everything else is made of: groups, rank shape, parts of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stepsight.dataset.job import Job
from stepsight.dataset.specs import ModelSpec, ParallelSpec, hashed_once
from stepsight.simulator.blocks.family import LayerKinds, find_family
from stepsight.simulator.blocks.shape import Group, RankShape
from stepsight.simulator.layout import Layout, layout_of

REPLICAS = ("cp", "dp")  # context-parallel ranks hold the same parameters too


@hashed_once
@dataclass(frozen=True)
class PartShape:
    """What distinguishes a part of the model from others: a pipeline stage holds one, or one per virtual stage.

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


def rank_shape(job: Job) -> RankShape:
    """What one rank of a job sees of a micro-batch."""
    return _rank_shape(job.model, job.parallel, job.batch.micro_batch, job.batch.precision, layout_of(job))


@lru_cache(maxsize=4096)
def _rank_shape(model: ModelSpec, p: ParallelSpec, micro_batch: int, precision: str, layout: Layout) -> RankShape:
    with_tp = REPLICAS if p.experts_tp == p.tp else ("tp", *REPLICAS)
    return RankShape(
        model,
        micro_batch,
        precision,
        tp=layout.group("tp"),
        cp=layout.group("cp"),
        ep=layout.part_of(with_tp, 1, p.ep),
        expert_tp=p.experts_tp,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        vocab_parallel=p.vocab_parallel,
        context_parallel=p.context_parallel,
        offload_activations=p.offload_activations,
    )


def groups_of(job: Job) -> Groups:
    """Groups of a job over which parameters are replicated or sharded."""
    return _groups(job.parallel, layout_of(job), bool(job.model.experts))


@lru_cache(maxsize=4096)
def _groups(p: ParallelSpec, layout: Layout, mixture: bool) -> Groups:
    shards = p.shards * p.cp
    whole = mixture and p.experts_tp < p.tp  # every tensor-parallel rank has experts of its own
    with_tp = ("tp", *REPLICAS) if whole else REPLICAS
    holders = p.dp * p.cp * (p.tp if whole else 1) // p.ep
    return Groups(
        replicas=layout.group(*REPLICAS),
        shard=layout.part_of(REPLICAS, 1, shards),
        replicate=layout.part_of(REPLICAS, shards, p.dp * p.cp // shards),
        experts=layout.part_of(with_tp, p.ep, holders),
        model=layout.group("tp", "pp"),
    )


def part_shapes(job: Job) -> tuple[PartShape, ...]:
    """Parts of the model in model order: even with the remainder on the earlier ones, or as ``stage_layers`` says."""
    p = job.parallel
    return _part_shapes(job.model, p.pp * p.virtual_stages, p.stage_layers)


@lru_cache(maxsize=4096)
def _part_shapes(model: ModelSpec, num_parts: int, stage_layers: tuple[int, ...]) -> tuple[PartShape, ...]:
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
        parts.append(PartShape(tuple(runs), index == 0, index == num_parts - 1))
    return tuple(parts)


@lru_cache(maxsize=4096)
def boundary_bytes(shape: RankShape, parts: tuple[PartShape, ...]) -> tuple[int, ...]:
    """Bytes of the activation that passes from each part to the next, ``len(parts) - 1``."""
    passes, before, out = find_family(shape.model.family).boundary_bytes, 0, []
    for part in parts[:-1]:
        before += part.num_layers
        out.append(passes(shape, before))
    return tuple(out)
