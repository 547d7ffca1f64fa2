"""What is left of whole iterations, for jobs that are alike: a Gaussian process on what its kernel names.

``Residual`` holds the jobs that taught it.  ``PublishedRuns`` is one for each framework's profile, precision, and dense
models or mixtures on a chip; it comes with shipped predictors, and ``python tools/shipped_data.py runs TABLES`` writes
its preset again.  Sources differ, so the runs of one say only a part of another's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import shorten
from stepsight.dataset.base.files import IF_SET, Saved, read_json
from stepsight.dataset.job.job import Job
from stepsight.training.corrections.corrector import GaussianProcess
from stepsight.training.corrections.intervals import MOST_LOG

Array = NDArray[np.float64]

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
_SCALES = np.array(list(SCALES.values()))
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
        place = np.log2(np.array(values, float)) / _SCALES
        mixture = "adapters" if m.lora_rank else "mixture" if m.experts else "dense"
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


class Columns(NamedTuple):
    """Features of jobs by column: ``(jobs, len(SCALES))``, ``(jobs, len(UNLIKE))`` and ``(jobs,)``."""

    places: Array
    labels: NDArray[np.str_]
    sizes: Array

    @classmethod
    def of(cls, rows: Sequence[JobFeatures]) -> Columns:
        places, labels = ([getattr(row, name) for row in rows] for name in ("place", "labels"))
        return cls(np.array(places), np.array(labels), np.array([row.doublings for row in rows]))


def covariance(one: Columns, two: Columns) -> Array:
    """Covariance of unit-variance corrections, ``(one, two)``; 1 for a job with itself."""
    squared = ((one.places[:, None] - two.places[None]) ** 2).sum(axis=2)
    squared += (one.labels[:, None] != two.labels[None]) @ np.square(list(UNLIKE.values()))
    near = np.exp(-squared / (2 * NEAR**2))
    drift = near * np.exp(-np.abs(one.sizes[:, None] - two.sizes[None]) / DRIFT_DOUBLINGS)
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
    spread: float  # deviation of corrections from job to job, in log units
    noise: float  # deviation of the same run repeated, in log units
    sources: tuple[str, ...] = ()  # who measured each; empty: one source
    asked_of: str = ""  # who measured the jobs that are asked about; empty: whoever measured the nearest row

    @property
    def prior_std_log(self) -> float:
        return self.spread

    @cached_property
    def _columns(self) -> Columns:
        return Columns.of(self.rows)

    @cached_property
    def _names(self) -> NDArray[np.str_]:
        return np.array(self.sources or ("",) * len(self.rows))

    @cached_property
    def _process(self) -> GaussianProcess:
        alike = np.where(self._names[:, None] == self._names[None], 1.0, SHARED)
        own = self.spread**2 * alike * covariance(self._columns, self._columns)
        return GaussianProcess(own + self.noise**2 * np.eye(len(self.rows)), np.array(self.logs))

    def left_out(self, groups: Sequence[Hashable]) -> tuple[Array, Array]:
        """Every log less its prediction from other groups, and the deviation expected, ``(rows,)`` each."""
        return self._process.left_out(groups)

    @property
    def software(self) -> tuple[str, ...]:
        """The framework that ran the jobs, in the words of the source."""
        return tuple(dict.fromkeys(row.labels[_BLOCK[0]] for row in self.rows))

    def posterior(self, asked: Sequence[JobFeatures]) -> tuple[Array, Array]:
        """Corrections of jobs, within those that the rows show, and the share of each that is known, ``(asked,)``."""
        shared, process = self.shared(asked), self._process
        known = np.minimum(1.0, process.explained(shared) / self.spread**2)
        return np.clip(process.mean(shared), *self.limits), known

    def log_factor(self, asked: Sequence[JobFeatures]) -> Array:
        """Corrections of jobs, ``(asked,)``."""
        return self.posterior(asked)[0]

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The least and the largest correction: those of single rows, or none, within ``MAX_LOG``."""
        return max(-MAX_LOG, min(0.0, *self.logs)), min(MAX_LOG, max(0.0, *self.logs))

    def known(self, asked: Sequence[JobFeatures]) -> Array:
        """Share of the variance between jobs that the rows explain: 1 for a job of the rows, 0 far from all."""
        return self.posterior(asked)[1]

    def shared(self, asked: Sequence[JobFeatures]) -> Array:
        """Covariance of each job, as one of its source, with every row, ``(asked, rows)``."""
        alike = covariance(Columns.of(asked), self._columns)
        if self.sources:
            owner = self.asked_of or self._names[alike.argmax(axis=1)][:, None]
            alike = alike * np.where(owner == self._names[None], 1.0, SHARED)
        return self.spread**2 * alike

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


