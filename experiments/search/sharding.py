"""Search the placement of a recommendation model's tables that has the shortest step.

A placement costs what its slowest rank looks up and the largest exchange.  Both follow from quantities that add up over
the shards of a rank, each timed once by the predictor, so one placement is judged in some ten microseconds.  The search
starts from greedy placements, moves one table at a time, and predicts the best ones in full.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import (
    AUTO,
    COLUMN,
    IN_NODE,
    NARROWEST,
    PARAMETERS,
    RECEIVED,
    REPLICATED,
    STATES,
    SUMS,
    TABLE,
    TablePlacement,
    least_busy,
    placements_of,
    ruled_kinds,
    shard_amounts,
    shard_lookup,
    table_names,
)
from stepsight.dataset.job.sharding_plans import placements_in
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.blocks.dlrm import lookup_op, missed_op
from stepsight.simulator.durations.latency_model import LatencyModel

Floats = NDArray[np.float64]
TRIALS = 20_000  # placements that are judged, if no limit is stated
FULL = 6  # of the best of them, those that are predicted in full
BASELINES = ("size-greedy", "lookup-greedy", "norm-greedy", "random")
# Columns of a rank's amounts: seconds of lookups, elements of sums that it sends and that it adds in its node, bytes on
# its device, elements of sums that it receives, seconds of gradients of replicas.
LOOKUPS, SENT, ADDED, HELD, ARRIVES, GRADIENTS = range(6)
_REPLICA_BYTES = 20.0  # moved for an element of a replica by a dense optimizer's step
_WARMTH = 0.03  # how much longer a placement may take that a search goes on from, at its beginning


@dataclass(frozen=True)
class Move:
    """A way to shard one table: its kind, number of shards and location, and what a shard adds to its rank."""

    kind: str
    shards: int
    location: str
    amounts: Floats


class PlacementCosts:
    """Seconds of placements of one job's tables, by a latency model.

    Args:
        job: The job.
        latency: What times lookups and exchanges.
    """

    def __init__(self, job: Job, latency: LatencyModel) -> None:
        self.job, self.ranks, self._latency = job, job.table_ranks, latency
        self.tables, self._spec = job.model.tables, job.sharding
        self.capacity = latency.hardware.memory_bytes - latency.hardware.reserved_bytes
        near, far = Collective("all_to_all", 1, 2, 2), Collective("all_to_all", 1, 2, 2)
        if self.ranks.num > 1:
            nodes, node = self.ranks.num // self.ranks.per_node, self.ranks.per_node
            far = replace(far, group_size=self.ranks.num, ranks_per_node=node)
            if self._spec.hierarchical and nodes > 1:
                far = replace(far, group_size=nodes, ranks_per_node=1)
            near = Collective("reduce_scatter", 1, max(node, 2), max(node, 2))
        self._far, self._near = (self._line(one) for one in (far, near))
        gradient = Collective("all_reduce", 1, max(self.ranks.num, 2), min(self.ranks.per_node, max(self.ranks.num, 2)))
        self._gradient = self._line(gradient)[1] * (self.ranks.num > 1)

    def _line(self, collective: Collective) -> tuple[float, float]:
        """Seconds of nothing and of a byte, from two sizes that steps have."""
        few, many = 2**20, 2**26
        times = self._latency.collective_seconds([replace(collective, num_bytes=size) for size in (few, many)])
        slope = max(float(times[1] - times[0]) / (many - few), 1e-15)
        return max(float(times[0]) - slope * few, 0.0), slope

    @cached_property
    def moves(self) -> list[list[Move]]:
        """The ways in which each table may be sharded; in ``uvm`` only where the devices cannot hold all tables."""
        whole = [shard_amounts(table, TABLE, 1, self.ranks, self._spec, "hbm") for table in self.tables]
        needed = sum(one[PARAMETERS] + one[STATES] for one in whole)
        places = ("hbm",) if needed < 0.75 * self.capacity * self.ranks.num else ("hbm", "uvm")
        if self._spec.location != "hbm":
            places = (self._spec.location,)
        found = []
        for table in self.tables:
            kinds = dict.fromkeys(ruled_kinds(table, replace(self._spec, rule=AUTO), self.ranks))
            widths = [
                n for n in (2, 4, 8) if table.dim % n == 0 and table.dim // n >= NARROWEST and n <= self.ranks.num
            ]
            kinds |= dict.fromkeys((COLUMN, n) for n in widths)
            found.append([self.move(table, kind, shards, place) for kind, shards in kinds for place in places])
        return found

    def move(self, table: TableSpec, kind: str, shards: int, location: str) -> Move:
        """What a shard of a table adds to its rank."""
        look = shard_lookup(table, kind, max(shards, 1), self.ranks, self._spec, location)
        ops = [lookup_op(look), lookup_op(look, backward=True), *[missed_op(look)] * (2 if look.missed else 0)]
        seconds = float(self._latency.op_seconds(ops).sum())
        latency = self._latency.hardware.op_latency_s  # tables of one rank share a call
        own = shard_amounts(table, kind, max(shards, 1), self.ranks, self._spec, location)
        amounts = np.zeros(6)
        amounts[LOOKUPS] = max(seconds - len(ops) * latency, 0.1 * seconds)
        amounts[[SENT, ADDED, ARRIVES]] = own[SUMS], own[IN_NODE], own[RECEIVED]
        amounts[HELD] = own[PARAMETERS] + own[STATES]
        if kind == REPLICATED:
            numel = table.rows * table.dim
            bandwidth = self._latency.hardware.memory_bandwidth_bytes_per_s
            amounts[GRADIENTS] = numel * (self.ranks.sum_bytes * self._gradient + _REPLICA_BYTES / bandwidth)
        return Move(kind, shards, location, amounts)

    def amounts(self, places: Sequence[TablePlacement]) -> Floats:
        """Amounts of every rank, shape ``(num_ranks, 6)``."""
        total = np.zeros((self.ranks.num, 6))
        for table, place in zip(self.tables, places, strict=True):
            self.add(total, self.move(table, place.kind, len(place.ranks), place.location), place.ranks, 1.0)
        return total

    def fits(self, places: Sequence[TablePlacement]) -> bool:
        """Whether the tables of every rank fit its device."""
        return float(self.amounts(places)[:, HELD].max()) <= self.capacity

    def add(self, total: Floats, move: Move, ranks: Sequence[int], sign: float) -> None:
        """Add or remove (-1) a table."""
        if move.kind == REPLICATED:
            total += sign * move.amounts
            return
        own = sign * move.amounts
        total[:, ARRIVES] += len(ranks) * own[ARRIVES]
        for rank in ranks:
            total[rank] += own
            total[rank, ARRIVES] -= own[ARRIVES]

    def seconds(self, total: Floats) -> float:
        """Seconds that a placement decides; infinite if a rank's tables do not fit."""
        most = total.max(axis=0).tolist()
        if most[HELD] > self.capacity:
            return math.inf
        exchanged = max(most[SENT], most[ARRIVES]) * self.ranks.sum_bytes
        seconds: float = most[LOOKUPS] + most[GRADIENTS]
        if exchanged:
            seconds += 2.0 * (self._far[0] + self._far[1] * exchanged)
        if most[ADDED]:
            seconds += 2.0 * (self._near[0] + self._near[1] * most[ADDED] * self.ranks.sum_bytes)
        return seconds


