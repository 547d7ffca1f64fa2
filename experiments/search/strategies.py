"""The legal strategies of a model on a cluster: by number, as jobs, and as parameters of Optuna trials."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.rules import MOST_ACTIONS
from stepsight.experiments.search.space import Space
from stepsight.simulator.schedules import find_schedule

if TYPE_CHECKING:
    import optuna

    from stepsight.experiments.search.expert_loads import ExpertLoads

# The components of a strategy besides the micro-batch, and those of single strategies.
VARIED = (
    "tp", "cp", "pp", "ep", "dp", "schedule", "virtual_stages", "zero_stage", "recompute", "sequence_parallel",
    "stage_layers", "dp_shard",
)  # fmt: skip
Options = dict[str, list[Any]]
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


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


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
            for ep in _divisors(model.experts) if model.experts else [1]:
                layout = Degrees(tp, cp, pp, ep, dp)
                if _is_legal(job, layout):
                    found.append(layout)
    return found


def _is_legal(job: Job, layout: Degrees, **chosen: Any) -> bool:
    """Whether the layout's own rules are satisfied, independent of all other choices."""
    try:
        build(job, layout, {"pipeline": "1 1f1b x1", "sequence_parallel": False, **chosen})
    except JobError:
        return False
    return True


def options_of(job: Job, space: Space, layout: Degrees) -> Options:
    """The further choices that are legal and distinct under one layout; all of their combinations are legal."""
    options: Options = {
        "pipeline": _pipelines(job, space, layout),
        "zero_stage": _sharding(space, layout),
        "recompute": _recompute(job, space, layout),
        "sequence_parallel": [
            sp
            for sp in (space.sequence_parallel if layout.tp > 1 else (False,))
            if not sp or _is_legal(job, layout, sequence_parallel=True)
        ],
    }
    if space.orders:
        options["order"] = _orders(space, layout)
    return options


