"""Prediction intervals: conformal ones from held-out runs, and errors of public predictors on published runs.

A predictor from public tables has no runs of its own to hold back.  Its errors on published runs are kept by source.
They grow with the logarithm of how many times as long an iteration takes as its FLOP at the devices' peak, one over its
HFU: the FLOP are certain, and all else (kernels below their peak, waiting, messages, the host) is in doubt in
proportion.  They are larger with unfused attention, and where few sources have run models of the kind on the chip.
Runs are slower than predicted more often than faster, so each side of an interval has a quantile of its own.  A
source's own runs never count.  What facts of a device alone say is nearly always too fast, so its interval, from its
errors on the same runs, reaches further up.  ``python tools/shipped_data.py widths RUNS`` writes both presets again.

Doubt about single ops and collectives, from errors of runs that were held back, and its sum over an iteration.

Errors of a kind in a phase (in a phase alone, of a kind alone where few runs have it) give a symmetric interval in
log-seconds.  Errors of one run's nodes agree in part: ``shared`` is the part of their variance that a run has in
common.  So the variance of an iteration is ``(1 - shared) sum (s_i d_i)^2 + shared (sum s_i d_i)^2``, with the share
``s_i`` of each signature in its time, and the deviation ``d_i`` of its logarithm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo, cached
from stepsight.dataset.base.files import Saved, read_json
from stepsight.dataset.job.job import Job

Array = NDArray[np.float64]

COVERAGE = 0.9
ROOFLINE_LOG = math.log(3.0)  # a roofline is within a factor of three of almost all measurements
UNSUPPORTED_LOG = math.log(2.0)  # added in full if all of an iteration lies outside the measured range
EXTRAPOLATED_SHARE = 0.2  # what takes a fifth of an iteration can be wrong by half before that costs ten percent
LARGE_LOG = math.log(10.0)  # of an op: percent would tell nobody anything
MOST_LOG = 100.0  # a wider interval is useless, and its end would overflow


@dataclass(frozen=True)
class Intervals(Saved):
    """Symmetric interval in log-seconds."""

    half_width_log: float = ROOFLINE_LOG  # half of its width
    coverage: float = COVERAGE  # part of held-back runs that it is meant to hold
    num_runs: int = 0  # from how many held-back runs it comes; 0: not from measurement

    def half_width(self, unsupported_share: float = 0.0, devices: int = 1) -> float:
        """Half of the width in log-seconds; it grows with the share of the time outside the measured range, and with
        the number of devices as errors on published runs do, since held-back runs are small.
        """
        half = self.half_width_log + UNSUPPORTED_LOG * min(max(unsupported_share, 0.0), 1.0)
        growth = OWN_WEIGHT * max(math.log2(max(devices, 1)) - 3.0, 0.0)  # beyond a node of eight
        return half * (1.0 + growth) if self.num_runs else half

    def __post_init__(self) -> None:
        if not (0 <= self.half_width_log <= MOST_LOG and 0 < self.coverage < 1 and self.num_runs >= 0):
            raise ValueError(
                f"0 <= half_width_log <= {MOST_LOG}, 0 < coverage < 1 and num_runs >= 0 must hold, "
                f"got {self.half_width_log}, {self.coverage} and {self.num_runs}"
            )


def conformal_quantile(scores: Sequence[float], coverage: float = COVERAGE, *, too_few: float | None = None) -> float:
    """Find the score that a new one exceeds with a probability of at most ``1 - coverage``.

    With the finite-sample correction of split-conformal prediction (Vovk et al. 2005; Lei et al. 2018).  Too few scores
    for the coverage give ``too_few``; by default the largest, stretched by the rank that is needed over their number,
    and ``ROOFLINE_LOG`` if there is none.
    """
    rank, count = math.ceil((len(scores) + 1) * coverage), len(scores)
    if rank > count and too_few is not None:
        return too_few
    if not count:
        return ROOFLINE_LOG
    ordered = sorted(scores)
    return ordered[rank - 1] if rank <= count else ordered[-1] * rank / count


def fit_intervals(log_residuals: Array, spread_log: float) -> Intervals:
    """Fit a symmetric interval to held-out logs of measured over predicted times, no narrower than their repeats'."""
    if not len(log_residuals):
        return Intervals()
    half_width = conformal_quantile(np.abs(log_residuals).tolist())
    return Intervals(float(min(max(half_width, spread_log), MOST_LOG)), COVERAGE, len(log_residuals))