def baseline_places(job: Job, name: str, seed: int = 0) -> tuple[TablePlacement, ...]:
    """Whole tables by a simple rule, the usual baselines of published sharders.

    Args:
        job: The job.
        name: ``size-greedy`` (bytes), ``lookup-greedy`` (indices times columns), ``norm-greedy`` (both, as a Euclidean
            norm of shares) or ``random``; each rank gets the next table when it has least.
        seed: Of ``random``.
    """
    tables, ranks, location = job.model.tables, job.table_ranks, job.sharding.location
    names = table_names(tables)
    size = np.array([float(table.rows * table.dim) for table in tables])
    looks = np.array([table.pooling * table.dim for table in tables])
    costs = {"size-greedy": size / size.sum(), "lookup-greedy": looks / looks.sum()}
    costs["norm-greedy"] = np.hypot(costs["size-greedy"], costs["lookup-greedy"])
    if name == "random":
        chosen = np.random.default_rng(seed).integers(ranks.num, size=len(tables)).tolist()
    else:
        busy, chosen = np.zeros(ranks.num), [0] * len(tables)
        for at in np.argsort(-costs[name], kind="stable").tolist():
            chosen[at] = int(busy.argmin())
            busy[chosen[at]] += costs[name][at]
    return tuple(
        [
            TablePlacement(name=own, kind=TABLE, ranks=(rank,), location=location)
            for own, rank in zip(names, chosen, strict=True)
        ]
    )


