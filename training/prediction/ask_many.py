"""``predict`` for a job or a program; for many jobs, ``predict_many`` as predictions and ``ask_many`` as arrays.

What jobs share is worked out once (``simulate_many``); the rest of a prediction when it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import without_collection
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.job.job import Job, JobLike
from stepsight.simulator.durations import latency_model
from stepsight.simulator.iteration.simulate_many import can_simulate_many, simulate_many
from stepsight.simulator.memory import estimate_memory
from stepsight.training.corrections.calibration import Calibration, JobCorrection
from stepsight.training.prediction import prediction as one_job
from stepsight.training.prediction.work_doubts import interval_ends
from stepsight.training.predictor.predictor import LearnedLatency, Predictor
from stepsight.training.predictor.software_used import software_change, software_stated, with_change

if TYPE_CHECKING:
    from stepsight.training.prediction.captured_prediction import CapturedPrediction

Floats = NDArray[np.float64]
FEWEST = 8  # fewest jobs on one hardware that are simulated together
SHARED = 64  # predictions whose intervals are computed together when the first is asked for


class Answers(NamedTuple):
    """Predicted times and memory of ``n`` jobs, in their order; each of shape ``(n,)``."""

    seconds: Floats  # iteration time, in seconds; NaN where a job does not fit in memory and was not timed
    low_s: Floats  # ends of the prediction interval, in seconds; NaN where seconds is
    high_s: Floats
    peak_bytes: Floats  # memory that the fullest stage needs
    capacity_bytes: Floats  # memory of that stage's device

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether each job fits in memory, shape ``(n,)``."""
        return np.asarray(self.peak_bytes <= self.capacity_bytes)


def ask_many(jobs: Sequence[Job], predictor: Predictor | str | None = None, *, only_fitting: bool = False) -> Answers:
    """Predict time, interval and peak memory of many jobs at once: what ``predict`` gives, but for rounding.

    Work that jobs share is done once, so one call should hold hundreds or thousands of jobs.  ``predictor``: as in
    ``predict``, which raises the same.  ``only_fitting``: leave out the time of jobs that do not fit in memory.
    """
    answers = Answers(*np.full((5, len(jobs)), np.nan))
    with without_collection():
        for index, group in _by_latency(jobs, predictor):
            group.ask(jobs, index, answers, only_fitting=only_fitting)
    return answers


@overload
def predict(
    job: JobLike,
    predictor: Predictor | str | Path | None = None,
    *,
    software: str = "",
    latency: str = "",
    date: str = "",
    container: str = "",
) -> one_job.Prediction: ...
@overload
def predict(job: Program, predictor: Predictor | str | Path | None = None) -> CapturedPrediction: ...
def predict(
    job: JobLike | Program,
    predictor: Predictor | str | Path | None = None,
    *,
    software: str = "",
    latency: str = "",
    date: str = "",
    container: str = "",
) -> one_job.Prediction | CapturedPrediction:
    """Predict one training iteration of a job, or of a program of one rank.

    Args:
        job: A ``Job``, the tables of one, or the path of a job file (.toml or .json); or a ``Program``, whose
            ``device_name`` names its hardware unless the predictor does.
        predictor: A ``Predictor`` for the job's hardware, the folder of one, the name of a shipped one (its own or its
            hardware's), one of MLflow's registry (``"models:/h100@champion"``), ``"roofline"``, or ``"latency:NAME"``
            (see ``latency``).  None takes the shipped one for the job's hardware, else a roofline from the facts.
        software: The framework that runs the job, as the runs of a calibration name it; by default the job's.
        latency: In place of a predictor: durations by a name in ``registries.LATENCIES`` or ``module:function``.
        date: Answer for software of this date (``2025-04``), with its profile and the drift that dated runs show.
        container: Answer for the software in this container.

    Returns:
        Iteration time, interval, breakdown, memory and timeline; of a program without the memory and the timeline.

    Raises:
        JobError: If the job breaks a rule, or there is neither a predictor nor a preset for its hardware.
        PredictorError: If the predictor is for other hardware, or no predictor has that name.

    Example:
        >>> predict("examples/gpt3-175b-1024.toml")  # doctest: +SKIP
        Prediction(21.55 s, 20.30 to 24.03 s, 24.7 GB, gpt3-175b on 1024 x a100-sxm-80gb)
    """
    if not isinstance(job, Program):
        usual = Job.of(job)
        if not (date or container):
            return one_job.predict(usual, predictor, software=software, latency=latency)
        asked = Job.of(job, software_stated(date, container))
        found = one_job.predict(asked, predictor, software=software, latency=latency)
        return with_change(found, software_change(usual, asked))
    if software or latency or date or container:
        raise JobError("software, latency, date and container do not go with a program: leave them out")
    from stepsight.training.prediction.captured_prediction import predict_program

    return predict_program(job, predictor)