PRESET = Path(__file__).with_name("published_widths.json")
FACTS_PRESET = "published_widths_of_facts.json"
# The next three were chosen for the interval score of sources left out in turn, not for the error of any prediction.
UNFUSED_WEIGHT = 0.3  # added to the scale of jobs with unfused attention
FEW_WEIGHT = 0.5  # divided by one more than the number of other sources with runs of the kind of model on the chip
LEVEL = 0.955  # of the quantile on each side: both hold ``COVERAGE`` of the runs of sources left out in turn
OWN_WEIGHT = 0.05  # growth per doubling of the devices beyond a node of eight, of a predictor judged by its own runs
LEAST_EXCESS = 0.2  # no prediction is more certain than that of an iteration at four fifths of the peak
FACTS_EXCESS = 1.0  # nor, by facts alone, than that of one at a third of it
MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class JobClass:
    """The properties of a predicted job that the size of its error depends on."""

    kind: tuple[str, str, str]  # dense or a mixture, attention, and generation of the chip
    excess: float  # logarithm of its time over that of its FLOP at the devices' peak


def job_class(mixture: bool, fused: bool, hardware: str, hfu: float) -> JobClass:
    """A likeness from plain facts; the chip's generation is the name's first letter and digit (``h1`` of H100)."""
    chip = re.match(r"g?([a-z]+-?\d)", hardware.lower())
    kind = "mixture" if mixture else "dense", "fused" if fused else "unfused", chip[1] if chip else hardware
    return JobClass(kind, max(-math.log(min(max(hfu, math.exp(-MOST_LOG)), 1.0)), LEAST_EXCESS))


def class_of(job: Job, hfu: float) -> JobClass:
    """The likeness of a job that is predicted with a hardware FLOP utilisation."""
    return job_class(bool(job.model.experts), job.model.fused_attention, job.hardware_name, hfu)


def uncalibrated_ends(
    intervals: Intervals, like: JobClass, outside: float, devices: int, *, public: bool, without: str = ""
) -> tuple[float, float]:
    """How far the interval of a predictor without calibration reaches below and above, in log-seconds.

    ``outside``: share of the job's time outside the measured range, 0 to 1.  ``devices``: how many move in step.
    ``public``: the predictor comes from public tables, so that without runs of its own published ones judge it, except
    those of the source ``without``.
    """
    if public and not intervals.num_runs:
        return published_widths().ends_of(like, without)
    half = intervals.half_width(outside, devices)
    return half, half


@dataclass(frozen=True)
class Widths:
    """What published runs are like, and the error of each, ``log(measured / predicted)``, by source."""

    sources: Mapping[str, tuple[tuple[JobClass, float], ...]]
    of_facts: bool = False  # of predictions from facts alone, for which neither attention nor few sources matter
    _known: Memo[str, tuple[float, float]] = field(
        default_factory=lambda: Memo("intervals: published errors", MOST_KNOWN), init=False, compare=False, repr=False
    )

    def ends_of(self, like: JobClass, without: str = "") -> tuple[float, float]:
        """How far the interval of a job reaches below and above its time, in log-seconds, from the errors of all
        sources except ``without``.
        """
        ends = self._known.get(without)
        if ends is None:
            self._known[without] = ends = self._quantiles(without)
        scale = self._scale(like, {without})
        return min(ends[0] * scale, MOST_LOG), min(ends[1] * scale, MOST_LOG)

    def of_kind(self, like: JobClass) -> frozenset[str]:
        """Sources with runs of a likeness's kind of model on its generation of chip."""
        return self._kinds.get((like.kind[0], like.kind[2]), frozenset())

    @cached_property
    def _kinds(self) -> dict[tuple[str, str], frozenset[str]]:
        kinds: dict[tuple[str, str], set[str]] = {}
        for name, like in ((name, like) for name, rows in self.sources.items() for like, _ in rows):
            kinds.setdefault((like.kind[0], like.kind[2]), set()).add(name)
        return {kind: frozenset(names) for kind, names in kinds.items()}

    def _scale(self, like: JobClass, without: Collection[str]) -> float:
        """Scale of the errors of jobs of a likeness; sources ``without`` say nothing of them."""
        if self.of_facts:
            return max(like.excess, FACTS_EXCESS)
        few = FEW_WEIGHT / (1 + len(self.of_kind(like).difference(without)))
        return like.excess * (1.0 + few + UNFUSED_WEIGHT * (like.kind[1] == "unfused"))

    def _quantiles(self, without: str) -> tuple[float, float]:
        """Quantiles of errors over their scale, down and up; ``ROOFLINE_LOG`` if there are none."""
        scores = [
            error / self._scale(like, {name, without})
            for name, rows in self.sources.items()
            for like, error in (rows if name != without else ())
        ]
        down, up = (conformal_quantile([sign * score for score in scores], LEVEL) for sign in (-1.0, 1.0))
        return max(down, 0.0), max(up, 0.0)

    def to_dict(self) -> dict[str, Any]:
        rows = {
            name: [[*like.kind, round(like.excess, 3), round(error, 4)] for like, error in rows]
            for name, rows in self.sources.items()
        }
        return {"coverage": COVERAGE, "of_facts": self.of_facts, "sources": rows}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Widths:
        sources: dict[str, list[tuple[JobClass, float]]] = {name: [] for name in value["sources"]}
        for name, (a, b, c, *numbers) in ((n, row) for n, rows in value["sources"].items() for row in rows):
            excess, error = map(float, numbers)
            if not abs(error) < MOST_LOG or not LEAST_EXCESS <= excess <= MOST_LOG:
                raise ValueError(
                    f"an error of {name} must lie within +-{MOST_LOG}, and its excess from {LEAST_EXCESS} to "
                    f"{MOST_LOG}, got {numbers}"
                )
            sources[name].append((JobClass((str(a), str(b), str(c)), excess), error))
        return cls({name: tuple(rows) for name, rows in sources.items()}, bool(value["of_facts"]))


