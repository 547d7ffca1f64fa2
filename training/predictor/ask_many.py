"""``ask_many``: the numbers that a search needs of many jobs, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job import Job
from stepsight.training.predictor.prediction import predict
from stepsight.training.predictor.predictor import Predictor


class Answers(NamedTuple):
    """Predicted times and memory of ``n`` jobs, in their order; each of shape ``(n,)``.

    Attributes:
        seconds: Iteration time, in seconds; NaN where a job does not fit in memory and was not timed.
        low_s, high_s: Ends of the prediction interval, in seconds; NaN where ``seconds`` is.
        peak_bytes: Memory that the fullest stage needs.
        capacity_bytes: Memory of that stage's device.
    """

    seconds: NDArray[np.float64]
    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]
    peak_bytes: NDArray[np.float64]
    capacity_bytes: NDArray[np.float64]

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether each job fits in memory, shape ``(n,)``."""
        return np.asarray(self.peak_bytes <= self.capacity_bytes)


def ask_many(
    jobs: Sequence[Job], predictor: Predictor | str | None = None, *, only_fitting: bool = False
) -> Answers:
    """Predict the time, the interval and the peak memory of many jobs at once.

    Args:
        jobs: The jobs.
        predictor: As in ``predict``.
        only_fitting: Whether to leave out the time of jobs that do not fit in memory.

    Returns:
        The same values as ``predict`` gives one by one.

    Raises:
        JobError: As ``predict``, for the first job that cannot be predicted.
        PredictorError: As ``predict``.
    """
    return Answers(*np.array([_one(job, predictor, only_fitting) for job in jobs]).reshape(-1, 5).T)


def _one(job: Job, predictor: Predictor | str | None, only_fitting: bool) -> Iterable[float]:
    prediction = predict(job, predictor)
    memory = prediction.memory
    if only_fitting and not memory.fits:
        return (np.nan, np.nan, np.nan, memory.peak_bytes, memory.capacity_bytes)
    return (prediction.iteration_time_s, *prediction.interval(), memory.peak_bytes, memory.capacity_bytes)
