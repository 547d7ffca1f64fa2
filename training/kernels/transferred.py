"""Ops of a device with few measurements: other devices' efficiency at its roofline, and a correction.

``seconds(op) = roofline(op) * exp(efficiency(op) + correction(op))``.  The efficiency (log of time over roofline) is
that of predictors that come with the package, the teachers: their mean, or that of the device that is said to be alike.

The correction is one Gaussian process for each family and precision.  Its covariance is a sum: a constant, a linear
term in each teacher's log-efficiency, and Matern-3/2 terms over the shape, over how well tiles fill the device, and
over the roofline.  Amplitudes, lengths and the noise maximise the posterior of the measured rows (Rasmussen and
Williams 2006, section 5.4.1) under log-normal priors that are the same for every device.  Far from every measurement
the correction returns to the constant and linear terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import ROUNDED, Saved, plain
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.features.node_features import columns_of, op_feature_names, op_features
from stepsight.training.corrections.corrector import GaussianProcess, Support, corrected, faded, rows_by
from stepsight.training.kernels.kernel_models import OUTSIDE, KernelModel, label

Array = NDArray[np.float64]
Blocks = Mapping[str, Array]  # columns of each term of the covariance, ``(rows, columns)``

LINEAR = "teachers"
# Amplitude and length of each term before anything is measured, in log units; the linear one has no length.
TERMS = {LINEAR: (0.3, 0.0), "shape": (0.15, 2.0), "tiles": (0.1, 1.0), "roofline": (0.2, 1.5)}
CONSTANT, NOISE = 0.5, 0.06
SHORT, SHORT_S = 0.7, 20e-6  # additional noise of the shortest ops; time at which it has halved
AMPLITUDE_STD, LENGTH_STD, NOISE_STD = 1.0, 0.7, 0.5  # deviation of the priors' logarithms
BLEND_S = 30e-6  # time of an op at which both posteriors of a correction have equal weight
ROWS_OF_SCALES = 250  # rows used to find amplitudes and lengths: the cost is cubic
MOST_ROWS = 800
STEPS = 25
ROBUST_STEPS, OUTLIER = 4, 2.0  # rows with errors beyond this many deviations have less weight
MOST_CORRECTION = 3.0  # log units
_CHUNK = 2048


@dataclass(frozen=True, eq=False)
class Posterior(Saved):
    """The posterior from the measured ops of one label."""

    # logarithms of the constant, the noise, the amplitude and length of each term, and how much more noise short ops
    # have
    scales: Array
    rows: Mapping[str, Array] = field(metadata=ROUNDED)  # columns of the measured ops by term
    weights: Array  # of each measured op, (rows,)

    def mean(self, asked: Blocks) -> Array:
        """Expected correction of each op in log units, ``(asked,)``."""
        count = len(asked[LINEAR])
        found = np.empty(count)
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            some = {name: block[part] for name, block in asked.items()}
            found[part] = _covariance(self.scales, _distances(some, self.rows)) @ self.weights
        return np.clip(found, -MOST_CORRECTION, MOST_CORRECTION)

    def __post_init__(self) -> None:
        count = len(_prior()[0])
        if self.scales.shape != (count,) or self.weights.ndim != 1 or not len(self.weights):
            raise ValueError(f"a posterior must have {count} scales and a weight for each row")
        if any(self.rows[name].ndim != 2 or len(self.rows[name]) != len(self.weights) for name in TERMS):
            raise ValueError("a posterior must have columns of every term, and as many rows as weights")
        if not all(np.isfinite(numbers).all() for numbers in (self.scales, self.weights, *self.rows.values())):
            raise ValueError("numbers of a posterior must be finite")


def fit_posterior(rows: Blocks, residuals: Array, seconds: Array, seed: int = 0) -> Posterior:
    """Fit to measured ops: log of their time over what other devices' efficiency says, ``(rows,)``; short ops are
    noisier.
    """
    from scipy.optimize import minimize

    order = np.random.default_rng(seed).permutation(len(residuals))[:MOST_ROWS]
    kept, wanted, times = {name: rows[name][order] for name in TERMS}, residuals[order], seconds[order]
    some = slice(0, ROWS_OF_SCALES)
    near = {name: block[some] for name, block in kept.items()}
    distances, (means, stds) = _distances(near, near), _prior()

    def cost(scales: Array) -> float:
        covariance = _covariance(scales, distances)
        covariance[np.diag_indices_from(covariance)] += _noise(scales, times[some]) + 1e-9
        prior = (((scales - means) / stds) ** 2).sum()
        return float(0.5 * (GaussianProcess(covariance, wanted[some]).cost() + prior))

    scales = np.asarray(minimize(cost, means, method="L-BFGS-B", options={"maxiter": STEPS}).x, dtype=np.float64)
    covariance = _covariance(scales, _distances(kept, kept))
    noise = usual = _noise(scales, times)
    for _ in range(ROBUST_STEPS):
        process = GaussianProcess(covariance + np.diag(noise), wanted)
        # Error of each row predicted from the others.
        left_out = np.abs(process.weights / np.diag(process.inverse)) / np.sqrt(usual)
        deviation = 1.48 * np.median(left_out) + 1e-9
        noise = usual * np.maximum(1.0, left_out / (OUTLIER * deviation)) ** 2
    return Posterior(scales, kept, process.weights)


class AskedOps(NamedTuple):
    """Ops of one label whose times are corrected: their columns by term, and their seconds without a correction."""

    ops: Sequence[Op]
    columns: Blocks
    seconds: Array


@dataclass(frozen=True, eq=False)
class Correction(Saved):
    """Two posteriors of the same measured ops, blended by the duration of an op.

    Short ops scatter more.  A posterior that knows it is nearer for long ops, but smooths away what is really different
    about short ones; for those one is taken that believes every measurement alike.
    """

    long: Posterior  # with more noise in short ops
    short: Posterior  # with the same noise in all
    support: Support  # lowest and highest log dims that were measured

    prior_std_log = CONSTANT

    def log_factor(self, asked: AskedOps) -> Array:
        """Logarithm of the factor of each op, ``(asked,)``; far away it is what the efficiencies alone say."""
        one, two = self.long.mean(asked.columns), self.short.mean(asked.columns)
        part = 1 / (1 + (BLEND_S / (asked.seconds * np.exp((one + two) / 2))) ** 2)
        return np.asarray(part * one + (1 - part) * two)

    def known(self, asked: AskedOps) -> Array:
        """Share of the variance that the measurements explain, by the distance from the measured dims, ``(asked,)``."""
        return faded(np.array([self.excess(op) for op in asked.ops]))

    def excess(self, op: Op) -> float:
        """Distance of an op from the measured dims, in log units summed over axes; 0 within."""
        place = _place(op)[: len(self.support.low)]
        low, high = (limit[: len(place)] for limit in self.support)
        return float(Support(low, high).beyond(place).sum())


def fit_correction(asked: AskedOps, residuals: Array, seed: int = 0) -> Correction:
    """Fit both posteriors to measured ops and seconds; other arguments as in ``fit_posterior``."""
    alike = np.full(len(asked.seconds), np.inf)
    long, short = (fit_posterior(asked.columns, residuals, each, seed) for each in (asked.seconds, alike))
    longest = max(len(op.dims) for op in asked.ops)
    places = [np.pad(_place(op), (0, longest - len(op.dims)), mode="edge") for op in asked.ops]
    return Correction(long, short, Support.of(np.array(places)))


def choose_rows(candidates: Blocks, wanted: int, *, targets: Blocks, weights: Array) -> tuple[list[int], Array]:
    """Which ops to measure first: each lowers the expected squared error of the targets, by their weights, most.

    Returns indices, and by how much each lowers the weighted variance.
    """
    scales = _prior()[0]
    own = _covariance(scales, _distances(candidates, candidates))
    other = _covariance(scales, _distances(targets, candidates))
    noise = float(np.exp(2 * scales[1]))
    chosen: list[int] = []
    gains = np.zeros(min(wanted, len(own)))
    for turn in range(len(gains)):
        gain = weights @ other**2 / (np.diag(own) + noise)
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        gains[turn] = gain[best]
        row = own[best] / (own[best, best] + noise)
        other -= np.outer(other[:, best], row)
        own -= np.outer(own[:, best], row)
    return chosen, gains


def _prior() -> tuple[Array, Array]:
    """Mean and deviation of the scales' priors."""
    means, stds = [np.log(CONSTANT), np.log(NOISE)], [AMPLITUDE_STD, NOISE_STD]
    for amplitude, length in TERMS.values():
        means.append(np.log(amplitude))
        stds.append(AMPLITUDE_STD)
        if length:
            means.append(np.log(length))
            stds.append(LENGTH_STD)
    return np.array([*means, np.log(SHORT)]), np.array([*stds, LENGTH_STD])