@cached(2)
def published_widths(*, of_facts: bool = False) -> Widths:
    """The preset of the package: of shipped predictors, or of predictions from facts alone."""
    return Widths.from_dict(read_json(PRESET.with_name(FACTS_PRESET) if of_facts else PRESET))


MOST_PRINTED = 1e9  # larger numbers are printed with an exponent


def seconds_text(seconds: float) -> str:
    """``31.0 us``, ``12.3 ms``, ``4.56 s`` or ``3.2e+30 s``."""
    if 0 < seconds < 1e-4:  # in milliseconds it would round to zero
        return f"{seconds * 1e6:.1f} us"
    if seconds >= MOST_PRINTED:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def interval_text(low_s: float, high_s: float) -> str:
    """``19.12 to 23.62 s``; with both units if they differ."""
    low, high = seconds_text(low_s), seconds_text(high_s)
    value, unit = low.rsplit(" ", 1)
    return f"{value if high.endswith(f' {unit}') else low} to {high}"


FEWEST_RUNS = 4  # fewest runs with a kind for an interval of its own
NORMAL_WIDTH = 1.645  # deviations that contain 90 % of a normal distribution
MEAN_TO_HALF = NORMAL_WIDTH / (2 / np.pi) ** 0.5  # half of that interval over the mean absolute error
SHARED = 0.3  # where no runs tell: a rule of thumb


@dataclass(frozen=True)
class HeldBackErrors:
    """``log(measured / predicted)`` of the nodes of one run that taught nothing, ``(n,)``."""

    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    logs: Array
    weights: Array  # share of each node in the run's time


@dataclass(frozen=True)
class NodeDoubts(Saved):
    """Half of the 90 % interval of single ops and collectives in log-seconds."""

    halves: Mapping[str, float]  # by ``kind/phase``, ``kind``, and for all others ``""``
    shared: float = SHARED

    def __post_init__(self) -> None:
        wrong = [half for half in self.halves.values() if not 0 <= half <= MOST_LOG]
        if wrong or not 0 <= self.shared <= 1:
            raise ValueError(f"doubts must lie from 0 to {MOST_LOG:g}, and what is shared from 0 to 1, got {wrong[:3]}")

    def half(self, kind: str, phase: str = "") -> float:
        """Of a kind in a phase; a factor of three where nothing is known."""
        names = (f"{kind}/{phase}", kind, "")
        return next((self.halves[name] for name in names if name in self.halves), ROOFLINE_LOG)

    def of_sum(self, shares: Array, halves: Array) -> float:
        """Of a sum of nodes, from the share of each in it."""
        each = shares * halves
        return float(np.sqrt((1 - self.shared) * (each**2).sum() + self.shared * each.sum() ** 2))


def fit_doubts(runs: Sequence[HeldBackErrors]) -> NodeDoubts:
    """Fit the intervals, which ``COVERAGE`` of the nodes of another run keep; every run counts alike.

    Nodes of a run resemble each other, so that the other run counts as one more with larger errors (Lee, Barber and
    Willett, "Distribution-free inference with hierarchical data", arXiv:2306.06342).
    """
    groups: dict[str, list[tuple[Array, Array]]] = {}
    for run in runs:
        count = max(len(run.logs), 1)
        names = np.array([("", kind, f"{kind}/{phase}") for kind, phase in zip(run.kinds, run.phases, strict=True)])
        for name in set(names.ravel().tolist()):
            own = np.abs(run.logs[(names == name).any(axis=1)])
            groups.setdefault(name, []).append((own, np.full(len(own), 1 / (count if name == "" else len(own)))))
    halves = {}
    for name, parts in sorted(groups.items()):
        if len(parts) >= FEWEST_RUNS or not name:
            errors, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
            order = np.argsort(errors)
            level = COVERAGE * (1 + 1 / len(parts)) - 1e-9  # with few runs the largest error
            place = int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), level))
            halves[name] = min(float(errors[order][min(place, len(order) - 1)]), MOST_LOG)
    means, squares = ([float(run.weights @ run.logs**power) for run in runs if run.weights.any()] for power in (1, 2))
    if len(means) < FEWEST_RUNS:
        return NodeDoubts(halves)
    shared = np.mean(np.square(means)) / max(float(np.mean(squares)), 1e-12)
    return NodeDoubts(halves, float(np.clip(shared, 0.0, 1.0)))
