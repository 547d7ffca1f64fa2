"""The legal strategies of a model on a cluster: what a search chooses from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepsight.dataset.errors import JobError
from stepsight.dataset.frameworks import find_framework
from stepsight.dataset.job import Job

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Space:
    """The choices of a search.  What does not fit a model and cluster is left out, never suggested.

    Attributes:
        max_tp: Largest tensor-parallel degree; by default the devices of a node.
        micro_batches: Sizes to try.
        schedules: Each with its virtual stages.
        cp: Context-parallel degrees, each where it leaves a rank ``MIN_CP_TOKENS`` tokens of a sequence.
        zero_stages, recompute, sequence_parallel: As in a job.

    Expert-parallel degrees are all that divide the experts; pipelines are those whose layers split nearly evenly.  What
    is the same as another choice is left out: selective recomputation with fused attention, which keeps nothing that it
    could free, and ``gpipe`` of one micro-batch, which is 1F1B.
    """

    max_tp: int = 0
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 1))
    cp: tuple[int, ...] = (1, 2, 4, 8)
    zero_stages: tuple[int, ...] = (0, 1, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (False, True)


# What a strategy is made of, beside the micro-batch, and what goes with one strategy alone.
VARIED = (
    "tp", "cp", "pp", "ep", "dp", "schedule", "virtual_stages", "zero_stage", "recompute", "sequence_parallel",
    "stage_layers", "dp_shard",
)  # fmt: skip
MIN_CP_TOKENS = 4096
MOST_UNEVEN = 1.2  # layers of the fullest stage over the mean: what waits for more is never best


class Degrees(NamedTuple):
    """Degrees that multiply to the devices, and that of the experts."""

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
            if rest or not dp or (cp > 1 and model.seq_len < cp * MIN_CP_TOKENS):
                continue
            if -(-model.total_layers // pp) * pp > MOST_UNEVEN * model.total_layers:
                continue
            for ep in _divisors(model.experts) if model.experts else [1]:
                layout = Degrees(tp, cp, pp, ep, dp)
                if _is_legal(job, layout):
                    found.append(layout)
    return found


def _is_legal(job: Job, layout: Degrees) -> bool:
    """Whether the layout's own rules hold, whatever else is chosen."""
    try:
        _build(job, layout, {"pipeline": "1 1f1b x1", "sequence_parallel": False})
    except JobError:
        return False
    return True


