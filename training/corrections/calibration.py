"""Corrections learned from whole iterations, within physical bounds.

Own runs give a bounded scale, shrunk hard towards none.  Tables of runs give factors of resources, which the simulator
turns into times, and a residual for jobs that are alike (see ``fit_calibration``).  Published runs give one too, which
comes with shipped predictors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import IF_SET, Saved
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.corrections.corrector import Corrector
from stepsight.training.corrections.intervals import MOST_LOG
from stepsight.training.corrections.releases import drift_of
from stepsight.training.corrections.residual import JobFeatures, PublishedRuns, Residual, block_of

Array = NDArray[np.float64]


class Resource(NamedTuple):
    """One factor: how far from 1 it is believed to be before any iteration was seen, and what it may not leave."""

    prior_std_log: float
    low_log: float
    high_log: float


# Priors: iteration times tell resources apart badly, so each factor is believed to be near 1, as products measured
# alone are (3 to 5 %).  What a run is off by belongs to jobs like it, not to other sizes: with wide priors of host and
# links, factors fitted on small runs made larger runs worse.  Bounds: products reach 0.6 to 0.8 of a peak alone and
# memory 0.93 of its bandwidth, so neither can be faster by more than what is left; clocks under power limits and cold
# caches slow them down in training.
RESOURCES: Mapping[str, Resource] = {
    "products": Resource(0.05, -0.25, 0.40),
    "streaming": Resource(0.05, -0.10, 0.70),
    "host": Resource(0.05, -1.50, 1.50),
    "near_links": Resource(0.05, -0.25, 0.70),
    "far_links": Resource(0.05, -0.30, 1.50),
}
NAMES = tuple(RESOURCES)
_RESOURCE_OF_BOUND = {
    "compute": "products",
    "memory": "streaming",
    "host_memory": "host",
    "host_link": "host",
    "host": "host",
}


def resource_of(work: Op | Collective) -> int:
    """Index in ``NAMES`` of the resource that bounds a work."""
    if isinstance(work, Collective):
        return NAMES.index("far_links" if work.num_nodes > 1 else "near_links")
    return NAMES.index(_RESOURCE_OF_BOUND[work.record.bound])


@dataclass(frozen=True)
class Constants(Corrector[Sequence[Op | Collective]]):
    """Factors by resource."""

    logs: tuple[float, ...] = (0.0,) * len(NAMES)  # their logarithms in the order of NAMES; 0: as measured

    def __post_init__(self) -> None:
        if len(self.logs) != len(NAMES):
            raise ValueError(f"constants must be those of {', '.join(NAMES)}, got {len(self.logs)}")
        for name, value in zip(NAMES, self.logs, strict=True):
            low, high = RESOURCES[name].low_log, RESOURCES[name].high_log
            if not low - 1e-9 <= value <= high + 1e-9:
                raise ValueError(f"the log of {name} must lie from {low} to {high}, got {value}")

    @classmethod
    def within(cls, logs: Array) -> Constants:
        """The nearest factors within the physical bounds."""
        lows, highs = zip(*((each.low_log, each.high_log) for each in RESOURCES.values()), strict=True)
        return cls(tuple(np.clip(logs, lows, highs).tolist()))

    @property
    def plain(self) -> bool:
        """Whether nothing is corrected."""
        return not any(self.logs)

    prior_std_log = 0.05  # of each resource, as in ``RESOURCES``

    def log_factor(self, asked: Sequence[Op | Collective]) -> Array:
        """Logarithm of the factor of each duration, ``(asked,)``."""
        return np.array([self.logs[resource_of(work)] for work in asked], dtype=np.float64)

    def to_dict(self) -> dict[str, float]:
        """Factors by resource."""
        return {name: math.exp(value) for name, value in zip(NAMES, self.logs, strict=True)}

    @classmethod
    def from_dict(cls, value: Mapping[str, float]) -> Constants:
        return cls(tuple(math.log(float(value[name])) for name in NAMES))


MAX_LOG_SCALE = 0.3
PRIOR_RUNS = 4.0  # weight of the prior that no correction is needed, in runs
MIN_GAIN = 0.05  # the held-out error must fall by this share
MOST_WIDTH = 10.0


class JobCorrection(NamedTuple):
    """What residuals say of a job: its log-factor; and the share of it each knows, with half of its own interval."""

    log_factor: float
    known: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Calibration(Saved):
    """``calibrated = scale * exp(release + published + residual) * seconds``, simulated with the constants."""

    scale: float = 1.0  # multiplies every duration; 1: uncalibrated
    constants: Constants = field(default_factory=Constants, metadata=IF_SET)  # multiply durations by what bounds them
    residual: Residual | None = field(default=None, metadata=IF_SET)  # of jobs that are alike; None: nothing is known
    width: float = field(default=0.0, metadata=IF_SET)  # of the interval, half of it, in deviations of the residual
    # what the runs that taught it are still off by: half of the narrowest interval, in log-seconds
    left_log: float = field(default=0.0, metadata=IF_SET)
    judged_log: float = field(default=0.0, metadata=IF_SET)  # likewise the runs that judged it
    # what published runs say of jobs near them; None: nothing, or they are switched off
    published: PublishedRuns | None = field(default=None, metadata=IF_SET)
    # whether the time holds for the month of the framework's profile, so that the release that a job states changes it
    dated: bool = field(default=False, metadata=IF_SET)

    def factor(self, job: Job, software: str = "") -> float:
        """The factor of a job's simulated time."""
        return self.scale * math.exp(self.of_jobs([job], [software])[0].log_factor)

    def least_factor(self, job: Job) -> float:
        """The least factor of jobs that differ from this one in strategy."""
        least = sum(each[0].limits[0] for each in self._residuals([job], [job.framework]))
        return self.scale * math.exp(least + (drift_of(job) if self.dated else 0.0))

    def of_jobs(self, jobs: Sequence[Job], software: Sequence[str]) -> list[JobCorrection]:
        """The corrections of jobs by their release and by residuals; ``software``: what runs each."""
        logs = np.array([drift_of(job) if self.dated else 0.0 for job in jobs])
        known = [list[tuple[float, float]]() for _ in jobs]
        for residual, width, index, likes in self._residuals(jobs, software):
            found, shares = residual.posterior(likes)
            halves = width * np.sqrt(residual.spread**2 * (1.0 - shares) + residual.noise**2)
            logs[index] += found
            for at, share, half in zip(index, shares.tolist(), halves.tolist(), strict=True):
                known[at].append((share, half))
        return [JobCorrection(log, tuple(own)) for log, own in zip(logs.tolist(), known, strict=True)]

    def _residuals(
        self, jobs: Sequence[Job], software: Sequence[str]
    ) -> list[tuple[Residual, float, list[int], list[JobFeatures]]]:
        """The residuals that speak of some jobs: the width of each, which jobs, and their features as it knows them."""
        found = []
        if self.published is not None:
            profiles = {at: job.profile.name for at, job in enumerate(jobs) if job.profile is not None}
            likes = {at: JobFeatures.of(jobs[at], name) for at, name in profiles.items()}
            blocks = {at: block_of(like) for at, like in likes.items()}
            for block in self.published.blocks.keys() & blocks.values():
                index = [at for at, own in blocks.items() if own == block]
                of = self.published.blocks[block]
                found.append((of, self.published.width, index, [likes[at] for at in index]))
        if self.residual is not None:
            every = [JobFeatures.of(job, name) for job, name in zip(jobs, software, strict=True)]
            found.append((self.residual, self.width, list(range(len(jobs))), every))
        return found

    def half_width_log(self, correction: JobCorrection, otherwise: float, *, judged: bool = False) -> float:
        """Half of a job's interval: by similar jobs, else ``otherwise``; at least the errors on runs."""
        for known, half in correction.known:
            otherwise = math.sqrt(known * min(half, otherwise) ** 2 + (1.0 - known) * otherwise**2)
        return max(otherwise, self.left_log, 0.0 if judged else self.judged_log)

    def __post_init__(self) -> None:
        if not (self.scale > 0 and abs(np.log(self.scale)) <= MAX_LOG_SCALE + 1e-9):
            raise ValueError(f"scale must lie within exp(+-{MAX_LOG_SCALE}), got {self.scale}")
        logs, needed = (self.left_log, self.judged_log), 0 if self.residual is None else 1e-9
        if not (needed <= self.width <= MOST_WIDTH and all(0 <= log <= MOST_LOG for log in logs)):
            raise ValueError(
                f"0 < width <= {MOST_WIDTH} and 0 <= left_log and judged_log <= {MOST_LOG:g} must hold, "
                f"got {self.width}, {self.left_log} and {self.judged_log}"
            )


def fit_scale(predicted: Array, measured: Array) -> Calibration:
    """Fit on whole iterations, ``(runs,)``; return no correction unless it helps on each held-out run in turn."""
    off = np.log(measured / predicted)
    if len(off) < 3:
        return Calibration()
    held_back = np.array([off[i] - _shrunk(np.delete(off, i)) for i in range(len(off))])
    if np.abs(held_back).mean() > (1 - MIN_GAIN) * np.abs(off).mean():
        return Calibration()
    return Calibration(float(np.exp(_shrunk(off))))


def _shrunk(off: Array) -> float:
    value = float(np.median(off)) * len(off) / (len(off) + PRIOR_RUNS)
    return float(np.clip(value, -MAX_LOG_SCALE, MAX_LOG_SCALE))
