"""Search the placement of a recommendation model's tables that has the shortest step.

A placement costs what its slowest rank looks up and the largest exchange.  Both follow from quantities that add up over
the shards of a rank, each timed once by the predictor, so one placement is judged in some ten microseconds.  The search
starts from greedy placements, moves one table at a time, and predicts the best ones in full.
"""

from __future__ import annotations

import heapq
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import read_file, reason
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job import sharding as rules
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import COLUMN, MOVED, REPLICATED, ROW, TABLE, Floats, Ranks, TablePlacement
from stepsight.dataset.job.sharding_plans import MOST_HOST_BYTES, placements_in
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.blocks.dlrm import both_ways
from stepsight.simulator.durations.latency_model import LatencyModel

TRIALS = 20_000  # placements that are judged, if no limit is stated
FULL = 6  # of the best of them, those that are predicted in full
GREEDY = ("size-greedy", "lookup-greedy", "norm-greedy", "random")
BASELINES = (*GREEDY, ROW, COLUMN, rules.TABLE_ROW)
_WARMTH = 0.03  # how much longer a placement may take that a search goes on from, at its beginning
Way = tuple[str, int, str]  # to shard a table: kind, number of shards, location


class PlacementCosts:
    """What placements of one job's tables cost, as ``table_seconds`` has it, with times of a latency model."""

    def __init__(self, job: Job, latency: LatencyModel) -> None:
        self.job, self.tables, self._latency, self._spec = job, job.model.tables, latency, job.sharding
        self.capacity = latency.hardware.memory_bytes - latency.hardware.reserved_bytes
        self.ranks = self._timed(job.table_ranks)
        self._known = dict[tuple[Any, ...], Floats]()
        looks = [rules.shard_lookup(table, TABLE, 1, "hbm", self.ranks, self._spec) for table in self.tables]
        self._call_s = max(fmean(alone - more for alone, more in map(self._looked_up, dict.fromkeys(looks))), 0.0)
        whole = [rules.shard_amounts(table, TABLE, 1, "hbm", self.ranks, self._spec) for table in self.tables]
        roomy = sum(one[rules.PARAMETERS] + one[rules.STATES] for one in whole) < 0.75 * self.capacity * self.ranks.num
        own = self._spec.location
        self._places = (own,) if roomy or own != "hbm" else ("hbm", "uvm")

    def _timed(self, ranks: Ranks) -> Ranks:
        """Ranks with the seconds of a byte that the latency model takes for their exchanges."""

        def byte_s(collective: Collective, few: int = 2**20, many: int = 2**26) -> float:  # two sizes that steps have
            times = self._latency.collective_seconds([replace(collective, num_bytes=size) for size in (few, many)])
            return max(float(times[1] - times[0]) / (many - few), 1e-15)

        if ranks.num == 1:
            return ranks
        nodes, node = ranks.num // ranks.per_node, ranks.per_node
        across = (nodes, 1) if self._spec.hierarchical and nodes > 1 else (ranks.num, node)
        far_s = byte_s(Collective("all_to_all", 1, *across))
        if nodes == 1:
            return ranks._replace(near_s=far_s)
        near_s = byte_s(Collective("reduce_scatter", 1, max(node, 2), max(node, 2)))
        return ranks._replace(near_s=near_s, far_s=far_s * nodes / (nodes - 1))

    def ways(self, table: TableSpec) -> list[Way]:
        """The ways in which a table may be sharded; in ``uvm`` only where the devices cannot hold all tables."""
        kinds = dict.fromkeys(rules.ruled_kinds(table, replace(self._spec, rule=rules.AUTO), self.ranks))
        widths = [
            n for n in (2, 4, 8) if table.dim % n == 0 and table.dim // n >= rules.NARROWEST and n <= self.ranks.num
        ]
        kinds |= dict.fromkeys((COLUMN, n) for n in widths)
        return [(kind, max(shards, 1), place) for kind, shards in kinds for place in self._places]

    def amounts(self, table: TableSpec, kind: str, shards: int, location: str, *_: Any) -> Floats:
        """``shard_amounts``, but what lookups move is as much as takes the seconds that they add to a call."""
        key = table, kind, shards, location
        if key not in self._known:
            alone_s, more_s = self._looked_up(rules.shard_lookup(*key, self.ranks, self._spec))
            self._known[key] = rules.shard_amounts(*key, self.ranks, self._spec).copy()
            self._known[key][MOVED] = max(more_s, 0.1 * alone_s) / self.ranks.memory_s
        return self._known[key]

    def _looked_up(self, look: rules.Lookup) -> tuple[float, float]:
        """Seconds of a table's call, and how much longer it is with such a table more: tables of one rank share it."""
        two = rules.joined((look, look), self._spec.optimizer)
        ops = [[op for way in both_ways(each) for op in way] for each in (look, two)]
        alone, both = (float(self._latency.op_seconds(own).sum()) for own in ops)
        return alone, both - alone

    def loads(self, places: Sequence[TablePlacement]) -> Floats:
        """Amounts of every rank, shape ``(num_ranks, QUANTITIES)``."""
        return rules.loads_of(self.tables, places, self.ranks, self._spec, self.amounts)

    def fits(self, loads: Floats) -> bool:
        """Whether the tables of every rank fit its device and its host."""
        on_host = rules.host_bytes(loads, self.ranks)
        return float(rules.held_bytes(loads)) <= self.capacity and on_host <= MOST_HOST_BYTES

    def seconds(self, loads: Floats) -> float:
        """Seconds that a placement decides; infinite if a rank's tables do not fit."""
        calls = int(loads[:, [rules.BY_ROWS, rules.OTHERS, rules.REPLICAS]].any(axis=0).sum())  # each has its own
        return float(rules.table_seconds(loads, self.ranks)) + self._call_s * calls if self.fits(loads) else math.inf