@dataclass(frozen=True)
class PublishedRun:
    """A published run that the correction was fitted with."""

    digest: str  # of the run
    source: str
    model: str  # in the words of the source
    log: float  # log(measured / predicted)
    like: JobFeatures

    @property
    def group(self) -> tuple[str, ...]:
        """Common properties of runs that say much of each other: source, model, device and precision."""
        return self.source, self.model, *self.like.labels[_DEVICE : _DEVICE + 2]

    def to_dict(self) -> list[Any]:
        """One line of the preset."""
        place = [round(number, 3) for number in (*self.like.place, self.like.doublings)]
        return [self.digest, self.source, self.model, *self.like.labels, round(self.log, 4), *place]

    @classmethod
    def from_dict(cls, value: Sequence[Any]) -> PublishedRun:
        digest, source, model, *rest = value
        labels, (log, *place, doublings) = rest[: len(UNLIKE)], map(float, rest[len(UNLIKE) :])
        if not abs(log) < MOST_LOG:
            raise ValueError(f"the log of a published run must lie within +-{MOST_LOG:g}, got {log}")
        return cls(digest, source, model, log, JobFeatures(tuple(place), tuple(labels), doublings))


SHARED = 0.2  # share of a correction's variance that sources have in common: with more, a source left out is worse off
PRESET = Path(__file__).with_name("published_runs.json")
PUBLISHED = (0.1, 0.04)  # spread and noise of corrections of published runs, in log units


@dataclass(frozen=True)
class PublishedRuns(Saved):
    """What published runs on a chip say of jobs near them, and nothing of frameworks and precisions without any."""

    runs: tuple[PublishedRun, ...]
    width: float  # of the interval, half of it, in deviations
    facts: str = field(default="", metadata=IF_SET)  # digest of the facts that the runs were predicted with
    asked_of: str = field(default="", metadata=IF_SET)  # as in ``Residual``

    @cached_property
    def _runs(self) -> dict[tuple[str, ...], list[PublishedRun]]:
        blocks = dict.fromkeys(block_of(run.like) for run in self.runs)
        return {block: [run for run in self.runs if block_of(run.like) == block] for block in blocks}

    @cached_property
    def blocks(self) -> dict[tuple[str, ...], Residual]:
        """The residual of each framework's profile, precision and kind of model."""
        return {
            block: Residual(
                tuple(run.like for run in runs),
                tuple(np.clip([run.log for run in runs], -MAX_LOG, MAX_LOG).tolist()),
                *PUBLISHED,
                tuple(run.source for run in runs),
                self.asked_of,
            )
            for block, runs in self._runs.items()
        }

    def without(self, source: str = "", group: tuple[str, ...] = ()) -> PublishedRuns:
        """Without the runs of a source, for a job of that source, or of a group; the same where it has none of them."""
        left = tuple(run for run in self.runs if run.source != source and run.group != group)
        return replace(self, runs=left, asked_of=source or self.asked_of) if len(left) < len(self.runs) else self

    def on(self, devices: Collection[str]) -> PublishedRuns:
        """The runs on these devices."""
        return replace(self, runs=tuple(run for run in self.runs if run.like.labels[_DEVICE] in devices))

    def near(self, like: JobFeatures) -> NearRuns | None:
        """The runs that say most of a job, and their correction; None: none is near."""
        residual = self.blocks.get(block_of(like))
        if residual is None:
            return None
        alike = residual.shared([like])[0] / residual.spread**2
        least = max(0.5 * alike.max(), NEAREST)
        near = [run for run, own in zip(self._runs[block_of(like)], alike, strict=True) if own >= least]
        models = tuple(dict.fromkeys(run.model for run in near))
        return NearRuns(float(residual.log_factor([like])[0]), len(near), models) if near else None


@dataclass(frozen=True)
class NearRuns(Saved):
    """The published runs near a job, and their correction of it."""

    log_factor: float
    runs: int
    models: tuple[str, ...]  # in the words of their sources

    @property
    def percent_slower(self) -> float:
        """By how much the published runs were slower than physics says."""
        return 100 * math.expm1(self.log_factor)

    def __str__(self) -> str:
        speed = f"{abs(self.percent_slower):.1f} % {'slower' if self.log_factor > 0 else 'faster'}"
        many = f"{self.runs} run{'s' * (self.runs > 1)}, {shorten(', '.join(self.models), 100)}"
        return f"published runs like this one were {speed} than physics says: {many}"


def block_of(like: JobFeatures) -> tuple[str, ...]:
    """What runs tell nothing of other values of: framework's profile, precision; dense model, mixture or adapters."""
    return tuple(like.labels[place] for place in _BLOCK)


_DEVICE = list(UNLIKE).index("device")
_BLOCK = tuple(list(UNLIKE).index(name) for name in ("software", "precision", "mixture"))
NEAREST = 0.1  # similarity of the jobs that a correction names


@cached(1)
def published_runs() -> PublishedRuns:
    """The preset of the package, of all chips."""
    return PublishedRuns.from_dict(read_json(PRESET))


def most_likely(logs: Array, shared: Array, more: Array) -> tuple[float, float]:
    """Most likely spread and noise of residuals, by their ``covariance``, and ``more`` of it from elsewhere."""
    if len(logs) < 3:
        return USUAL

    def cost(pair: tuple[float, float]) -> float:
        return GaussianProcess(pair[0] ** 2 * shared + pair[1] ** 2 * np.eye(len(logs)) + more, logs).cost()

    return min(product(SPREADS, NOISES), key=cost)
