"""``ask_many``: the numbers that a search needs of many jobs, as arrays."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job import Job
from stepsight.simulator.latency_model import LatencyModel
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.simulate_many import can_simulate_many, simulate_many
from stepsight.training.predictor.learned_latency import LearnedLatency
from stepsight.training.predictor.prediction import asked_predictor, half_width, latency_of_facts, predict
from stepsight.training.predictor.predictor import Predictor

Floats = NDArray[np.float64]
FEWEST = 8  # jobs on one hardware from which on they are simulated together


class Answers(NamedTuple):
    """Predicted times and memory of ``n`` jobs, in their order; each of shape ``(n,)``.

    Attributes:
        seconds: Iteration time, in seconds; NaN where a job does not fit in memory and was not timed.
        low_s, high_s: Ends of the prediction interval, in seconds; NaN where ``seconds`` is, or if not asked for.
        peak_bytes: Memory that the fullest stage needs.
        capacity_bytes: Memory of that stage's device.
    """

    seconds: Floats
    low_s: Floats
    high_s: Floats
    peak_bytes: Floats
    capacity_bytes: Floats

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether each job fits in memory, shape ``(n,)``."""
        return np.asarray(self.peak_bytes <= self.capacity_bytes)


def ask_many(
    jobs: Sequence[Job],
    predictor: Predictor | str | None = None,
    *,
    only_fitting: bool = False,
    intervals: bool = True,
) -> Answers:
    """Predict the time, the interval and the peak memory of many jobs at once.

    What jobs share is worked out once, so ask about hundreds or thousands in one call.

    Args:
        jobs: The jobs.
        predictor: As in ``predict``.
        only_fitting: Whether to leave out the time of jobs that do not fit in memory.
        intervals: Whether the ends of the intervals are wanted.

    Returns:
        The values that ``predict`` gives one by one, except for rounding.

    Raises:
        JobError: As ``predict``, for a job that cannot be predicted.
        PredictorError: As ``predict``.
    """
    answers = Answers(*np.full((5, len(jobs)), np.nan))
    collects = gc.isenabled()
    gc.disable()  # nothing made here is circular, and garbage collection would cost a tenth of the time
    try:
        for index, group in _by_latency(jobs, predictor):
            group.ask(jobs, index, answers, only_fitting=only_fitting, intervals=intervals)
    finally:
        if collects:
            gc.enable()
    return answers


class _Group(NamedTuple):
    """Jobs that one latency model answers for; ``predictor``: None, facts do."""

    latency: LatencyModel
    predictor: Predictor | None

    def ask(
        self, jobs: Sequence[Job], index: list[int], answers: Answers, *, only_fitting: bool, intervals: bool
    ) -> None:
        """Fill in the answers for some of the jobs."""
        for place in index:
            memory = estimate_memory(jobs[place], self.latency.hardware)
            answers.peak_bytes[place], answers.capacity_bytes[place] = memory.peak_bytes, memory.capacity_bytes
        if only_fitting:
            index = [place for place in index if answers.peak_bytes[place] <= answers.capacity_bytes[place]]
        together = [place for place in index if can_simulate_many(jobs[place], self.latency)]
        if len(together) < FEWEST:
            together = []
        seconds, shares = self._simulate([jobs[place] for place in together], intervals=intervals)
        for place, time_s, share in zip(together, seconds.tolist(), shares.tolist(), strict=True):
            self._put(jobs[place], place, (time_s, share if intervals else None), answers)
        for place in set(index) - set(together):
            found = predict(jobs[place], self.predictor or "roofline")
            answers.seconds[place] = found.iteration_time_s
            if intervals:
                answers.low_s[place], answers.high_s[place] = found.interval()

    def _simulate(self, jobs: list[Job], *, intervals: bool) -> tuple[Floats, Floats]:
        """Seconds before calibration, and the part of each outside of what was measured, 0 to 1; shape ``(n,)``."""
        if not jobs:
            return np.zeros(0), np.zeros(0)
        latency = self.latency
        if not intervals or not isinstance(latency, LearnedLatency):
            times = simulate_many(jobs, latency)
            return times.seconds, np.zeros(len(jobs))
        crowded = bool(latency.outside(())[0])
        times = simulate_many(
            jobs, latency, None if crowded else lambda works: list(map(bool, latency.outside(works)[1]))
        )
        share = np.ones(len(jobs)) if crowded else np.minimum(1.0, times.outside / np.maximum(times.seconds, 1e-12))
        return times.seconds, share

    def _put(self, job: Job, place: int, found: tuple[float, float | None], answers: Answers) -> None:
        seconds, share = found
        if self.predictor is not None:
            seconds *= self.predictor.calibration.factor(job, job.framework)
        answers.seconds[place] = seconds
        if share is not None:
            factor = np.exp(half_width(self.predictor, job, job.framework, share))
            answers.low_s[place], answers.high_s[place] = seconds / factor, seconds * factor


def _by_latency(jobs: Sequence[Job], predictor: Predictor | str | None) -> list[tuple[list[int], _Group]]:
    """Places of the jobs that each latency model answers for."""
    serving: dict[str, Predictor | None] = {}
    groups: dict[int, tuple[list[int], _Group]] = {}
    for place, job in enumerate(jobs):
        name = job.cluster.hardware
        if name not in serving:
            serving[name] = asked_predictor(name, predictor)
        asked = serving[name]
        latency = latency_of_facts(job) if asked is None else asked.latency(job)
        groups.setdefault(id(latency), ([], _Group(latency, asked)))[0].append(place)
    return list(groups.values())