def baseline_places(job: Job, name: str, seed: int = 0) -> tuple[TablePlacement, ...]:
    """Whole tables by a rule of published sharders: ``size-greedy`` (bytes), ``lookup-greedy`` (indices times columns)
    or ``norm-greedy`` (both, as a Euclidean norm of shares), where each rank gets the next table when it has least;
    or ``random``.  ``torchrec``: its planner.  A rule of ``[sharding]``: all tables by it.
    """
    if name == "torchrec":
        return planner_places(job)
    if name in rules.RULES:
        return rules.placements_of(
            job.model.tables, replace(job.sharding, tables=(), plan="", rule=name), job.table_ranks
        )
    tables, ranks, location = job.model.tables, job.table_ranks, job.sharding.location
    names = rules.table_names(tables)
    size = np.array([float(table.rows * table.dim) for table in tables])
    looks = np.array([table.pooling * table.dim for table in tables])
    costs = {"size-greedy": size / size.sum(), "lookup-greedy": looks / looks.sum()}
    costs["norm-greedy"] = np.hypot(costs["size-greedy"], costs["lookup-greedy"])
    if name == "random":
        chosen = np.random.default_rng(seed).integers(ranks.num, size=len(tables)).tolist()
    else:
        chosen = least_loaded(costs[name].tolist(), ranks.num, len(tables))
    pairs = zip(names, chosen, strict=True)
    return tuple([TablePlacement(name=own, kind=TABLE, ranks=(rank,), location=location) for own, rank in pairs])


