"""Fit a calibration to a table of iteration times: constants by gradient through the simulator, the rest by similar
jobs.

The logarithm of an iteration's time falls with that of a resource's factor by the part of the critical path that the
resource makes up: ``d log T / d log f_g = sum_{i in g} n_i t_i / T``, with ``n_i = dT / dt_i`` from the engine.  With
normal priors on the factors, and residuals that jobs share as far as they are alike, a few Gauss-Newton steps find
the most likely factors; what they leave is the residual's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job
from stepsight.simulator.iteration.simulate import simulate
from stepsight.training.corrections.calibration import MOST_WIDTH, NAMES, RESOURCES, Calibration, Constants, resource_of
from stepsight.training.corrections.corrector import GaussianProcess
from stepsight.training.corrections.intervals import conformal_quantile
from stepsight.training.corrections.residual import Columns, JobFeatures, Residual, covariance, most_likely
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]

STEPS = 3  # steps of Gauss-Newton; times are nearly linear in factors
FEWEST_GROUPS = 4  # groups of runs, each of one kind of job: fewer do not tell resources apart
MIN_ROWS = 10  # fewest runs for an estimate of their errors
NORMAL_WIDTH = 1.645  # deviations that contain 90 % of a normal distribution


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job and its measured iteration time."""

    job: Job
    seconds: float  # measured
    software: str = ""  # what ran it, in the words of who measured

    @property
    def like(self) -> JobFeatures:
        return JobFeatures.of(self.job, self.software)


@dataclass(frozen=True)
class CalibrationFit:
    """A calibrated predictor with what the calibration was fitted on."""

    predictor: Predictor  # the predictor with its calibration
    # log(measured / predicted) of every row before calibration, with the covariance that the fit assumed.  Rows left
    # out of it are predicted to first order in the factors, and without their bounds.
    process: GaussianProcess


def fit_calibration(predictor: Predictor, rows: Sequence[TimedJob]) -> CalibrationFit:
    """Fit factors of resources and a residual, which replace the predictor's; its scale and its published runs stay.

    Fewer than ``FEWEST_GROUPS`` groups of runs give one factor for each iteration alone, that of the residual.
    """
    assert rows
    start = Calibration(predictor.calibration.scale, published=predictor.calibration.published)
    likes = [row.like for row in rows]
    shared = covariance(Columns.of(likes), Columns.of(likes))
    measured = np.log([row.seconds / start.factor(row.job) for row in rows])
    several = len({(like.place, like.labels) for like in likes}) >= FEWEST_GROUPS
    prior = np.diag([each.prior_std_log**2 for each in RESOURCES.values()]) * several
    constants, first = Constants(), np.zeros(0)
    for step in range(STEPS if several else 1):
        logs, parts = _simulate(predictor, constants, rows)
        by_constants = parts @ prior @ parts.T
        left = measured - logs + parts @ np.array(constants.logs)  # without any correction
        if step == 0:
            first = left
            spread, noise = most_likely(left, shared, by_constants)
        believed = spread**2 * shared + noise**2 * np.eye(len(rows))
        total = believed + by_constants
        constants = Constants.within(prior @ parts.T @ GaussianProcess(total, left).weights)
    logs, _ = _simulate(predictor, constants, rows)
    residual = Residual(tuple(likes), tuple((measured - logs).tolist()), spread, noise)
    process = GaussianProcess(total, first)
    off, stds = process.left_out([row.job for row in rows])
    width = conformal_quantile(np.abs(off / stds).tolist(), too_few=2 * NORMAL_WIDTH)
    width = min(max(NORMAL_WIDTH, width), MOST_WIDTH)  # of COVERAGE of jobs left out in turn, in deviations
    left_log = off_by(measured - logs - residual.log_factor(likes))
    calibration = replace(start, constants=constants, residual=residual, width=width, left_log=left_log)
    return CalibrationFit(replace(predictor, calibration=calibration), process)


def off_by(logs: Array) -> float:
    """The ``COVERAGE`` quantile of errors, from ``log(measured / predicted)`` of some runs; 0 if there are too few."""
    return conformal_quantile(np.abs(logs).tolist()) if len(logs) >= MIN_ROWS else 0.0


def _simulate(predictor: Predictor, constants: Constants, rows: Sequence[TimedJob]) -> tuple[Array, Array]:
    """Log-seconds of every row, and the parts of its critical path by resource, ``(rows, len(NAMES))``."""
    with_them = replace(predictor, calibration=Calibration(constants=constants))
    logs, parts = np.zeros(len(rows)), np.zeros((len(rows), len(NAMES)))
    known: dict[Job, tuple[float, Array]] = {}
    for index, row in enumerate(rows):
        if row.job not in known:
            simulation = simulate(row.job, with_them.latency(row.job))
            seconds = simulation.count_works() * simulation.work_seconds / simulation.iteration_time_s
            own = np.zeros(len(NAMES))
            np.add.at(own, [resource_of(work) for work in simulation.lowered.all_works], seconds)
            known[row.job] = math.log(simulation.iteration_time_s), own
        logs[index], parts[index] = known[row.job]
    return logs, parts
