"""Evaluated strategies of a search, with memory and prediction, and their order."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.search.settings import Goal, Seconds
from stepsight.experiments.search.sharding import ExpertLoads, sharding_facts
from stepsight.simulator.memory import Memory, is_tight
from stepsight.training.prediction.ask_many import Answers
from stepsight.training.prediction.prediction import Prediction

if TYPE_CHECKING:
    from pandas import DataFrame


_SHOWN = (
    "schedule", "virtual_stages", "zero_stage", "dp_shard", "recompute", "recompute_every", "offload_activations",
    "sequence_parallel", "order",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Choice:
    """One strategy that a search evaluated.

    ``peak_bytes`` and ``capacity_bytes`` are the predicted memory of the fullest stage and that of its device;
    ``seconds`` the predicted iteration time, low and high end of its interval, None if the strategy does not fit in
    memory, since such strategies are not timed.
    """

    job: Job
    peak_bytes: float
    capacity_bytes: float
    seconds: Seconds | None
    _predict: Callable[[Job], Prediction] = field(compare=False)

    @classmethod
    def of(cls, prediction: Prediction, ask: Callable[[Job], Prediction]) -> Choice:
        """The strategy of a prediction, which is timed even if it does not fit; ``ask`` predicts a job."""
        seconds = (prediction.iteration_time_s, prediction.low_s, prediction.high_s)
        memory = prediction.memory
        choice = cls(prediction.job, memory.peak_bytes, memory.capacity_bytes, seconds, ask)
        choice.__dict__["prediction"] = prediction
        return choice

    @classmethod
    def of_answers(cls, jobs: Sequence[Job], answers: Answers, ask: Callable[[Job], Prediction]) -> list[Choice]:
        """The strategies of jobs that were predicted together."""
        rows = np.array(answers).T.tolist()
        return [
            cls(job, peak, capacity, (time_s, low_s, high_s) if peak <= capacity else None, ask)
            for job, (time_s, low_s, high_s, peak, capacity) in zip(jobs, rows, strict=True)
        ]

    @property
    def timed(self) -> Seconds:
        """The seconds of a strategy that was timed."""
        assert self.seconds is not None, self.job
        return self.seconds

    @cached_property
    def prediction(self) -> Prediction | None:
        """The full prediction, computed on first use; None if the strategy does not fit in memory."""
        return None if self.seconds is None else self._predict(self.job)

    @cached_property
    def memory(self) -> Memory:
        """Predicted peak memory of every stage, computed on first use."""
        return self._predict(self.job).memory

    def __repr__(self) -> str:
        time = f"{self.seconds[0]:.4g} s" if self.seconds is not None else "not timed"
        fits = "" if self.fits else ", does not fit"
        return f"Choice({self.job.name}, {time}, {self.peak_bytes / 1e9:.1f} GB{fits})"

    @property
    def fits(self) -> bool:
        """Whether the fullest stage fits in a device's memory."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def tight(self) -> bool:
        """Whether it fits, but the allocator's usual slack does not."""
        return is_tight(self.peak_bytes, self.capacity_bytes)

    @property
    def needed_bytes(self) -> float:
        """Memory that the fullest stage needs; of a tight one without the allocator's slack, which fills the device."""
        stages = enumerate(self.memory.stages if self.tight else ())
        needs = [stage.tensors + self.memory.device(at).reserved_bytes for at, stage in stages]
        return max(needs, default=self.peak_bytes)

    def rank(self, goal: Goal) -> tuple[bool, float]:
        """Sort key, best first: by the goal; strategies that do not fit come last, by their memory."""
        if self.seconds is None or not self.fits:
            return True, self.peak_bytes
        return False, goal.score(self.job, self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the strategy, seconds (None if not timed), bytes of the fullest stage."""
        parallel = self.job.parallel
        time_s, low_s, high_s = self.seconds or (None, None, None)
        return {
            **{axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep", "dp")},
            "micro_batch": self.job.batch.micro_batch,
            **{name: getattr(parallel, name) for name in _SHOWN},
            "stage_layers": list(parallel.stage_layers),
            "iteration_time_s": time_s,
            "low_s": low_s,
            "high_s": high_s,
            "memory_bytes": self.peak_bytes,
            "fits": self.fits,
            "tight": self.tight,
            **(sharding_facts(self.job) if self.job.model.tables else {}),
        }


@dataclass(frozen=True)
class Rival:
    """A strategy that may be faster than the best."""

    choice: Choice  # the strategy
    slower_percent: float  # how much more time it is predicted to take than the best
    error_percent: float  # half of the interval of this difference (coverage as that of predictions)
    measure: str  # the kind of op or collective that contributes most to the error: what to measure
    measure_s: float  # seconds of it that the strategy spends more than the best, in an iteration

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self.choice.to_dict(), **{key: value for key, value in vars(self).items() if key != "choice"}}


@dataclass
class SearchResult:
    """Distinct strategies, best first; those that do not fit in memory come last.

    Attributes:
        choices: The evaluated strategies, and the given job if it fits.
        evaluated: Number of strategies evaluated, by all processes of the study.
        legal: Number of strategies in the space.
        own: The given job.
        gap_percent: How much longer ``best`` takes, at most, than the best strategy of the space, in percent; 0: it is
            optimal.  None: not known, or no strategy that was evaluated fits.
        undecided: Number of strategies that were not evaluated and that bounds do not exclude.
        rivals: With ``robust``: strategies that the predictor cannot distinguish from the best.
        regrets: With ``robust`` by regret: the expected regret of the first choices, in percent.
        goal: The objective.
        plans: The best strategy of each scenario, best first; empty if only the job's own scenario was searched.
        skipped: Scenarios without a legal strategy, each with the reason.
        expert_loads: By which the experts of each strategy are placed, if they were given.
        baselines: Of a recommendation model: seconds of an iteration by how its tables are placed; None: no legal plan.
    """

    choices: list[Choice] = field(default_factory=list)
    evaluated: int = 0
    legal: int = 0
    own: Choice | None = None
    gap_percent: float | None = None
    undecided: int = 0
    rivals: Sequence[Rival] = ()
    regrets: tuple[float, ...] = ()
    goal: Goal = field(default_factory=Goal)
    plans: Sequence[Choice] = ()
    skipped: tuple[str, ...] = ()
    expert_loads: ExpertLoads | None = None
    baselines: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def any_fits(self) -> bool:
        """Whether a strategy fits in memory."""
        return bool(self.choices) and self.choices[0].fits

    def __repr__(self) -> str:
        best = repr(self.choices[0]) if self.any_fits else "none fits"
        return f"SearchResult({self.counts.split(',')[0]}, best: {best}, {self.proof})"

    @property
    def too_large(self) -> int:
        """Number of evaluated strategies that do not fit in memory."""
        return min(self.evaluated, sum(not choice.fits for choice in self.choices))

    @property
    def counts(self) -> str:
        """The number of strategies, by outcome; of a recommendation model those of placements of its tables."""
        if self.own is not None and self.own.job.model.tables:
            return f"{self.evaluated} placements judged by their slowest rank, {len(self.choices)} predicted in full"
        excluded = self.legal - self.evaluated
        text = f"{self.legal} legal strateg{'y' if self.legal == 1 else 'ies'}, {self.evaluated} evaluated"
        if self.too_large:
            text += f" ({self.too_large} of them too large for the devices' memory)"
        if by_bounds := excluded - self.undecided:
            text += f", {by_bounds} excluded by bounds: too slow or too large"
        return text + (f", {self.undecided} not evaluated" if self.undecided else "")

    @property
    def proof(self) -> str:
        """The quality of the best strategy in words: ``optimal`` or ``within 3 %``."""
        if self.any_fits:
            if self.gap_percent is None:
                return "not proved"
            return "optimal" if self.gap_percent == 0 else f"within {self.gap_percent:.2g} % of the optimum"
        if self.undecided:
            tried = f"none of the {self.evaluated} strategies evaluated fits in memory"
            return f"{tried}, and {self.undecided} that may fit were not evaluated: search on"
        text = "the only legal one is" if self.legal == 1 else f"all {self.legal} legal ones are"
        text = f"no strategy fits in memory: {text} too large"
        if self.choices:
            needed = f"{self.choices[0].peak_bytes / 1e9:.1f} GB of {self.choices[0].capacity_bytes / 1e9:.1f} GB"
            text += f"; {self.choices[0].job.name} needs least, {needed}"
        return text

    @property
    def best(self) -> Choice:
        """The best strategy that fits in memory, by default the one with the shortest predicted iteration; if none
        does, a ``JobError``.
        """
        if not self.any_fits:
            raise JobError(self.proof)
        return self.choices[0]

    @cached_property
    def front(self) -> list[dict[str, Any]]:
        """Strategies that no other one beats in time of training and in cost, the shortest time first; rows as those
        of ``to_frame``.  Where a price is not known, the number of devices stands for the cost.
        """
        rows = [self._row(choice) for choice in self.choices if choice.fits]
        second = cost_axis(rows)
        return [rows[at] for at in front_of([(row["training_time_s"], row[second]) for row in rows])]

    def _row(self, choice: Choice) -> dict[str, Any]:
        placed = {} if self.expert_loads is None else {"imbalance": choice.job.model.imbalance}
        return {**choice.to_dict(), **placed, **self.goal.objectives(choice.job, choice.seconds)}

    @property
    def _rows(self) -> list[dict[str, Any]]:
        rows = [self._row(choice) for choice in self.choices]
        for row, regret in itertools.zip_longest(rows, self.regrets) if self.regrets else ():
            row["expected_regret_percent"] = regret
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``best`` is None if no strategy fits in memory."""
        rows, experts = self._rows, dict[str, Any]()
        if self.expert_loads is not None:  # placement of the best strategy's experts
            experts["expert_placement"] = None
            if self.any_fits:
                best, loads = self.choices[0], self.expert_loads
                in_order = best._predict(loads.apply(best.job, by_load=False)).iteration_time_s
                told = {**loads.to_dict(best.job.parallel.ep), "iteration_time_in_order_s": in_order}
                experts["expert_placement"] = told
        return {
            "best": rows[0] if self.any_fits else None,
            "evaluated": self.evaluated,
            "legal": self.legal,
            "gap_percent": self.gap_percent,
            "own": None if self.own is None else self._row(self.own),
            "front": self.front,
            "plans": [self._row(choice) for choice in self.plans],
            "skipped": list(self.skipped),
            "rivals": [rival.to_dict() for rival in self.rivals],
            **experts,
            **({"baselines": dict(self.baselines)} if self.baselines else {}),
            "choices": rows,
        }

    def to_frame(self) -> DataFrame:
        """A pandas table with a row for each strategy, best first: the keys of ``Choice.to_dict``, and the objectives
        of the goal; with ``robust`` by regret, the expected regret too.
        """
        from pandas import DataFrame

        return DataFrame(self._rows)

    def plot(self, axes: Any = None) -> Any:
        """Draw iteration time over memory of every strategy that was timed, on matplotlib axes or a new figure."""
        from stepsight.experiments.reports.plots import draw_search

        return draw_search(self._rows, axes, self.proof)

    def _repr_html_(self) -> str:
        """HTML for a notebook: the proof, and the first strategies as a table."""
        columns = ["tp", "pp", "dp", "micro_batch", "schedule", "zero_stage", "recompute"]
        columns = ["placement"] if self.choices and self.choices[0].job.model.tables else columns
        columns += ["iteration_time_s", "low_s", "high_s", "memory_bytes", "fits"]
        head = f"<p>{escape(f'{self.counts}: {self.proof}')}</p>"
        return head + (self.to_frame()[columns].head(10).to_html(index=False) if self.choices else "")


def front_of(points: Sequence[tuple[float, float] | None]) -> list[int]:
    """Numbers of the points that no other one beats in both values, the least first value first."""
    found, least = [], math.inf
    for point, at in sorted((point, at) for at, point in enumerate(points) if point is not None):
        if point[1] < least:
            found.append(at)
            least = point[1]
    return found


def cost_axis(rows: Sequence[dict[str, Any]]) -> str:
    """The second axis of the front: ``cost``, or ``devices`` if a price is not known."""
    return "cost" if all(row["cost"] is not None for row in rows) else "devices"


Floats = NDArray[np.float64]
COVERAGE = 0.9  # of prediction intervals
DRAWS = 4096  # of errors; their number decides the last digit of a regret, not the order of strategies that differ
MOST_RIVALS = 24  # strategies that are compared with the best: each comparison takes a full prediction


def find_rivals(choices: Sequence[Choice]) -> tuple[Rival, ...]:
    """Find the strategies that cannot be distinguished from the first, of ``MOST_RIVALS`` at most; best first.

    Two strategies of a job share most of their ops, and errors that they share cancel when they are compared.  The
    error of each kind of op and collective is taken as independent of the others, and of the same relative size for all
    kinds: the size that makes up the prediction interval of the best strategy.  The error of a difference then comes
    from the kinds of which one strategy spends more time than the other, along their critical paths.
    """
    compared, kinds, seconds, size = _compared(choices)
    found = []
    for choice, spent in zip(compared[1:], seconds[1:], strict=True):
        more, time_s = spent - seconds[0], compared[0].timed[0]
        slower, error = choice.timed[0] / time_s - 1.0, size * float(np.linalg.norm(more)) / time_s
        if abs(slower) <= error:
            most = int(np.abs(more).argmax())
            found.append(Rival(choice, 100.0 * slower, 100.0 * error, kinds[most], float(more[most])))
    return tuple(found)


def by_expected_regret(choices: Sequence[Choice]) -> tuple[list[Choice], tuple[float, ...]]:
    """Sort the fastest strategies, ``1 + MOST_RIVALS`` at most, by their expected regret; all choices, and these
    regrets in percent.

    The regret of a strategy is how much longer it takes than the fastest of them turns out to take. The errors of kinds
    of ops and collectives are drawn; strategies share them.
    """
    compared, _, seconds, size = _compared(choices)
    if not compared:
        return list(choices), ()
    rest = np.array([choice.timed[0] for choice in compared]) - seconds.sum(axis=1)  # launches
    regrets = expected_regrets(seconds, rest, size / NormalDist().inv_cdf((1.0 + COVERAGE) / 2.0))
    order = np.argsort(regrets, kind="stable").tolist()
    first = {id(choice) for choice in compared}
    ranked = [*(compared[at] for at in order), *(choice for choice in choices if id(choice) not in first)]
    return ranked, tuple((100.0 * regrets[order]).tolist())


def _compared(choices: Sequence[Choice]) -> tuple[list[Choice], list[str], Floats, float]:
    """The best strategies that fit, kinds, and seconds by kind, shape ``(strategies, kinds)``; and the relative error
    of each kind that adds up to half of the interval of the best, with the interval's coverage.
    """
    best = [choice for choice in choices if choice.fits and choice.seconds is not None][: 1 + MOST_RIVALS]
    spent = [seconds_by_kind(choice) for choice in best]
    kinds = list(dict.fromkeys(kind for one in spent for kind in one))
    seconds, size = np.array([[one.get(kind, 0.0) for kind in kinds] for one in spent]), 0.0
    if best:
        time_s, _, high_s = best[0].timed
        size = math.log(high_s / time_s) * time_s / float(np.linalg.norm(seconds[0]))
    return best, kinds, seconds, size


def expected_regrets(seconds: Floats, rest: Floats, size: float) -> Floats:
    """Mean excess of each strategy over the fastest one of each sample; relative, shape ``(n,)``.

    ``seconds`` are by kind of op and collective, shape ``(n, kinds)``, ``rest`` those that have no error, shape
    ``(n,)``; ``size``: standard deviation of the logarithm of each kind's error, whose mean is 1.
    """
    half = np.random.default_rng(0).standard_normal((DRAWS // 2, seconds.shape[1]))
    errors = np.exp(size * np.concatenate([half, -half]) - size**2 / 2.0)
    times = errors @ seconds.T + rest
    return np.asarray((times / times.min(axis=1, keepdims=True)).mean(axis=0) - 1.0)


def seconds_by_kind(choice: Choice) -> dict[str, float]:
    """Seconds of the critical path of a strategy by kind of op and collective; they add up to the iteration time."""
    assert choice.prediction is not None
    simulation = choice.prediction.simulation
    scale = choice.prediction.iteration_time_s / simulation.iteration_time_s
    taken, found = simulation.work_counts * simulation.work_seconds * scale, defaultdict[str, float](float)
    for work, seconds in zip(simulation.lowered.all_works, taken.tolist(), strict=True):
        where = "" if isinstance(work, Op) else " within a node" if work.num_nodes == 1 else " across nodes"
        found[work.kind + where] += seconds
    return {kind: seconds for kind, seconds in found.items() if seconds > 0}