def predict_many(jobs: Iterable[JobLike], predictor: Predictor | str | None = None) -> list[one_job.Prediction]:
    """Predict several jobs; shared parts are computed once.

    Interval, breakdown and timeline of a prediction are computed when they are first asked for.  ``ask_many`` is
    quicker for time, interval and memory alone.

    Args:
        jobs: Each a ``Job``, the tables of one, or the path of a job file.
        predictor: As in ``predict``.

    Returns:
        One prediction for each job, in their order.

    Raises:
        JobError: As ``predict``, for a job that cannot be predicted.
        PredictorError: As ``predict``.

    Example:
        >>> jobs = [replace(job, batch=replace(job.batch, micro_batch=size)) for size in (1, 2, 4)]  # doctest: +SKIP
        >>> [prediction.iteration_time_s for prediction in predict_many(jobs)]  # doctest: +SKIP
    """
    if isinstance(jobs, str | Path | Mapping | Job):
        raise JobError(f"predict_many takes several jobs, for example a list, got one of type {type(jobs).__name__}")
    asked = [job if isinstance(job, Job) else Job.of(job) for job in jobs]
    found: dict[int, one_job.Prediction] = {}
    with without_collection():
        for index, group in _by_latency(asked, predictor):
            found.update(zip(index, group.predict([asked[place] for place in index]), strict=True))
    return [found[place] for place in range(len(asked))]


class _Together:
    """Jobs that one group answers, with the shares of their times outside the measured range, computed on request."""

    def __init__(self, group: _Group, jobs: list[Job]) -> None:
        self._group, self._jobs = group, jobs

    def share(self, place: int) -> float:
        """Part of a job's critical path outside the measured range, 0 to 1."""
        return float(self._shares[place])

    @cached_property
    def _shares(self) -> Floats:
        return self._group.times(self._jobs, intervals=True)[1]