@dataclass(frozen=True)
class ShardingSearch:
    """Placements that a search found, best first, with how many were judged and in how many seconds."""

    places: tuple[tuple[TablePlacement, ...], ...]
    judged: int
    seconds: float


def search_places(
    costs: PlacementCosts,
    trials: int = TRIALS,
    seed: int = 0,
    timeout_s: float = math.inf,
    on_trial: Callable[[int, float | None], None] | None = None,
) -> ShardingSearch:
    """Move one table at a time, as in annealing, from the best of a few placements."""
    job, random, begin = costs.job, np.random.default_rng(seed), time.monotonic()
    free = replace(job.sharding, tables=(), plan="", rule=AUTO)
    starts = [placements_of(costs.tables, job.sharding, costs.ranks), placements_of(costs.tables, free, costs.ranks)]
    starts += [baseline_places(job, name) for name in BASELINES]
    judged = sorted(((costs.seconds(costs.amounts(one)), number) for number, one in enumerate(starts)))
    current, now = list(starts[judged[0][1]]), judged[0][0]
    found = {tuple(starts[number]): seconds for seconds, number in judged}
    total, count = costs.amounts(current), len(starts)
    while count < trials and time.monotonic() - begin < timeout_s:
        warmth = _WARMTH * (1.0 - count / trials) ** 2
        at = int(random.integers(len(current)))
        place, tried = _moved(costs, current[at], at, total, random), total.copy()
        before = current[at]
        costs.add(tried, _of(costs, at, before), before.ranks, -1.0)
        costs.add(tried, _of(costs, at, place), place.ranks, 1.0)
        seconds = costs.seconds(tried)
        count += 1
        if seconds <= now * (1.0 + warmth * float(random.random())) or math.isinf(now):
            current[at], total, now = place, tried, seconds
            if seconds < min(found.values()):
                found[tuple(current)] = seconds
        if on_trial is not None and count % 1000 == 0:
            on_trial(count - 1, None)
    ranked = sorted(found, key=lambda one: found[one])
    return ShardingSearch(tuple(ranked), count, time.monotonic() - begin)


def _of(costs: PlacementCosts, at: int, place: TablePlacement) -> Move:
    key = (place.kind, len(place.ranks), place.location)
    known = next((m for m in costs.moves[at] if (m.kind, m.shards, m.location) == key), None)
    if known is None:
        known = costs.move(costs.tables[at], *key)
        costs.moves[at].append(known)
    return known


def _moved(
    costs: PlacementCosts, place: TablePlacement, at: int, total: Floats, random: np.random.Generator
) -> TablePlacement:
    """Another placement of a table: on idle ranks or on random ones, sharded as before or otherwise."""
    moves, ranks = costs.moves[at], costs.ranks
    move = moves[int(random.integers(len(moves)))]
    if move.shards == 0:
        own: tuple[int, ...] = ()
    elif move.kind in (TABLE, COLUMN) and random.random() < 0.5:
        own = tuple(sorted(random.choice(ranks.num, min(move.shards, ranks.num), replace=False).tolist()))
    else:
        busy = total[:, LOOKUPS] + total[:, SENT] * 1e-12
        own = least_busy(busy * (1.0 + 0.05 * random.random(ranks.num)), move.kind, move.shards, ranks)
    return TablePlacement(name=place.name, kind=move.kind, ranks=own, location=move.location)


def placed(job: Job, places: Sequence[TablePlacement]) -> Job:
    """The job with a placement of every table."""
    return replace(job, sharding=replace(job.sharding, plan="", tables=tuple(places)))


def sharding_dict(job: Job) -> dict[str, Any]:
    """The table ``[sharding]`` of a job, with the placement of every table; plain values for JSON."""
    places = placements_of(job.model.tables, job.sharding, job.table_ranks)
    return {**asdict(job.sharding), "tables": [{**asdict(place), "ranks": list(place.ranks)} for place in places]}


def baselines_of(job: Job, seconds: Callable[[Job], float]) -> dict[str, float | None]:
    """Seconds of an iteration of the baselines and, where torchrec is installed, of its planner's plan; None: the
    tables of a rank do not fit, or there is no plan.
    """
    found: dict[str, float | None] = {}
    names = (*BASELINES, *(["torchrec"] if has_torchrec() else []))
    for name in names:
        try:
            found[name] = seconds(
                placed(job, planner_places(job) if name == "torchrec" else baseline_places(job, name))
            )
        except StepsightError:
            found[name] = None
    return found


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
