"""Prediction intervals: conformal ones from held-out runs, and errors of public predictors on published runs.

A predictor from public tables has no runs of its own to hold back.  Its errors on published runs are kept by source and
by what their jobs are like.  They are counted in units of a scale that grows with mixtures of experts, 8-bit products,
unfused attention, devices, what was never measured, and where few sources have run on the chip.  A job's interval is
their conformal quantile times its own scale; a source with many runs counts for less than as many sources with one, and
not at all for its own runs.  Runs are slower than predicted more often than faster, so an interval reaches further up
than down.  Where the host decides the time, the doubt of the host's time is added.
``python tools/shipped_data.py widths RUNS`` writes the preset again.

Doubt about single ops and collectives, from errors of runs that were held back, and its sum over an iteration.

Errors of a kind in a phase (in a phase alone, of a kind alone where few runs have it) give a symmetric interval in
log-seconds.  Errors of one run's nodes agree in part: ``shared`` is the part of their variance that a run has in
common.  So the variance of an iteration is ``(1 - shared) sum (s_i d_i)^2 + shared (sum s_i d_i)^2``, with the share
``s_i`` of each signature in its time, and the deviation ``d_i`` of its logarithm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo, cached
from stepsight.dataset.base.files import Saved, read_json
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import QUANTIZED

Array = NDArray[np.float64]

COVERAGE = 0.9
ROOFLINE_LOG = math.log(3.0)  # a roofline is within a factor of three of almost all measurements
UNSUPPORTED_LOG = math.log(2.0)  # added in full if all of an iteration lies outside the measured range
EXTRAPOLATED_SHARE = 0.2  # what takes a fifth of an iteration can be wrong by half before that costs ten percent
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
        return half * _growth(devices, OWN_WEIGHT) if self.num_runs else half

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
# The next seven were chosen for the interval score of sources left out in turn, not for the error of any prediction.
KIND_WEIGHTS = {"mixture": 0.75, "8-bit": 0.5, "unfused": 1.0}  # added to the scale of jobs of the kind
SHARE_WEIGHT = 0.25  # if all of an iteration lies outside the measured range
DEVICES_WEIGHT = 0.1  # per doubling of the devices beyond a node of eight
OWN_WEIGHT = 0.05  # the same for a predictor that is judged by runs of its own
CHIP_WEIGHT = 0.5  # divided by the number of sources with runs on the chip
SOURCE_POWER = 0.5  # a run's weight is one over this power of the number of runs of its source
LEVEL = 0.92  # of the quantile: it holds ``COVERAGE`` of the runs of sources left out in turn
DOWN, UP = 0.9, 1.1  # parts of a half width below and above the prediction
RECOMMENDATION = "recommendation"  # kind of a job
HOSTS = (0.6, 3.0)  # times of a host over predicted ones, in nine of ten functional tests of Megatron-LM (2024-26)
MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class JobClass:
    """The properties of a job that the size of its prediction error depends on."""

    kind: tuple[str, str, str, str]  # dense or a mixture, width of products, attention, and generation of the chip
    devices: int  # how many move in step


def class_of(job: Job) -> JobClass:
    """The likeness of a job."""
    narrow, fused = job.batch.precision in QUANTIZED, job.model.fused_attention
    like = job_class(bool(job.model.experts), narrow, fused, job.hardware_name, job.cluster.num_devices)
    return replace(like, kind=(RECOMMENDATION, *like.kind[1:])) if job.model.tables else like


def job_class(mixture: bool, narrow: bool, fused: bool, hardware: str, devices: int) -> JobClass:
    """A likeness from plain facts; the chip's generation is the name's first letter and digit (``h1`` of H100)."""
    chip = re.match(r"g?([a-z]+-?\d)", hardware.lower())
    kind = (
        "mixture" if mixture else "dense",
        "8-bit" if narrow else "16-bit or more",
        "fused" if fused else "unfused",
        chip[1] if chip else hardware,
    )
    return JobClass(kind, devices)


@dataclass(frozen=True, slots=True)
class PublishedError:
    """The error of one published run."""

    digest: str  # of its row
    like: JobClass  # what its job is like
    share: float  # part of its predicted time outside of what was measured
    error: float  # log(measured / predicted)


def _scale(like: JobClass, share: float, others: int) -> float:
    """Scale of errors; ``share`` of the time is outside of what was measured, ``others``: more sources of the chip."""
    known = sum(KIND_WEIGHTS.get(word, 0.0) for word in like.kind) + CHIP_WEIGHT / max(others, 0.5)
    return known + SHARE_WEIGHT * min(max(share, 0.0), 1.0) + _growth(like.devices)


def _growth(devices: int, weight: float = DEVICES_WEIGHT) -> float:
    """The growth of errors with the number of devices beyond a node of eight."""
    return 1.0 + weight * max(math.log2(max(devices, 1)) - 3.0, 0.0)


def ends_of(half: float, host_share: float) -> tuple[float, float]:
    """How far an interval reaches below and above a prediction, in log-seconds; ``host_share``: what hosts decide."""
    share = min(max(host_share, 0.0), 1.0)
    return DOWN * half - math.log1p(share * (HOSTS[0] - 1.0)), UP * half + math.log1p(share * (HOSTS[1] - 1.0))


def uncalibrated_ends(
    intervals: Intervals, like: JobClass, shares: tuple[float, float], *, public: bool, without: str = ""
) -> tuple[float, float]:
    """How far the interval of a predictor without calibration reaches below and above, in log-seconds.

    ``shares``: of the job's time, outside the measured range and decided by the host, 0 to 1.  ``public``: the
    predictor comes from public tables, so that without runs of its own published ones judge it, except those of the
    source ``without``.
    """
    outside, host = shares
    if public and not intervals.num_runs:
        # No published run of a recommendation model judges the widths: its lookups were never measured at all.
        more = UNSUPPORTED_LOG * outside * (like.kind[0] == RECOMMENDATION)
        return ends_of(published_widths().half_width_of(like, outside, without) + more, host)
    half = intervals.half_width(outside, like.devices)
    return half, half


@dataclass(frozen=True)
class Widths:
    """Errors on published runs, by source."""

    sources: Mapping[str, tuple[PublishedError, ...]]
    _known: Memo[str, float] = field(
        default_factory=lambda: Memo("intervals: published errors", MOST_KNOWN), init=False, compare=False, repr=False
    )

    def half_width_of(self, like: JobClass, unsupported_share: float, without: str = "") -> float:
        """Half of the interval of a job in log-seconds, from the errors of all sources except ``without``."""
        quantile = self._known.get(without)
        if quantile is None:
            self._known[without] = quantile = self._quantile(without)
        return min(quantile * _scale(like, unsupported_share, len(self.on_chip(like) - {without})), MOST_LOG)

    def on_chip(self, like: JobClass) -> frozenset[str]:
        """Sources with runs on the generation of chip of a likeness."""
        return self._chips.get(like.kind[3], frozenset())

    @cached_property
    def _chips(self) -> dict[str, frozenset[str]]:
        pairs = {(row.like.kind[3], name) for name, rows in self.sources.items() for row in rows}
        return {chip: frozenset(name for other, name in pairs if other == chip) for chip, _ in pairs}

    def _quantile(self, without: str) -> float:
        """The weighted conformal quantile of errors over their scale; ``ROOFLINE_LOG`` if there are none."""
        scores, weights = [], []
        for name, rows in self.sources.items():
            for row in rows if name != without else ():
                scale = _scale(row.like, row.share, len(self.on_chip(row.like) - {name, without}))
                scores.append(max(row.error / UP, -row.error / DOWN) / scale)
                weights.append(len(rows) ** -SOURCE_POWER)
        if not scores:
            return ROOFLINE_LOG
        order, weight = np.argsort(scores), np.array(weights)
        reached = np.cumsum(weight[order])
        needed = LEVEL * (reached[-1] + float((weight**2).sum() / weight.sum()))  # the job itself: a typical run
        at = int(np.searchsorted(reached, needed))
        return float(scores[order[at]] if at < len(order) else scores[order[-1]] * needed / reached[-1])

    def to_dict(self) -> dict[str, Any]:
        rows = {
            name: [[o.digest, *o.like.kind, o.like.devices, round(o.share, 3), round(o.error, 4)] for o in offs]
            for name, offs in self.sources.items()
        }
        return {"coverage": COVERAGE, "sources": rows}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Widths:
        sources: dict[str, list[PublishedError]] = {name: [] for name in value["sources"]}
        for name, (digest, a, b, c, d, *numbers) in ((n, row) for n, rows in value["sources"].items() for row in rows):
            devices, share, error = map(float, numbers)
            if not abs(error) < MOST_LOG or not math.isfinite(share) or not 1 <= devices < math.inf:
                raise ValueError(f"an error of {name} must lie within +-{MOST_LOG} with devices, got {numbers}")
            like = JobClass((str(a), str(b), str(c), str(d)), int(devices))
            sources[name].append(PublishedError(str(digest), like, share, error))
        return cls({name: tuple(rows) for name, rows in sources.items()})


@cached(1)
def published_widths() -> Widths:
    """The preset of the package."""
    return Widths.from_dict(read_json(PRESET))


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
