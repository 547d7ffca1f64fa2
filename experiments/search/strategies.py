"""The legal strategies of a model on a cluster: by number, as jobs, and as parameters of Optuna trials."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec
from stepsight.dataset.job.rules import MOST_ACTIONS
from stepsight.experiments.search.settings import Scenarios, Space
from stepsight.simulator.schedules import find_schedule

if TYPE_CHECKING:
    import optuna

    from stepsight.experiments.search.sharding import ExpertLoads

# The components of a strategy besides the micro-batch, and those of single strategies.
VARIED = (
    "tp", "cp", "pp", "ep", "dp", "schedule", "virtual_stages", "zero_stage", "recompute", "sequence_parallel",
    "stage_layers", "dp_shard",
)  # fmt: skip
MIN_CP_TOKENS = 4096
MOST_UNEVEN = 1.2  # layers of the fullest stage over the mean: a strategy with a larger imbalance is never best


class Degrees(NamedTuple):
    """Parallel degrees whose product is the number of devices, and the degree of the experts."""

    tp: int
    cp: int
    pp: int
    ep: int
    dp: int

    def __str__(self) -> str:
        return "-".join(f"{axis}{size}" for axis, size in self._asdict().items())


Fields = dict[str, Any]  # of a job's ``parallel``, and its ``micro_batch``
Options = dict[str, dict[Any, Fields]]  # by choice: its values, as trials name them, with the fields that each one sets


def build(job: Job, layout: Degrees, **fields: Any) -> Job:
    """The job with a layout and some fields; its pipeline is 1F1B with micro-batches of 1 unless they say otherwise."""
    chosen = {"schedule": "1f1b", "virtual_stages": 1, "stage_layers": (), "dp_shard": 0, **fields}
    size = chosen.pop("micro_batch", 1)
    profile = job.profile if job.parallel.pp == 1 else None  # a job of one stage does not state its pipeline runtime
    if profile is not None:
        chosen["runtime"] = profile.runtime_of(layout.pp, chosen["virtual_stages"])
    parallel = replace(job.parallel, **layout._asdict(), **chosen)
    return replace(job, parallel=parallel, batch=replace(job.batch, micro_batch=size, flushes=1), open_stages=False)


def _is_legal(job: Job, layout: Degrees, *, sequence_parallel: bool = False) -> bool:
    """Whether the layout's own rules are satisfied, independent of all other choices."""
    with suppress(JobError):
        build(job, layout, sequence_parallel=sequence_parallel)
        return True
    return False