class _Group(NamedTuple):
    """Jobs with one latency model; ``predictor`` None: a roofline from hardware facts, or durations from elsewhere.

    ``asked``: the arguments of ``predict`` for one job.
    """

    latency: latency_model.LatencyModel
    predictor: Predictor | None
    asked: Predictor | str

    def ask(self, jobs: Sequence[Job], index: list[int], answers: Answers, *, only_fitting: bool) -> None:
        """Fill in the results of some of the jobs."""
        for place in index:
            memory = estimate_memory(jobs[place], self.latency.hardware)
            answers.peak_bytes[place], answers.capacity_bytes[place] = memory.peak_bytes, memory.capacity_bytes
        if only_fitting:
            index = [place for place in index if answers.peak_bytes[place] <= answers.capacity_bytes[place]]
        # An interval that covers several jobs takes a prediction of each.
        single = [place for place in index if jobs[place].uninterleaved is None]
        together = self._simulable(jobs, single)
        times, shares = self.times([jobs[place] for place in together], intervals=True)
        corrections, scale = self._corrections([jobs[place] for place in together])
        columns = zip(together, times.tolist(), corrections, shares.tolist(), strict=True)
        for place, time_s, correction, outside in columns:
            answers.seconds[place] = time_s = time_s * scale * math.exp(correction.log_factor)
            *_, certain = one_job.utilisation(jobs[place], self.latency.hardware, time_s)
            down, up = interval_ends(self.predictor, jobs[place], correction, outside, certain, self.latency)
            answers.low_s[place], answers.high_s[place] = time_s * math.exp(-down), time_s * math.exp(up)
        for place in set(index) - set(together):
            found = one_job.predict(jobs[place], self.asked)
            answers.seconds[place] = found.iteration_time_s
            answers.low_s[place], answers.high_s[place] = found.interval()

    def predict(self, jobs: list[Job]) -> list[one_job.Prediction]:
        """Predictions of jobs that this group's latency model answers for."""
        own = self._simulable(jobs, range(len(jobs)))
        asked = [jobs[place] for place in own]
        corrections, scale = self._corrections(asked)
        factors = (scale * math.exp(correction.log_factor) for correction in corrections)
        times = zip(self.times(asked, intervals=False)[0].tolist(), factors, strict=True)
        seconds = {place: time_s * factor for place, (time_s, factor) in zip(own, times, strict=True)}
        shares: dict[int, Callable[[], float]] = {}
        for at in range(0, len(own), SHARED):
            some = own[at : at + SHARED]
            together = _Together(self, [jobs[place] for place in some])
            shares.update((place, partial(together.share, number)) for number, place in enumerate(some))
        predictor, found = self.predictor, []
        given = self.latency if isinstance(self.latency, latency_model.GivenLatency) else None
        source = (predictor or given).source if predictor or given else one_job.source_of_facts(jobs[0])  # type: ignore[union-attr]
        for place, job in enumerate(jobs):
            if place not in seconds:
                found.append(one_job.predict(job, self.asked))
                continue
            time_s, share = seconds[place], None if predictor is None else shares[place]
            software = "" if predictor is None else job.framework
            found.append(one_job.Prediction(job, time_s, source, None, predictor, software, share, given=given))
        return found

    def _simulable(self, jobs: Sequence[Job], index: Sequence[int]) -> list[int]:
        """The jobs that can be simulated together."""
        together = [place for place in index if can_simulate_many(jobs[place], self.latency)]
        return together if len(together) >= FEWEST else []

    def _corrections(self, jobs: Sequence[Job]) -> tuple[list[JobCorrection], float]:
        """Calibration of whole iterations, and its factor of all."""
        calibration = Calibration() if self.predictor is None else self.predictor.calibration
        return calibration.of_jobs(jobs, [job.framework for job in jobs]), calibration.scale

    def times(self, jobs: list[Job], *, intervals: bool) -> tuple[Floats, Floats]:
        """Seconds before calibration, and the share of each outside the measured range, 0 to 1; shape ``(n,)``."""
        latency = self.latency
        if not intervals or not isinstance(latency, LearnedLatency):
            return simulate_many(jobs, latency)[0], np.zeros(len(jobs))
        crowded = bool(latency.outside(())[0])  # more devices of a node compute at once than were measured
        seconds, outside = simulate_many(
            jobs, latency, lambda works: [not crowded and bool(reason) for reason in latency.outside(works)[1]]
        )
        seconds = np.maximum(seconds, 1e-12)
        return seconds, np.clip(outside / seconds + crowded, 0.0, 1.0)


def _by_latency(jobs: Sequence[Job], predictor: Predictor | str | None) -> list[tuple[list[int], _Group]]:
    """Indices of the jobs of each latency model."""
    serving: dict[str, Predictor | None] = {}
    groups: dict[int, tuple[list[int], _Group]] = {}
    for place, job in enumerate(jobs):
        name = job.cluster.hardware
        if elsewhere := latency_model.latency_name(predictor):
            given = latency_model.latency_of_job(job, elsewhere)
            groups.setdefault(id(given), ([], _Group(given, None, latency_model.LATENCY + elsewhere)))[0].append(place)
            continue
        if name not in serving:
            serving[name] = one_job.asked_predictor(name, predictor)
        asked = serving[name]
        latency = one_job.latency_of_facts(job) if asked is None else asked.latency(job)
        groups.setdefault(id(latency), ([], _Group(latency, asked, asked or one_job.ROOFLINE)))[0].append(place)
    return list(groups.values())