def search_places(
    costs: PlacementCosts,
    trials: int = TRIALS,
    seed: int = 0,
    timeout_s: float = math.inf,
    on_trial: Callable[[int, float | None], None] | None = None,
) -> tuple[list[tuple[TablePlacement, ...]], int]:
    """Move one table at a time, as in annealing, from the best of a few placements; the placements that were best at
    some time, best first, and how many were judged.
    """
    job, random, begin = costs.job, np.random.default_rng(seed), time.monotonic()
    starts = [rules.placements_of(costs.tables, job.sharding, costs.ranks)]
    starts += [baseline_places(job, name) for name in (rules.AUTO, *BASELINES)]
    loads = [costs.loads(places) for places in starts]
    judged = [costs.seconds(one) for one in loads]
    found = {tuple(places): seconds for places, seconds in zip(starts, judged, strict=True)}
    best = int(np.argmin(judged))
    current, total, now, least, count = list(starts[best]), loads[best], judged[best], judged[best], len(starts)
    ways = [costs.ways(table) for table in costs.tables]
    while count < trials and time.monotonic() - begin < timeout_s:
        warmth = _WARMTH * (1.0 - count / trials) ** 2
        at = int(random.integers(len(current)))
        place = _moved(costs, current[at], ways[at], total, random)
        tried = total.copy()
        for one, sign in ((current[at], -1.0), (place, 1.0)):
            rules.add_shards(
                tried, sign * costs.amounts(costs.tables[at], one.kind, one.shards, one.location), one.ranks
            )
        seconds = costs.seconds(tried)
        count += 1
        if seconds <= now * (1.0 + warmth * float(random.random())) or math.isinf(now):
            current[at], total, now = place, tried, seconds
            if seconds < least:
                least = found[tuple(current)] = seconds
        if on_trial is not None and count % 1000 == 0:
            on_trial(count - 1, None)
    return sorted(found, key=lambda one: found[one]), count


def _moved(
    costs: PlacementCosts, place: TablePlacement, ways: Sequence[Way], total: Floats, random: np.random.Generator
) -> TablePlacement:
    """Another placement of a table: on idle ranks or on random ones, sharded as before or otherwise."""
    (kind, shards, location), ranks = ways[int(random.integers(len(ways)))], costs.ranks
    if kind == REPLICATED:
        own: tuple[int, ...] = ()
    elif kind in (TABLE, COLUMN) and random.random() < 0.5:
        own = tuple(sorted(random.choice(ranks.num, min(shards, ranks.num), replace=False).tolist()))
    else:
        own = rules.least_busy(total[:, MOVED] * (1.0 + 0.05 * random.random(ranks.num)), kind, shards, ranks)
    return TablePlacement(name=place.name, kind=kind, ranks=own, location=location)


def placed(job: Job, places: Sequence[TablePlacement]) -> Job:
    """The job with a placement of every table."""
    return replace(job, sharding=replace(job.sharding, plan="", tables=tuple(places)))


def sharding_facts(job: Job) -> dict[str, Any]:
    """The table ``[sharding]`` of a job with the placement of every table, plain values for JSON; the placement in
    words, and what the slowest rank looks up over the mean.
    """
    tables, ranks = job.model.tables, job.table_ranks
    places = rules.placements_of(tables, job.sharding, ranks)
    stated = {**asdict(job.sharding), "tables": [{**asdict(place), "ranks": list(place.ranks)} for place in places]}
    share = rules.rank_tables(tables, places, ranks, job.sharding).mean_share
    return {"sharding": stated, "placement": rules.placement_words(places), "imbalance": 1.0 / share}


