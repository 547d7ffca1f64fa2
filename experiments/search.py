"""Strategy search: an Optuna study that asks ``predict`` about the legal strategies of a model on a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepsight.dataset.errors import JobError, StepsightError
from stepsight.dataset.files import digest
from stepsight.dataset.job import Job
from stepsight.training.prediction import Prediction, predict

if TYPE_CHECKING:
    import optuna

    from stepsight.training.predictor import Predictor

SAMPLERS = ("auto", "tpe", "random")


@dataclass(frozen=True)
class Space:
    """The choices of a search.  What does not fit a model and cluster is left out, never suggested.

    Attributes:
        max_tp: Largest tensor-parallel degree; by default the devices of a node.
        micro_batches: Sizes to try.
        schedules: Each with its virtual stages.
        cp: Context-parallel degrees, each where it leaves a rank ``MIN_CP_TOKENS`` tokens of a sequence.
        zero_stages, recompute, sequence_parallel: As in a job.

    Expert-parallel degrees are all that divide the experts; pipelines are those whose layers split nearly evenly.
    """

    max_tp: int = 0
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 1))
    cp: tuple[int, ...] = (1, 2, 4, 8)
    zero_stages: tuple[int, ...] = (0, 1, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (False, True)


MIN_CP_TOKENS = 4096
MOST_UNEVEN = 1.2  # layers of the fullest stage over the mean: what waits for more is never best
MOST_SEED = 2**31  # samplers take 32 bits, and a study that goes on adds its trials


class Layout(NamedTuple):
    """Degrees that multiply to the devices, and that of the experts."""

    tp: int
    cp: int
    pp: int
    ep: int
    dp: int

    def __str__(self) -> str:
        return "-".join(f"{axis}{size}" for axis, size in self._asdict().items())


@dataclass(frozen=True)
class Choice:
    """One strategy that was asked about."""

    job: Job
    prediction: Prediction
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        parallel, batch = self.job.parallel, self.job.batch
        return {
            "tp": parallel.tp,
            "cp": parallel.cp,
            "pp": parallel.pp,
            "ep": parallel.ep,
            "dp": parallel.dp,
            "micro_batch": batch.micro_batch,
            "schedule": parallel.schedule,
            "virtual_stages": parallel.virtual_stages,
            "zero_stage": parallel.zero_stage,
            "recompute": parallel.recompute,
            "sequence_parallel": parallel.sequence_parallel,
            "iteration_time_s": self.prediction.iteration_time_s,
            "low_s": self.prediction.low_s,
            "high_s": self.prediction.high_s,
            "memory_bytes": self.prediction.memory.peak_bytes,
            "fits": self.fits,
        }


@dataclass
class SearchResult:
    """Distinct strategies, best first; those that do not fit in memory come last.

    Attributes:
        choices: What was evaluated.
        evaluated, legal: How many of how many.
        own: The job as it was given.
    """

    choices: list[Choice] = field(default_factory=list)
    evaluated: int = 0
    legal: int = 0
    own: Choice | None = None

    @property
    def best(self) -> Choice:
        if not self.choices or not self.choices[0].fits:
            raise JobError(f"no strategy fits in memory: {self.evaluated} tried of {self.legal} legal ones")
        return self.choices[0]


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def layouts(job: Job, space: Space) -> list[Layout]:
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
                layout = Layout(tp, cp, pp, ep, dp)
                if _is_legal(job, layout):
                    found.append(layout)
    return found


def _is_legal(job: Job, layout: Layout) -> bool:
    """Whether the layout's own rules hold, whatever else is chosen."""
    try:
        _build(job, layout, {"pipeline": "1 1f1b x1", "sequence_parallel": False})
    except JobError:
        return False
    return True


