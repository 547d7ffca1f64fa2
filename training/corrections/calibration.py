"""Corrections learned from whole iterations, within physical bounds.

Own runs give a bounded scale, shrunk hard towards none.  Tables of runs give factors of resources, which the simulator
turns into times, and a residual for jobs that are alike (see ``fit_calibration``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.codec import IF_SET, Saved
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.corrections.corrector import GaussianProcess, doubt
from stepsight.training.corrections.intervals import MOST_LOG

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Resource:
    """One factor."""

    prior_std_log: float  # how far from 1 it is believed to be before any iteration was seen, in log units
    # low_log, high_log: what it may not leave
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


def prior_stds() -> Array:
    """``prior_std_log`` of every resource, ``(len(NAMES),)``."""
    return np.array([resource.prior_std_log for resource in RESOURCES.values()])


@dataclass(frozen=True)
class Constants:
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
        limits = RESOURCES.values()
        pairs = zip(logs.tolist(), limits, strict=True)
        return cls(tuple(min(max(value, limit.low_log), limit.high_log) for value, limit in pairs))

    @property
    def plain(self) -> bool:
        """Whether nothing is corrected."""
        return not any(self.logs)

    prior_std_log = 0.05  # of each resource, as in ``RESOURCES``

    def log_factor(self, asked: Sequence[Op | Collective]) -> Array:
        """Logarithm of the factor of each duration, ``(asked,)``."""
        return np.array([self.logs[resource_of(work)] for work in asked], dtype=np.float64)

    def known(self, asked: Sequence[Op | Collective]) -> Array:
        """1 for work whose resource whole iterations corrected, else 0, ``(asked,)``."""
        return np.array([self.logs[resource_of(work)] != 0.0 for work in asked], dtype=np.float64)

    def to_dict(self) -> dict[str, float]:
        """Factors by resource."""
        return {name: math.exp(value) for name, value in zip(NAMES, self.logs, strict=True)}

    @classmethod
    def from_dict(cls, value: Mapping[str, float]) -> Constants:
        return cls(tuple(math.log(float(value[name])) for name in NAMES))


# Doublings of each quantity that correspond to one unit of distance.
SCALES = {
    "hidden": 1.0,
    "layers": 2.0,
    "seq_len": 1.0,
    "micro_batch_tokens": 1.5,
    "head_dim": 0.5,
    "kv_heads_share": 2.0,
    "ffn_over_hidden": 0.5,
    "tp": 1.0,
    "pp": 1.5,
    "cp": 1.0,
    "ep": 1.0,
    "virtual_stages": 2.0,
}
# Distance between jobs that differ in one of these.
UNLIKE = {"software": 0.7, "device": 0.7, "precision": 1.0, "recompute": 1.0, "family": 1.0, "mixture": 2.0}
NEAR, WIDE = 1.0, 3.0  # distances at which two kinds of similarity fall to exp(-1/2)
NEAR_PART, WIDE_PART, DRIFT_PART = 0.7, 0.3, 0.05  # shares of the variance
MOST_DOUBLINGS = 1000.0  # larger numbers are typing mistakes
DRIFT_DOUBLINGS = 2.0  # doublings of the number of devices over which a correction's drift decorrelates


@dataclass(frozen=True, slots=True)
class JobFeatures(Saved):
    """The features of a job that its similarity depends on."""

    place: tuple[float, ...]  # doublings over SCALES, (len(SCALES),)
    labels: tuple[str, ...]  # in the order of UNLIKE
    doublings: float  # of one device

    @classmethod
    def of(cls, job: Job, software: str = "") -> JobFeatures:
        """Features of a job; ``software`` names the framework in any words, empty: unknown."""
        m, p, batch = job.model, job.parallel, job.batch
        tokens = batch.micro_batch * m.seq_len / p.cp
        kv_share = (m.kv_heads or m.heads) / m.heads
        values = (
            m.hidden, m.layers, m.seq_len, tokens, m.head_size, kv_share,
            (m.expert_ffn or m.ffn or 4 * m.hidden) / m.hidden, p.tp, p.pp, p.cp, p.ep, p.virtual_stages,
        )  # fmt: skip
        place = np.log2(np.array(values, float)) / np.array(list(SCALES.values()))
        mixture = "mixture" if m.experts else "dense"
        labels = (software, job.hardware_name, batch.precision, p.recompute, m.family, mixture)
        return cls(tuple(place.tolist()), labels, float(np.log2(job.cluster.num_devices)))

    def __post_init__(self) -> None:
        if (len(self.place), len(self.labels)) != (len(SCALES), len(UNLIKE)):
            raise ValueError(
                f"{len(SCALES)} places and {len(UNLIKE)} labels must be there, got {self.place} and {self.labels}"
            )
        numbers = (*self.place, self.doublings)
        if not all(abs(number) <= MOST_DOUBLINGS for number in numbers):
            raise ValueError(f"places and doublings must lie within +-{MOST_DOUBLINGS:g}, got {numbers}")


def covariance(one: Sequence[JobFeatures], two: Sequence[JobFeatures]) -> Array:
    """Covariance of unit-variance corrections, ``(len(one), len(two))``; 1 for a job with itself."""
    places, others = np.array([row.place for row in one]), np.array([row.place for row in two])
    squared = ((places[:, None] - others[None]) ** 2).sum(axis=2)
    for index, distance in enumerate(UNLIKE.values()):
        left, right = (np.array([row.labels[index] for row in rows]) for rows in (one, two))
        squared += distance**2 * (left[:, None] != right[None])
    sizes, counts = np.array([row.doublings for row in one]), np.array([row.doublings for row in two])
    near = np.exp(-squared / (2 * NEAR**2))
    drift = near * np.exp(-np.abs(sizes[:, None] - counts[None]) / DRIFT_DOUBLINGS)
    wide = np.exp(-squared / (2 * WIDE**2))
    own = NEAR_PART - DRIFT_PART
    return np.asarray(own * near + DRIFT_PART * drift + WIDE_PART * wide)


MAX_LOG = 0.3  # limit of every correction
SPREADS = (0.03, 0.06, 0.1, 0.15)  # deviation of corrections between jobs, in log units: typical errors of simulators
NOISES = (0.01, 0.02)  # published runs of the same job differ by up to 4.7 %
USUAL = (0.1, 0.01)
LEAST = 1e-3  # of spread and noise: with smaller ones the matrix has no inverse


@dataclass(frozen=True)
class Residual:
    """``log(measured / predicted)`` of some jobs."""

    rows: tuple[JobFeatures, ...]  # the jobs, as far as it matters
    logs: tuple[float, ...]  # what is left of each, (rows,)
    # spread, noise: deviation of corrections from job to job, and of the same run repeated, in log units
    spread: float
    noise: float

    @property
    def prior_std_log(self) -> float:
        return self.spread

    @cached_property
    def _process(self) -> GaussianProcess:
        own = self.spread**2 * covariance(self.rows, self.rows)
        return GaussianProcess(own + self.noise**2 * np.eye(len(self.rows)), np.array(self.logs))

    @property
    def software(self) -> tuple[str, ...]:
        """The framework that ran the jobs, in the words of the source."""
        place = list(UNLIKE).index("software")
        return tuple(dict.fromkeys(row.labels[place] for row in self.rows))

    def log_factor(self, asked: Sequence[JobFeatures]) -> Array:
        """Corrections of jobs, within ``MAX_LOG``, ``(asked,)``."""
        return np.array([np.clip(self._process.mean(shared), -MAX_LOG, MAX_LOG) for shared in self._shared(asked)])

    def known(self, asked: Sequence[JobFeatures]) -> Array:
        """Share of the variance between jobs that the rows explain: 1 for a job of the rows, 0 far from all."""
        explained = [self._process.explained(shared) for shared in self._shared(asked)]
        return np.minimum(1.0, np.array(explained) / self.spread**2)

    def _shared(self, asked: Sequence[JobFeatures]) -> list[Array]:
        """Covariance of each job with every row, ``(rows,)`` each."""
        return [self.spread**2 * covariance([each], self.rows)[0] for each in asked]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**row.to_dict(), "log": log} for row, log in zip(self.rows, self.logs, strict=True)]
        return {"spread": self.spread, "noise": self.noise, "rows": rows}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Residual:
        spread, noise = float(value["spread"]), float(value["noise"])
        logs = tuple(float(row["log"]) for row in value["rows"])
        if not (LEAST <= spread <= 1 and LEAST <= noise <= 1 and logs):
            raise ValueError(
                f"a residual needs rows, spread and noise from {LEAST} to 1, got {len(logs)}, {spread}, {noise}"
            )
        if not (np.abs(logs) <= MOST_LOG).all():
            raise ValueError(f"logs of a residual must lie within +-{MOST_LOG:g}, got {logs!s:.80}")
        return cls(tuple(JobFeatures.from_dict(row) for row in value["rows"]), logs, spread, noise)


def most_likely(logs: Array, shared: Array, more: Array) -> tuple[float, float]:
    """Most likely spread and noise of residuals, by their ``covariance``, and ``more`` of it from elsewhere."""
    if len(logs) < 3:
        return USUAL
    found = {}
    for spread in SPREADS:
        for noise in NOISES:
            total = spread**2 * shared + noise**2 * np.eye(len(logs)) + more
            found[spread, noise] = GaussianProcess(total, logs).cost()
    return min(found, key=lambda key: found[key])


MAX_LOG_SCALE = 0.3
PRIOR_RUNS = 4.0  # weight of the prior that no correction is needed, in runs
MIN_GAIN = 0.05  # the held-out error must fall by this share
MOST_WIDTH = 10.0


@dataclass(frozen=True)
class Calibration(Saved):
    """``calibrated = scale * exp(residual) * seconds``; the seconds are simulated with the constants."""

    scale: float = 1.0  # multiplies every duration; 1: uncalibrated
    # multiply durations by what bounds them
    constants: Constants = field(default_factory=Constants, metadata=IF_SET)
    # what is left of jobs that are alike; None: nothing is known
    residual: Residual | None = field(default=None, metadata=IF_SET)
    width: float = field(default=0.0, metadata=IF_SET)  # of the interval, half of it, in deviations of the residual
    # what the runs that taught it are still off by: half of the narrowest interval, in log-seconds
    left_log: float = field(default=0.0, metadata=IF_SET)
    judged_log: float = field(default=0.0, metadata=IF_SET)  # likewise the runs that judged it

    @property
    def by_runs(self) -> bool:
        """Whether a table of runs changed the calibration."""
        return self.residual is not None or not self.constants.plain

    def factor(self, job: Job, software: str = "") -> float:
        """The factor of a job's simulated time."""
        if self.residual is None:
            return self.scale
        return self.scale * math.exp(self.residual.log_factor([JobFeatures.of(job, software)])[0])

    def half_width_log(self, job: Job, software: str, otherwise: float, *, judged: bool = False) -> float:
        """Half of a job's interval: by similar jobs, else ``otherwise``; at least the errors on runs."""
        if self.residual is None:
            return otherwise
        asked = [JobFeatures.of(job, software)]
        known = float(self.residual.known(asked)[0])
        own = min(self.width * float(doubt(self.residual, asked, self.residual.noise)[0]), otherwise)
        half = math.sqrt(known * own**2 + (1.0 - known) * otherwise**2)
        return max(half, self.left_log, 0.0 if judged else self.judged_log)

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