def has_torchrec() -> bool:
    """Whether torchrec can be imported."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import torchrec  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def planner_places(job: Job, kinds: Sequence[str] = ()) -> tuple[TablePlacement, ...]:
    """The plan of ``EmbeddingShardingPlanner`` with its default cost model, for a job's tables and devices; ``kinds``:
    those that tables may have, by default all.
    """
    if not has_torchrec():
        raise StepsightError("torchrec's planner needs torchrec 1.8, which is not installed")
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import ModuleSharder
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    ranks, facts = job.table_ranks, find_hardware(job.cluster.hardware)
    named = dict(zip(rules.table_names(job.model.tables), job.model.tables, strict=True))
    types = [kind.replace("-", "_") for kind in kinds] or None
    constraints = {
        name: ParameterConstraints(pooling_factors=[table.pooling], num_poolings=[1.0], sharding_types=types)
        for name, table in named.items()
    }
    configs = [
        EmbeddingBagConfig(num_embeddings=table.rows, embedding_dim=table.dim, name=name, feature_names=[name])
        for name, table in named.items()
    ]
    with warnings.catch_warnings(action="ignore"):
        logging.disable(logging.WARNING)
        try:
            topology = Topology(
                world_size=ranks.num,
                local_world_size=ranks.per_node,
                compute_device="cuda" if facts is None or facts.kind == "gpu" else "cpu",
                **({"hbm_cap": int(facts.memory_bytes)} if facts is not None and facts.kind == "gpu" else {}),
            )
            planner = EmbeddingShardingPlanner(topology=topology, batch_size=ranks.samples, constraints=constraints)
            sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder()]
            collection = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)  # without memory
            plan = planner.plan(collection, sharders)
        except PlannerError as error:
            raise StepsightError(f"torchrec's planner finds no plan: {str(error).splitlines()[0]:.200}") from None
        finally:
            logging.disable(logging.NOTSET)
    entries = {name: vars(own) for one in plan.plan.values() for name, own in one.items()}
    by_name = {place.name: place for place in placements_in(entries, "torchrec's plan")}
    return tuple([by_name[name] for name in named])


def torchrec_plan(plan: Mapping[str, Mapping[str, Mapping[str, Any]]], device: str = "cuda") -> Any:
    """A plan, as ``--to torchrec`` writes it and ``json.load`` reads it, as a ``ShardingPlan`` of torchrec with its
    shards on ``cuda`` or ``cpu``.
    """
    if not has_torchrec():
        raise StepsightError("a plan becomes torchrec's with torchrec 1.8, which is not installed")
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    def sharding(entry: Mapping[str, Any]) -> ParameterSharding:
        here = r"/cuda:\d+" if device == "cpu" else "/cuda"  # torchrec refuses a CPU with a number
        shards = [
            ShardMetadata(**{**shard, "placement": re.sub(here, f"/{device}", shard["placement"])})
            for shard in entry.get("sharding_spec", {}).get("shards", ())
        ]
        spec = EnumerableShardingSpec(shards) if shards else None
        return ParameterSharding(entry["sharding_type"], entry["compute_kernel"], entry["ranks"] or None, spec)

    modules = {
        module: EmbeddingModuleShardingPlan({name: sharding(entry) for name, entry in tables.items()})
        for module, tables in plan.items()
    }
    return ShardingPlan(modules)


Placement = tuple[tuple[int, ...], ...]  # numbers of the experts of each rank
MOST_LAYERS, MOST_EXPERTS = 4096, 16384


@dataclass(frozen=True)
class ExpertLoads:
    """Number of tokens of each expert."""

    layers: tuple[tuple[float, ...], ...]  # each with experts, or one row for all: tokens by expert, in any unit

    def __post_init__(self) -> None:
        sizes = {len(loads) for loads in self.layers}
        if len(sizes) != 1 or not 1 <= len(self.layers) <= MOST_LAYERS or not 2 <= max(sizes) <= MOST_EXPERTS:
            rule = f"one row, or one for each of at most {MOST_LAYERS} layers, of 2 to {MOST_EXPERTS} experts each"
            raise StepsightError(f"expert loads must be {rule}, got {len(self.layers)} rows of {sorted(sizes)!s:.80}")
        for row, loads in enumerate(self.layers):
            wrong = [load for load in loads if not 0 <= load < math.inf]
            if wrong or not sum(loads) > 0:
                got = f"{wrong[0] if wrong else 'only 0'} in row {row + 1}"
                raise StepsightError(f"loads of experts must be numbers of tokens >= 0, not all 0, got {got}")

    @classmethod
    def read(cls, path: Path) -> ExpertLoads:
        """Read a CSV file: a number of tokens for each expert; one line, or one for each layer with experts."""
        try:
            lines = read_file(path).decode("utf-8", "replace").splitlines()
        except OSError as error:
            raise StepsightError(f"cannot read expert loads {path}: {reason(error)}") from None
        rows = list[tuple[float, ...]]()
        for number, line in enumerate(lines, start=1):
            try:
                rows += [tuple(map(float, line.split(",")))] if line.strip() else []
            except ValueError:
                rule = "loads must be numbers separated by commas, one for each expert"
                raise StepsightError(f"{path}, line {number}: {rule}, got {line!r:.80}") from None
        if not rows:
            raise StepsightError(f"{path} must hold a line of loads, one number for each expert, got none")
        return cls(tuple(rows))

    @classmethod
    def of(cls, value: ExpertLoads | str | Path | None) -> ExpertLoads | None:
        """Loads unchanged, or those of a file."""
        return cls.read(Path(value)) if isinstance(value, str | Path) else value

    def check(self, job: Job) -> None:
        """Check that the job has the same experts and layers."""
        model, experts = job.model, len(self.layers[0])
        mixtures = (model.layers - model.dense_layers) // model.moe_every
        if not model.experts:
            raise StepsightError(f"expert loads are for a model with experts, got {job.model_name}, which has none")
        if experts != model.experts:
            raise StepsightError(f"expert loads must be of the model's {model.experts} experts, got {experts}")
        if len(self.layers) not in (1, mixtures):
            rule = f"one line, or one for each of the {mixtures} layers with experts"
            raise StepsightError(f"expert loads must be {rule}, got {len(self.layers)}")

    def imbalance(self, ep: int, *, by_load: bool = True) -> float:
        """Tokens of the busiest rank relative to the mean, averaged over layers."""
        place = _placed if by_load else _in_order
        return fmean(_busiest(loads, place(loads, ep)) * ep / sum(loads) for loads in self.layers)

    def apply(self, job: Job, *, by_load: bool = True) -> Job:
        """The job with the imbalance of its experts under its expert-parallel degree."""
        imbalance = max(1.0, self.imbalance(job.parallel.ep, by_load=by_load))
        return replace(job, model=replace(job.model, imbalance=imbalance))

    def to_dict(self, ep: int) -> dict[str, Any]:
        """Plain values for JSON: the experts of each rank by layer, and the gain of this placement."""
        return {
            "imbalance": self.imbalance(ep),
            "imbalance_in_order": self.imbalance(ep, by_load=False),
            "experts_of_ranks": [list(map(list, _placed(loads, ep))) for loads in self.layers],
        }


def _in_order(loads: tuple[float, ...], ep: int) -> Placement:
    each = len(loads) // ep
    return tuple([tuple(range(rank * each, (rank + 1) * each)) for rank in range(ep)])


def least_loaded(loads: Sequence[float], ranks: int, room: int) -> list[int]:
    """The rank of each load: the heaviest first, to the rank with least that has room (Graham 1969, LPT)."""
    found, held, heap = [0] * len(loads), [0] * ranks, [(0.0, rank) for rank in range(ranks)]
    for at in sorted(range(len(loads)), key=lambda at: -loads[at]):
        load, found[at] = heapq.heappop(heap)
        held[found[at]] += 1
        if held[found[at]] < room:
            heapq.heappush(heap, (load + loads[at], found[at]))
    return found


@cached(4096)
def _placed(loads: tuple[float, ...], ep: int) -> Placement:
    """The experts of each rank by load; in their order where this is no better."""
    ranks = least_loaded(loads, ep, len(loads) // ep)
    found = tuple([tuple([expert for expert, own in enumerate(ranks) if own == rank]) for rank in range(ep)])
    plain = _in_order(loads, ep)
    return found if _busiest(loads, found) < _busiest(loads, plain) else plain


def _busiest(loads: tuple[float, ...], placement: Placement) -> float:
    return max(sum(loads[expert] for expert in rank) for rank in placement)