def _options(job: Job, space: Space, layout: Layout) -> dict[str, list[Any]]:
    """The further choices that are legal and differ under one layout."""
    per_replica = job.batch.global_batch // layout.dp
    tokens = job.model.seq_len // layout.cp
    sequence_parallel = space.sequence_parallel if layout.tp > 1 else (False,)
    return {
        "pipeline": [
            f"{size} {schedule} x{chunks}"
            for size in space.micro_batches
            if per_replica % size == 0
            for schedule, chunks in (space.schedules if layout.pp > 1 else space.schedules[:1])
            if chunks == 1 or (layout.pp * chunks <= job.model.total_layers and per_replica // size % layout.pp == 0)
        ],
        "zero_stage": list(space.zero_stages) if layout.dp * layout.cp > 1 else [0],
        "recompute": list(space.recompute),
        "sequence_parallel": [sp for sp in sequence_parallel if not sp or tokens % layout.tp == 0],
    }


def _build(job: Job, layout: Layout, chosen: dict[str, Any]) -> Job:
    """The job with a layout and further choices; ``pipeline`` is micro-batch, schedule and virtual stages."""
    size, schedule, chunks = chosen["pipeline"].split()
    rest = {key: value for key, value in chosen.items() if key != "pipeline"}
    free = {"schedule": schedule, "virtual_stages": int(chunks[1:]), "stage_layers": (), "dp_shard": 0}
    return replace(
        job,
        parallel=replace(job.parallel, **layout._asdict(), **free, **rest),
        batch=replace(job.batch, micro_batch=int(size)),
    )


def strategies(job: Job, space: Space | None = None) -> Iterator[Job]:
    """Every legal strategy for the job's model, global batch and cluster."""
    space = space or Space()
    for layout in layouts(job, space):
        options = _options(job, space, layout)
        for values in itertools.product(*options.values()):
            yield _build(job, layout, dict(zip(options, values, strict=True)))


class Grid:
    """Every legal strategy as the parameters of an Optuna trial, and which of them are left to evaluate.

    Shapes: ``n`` strategies.

    Attributes:
        left: ``(n,)``, what was not taken yet.

    Raises:
        JobError: If there is none.
    """

    def __init__(self, job: Job, space: Space) -> None:
        self._job = job
        found = {str(layout): layout for layout in layouts(job, space)}
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

    def shuffle(self, seed: int) -> None:
        """Which of several nearest strategies comes first."""
        self._turn = np.random.default_rng(seed).permutation(len(self))

    def take(self, index: int) -> Job:
        """The job of a strategy, which is then no longer left."""
        name, values = self._points[index]
        self.left[index] = False
        return _build(self._job, self._layouts[name], dict(zip(self._options[name], values, strict=True)))

    def params(self, index: int) -> dict[str, Any]:
        """Of a trial.  A parameter's choices may not change within a study: where they depend on the layout, so does
        its name."""
        name, values = self._points[index]
        named = zip(self._options[name].items(), values, strict=True)
        return {"layout": name, **{_label(key, of): value for (key, of), value in named}}

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


def _question(job: Job, predictor: Predictor | None, space: Space) -> str:
    """What a study is about: its trials answer no other question."""
    asked = (job.model, job.batch.global_batch, job.batch.precision, job.cluster, job.parallel.bucket_mbytes, space)
    return digest(repr(asked), "" if predictor is None else predictor.source)


def _study(storage: str | None, name: str | None, question: str) -> optuna.Study:
    """A new study, or the stored one of that name if it asks the same."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        study = optuna.create_study(storage=_storage(storage), study_name=name, load_if_exists=name is not None)
    except (SQLAlchemyError, OSError, ImportError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise StepsightError(
            f"storage must be a database URL or a writable journal file, got {storage}: {reason}"
        ) from None
    if study.user_attrs.get("question", question) != question:
        raise StepsightError(
            f"study {name!r} in {storage} is about another job, space or predictor: choose another name"
        )
    study.set_user_attr("question", question)
    return study


def _storage(storage: str | None) -> Any:
    """Optuna storage: none (memory), a database URL, or the path of a journal file."""
    if storage is None or "://" in storage:
        return storage
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(storage)
    if path.exists() and not (path.is_file() and path.read_bytes()[:11] in (b"", b'{"op_code":')):
        raise StepsightError(f"a study's journal is a new file or one that a search wrote, got {storage}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(storage))


def search(
    job: Job,
    predictor: Predictor | None = None,
    *,
    space: Space | None = None,
    trials: int = 200,
    sampler: str = "auto",
    seed: int = 0,
    storage: str | None = None,
    study_name: str | None = None,
    on_trial: Callable[[int, float | None], None] | None = None,
) -> SearchResult:
    """Find the strategy with the shortest predicted iteration that fits in memory.

    Args:
        job: Gives the model, global batch and cluster; its own strategy is only the template for what the
            space does not vary.
        trials: At most so many distinct strategies beside those of a stored study; a space that is not larger is
            enumerated whole (``auto``).
        sampler: ``tpe``, ``random``, or ``auto``: enumeration where ``trials`` allow it, else ``tpe``.
        storage: None, a database URL, or a journal file's path; a stored study of that name goes on.
        on_trial: Called with the number of the strategy and the best time so far.

    Raises:
        JobError: If no legal strategy exists.
    """
    import optuna

    space = space or Space()
    if seed < 0:
        raise StepsightError(f"seed must be >= 0, got {seed}")
    if seed > MOST_SEED:
        raise StepsightError(f"seed must be <= {MOST_SEED}, got {seed}")
    given = predict(job, predictor)  # a job that cannot be answered is refused before a study begins
    if trials < 1:
        raise StepsightError(f"trials must be >= 1, got {trials}")
    if sampler not in SAMPLERS:
        raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    grid = Grid(job, space)
    study = _study(storage, study_name, _question(job, predictor, space))
    seed += len(study.trials)  # a study that goes on does not repeat its choices
    whole = sampler == "auto" and len(grid) <= trials
    study.sampler = (
        optuna.samplers.RandomSampler(seed) if whole or sampler == "random" else optuna.samplers.TPESampler(seed=seed)
    )
    grid.shuffle(seed)
    choices: list[Choice] = []

    def evaluate(index: int) -> Choice:
        candidate = grid.take(index)
        prediction = predict(candidate, predictor)
        choices.append(Choice(candidate, prediction, prediction.memory.fits))
        return choices[-1]

    for earlier in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
        index = grid.index(earlier.params)
        if index is not None and grid.left[index]:
            evaluate(index)
    for number in range(min(trials, int(grid.left.sum()))):
        if whole:
            study.enqueue_trial(grid.params(int(np.argmax(grid.left))))
        trial, index = _ask(study, grid)
        try:
            choice = evaluate(index)
        except BaseException:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        memory = choice.prediction.memory
        trial.set_constraint("memory", memory.peak_bytes - memory.capacity_bytes)
        study.tell(trial, choice.prediction.iteration_time_s)
        if on_trial is not None:
            on_trial(number, min((c.prediction.iteration_time_s for c in choices if c.fits), default=None))
    choices.sort(key=lambda c: (not c.fits, c.prediction.iteration_time_s))
    return SearchResult(choices, len(choices), len(grid), Choice(job, given, given.memory.fits))


def _ask(study: optuna.Study, grid: Grid) -> tuple[optuna.Trial, int]:
    """A trial of a strategy that was not evaluated yet; in place of one that was, the nearest that was not."""
    import optuna

    while True:
        trial = study.ask()
        index = grid.suggest(trial)
        if grid.left[index]:
            return trial, index
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers learn nothing from these
        study.enqueue_trial(grid.params(grid.nearest(index)))


def exhaustive(job: Job, predictor: Predictor | None = None, space: Space | None = None) -> SearchResult:
    """Ask about every legal strategy: the reference for ``search``."""
    choices = []
    for candidate in strategies(job, space):
        prediction = predict(candidate, predictor)
        choices.append(Choice(candidate, prediction, prediction.memory.fits))
    choices.sort(key=lambda c: (not c.fits, c.prediction.iteration_time_s))
    return SearchResult(choices, len(choices), len(choices))