def _noise(scales: Array, seconds: Array) -> Array:
    """Variance of each measurement in log units."""
    more = np.exp(2 * scales[-1]) / (1 + (seconds / SHORT_S) ** 2)
    return np.asarray(np.exp(2 * scales[1]) * (1 + more))


def _distances(left: Blocks, right: Blocks) -> dict[str, Array]:
    """Products of the linear term's columns, squared distances of the others', ``(left, right)`` each."""
    found = {}
    for name in TERMS:
        one, two = left[name], right[name]
        products = one @ two.T
        if name == LINEAR:
            found[name] = products / max(one.shape[1], 1)
        else:
            squares = (one**2).sum(axis=1)[:, None] + (two**2).sum(axis=1)[None, :] - 2 * products
            found[name] = np.maximum(squares, 0.0)
    return found


def _covariance(scales: Array, distances: Mapping[str, Array]) -> Array:
    total = np.full(distances[LINEAR].shape, np.exp(2 * scales[0]))
    at = 2
    for name, (_, length) in TERMS.items():
        power = np.exp(2 * scales[at])
        if length:
            steps = np.sqrt(3 * distances[name]) * np.exp(-scales[at + 1])
            total += power * (1 + steps) * np.exp(-steps)
        else:
            total += power * distances[name]
        at += 2 if length else 1
    return total