def _options(job: Job, space: Space, layout: Degrees) -> dict[str, list[Any]]:
    """The further choices that are legal and differ under one layout."""
    per_replica = job.batch.global_batch // layout.dp
    schedules = [s for s in space.schedules if _runtime(job) != "deepspeed" or s == ("1f1b", 1)]  # its only one
    recompute = [r for r in space.recompute if r != "selective" or not job.model.fused_attention]
    if job.parallel.offload_activations:
        recompute = ["none"]  # what is offloaded is not computed again
    tokens = job.model.seq_len // layout.cp
    sequence_parallel = space.sequence_parallel if layout.tp > 1 else (False,)
    return {
        "pipeline": [
            f"{size} {schedule} x{chunks}"
            for size in space.micro_batches
            if per_replica % size == 0
            for schedule, chunks in (schedules if layout.pp > 1 else space.schedules[:1])
            if chunks == 1 or (layout.pp * chunks <= job.model.total_layers and per_replica // size % layout.pp == 0)
            if schedule != "gpipe" or per_replica > size or ("1f1b", 1) not in space.schedules
        ],
        "zero_stage": list(space.zero_stages) if layout.dp * layout.cp > 1 else [0],
        "recompute": recompute or list(space.recompute),
        "sequence_parallel": [sp for sp in sequence_parallel if not sp or tokens % layout.tp == 0],
    }


def _runtime(job: Job) -> str:
    """Who passes messages between stages: a job of one stage does not say, its framework does."""
    return find_framework(job.framework).runtime if job.framework and job.parallel.pp == 1 else job.parallel.runtime


def _build(job: Job, layout: Degrees, chosen: dict[str, Any]) -> Job:
    """The job with a layout and further choices; ``pipeline`` is micro-batch, schedule and virtual stages."""
    size, schedule, chunks = chosen["pipeline"].split()
    rest = {key: value for key, value in chosen.items() if key != "pipeline"}
    free = {"schedule": schedule, "virtual_stages": int(chunks[1:]), "stage_layers": (), "dp_shard": 0}
    if job.framework and job.parallel.pp == 1:
        free["runtime"] = find_framework(job.framework).runtime_of(layout.pp, int(chunks[1:]))
    return replace(
        job,
        parallel=replace(job.parallel, **layout._asdict(), **free, **rest),
        batch=replace(job.batch, micro_batch=int(size)),
    )


def strategies(job: Job, space: Space | None = None) -> Iterator[Job]:
    """Every legal strategy for the job's model, global batch and cluster."""
    space = space or Space()
    for layout in legal_degrees(job, space):
        options = _options(job, space, layout)
        for values in itertools.product(*options.values()):
            yield _build(job, layout, dict(zip(options, values, strict=True)))


class Grid:
    """Every legal strategy as the parameters of an Optuna trial, and which of them are left to evaluate.

    Shapes: ``n`` strategies.

    Attributes:
        space: The choices that it is made of.
        left: ``(n,)``, False where a strategy is claimed or evaluated.

    Raises:
        JobError: If there is none.
    """

    def __init__(self, job: Job, space: Space) -> None:
        self._template = job
        self.space = space
        found = {str(layout): layout for layout in legal_degrees(job, space)}
        options = {name: _options(job, space, layout) for name, layout in found.items()}
        self._layouts = found
        self._options = {name: option for name, option in options.items() if all(option.values())}
        self._points = [
            (name, values) for name, option in self._options.items() for values in itertools.product(*option.values())
        ]
        if not self._points:
            raise JobError(
                f"no legal strategy for {job.cluster.num_devices} devices and global_batch {job.batch.global_batch}"
            )
        self._places = {point: index for index, point in enumerate(self._points)}
        columns = zip(*((*found[name], *values) for name, values in self._points), strict=True)
        self._codes = np.stack([np.unique(np.array(column), return_inverse=True)[1] for column in columns], axis=1)
        self._turn = np.arange(len(self._points))
        self.left = np.ones(len(self._points), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._points)

    def find(self, job: Job) -> int | None:
        """The strategy that a job has, None if it is not in this grid."""
        p, batch = job.parallel, job.batch
        pipeline = f"{batch.micro_batch} {p.schedule} x{p.virtual_stages}"
        point = str(Degrees(p.tp, p.cp, p.pp, p.ep, p.dp)), (pipeline, p.zero_stage, p.recompute, p.sequence_parallel)
        index = self._places.get(point)
        return index if index is not None and self.job(index) == job else None

    def shuffle(self, seed: int) -> None:
        """Which of several nearest strategies comes first."""
        self._turn = np.random.default_rng(seed).permutation(len(self))

    def job(self, index: int) -> Job:
        """The job of a strategy."""
        name, values = self._points[index]
        return _build(self._template, self._layouts[name], dict(zip(self._options[name], values, strict=True)))

    def params(self, index: int) -> dict[str, Any]:
        """Of a trial.  A parameter's choices may not change within a study: where they depend on the layout, so does
        its name."""
        name, values = self._points[index]
        named = zip(self._options[name].items(), values, strict=True)
        return {"layout": name, **{_label(key, of): value for (key, of), value in named}}

    def distributions(self, index: int) -> dict[str, Any]:
        """Optuna's distributions of ``params``."""
        from optuna.distributions import CategoricalDistribution

        name, _ = self._points[index]
        option = self._options[name]
        named = {_label(key, of): CategoricalDistribution(of) for key, of in option.items()}
        return {"layout": CategoricalDistribution(list(self._options)), **named}

    def suggest(self, trial: optuna.Trial) -> int:
        """The strategy that a trial's sampler chooses."""
        name = trial.suggest_categorical("layout", list(self._options))
        option = self._options[name]
        return self._places[
            name, tuple(trial.suggest_categorical(_label(key, values), values) for key, values in option.items())
        ]

    def index(self, params: dict[str, Any]) -> int | None:
        """The strategy with these parameters, None if it is not in this grid."""
        name = params.get("layout", "")
        keys = [_label(key, values) for key, values in self._options.get(name, {}).items()]
        return self._places.get((name, tuple(params.get(key) for key in keys)))

    def nearest(self, index: int) -> int:
        """The strategy left that differs from this one in the fewest choices."""
        left = np.flatnonzero(self.left)
        distance = (self._codes[left] != self._codes[index]).sum(axis=1)
        return int(left[np.lexsort((self._turn[left], distance))[0]])


def _label(key: str, values: list[Any]) -> str:
    return f"{key}[{'|'.join(map(str, values))}]"