def _pipelines(job: Job, space: Space, layout: Degrees) -> list[str]:
    """Micro-batch, schedule and virtual stages, as ``2 1f1b x4``."""
    schedules = space.pipelines
    if _runtime(job) == "deepspeed":
        schedules = tuple(s for s in schedules if s == ("1f1b", 1))  # the only one
    if layout.pp == 1:
        schedules = tuple((name, 1) for name, _ in schedules[:1])
    per_replica, layers = job.batch.global_batch // layout.dp, job.model.total_layers
    return [
        f"{size} {schedule} x{chunks}"
        for size in space.micro_batches
        if per_replica % size == 0
        for schedule, chunks in schedules
        if chunks == 1 or layout.pp * chunks <= layers
        if schedule != "gpipe" or per_replica > size or ("1f1b", 1) not in schedules
        if layout.pp == 1 or _runs(schedule, layout.pp, per_replica // size, chunks)
    ]


def _runs(schedule: str, stages: int, micro_batches: int, chunks: int) -> bool:
    """Whether a schedule allows these numbers."""
    if stages * chunks * micro_batches > MOST_ACTIONS:
        return False
    if chunks == 1 and schedule in ("1f1b", "gpipe", "zb-h1"):
        return True
    if schedule in ("1f1b", "interleaved-zb", "looped-bfs"):
        return micro_batches % stages == 0
    return _can_be_made(schedule, stages, micro_batches, chunks)


@cached(16384)
def _can_be_made(schedule: str, stages: int, micro_batches: int, chunks: int) -> bool:
    with suppress(JobError):
        find_schedule(schedule, stages, micro_batches, chunks)
        return True
    return False


def _sharding(space: Space, layout: Degrees) -> list[str]:
    """ZeRO stages, those that shard over some replicas only as ``3/8``."""
    if layout.dp * layout.cp == 1:
        return ["0"]
    shards = [""]
    if space.dp_shard:
        fewer = [f"/{n}" for n in space.dp_shard if 0 < n < layout.dp and layout.dp % n == 0]
        whole = [""] if any(n in (0, layout.dp) for n in space.dp_shard) else []
        shards = [*whole, *(some for some in fewer if some != "/1" or layout.cp > 1)] or [""]
    return [f"{zero}{over}" for zero in space.zero_stages for over in (shards if zero else [""])]


def _recompute(job: Job, space: Space, layout: Degrees) -> list[str]:
    """How activations are kept: ``none``, ``offload``, ``selective``, ``full``, or ``full/2`` of every second layer."""
    offload = space.offload_activations or (job.parallel.offload_activations,)
    most = -(-job.model.total_layers // layout.pp)
    every = [n for n in space.recompute_every or (job.parallel.recompute_every,) if n <= most or n == 1] or [1]
    found = ["offload"] if True in offload else []
    for kind in space.recompute if False in offload else ():
        if kind == "full":
            found += ["full" if n == 1 else f"full/{n}" for n in every]
        elif kind == "none" or not job.model.fused_attention:
            found.append(kind)
    return found or list(space.recompute)


def _orders(space: Space, layout: Degrees) -> list[str]:
    """Orders that differ in axes of more than one rank."""
    found: dict[tuple[str, ...], str] = {}
    for order in space.orders:
        found.setdefault(tuple(axis for axis in order.split("-") if getattr(layout, axis) > 1), order)
    return list(found.values())


def _runtime(job: Job) -> str:
    """The pipeline runtime: a job of one stage does not state it, its framework does."""
    profile = job.profile if job.parallel.pp == 1 else None
    return job.parallel.runtime if profile is None else profile.runtime


def build(job: Job, layout: Degrees, chosen: dict[str, Any]) -> Job:
    """Build the job with a layout and further choices, as ``options_of`` writes them."""
    chosen = dict(chosen)
    size, schedule, chunks = chosen.pop("pipeline").split()
    free = {"schedule": schedule, "virtual_stages": int(chunks[1:]), "stage_layers": (), "dp_shard": 0}
    if "zero_stage" in chosen:
        zero, _, shards = chosen.pop("zero_stage").partition("/")
        free |= {"zero_stage": int(zero), "dp_shard": int(shards or 0)}
    if "recompute" in chosen:
        kind, _, every = chosen.pop("recompute").partition("/")
        free |= {"recompute": "none" if kind == "offload" else kind, "offload_activations": kind == "offload"}
        if kind != job.parallel.recompute:  # the search's own ``selective`` is the attention core
            free["recompute_modules"] = ()
        if kind == "full":
            free["recompute_every"] = int(every or 1)
    profile = job.profile if job.parallel.pp == 1 else None
    if profile is not None:
        free["runtime"] = profile.runtime_of(layout.pp, int(chunks[1:]))
    return replace(
        job,
        parallel=replace(job.parallel, **layout._asdict(), **free, **chosen),
        batch=replace(job.batch, micro_batch=int(size)),
        open_stages=False,
    )


def choices_of(job: Job) -> tuple[Degrees, dict[str, Any]]:
    """The layout and the further choices of a job; the arguments of ``build``."""
    p = job.parallel
    every = f"/{p.recompute_every}" if p.recompute_every > 1 and p.recompute == "full" else ""
    over = f"/{p.dp_shard}" if p.dp_shard and p.dp_shard != p.dp and p.zero_stage else ""
    return Degrees(p.tp, p.cp, p.pp, p.ep, p.dp), {
        "pipeline": f"{job.batch.micro_batch} {p.schedule} x{p.virtual_stages}",
        "zero_stage": f"{p.zero_stage}{over}",
        "recompute": "offload" if p.offload_activations else f"{p.recompute}{every}",
        "sequence_parallel": p.sequence_parallel,
        "order": p.order,
    }


class Grid:
    """Every legal strategy, and the remaining ones.

    A layout (the degrees) and all combinations of the further choices that are legal under it make a block; strategies
    are numbered block by block.  Nothing is stored for a strategy but whether it remains.

    Shapes: ``n`` strategies.

    Attributes:
        job: The job that they are strategies of.
        space: The choices that it is made of.
        remaining: ``(n,)``, False where a strategy was evaluated.
        layouts, options: Of each block.
        bounds: Strategies of block ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.

    Args:
        job, space: As the attributes.
        loads: Of the model's experts, which every strategy then places by their loads.

    Raises:
        JobError: If there is none.
    """

    def __init__(self, job: Job, space: Space, loads: ExpertLoads | None = None) -> None:
        self.job, self.space, self._loads = job, space, loads
        self.layouts: list[Degrees] = []
        self.options: list[Options] = []
        for layout in legal_degrees(job, space):
            options = options_of(job, space, layout)
            if all(options.values()):
                self.layouts.append(layout)
                self.options.append(options)
        self._shapes = [tuple(map(len, options.values())) for options in self.options]
        self.bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in self._shapes)])
        if not self.layouts:
            raise JobError(
                f"no legal strategy for {job.cluster.num_devices} devices and global_batch {job.batch.global_batch}"
            )
        self._block_of = {str(layout): block for block, layout in enumerate(self.layouts)}
        self.remaining = np.ones(len(self), dtype=np.bool_)
        self._distributions: dict[int, dict[str, Any]] = {}
        self._labels = [[_label(key, values) for key, values in options.items()] for options in self.options]

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def _point(self, index: int) -> tuple[int, list[Any]]:
        """Block of a strategy, and its further choices."""
        block = int(np.searchsorted(self.bounds, index, side="right")) - 1
        places = np.unravel_index(index - int(self.bounds[block]), self._shapes[block])
        return block, [values[int(at)] for values, at in zip(self.options[block].values(), places, strict=True)]

    def strategy(self, index: int) -> Job:
        """The job in a strategy."""
        block, values = self._point(index)
        return self.build(self.layouts[block], dict(zip(self.options[block], values, strict=True)))

    def build(self, layout: Degrees, chosen: dict[str, Any]) -> Job:
        """The job with a layout and further choices."""
        job = build(self.job, layout, chosen)
        return job if self._loads is None else self._loads.apply(job)

    def find(self, job: Job) -> int | None:
        """The strategy that a job has; None if it is not in this grid."""
        layout, chosen = choices_of(job)
        options = self.options[self._block_of.get(str(layout), 0)]
        labels = {_label(key, values): chosen[key] for key, values in options.items()}
        index = self.index({"layout": str(layout), **labels})
        return index if index is not None and self.strategy(index) == job else None

    @cached_property
    def _codes(self) -> NDArray[np.int32]:
        """A code for each degree and choice, equal for equal values; shape ``(n, choices)``."""
        numbers: dict[tuple[str, Any], int] = {}
        rows = []
        for layout, options in zip(self.layouts, self.options, strict=True):
            own = [[numbers.setdefault((key, one), len(numbers)) for one in values] for key, values in options.items()]
            chosen = np.stack(np.meshgrid(*own, indexing="ij"), axis=-1).reshape(-1, len(own))
            rows.append(np.hstack([np.tile(layout, (len(chosen), 1)), chosen]))
        return np.concatenate(rows).astype(np.int32)

    def params(self, index: int) -> dict[str, Any]:
        """Parameters of a trial.

        A parameter's choices may not change within a study: where they depend on the layout, so does its name.
        """
        block, values = self._point(index)
        return {"layout": str(self.layouts[block]), **dict(zip(self._labels[block], values, strict=True))}

    def distributions(self, index: int) -> dict[str, Any]:
        """Optuna's distributions of ``params``."""
        from optuna.distributions import CategoricalDistribution

        block = int(np.searchsorted(self.bounds, index, side="right")) - 1
        if block not in self._distributions:
            named = zip(self._labels[block], self.options[block].values(), strict=True)
            values = {"layout": list(self._block_of), **dict(named)}
            self._distributions[block] = {name: CategoricalDistribution(of) for name, of in values.items()}
        return self._distributions[block]

    def suggest(self, trial: optuna.Trial) -> int:
        """The strategy that a trial's sampler chooses."""
        block = self._block_of[trial.suggest_categorical("layout", list(self._block_of))]
        for label, values in zip(self._labels[block], self.options[block].values(), strict=True):
            trial.suggest_categorical(label, values)
        index = self.index(trial.params)
        assert index is not None, trial.params
        return index

    def index(self, params: dict[str, Any]) -> int | None:
        """The strategy with these parameters of a trial; None if it is not in this grid."""
        block = self._block_of.get(params.get("layout", ""))
        if block is None:
            return None
        options = zip(self._labels[block], self.options[block].values(), strict=True)
        try:
            places = tuple(values.index(params.get(label)) for label, values in options)
        except ValueError:
            return None
        return int(self.bounds[block]) + int(np.ravel_multi_index(places, self._shapes[block]))

    def nearest(self, index: int, order: NDArray[np.int64]) -> int:
        """The remaining strategy that differs from this one in the fewest choices.

        Args:
            index: Of a strategy.
            order: Place of each strategy, shape ``(n,)``; of strategies that are equally near the first is taken.
        """
        left = np.flatnonzero(self.remaining)
        distance = (self._codes[left] != self._codes[index]).sum(axis=1)
        return int(left[np.lexsort((order[left], distance))[0]])


def _label(key: str, values: list[Any]) -> str:
    return f"{key}[{'|'.join(map(str, values))}]"


def strategies(job: Job, space: Space | None = None) -> Iterator[Job]:
    """Every legal strategy for the job's model, global batch and cluster."""
    grid = Grid(job, space or Space())
    return map(grid.strategy, range(len(grid)))