def legal_degrees(job: Job, space: Space) -> list[Degrees]:
    """Legal degrees for the job's model, batch and cluster."""
    model, devices = job.model, job.cluster.num_devices
    found = []
    for tp in _divisors(devices):
        if tp > (space.max_tp or job.cluster.devices_per_node):
            continue
        for cp, pp in itertools.product(space.cp, _divisors(devices // tp)):
            dp, rest = divmod(devices, tp * cp * pp)
            if rest or not dp or (cp > 1 and model.seq_len < cp * MIN_CP_TOKENS) or job.batch.global_batch % dp:
                continue
            if -(-model.total_layers // pp) * pp > MOST_UNEVEN * model.total_layers:
                continue
            layouts = [Degrees(tp, cp, pp, ep, dp) for ep in (_divisors(model.experts) if model.experts else [1])]
            found += [layout for layout in layouts if _is_legal(job, layout)]
    return found


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def options_of(job: Job, space: Space, layout: Degrees) -> Options:
    """The further choices that are legal and distinct under one layout; all of their combinations are legal."""
    sequences = [sp for sp in space.sequence_parallel if not sp or _is_legal(job, layout, sequence_parallel=True)]
    options: Options = {
        "pipeline": _pipelines(job, space, layout),
        "zero_stage": _sharding(space, layout),
        "recompute": _recompute(job, space, layout),
        "sequence_parallel": {sp: {"sequence_parallel": sp} for sp in (sequences if layout.tp > 1 else [False])},
    }
    if space.orders:
        distinct: dict[tuple[str, ...], str] = {}  # orders differ in axes of more than one rank
        for order in space.orders:
            distinct.setdefault(tuple(axis for axis in order.split("-") if getattr(layout, axis) > 1), order)
        options["order"] = {order: {"order": order} for order in distinct.values()}
    return options


def _pipelines(job: Job, space: Space, layout: Degrees) -> dict[Any, Fields]:
    """Micro-batch, schedule and virtual stages, as ``2 1f1b x4``."""
    schedules, profile = space.pipelines, job.profile if job.parallel.pp == 1 else None
    if (job.parallel.runtime if profile is None else profile.runtime) == "deepspeed":
        schedules = tuple(s for s in schedules if s == ("1f1b", 1))  # the only one
    if layout.pp == 1:
        schedules = tuple((name, 1) for name, _ in schedules[:1])
    per_replica, layers = job.batch.global_batch // layout.dp, job.model.total_layers
    return {
        f"{size} {name} x{chunks}": {"micro_batch": size, "schedule": name, "virtual_stages": chunks}
        for size in space.micro_batches
        if per_replica % size == 0
        for name, chunks in schedules
        if chunks == 1 or layout.pp * chunks <= layers
        if name != "gpipe" or per_replica > size or ("1f1b", 1) not in schedules
        if layout.pp == 1 or _runs(name, layout.pp, per_replica // size, chunks)
    }


@cached(16384)
def _runs(schedule: str, stages: int, micro_batches: int, chunks: int) -> bool:
    """Whether a schedule allows these numbers."""
    if stages * chunks * micro_batches > MOST_ACTIONS:
        return False
    if chunks == 1 and schedule in ("1f1b", "gpipe", "zb-h1"):
        return True
    if schedule in ("1f1b", "interleaved-zb", "looped-bfs"):
        return micro_batches % stages == 0
    with suppress(JobError):
        find_schedule(schedule, stages, micro_batches, chunks)
        return True
    return False


def _sharding(space: Space, layout: Degrees) -> dict[Any, Fields]:
    """ZeRO stages; those that shard over some replicas only as ``3/8``."""
    if layout.dp * layout.cp == 1:
        return {"0": {"zero_stage": 0}}
    shards = [n for n in space.dp_shard if 0 < n < layout.dp and layout.dp % n == 0 and (n > 1 or layout.cp > 1)]
    if not shards or 0 in space.dp_shard or layout.dp in space.dp_shard:
        shards.insert(0, 0)
    return {
        f"{zero}/{over}" if over else f"{zero}": {"zero_stage": zero, "dp_shard": over}
        for zero in space.zero_stages
        for over in (shards if zero else [0])
    }


def _recompute(job: Job, space: Space, layout: Degrees) -> dict[Any, Fields]:
    """How activations are kept: ``none``, ``offload``, ``selective``, ``full``, or ``full/2`` of every second layer."""
    offload = space.offload_activations or (job.parallel.offload_activations,)
    most = -(-job.model.total_layers // layout.pp)
    found: dict[Any, Fields] = {}
    kinds = [kind for kind in space.recompute if kind != "selective" or not job.model.fused_attention]
    if True in offload:
        found["offload"] = {"recompute": "none", "offload_activations": True, "recompute_modules": ()}
        kinds = kinds if False in offload else []
    for kind in kinds if kinds or found else space.recompute:
        fields: Fields = {"recompute": kind, "offload_activations": False}
        if kind != job.parallel.recompute:  # the search's own ``selective`` is the attention core
            fields["recompute_modules"] = ()
        if kind != "full":
            found[kind] = fields
            continue
        every = space.recompute_every or (job.parallel.recompute_every,)
        for n in [n for n in every if n <= most or n == 1] or [1]:
            found["full" if n == 1 else f"full/{n}"] = {**fields, "recompute_every": n}
    return found


@dataclass(frozen=True)
class Block:
    """All strategies of one layout: every combination of the further choices."""

    layout: Degrees  # the parallel degrees
    options: Options  # the further choices
    first: int  # number of the block's first strategy

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each choice."""
        return tuple(map(len, self.options.values()))

    @cached_property
    def fields(self) -> list[list[Fields]]:
        """What each value of each choice sets."""
        return [list(values.values()) for values in self.options.values()]

    @cached_property
    def parameters(self) -> dict[str, list[Any]]:
        """Values by parameter of a trial, which may not change within a study: where they depend on the layout, so does
        the parameter's name.
        """
        return {f"{key}[{'|'.join(map(str, values))}]": list(values) for key, values in self.options.items()}

    def index(self, places: Sequence[int]) -> int:
        """Number of the strategy with these places among the values of each choice."""
        return self.first + int(np.ravel_multi_index(tuple(places), self.shape))

    def places(self, index: int) -> list[int]:
        """Places of a strategy's values; the last choice varies fastest."""
        return [int(place) for place in np.unravel_index(index - self.first, self.shape)]


class Grid:
    """Every legal strategy by its number, block by block, and the ``remaining`` ones, shape ``(number of
    strategies,)``: False where a strategy was evaluated.

    Blocks are by name of the layout. With ``loads`` of the model's experts every strategy places these by their loads.
    """

    def __init__(self, job: Job, space: Space, loads: ExpertLoads | None = None) -> None:
        self.job, self.space, self._loads = job, space, loads
        self.blocks: dict[str, Block] = {}
        count = 0
        for layout in legal_degrees(job, space):
            block = Block(layout, options_of(job, space, layout), count)
            if size := prod(block.shape):
                self.blocks[str(layout)] = block
                count += size
        if not count:
            devices, batch = job.cluster.num_devices, job.batch.global_batch
            raise JobError(f"no legal strategy for {devices} devices and global_batch {batch}")
        self.remaining = np.ones(count, dtype=np.bool_)
        self._ordered = list(self.blocks.values())
        self._firsts = [block.first for block in self._ordered]

    def __len__(self) -> int:
        return len(self.remaining)

    def _block(self, index: int) -> Block:
        return self._ordered[bisect_right(self._firsts, index) - 1]

    def strategy(self, index: int) -> Job:
        """The job in a strategy."""
        block = self._block(index)
        fields: Fields = {}
        for sets, at in zip(block.fields, block.places(index), strict=True):
            fields |= sets[at]
        return self.build(block.layout, **fields)

    def build(self, layout: Degrees, **fields: Any) -> Job:
        """The job with a layout and some fields, with placed experts."""
        job = build(self.job, layout, **fields)
        return job if self._loads is None else self._loads.apply(job)

    def find(self, job: Job) -> int | None:
        """The strategy that a job has; None if it is not in this grid."""
        stated = {**vars(job.parallel), "micro_batch": job.batch.micro_batch}
        block = self.blocks.get(str(Degrees(*(stated[axis] for axis in Degrees._fields))))
        if block is None:
            return None
        places = []
        for values in block.fields:
            same = [at for at, sets in enumerate(values) if all(stated[key] == sets[key] for key in sets)]
            if not same:
                return None
            places.append(same[0])
        index = block.index(places)
        return index if self.strategy(index) == job else None

    def params(self, index: int) -> dict[str, Any]:
        """Parameters of a trial: ``layout``, and one for each further choice."""
        block = self._block(index)
        chosen = zip(block.parameters.items(), block.places(index), strict=True)
        return {"layout": str(block.layout), **{name: values[at] for (name, values), at in chosen}}

    @cached_property
    def distributions(self) -> dict[str, dict[str, Any]]:
        """Optuna's distributions of the parameters of each layout's strategies."""
        from optuna.distributions import CategoricalDistribution as Categorical

        layout = Categorical(list(self.blocks))
        return {
            name: {"layout": layout, **{key: Categorical(values) for key, values in block.parameters.items()}}
            for name, block in self.blocks.items()
        }

    def suggest(self, trial: optuna.Trial) -> int:
        """The strategy that a trial's sampler chooses."""
        block = self.blocks[trial.suggest_categorical("layout", list(self.blocks))]
        for name, values in block.parameters.items():
            trial.suggest_categorical(name, values)
        index = self.index(trial.params)
        assert index is not None, trial.params
        return index

    def index(self, params: dict[str, Any]) -> int | None:
        """The strategy with these parameters of a trial; None if it is not in this grid."""
        block = self.blocks.get(params.get("layout", ""))
        if block is None or any(params.get(name) not in values for name, values in block.parameters.items()):
            return None
        return block.index([values.index(params[name]) for name, values in block.parameters.items()])


def strategies(job: Job, space: Space | None = None) -> Iterator[Job]:
    """Every legal strategy for the job's model, global batch and cluster."""
    grid = Grid(job, space or Space())
    return map(grid.strategy, range(len(grid)))


def scenario_jobs(job: Job, scenarios: Scenarios) -> Iterator[tuple[str, Job | JobError]]:
    """Each scenario in words, with the job on it, or the reason why there is no legal strategy."""
    for nodes, named, global_batch, seq_len in itertools.product(
        scenarios.nodes or [job.cluster.nodes],
        scenarios.clusters or [""],
        scenarios.global_batches or [job.batch.global_batch],
        scenarios.seq_lens or [job.model.seq_len],
    ):
        words = f"{nodes} nodes of {named or job.cluster.hardware}, global batch {global_batch}, {seq_len} tokens"
        cluster = replace(job.cluster, nodes=nodes)
        if named:
            hardware, _, fabric = named.partition("@")
            cluster = replace(cluster, hardware=hardware, fabric=fabric)
        model, batch = replace(job.model, seq_len=seq_len), replace(job.batch, global_batch=global_batch)
        yield words, _first_legal(job, model=model, batch=batch, cluster=cluster)


def _first_legal(job: Job, *, model: ModelSpec, batch: BatchSpec, cluster: ClusterSpec) -> Job | JobError:
    """The job with another model, batch and cluster, in its own strategy if that is legal, else in the first legal."""
    devices, own = cluster.num_devices, job.parallel
    free: Fields = {"cp": 1, "ep": 1, "schedule": "1f1b", "virtual_stages": 1, "stage_layers": (), "dp_shard": 0}
    plain, one = replace(own, sequence_parallel=False, **free), replace(batch, micro_batch=1, flushes=1)
    tensor = [2**power for power in range(cluster.devices_per_node.bit_length())]
    pairs = itertools.product(range(1, min(devices, model.total_layers) + 1), tensor)
    tried = [(replace(plain, tp=tp, pp=pp), one) for pp, tp in pairs if devices % (tp * pp) == 0]
    if model.tables:  # a step of a recommendation model has one batch
        tried.insert(0, (own, replace(one, micro_batch=max(1, batch.global_batch // devices))))
    reason: JobError | None = None
    for parallel, sized in [(own, batch), *tried]:
        dp = max(1, devices // (parallel.tp * parallel.cp * parallel.pp))
        try:
            return replace(job, model=model, batch=sized, cluster=cluster, parallel=replace(parallel, dp=dp))
        except JobError as error:
            reason = error if reason is None or parallel.tp == parallel.pp == 1 else reason
    assert reason is not None
    return reason
