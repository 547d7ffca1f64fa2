"""torchrec's own planner on a job's tables, and plans as objects of torchrec; torchrec need not be installed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import TablePlacement, table_names
from stepsight.dataset.job.sharding_plans import placements_in


def has_torchrec() -> bool:
    """Whether torchrec can be imported."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import torchrec  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def planner_places(job: Job) -> tuple[TablePlacement, ...]:
    """The plan of ``EmbeddingShardingPlanner`` with its default cost model, for a job's tables and devices.

    Raises:
        StepsightError: If torchrec is not installed, or finds no plan.
    """
    if not has_torchrec():
        raise StepsightError("torchrec's planner needs torchrec 1.8, which is not installed")
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import ModuleSharder

    ranks, facts = job.table_ranks, find_hardware(job.cluster.hardware)
    topology = Topology(
        world_size=ranks.num,
        local_world_size=ranks.per_node,
        compute_device="cuda" if facts is None or facts.kind == "gpu" else "cpu",
        **({"hbm_cap": int(facts.memory_bytes)} if facts is not None and facts.kind == "gpu" else {}),
    )
    names = table_names(job.model.tables)
    constraints = {
        name: ParameterConstraints(pooling_factors=[table.pooling], num_poolings=[1.0])
        for name, table in zip(names, job.model.tables, strict=True)
    }
    with warnings.catch_warnings(action="ignore"):
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=ranks.samples, constraints=constraints)
    sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder()]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            plan = planner.plan(_collection(job.model.tables), sharders)
    except PlannerError as error:
        raise StepsightError(f"torchrec's planner finds no plan: {str(error).splitlines()[0]:.200}") from None
    finally:
        logging.disable(logging.NOTSET)
    entries = {name: vars(sharding) for module in plan.plan.values() for name, sharding in module.items()}
    by_name = {place.name: place for place in placements_in(_plain(entries), "torchrec's plan")}
    return tuple([by_name[name] for name in names])


def _collection(tables: tuple[TableSpec, ...]) -> Any:
    """The tables as an ``EmbeddingBagCollection`` without memory."""
    import torch
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(num_embeddings=table.rows, embedding_dim=table.dim, name=name, feature_names=[f"f{at}"])
            for at, (name, table) in enumerate(zip(table_names(tables), tables, strict=True))
        ],
    )


def tables_of(collection: Any) -> tuple[TableSpec, ...]:
    """The tables of torchrec's ``EmbeddingBagCollection``; how many indices a sample has is not known to it."""
    words = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
    return tuple(
        [
            TableSpec(
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                name=config.name,
                precision=words.get(str(config.data_type.value).lower(), "fp32"),
            )
            for config in collection.embedding_bag_configs()
        ]
    )


def _plain(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields of ``ParameterSharding`` by table, as plan files have them."""
    found = {}
    for name, entry in entries.items():
        spec = entry.get("sharding_spec")
        shards = [{"placement": str(shard.placement)} for shard in getattr(spec, "shards", ())]
        found[name] = {
            "sharding_type": entry["sharding_type"],
            "compute_kernel": entry["compute_kernel"],
            "ranks": entry.get("ranks"),
            **({"sharding_spec": {"shards": shards}} if shards else {}),
        }
    return found


def _on(placement: str, device: str) -> str:
    """A shard's place on a device without a number: ``rank:3/cpu``."""
    return f"{placement.partition('/')[0]}/{device}"


def torchrec_plan(plan: Mapping[str, Mapping[str, Mapping[str, Any]]], device: str = "cuda") -> Any:
    """A plan, as ``--to torchrec`` writes it and ``json.load`` reads it, as a ``ShardingPlan`` of torchrec.

    Args:
        plan: By module, by table, the fields of ``ParameterSharding``.
        device: Of the shards: ``cuda`` or ``cpu``.
    """
    if not has_torchrec():
        raise StepsightError("a plan becomes torchrec's with torchrec 1.8, which is not installed")
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    modules = {}
    for module, tables in plan.items():
        own = EmbeddingModuleShardingPlan()
        for name, entry in tables.items():
            shards = [
                ShardMetadata(
                    shard_offsets=shard["shard_offsets"],
                    shard_sizes=shard["shard_sizes"],
                    placement=shard["placement"]
                    if device == "cuda"
                    else f"{shard['placement'].partition('/')[0]}/{device}",
                )
                for shard in entry.get("sharding_spec", {}).get("shards", ())
            ]
            own[name] = ParameterSharding(
                sharding_type=entry["sharding_type"],
                compute_kernel=entry["compute_kernel"],
                ranks=entry["ranks"] or None,
                sharding_spec=EnumerableShardingSpec(shards) if shards else None,
            )
        modules[module] = own
    return ShardingPlan(plan=modules)