_COLUMNS = {
    "shape": ("log_dim", "log_tiles_per_processor"),
    "tiles": ("log_waste_",),
    "roofline": ("log_roofline_s", "log_intensity"),
}


@dataclass(frozen=True, eq=False)
class Teacher:
    """A shipped predictor whose efficiencies are used."""

    name: str  # of the predictor
    digest: str  # of it, as its manifest says
    kernel: KernelModel  # its ops

    def efficiency(self, ops: Sequence[Op]) -> Array:
        """Log of time over roofline of each op, ``(ops,)``."""
        roofline = [roofline_seconds(op, self.kernel.hardware) for op in ops]
        return np.asarray(np.log(self.kernel.seconds(ops, 1) / np.array(roofline)))


@dataclass(frozen=True, eq=False)
class Transfer:
    """Ops by other devices' efficiency and by the measured ones."""

    hardware: Hardware  # the device
    teachers: tuple[Teacher, ...]  # whose efficiencies count
    like: str = ""  # name of the teacher whose efficiency is the first guess; empty: the mean of all
    posteriors: Mapping[str, Correction] = field(default_factory=dict)  # corrections by label and software (name_of)
    # features that each term of the covariance reads
    columns: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            term: tuple(name for name in op_feature_names() if name.startswith(starts))
            for term, starts in _COLUMNS.items()
        }
    )

    def seconds(self, ops: Sequence[Op], variants: Sequence[int] | NDArray[np.int64] | int = 0) -> Array:
        """Seconds of each op, ``(ops,)``.  ``variants``: which software runs each; 0 is the one to predict for."""
        seconds = np.array([roofline_seconds(op, self.hardware) for op in ops], dtype=np.float64)
        which = np.broadcast_to(np.asarray(variants), (len(ops),)).tolist()
        groups = rows_by((self._posterior_name(op, variant), op.dtype) for op, variant in zip(ops, which, strict=True))
        for (name, _), members in groups.items():
            base, rows = self.rows_of([ops[index] for index in members])
            seconds[members] *= np.exp(base)
            if name in self.posteriors:
                asked = AskedOps([ops[index] for index in members], rows, seconds[members])
                seconds[members] = corrected(asked.seconds, asked, self.posteriors[name])
        return seconds

    def rows_of(self, ops: Sequence[Op]) -> tuple[Array, dict[str, Array]]:
        """First estimate of the log-efficiency, ``(ops,)``, and the posterior's columns, of ops of one precision."""
        known, told = [], np.zeros((len(ops), len(self.teachers)))
        for column, teacher in enumerate(self.teachers):
            if ops[0].record.bound != "compute" or ops[0].dtype in teacher.kernel.hardware.peak_flops:
                known.append(column)
                told[:, column] = teacher.efficiency(ops)
        guessing = [column for column in known if self.like in ("", self.teachers[column].name)] or known
        base = told[:, guessing].mean(axis=1) if guessing else np.zeros(len(ops))
        names, features = op_feature_names(), op_features(ops, self.hardware, 1)
        rows = {LINEAR: np.column_stack([np.where(told == 0.0, 0.0, told - base[:, None]), base])}
        rows |= {term: features[:, columns_of(wanted, names, "a transfer")] for term, wanted in self.columns.items()}
        return base, rows

    def unsupported(self, op: Op) -> str:
        """Why an op lies outside the measured range; empty if it lies within."""
        name = self._posterior_name(op, 0)
        if name not in self.posteriors:
            return f"{op}: no {op.kind} was measured; predicted from other devices' efficiency"
        excess = self.posteriors[name].excess(op)
        return f"{op}: {np.exp(excess):.1f} x outside the measured range" if excess > OUTSIDE else ""

    def _posterior_name(self, op: Op, variant: int) -> str:
        own = label(op.family, op, self.hardware)
        return name_of(own, variant) if name_of(own, variant) in self.posteriors else name_of(own, 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "teachers": {teacher.name: teacher.digest for teacher in self.teachers},
            "like": self.like,
            "columns": plain(self.columns),
            "posteriors": plain(self.posteriors),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], hardware: Hardware, teacher_of: Callable[[str], Teacher]) -> Transfer:
        """Read the result of ``to_dict``; a teacher of another version is a ``PredictorError``."""
        teachers = tuple(teacher_of(str(name)) for name in value["teachers"])
        for teacher in teachers:
            if teacher.digest != value["teachers"][teacher.name]:
                told = f"this predictor was trained with another version of {teacher.name}"
                raise PredictorError(f"{told}: train it again from its table")
        tables = value["posteriors"]
        for name, limits in value.get("support", {}).items():  # where earlier versions saved them
            tables = {**tables, name: {**tables[name], "support": dict(zip(("low", "high"), limits, strict=True))}}
        posteriors = {name: Correction.from_dict(table) for name, table in tables.items()}
        if any(p.long.rows[LINEAR].shape[1] != len(teachers) + 1 for p in posteriors.values()):
            raise PredictorError("every correction must have a range and a column for each teacher")
        columns = {term: tuple(map(str, value["columns"][term])) for term in _COLUMNS}
        return cls(hardware, teachers, str(value["like"]), posteriors, columns)


def name_of(label: str, variant: int) -> str:
    """Name of the correction of a label with one software."""
    return f"{label}#{variant}"


def _place(op: Op) -> Array:
    return np.log(np.maximum(op.dims, 1.0))
