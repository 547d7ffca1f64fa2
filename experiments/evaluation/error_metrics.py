"""Rows with their predictions, and how good these are: errors, ranks, regret, and two baselines without a simulator.

*Constant MFU*: the model's FLOP at one utilisation, times the pipeline's bubble; the utilisation is the best one for
the very rows that it is scored on, each device and precision of a source for itself.  *Carried forward*: the smallest
run of a series gives a speed per device, which all larger runs are said to have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError, PredictorError
from stepsight.dataset.job.frameworks import Framework
from stepsight.dataset.job.job import Job
from stepsight.experiments.evaluation.row_jobs import PublishedJob, is_copy, jobs_of, run_digest
from stepsight.experiments.evaluation.runs_table import Row, RowError
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.corrections.intervals import EXTRAPOLATED_SHARE
from stepsight.training.fitting.train_runs import spearman
from stepsight.training.prediction.prediction import ROOFLINE, asked_predictor, is_word, predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.software_used import SoftwareUsed
from stepsight.training.shipped.catalogue import shipped_predictor, shipped_without
from stepsight.training.tracking.tracking import load_predictor

Times = Sequence[float] | NDArray[np.float64]
DIGITS = 12  # of a time: what is predicted alike is equal, whatever the last bits of its FLOP are
TOP = 5
_TIMES = ("measured_s", "predicted_s", "low_s", "high_s")


@dataclass(frozen=True, slots=True)
class Scored:
    """A row that was predicted."""

    row: Row  # with the job and its framework: what ran
    job: Job
    framework: Framework
    measured_s: float  # iteration times
    predicted_s: float
    low_s: float
    high_s: float
    ideal_s: float  # time of the model's FLOP at the devices' peak
    hfu: float  # part of the predicted time that all FLOP take at the devices' peak
    unsupported_share: float  # part of the predicted time in what lies outside of what was measured, 0 ... 1
    breakdown: dict[str, float] = field(repr=False)  # seconds by cause
    open: str = ""  # columns that the row leaves open, each with the values that were predicted; empty: none
    # whose kernels answered, and what the row states of its software without effect
    software: SoftwareUsed = field(default_factory=SoftwareUsed)
    fits: bool = True  # whether the job is predicted to fit in the devices' memory; a run that ran does
    # predicted_s, low_s, high_s where published runs near the row count, those of its source too; of a run that the
    # correction was fitted with, its group does not; None: they change nothing
    known: tuple[float, float, float] | None = None

    @property
    def with_known(self) -> Scored:
        """The row with what published runs near it say."""
        predicted_s, low_s, high_s = self.known or (self.predicted_s, self.low_s, self.high_s)
        return replace(self, predicted_s=predicted_s, low_s=low_s, high_s=high_s)

    @property
    def digest(self) -> str:
        """Identity of the run; see ``run_digest``."""
        return run_digest(self.job, self.measured_s)

    @property
    def error(self) -> float:
        """``predicted / measured - 1`` in percent."""
        return 100.0 * (self.predicted_s / self.measured_s - 1.0)

    @property
    def in_interval(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def out_of_support(self) -> bool:
        """Whether a notable part of the time lies outside of what was measured."""
        return self.unsupported_share > EXTRAPOLATED_SHARE

    @property
    def choice(self) -> Hashable:
        """Common properties of rows that a user could choose between: model, devices and global batch."""
        m, batch = self.job.model, self.job.batch
        model = self.row.text("model_name"), m.layers, m.hidden, m.heads  # one name may stand for several
        devices = (self.job.cluster.hardware, self.row.gpus)
        return self.row.source, model, m.seq_len, devices, batch.global_batch, batch.precision

    @property
    def kind(self) -> str:
        """Rows of a source fall into kinds that are hard in different ways: precision, mixtures of experts."""
        mixture = "moe" if self.job.model.experts else "dense"
        return f"{self.job.batch.precision} {mixture}"

    def to_flat_dict(self) -> dict[str, Any]:
        """One row of a table: the run, its times in seconds, its error in percent, its breakdown in seconds."""
        return {
            "source": self.row.source,
            "row_id": self.row.row_id,
            "job": self.job.name,
            "framework": self.framework.name,
            "hardware": self.job.cluster.hardware,
            "devices": self.job.cluster.num_devices,
            "error_percent": self.error,
            **{name: getattr(self, name) for name in (*_TIMES, "in_interval", "fits", "open")},
            "kernels": "; ".join(f"{family} by {name}" for family, name in self.software.kernels.items()),
            "unused_software": "; ".join(self.software.unused),
            "unsupported_share": self.unsupported_share,
            **{f"{cause}_s": seconds for cause, seconds in self.breakdown.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """The measured and predicted times in seconds and the profile, for JSON."""
        told: dict[str, Any] = {"row_id": self.row.row_id, "profile": self.framework.name}
        told |= {name: getattr(self, name) for name in (*_TIMES, "fits")}
        told |= {} if self.known is None else {"predicted_with_published_s": self.known[0]}
        return told | ({"open": self.open} if self.open else {})


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predicted against measured times, in percent unless stated otherwise; None if there are no runs."""

    used: int  # rows
    mape: float | None = None  # as the next three, of the absolute error ``|predicted / measured - 1|``
    median: float | None = None
    p90: float | None = None
    max: float | None = None
    bias: float | None = None  # mean signed error
    spearman: float | None = None  # rank correlation of predicted and measured times, -1 ... 1

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


def errors(predicted: Times, measured: Times) -> Errors:
    """Errors of some rows, in any order."""
    if not len(measured):
        return Errors(0)
    one, two = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    signed = 100.0 * (one / two - 1.0)
    size = np.abs(signed)
    figures = map(float, (size.mean(), np.median(size), np.quantile(size, 0.9), size.max(), signed.mean()))
    mape, median, p90, most, bias = figures
    return Errors(len(size), mape, median, p90, most, bias, spearman(one, two) if len(size) > 1 else None)


def regret(groups: Sequence[Hashable], predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Percent by which the chosen runs are slower than the best ones, mean over groups: in each the run with the
    shortest predicted time is chosen (the mean of those predicted alike). A group in which all are predicted alike
    leaves no choice and does not count; None if no group does.
    """
    costs = []
    for rows in rows_by(groups).values():
        times, truths = [predicted[i] for i in rows], [measured[i] for i in rows]
        if max(times) > min(times):
            costs.append(chosen_time(times, truths) / min(truths) - 1.0)
    return 100.0 * sum(costs) / len(costs) if costs else None


def chosen_time(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Measured time of the run with the shortest predicted time; the mean of those predicted alike."""
    shortest = min(predicted)
    chosen = [truth for seconds, truth in zip(predicted, measured, strict=True) if seconds == shortest]
    return sum(chosen) / len(chosen)


MISSED = 0.1  # share of measured times that may lie outside of their intervals


def interval_score(rows: Sequence[Any]) -> float | None:
    """Mean interval score of rows as ``Scored``, in parts of the measured time: the width, and ``2 / MISSED`` times
    what a run lies outside of its interval; less is better (Gneiting and Raftery 2007, equation 43).
    """
    costs = []
    for row in rows:
        outside = max(row.low_s - row.measured_s, row.measured_s - row.high_s, 0.0)
        costs.append((row.high_s - row.low_s + 2.0 / MISSED * outside) / row.measured_s)
    return sum(costs) / len(costs) if costs else None


def share(flags: Sequence[bool]) -> float | None:
    """Percent of true values; None if there are none."""
    return 100.0 * fmean(flags) if flags else None


def best_scale(ideal: Sequence[float], measured: Sequence[float]) -> float:
    """The factor on ``ideal`` with the least mean of ``|factor * ideal / measured - 1|``: a weighted median."""
    weight = np.asarray(ideal, dtype=np.float64) / np.asarray(measured, dtype=np.float64)
    order = np.argsort(1.0 / weight)
    reached = np.cumsum(weight[order])
    return float((1.0 / weight)[order][np.searchsorted(reached, reached[-1] / 2.0)])


def constant_mfu(rows: Sequence[Scored], *, by_source: bool = True) -> list[float]:
    """Seconds of every row by a constant MFU of its chip and precision (and source), in their order."""
    seconds = [0.0] * len(rows)
    alike = lambda row: (row.row.source * by_source, row.job.cluster.hardware, row.job.batch.precision)
    all_of = ((row, row.job.parallel, row.job.num_micro_batches) for row in rows)  # the bubble as a part of the work
    ideal = [row.ideal_s * (1.0 + (p.pp - 1) / (p.virtual_stages * count)) for row, p, count in all_of]
    for indices in rows_by(map(alike, rows)).values():
        scale = best_scale([ideal[i] for i in indices], [rows[i].measured_s for i in indices])
        for i in indices:
            seconds[i] = float(f"{scale * ideal[i]:.{DIGITS}g}")
    return seconds


def carried_forward(rows: Sequence[Scored]) -> list[float | None]:
    """Seconds of every row, carried forward, in their order; None for the smallest runs of their series."""
    seconds: list[float | None] = [None] * len(rows)
    sequences = [row.job.batch.global_batch / row.row.gpus for row in rows]  # of an iteration for every device

    def unlike(start: int, row: int) -> tuple[float, float]:  # by micro-batch, then by sequences per device
        micro = rows[start].job.batch.micro_batch / rows[row].job.batch.micro_batch
        return max(micro, 1 / micro), abs(sequences[start] / sequences[row] - 1.0)

    for indices in rows_by(map(series_of, rows)).values():
        fewest = min(rows[i].row.gpus for i in indices)
        starts = [i for i in indices if rows[i].row.gpus == fewest]
        smallest = sorted({(rows[i].job.batch.micro_batch, sequences[i]): i for i in reversed(starts)}.values())
        for i in indices:
            if rows[i].row.gpus > fewest:
                start = min(smallest, key=lambda other, i=i: unlike(other, i))  # type: ignore[misc]
                seconds[i] = rows[start].measured_s * sequences[i] / sequences[start]
    return seconds


def series_of(row: Scored) -> Hashable:
    """Common properties of the runs of a series: all except the number of replicas and the batch."""
    p, job = row.job.parallel, row.job
    degrees = (p.tp, p.pp, p.virtual_stages, p.cp, p.ep, p.sequence_parallel, p.recompute, p.recompute_every)
    software = row.row.source, row.row.text("framework")
    return software, job.model, degrees, p.zero_stage, p.dp_shard, job.batch.precision, job.cluster.hardware


def choice_groups(rows: Sequence[Scored]) -> list[dict[str, Any]]:
    """Measured runs of one model on the same devices with one global batch, between which a user could choose.

    Groups without a choice are left out: those of one strategy, which ran on two clusters, say, or with two versions of
    the software, and those whose runs are all predicted alike.  Of each: the measured times of the fastest run and of
    the one predicted to be (the mean of those predicted alike), the ``place`` of that; in percent its ``regret``, that
    by chance and by a constant MFU, how many of the ``TOP`` fastest are among as many predicted to be (None for no more
    runs), and how many of their pairs are predicted in their order (of those predicted alike a half).
    """
    naive, found = constant_mfu(rows), []
    for indices in rows_by(row.choice for row in rows).values():
        own, strategies = [rows[i] for i in indices], set()
        for p, batch in ((row.job.parallel, row.job.batch) for row in own):
            degrees = (p.tp, p.cp, p.pp, p.ep, p.dp, p.schedule, p.virtual_stages, p.stage_layers, p.order)
            memory = (p.zero_stage, p.dp_shard, p.recompute, p.recompute_every, p.sequence_parallel)
            strategies.add((degrees, memory, p.offload_activations, batch.micro_batch))
        if len({row.predicted_s for row in own}) > 1 and len(strategies) > 1:
            found.append(_group(own, [naive[i] for i in indices]))
    return found


def _group(rows: Sequence[Scored], naive: Sequence[float]) -> dict[str, Any]:
    measured, predicted = [row.measured_s for row in rows], [row.predicted_s for row in rows]
    best, row, job = min(measured), rows[0].row, rows[0].job
    ways = {"": predicted, "random_": [0.0] * len(rows), "constant_mfu_": naive}
    chosen = {name: chosen_time(times, measured) for name, times in ways.items()}
    fastest, first = (sorted(range(len(rows)), key=times.__getitem__)[:TOP] for times in (measured, predicted))
    pairs = [(predicted[one], predicted[two]) for one, two in combinations(fastest, 2)]  # the faster run first
    devices = f"{row.gpus} x {job.cluster.hardware}, global batch {job.batch.global_batch}, {job.batch.precision}"
    return {
        "source": row.source,
        "name": f"{row.text('model_name') or job.model_name}, {devices}",
        "runs": len(rows),
        "best_s": best,
        "chosen_s": chosen[""],
        "place": 1 + sum(time_s < chosen[""] for time_s in measured),
        **{f"{name}regret": 100.0 * (seconds / best - 1.0) for name, seconds in chosen.items()},
        "top_shared": 100.0 * len(set(fastest) & set(first)) / TOP if len(rows) > TOP else None,
        "top_order": 100.0 * sum((one < two) + 0.5 * (one == two) for one, two in pairs) / len(pairs),
    }


def mean_figures(groups: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over groups; None if there are none."""
    means: dict[str, float | None] = {"groups": len(groups), "runs": sum(group["runs"] for group in groups)}
    for key in ("regret", "random_regret", "constant_mfu_regret", "top_shared", "top_order"):
        values = [group[key] for group in groups if group[key] is not None]
        means[key] = fmean(values) if values else None
    return means


OTHER_HARDWARE = "the predictor is for other hardware"
FITTED = "the predictor was fitted on it"
PredictorOf = Callable[[str], Predictor | None]  # of a hardware's name; None: hardware facts answer


def without_source(predictor: Predictor | None, source: str) -> Predictor | None:
    """A predictor without what published runs of one source say; a shipped one also without the power they told."""
    if predictor is None or predictor.calibration.published is None:
        return predictor
    if predictor is shipped_predictor(predictor.hardware.name):
        return shipped_without(predictor.hardware.name, source)
    return predictor.with_published(predictor.calibration.published.without(source))


def predictor_by_hardware(asked: Predictor | str | None = None) -> PredictorOf:
    """The given predictor (or hardware facts) for every row; if none is given, the shipped one for each hardware."""
    if asked is None:
        return shipped_predictor
    if isinstance(asked, str) and is_word(asked):
        return lambda hardware: asked_predictor(hardware, asked)
    predictor = load_predictor(asked) if isinstance(asked, str) else asked
    return lambda hardware: predictor


def score(row: Row, predictor_of: PredictorOf) -> Scored:
    """Predict one row without what its own source taught, and as ``predict`` answers: see ``Scored.known``."""
    every = jobs_of(row)
    job = every[0].job
    taught = predictor_of(job.cluster.hardware)
    if taught is not None:  # it must serve the hardware, know the software, and not have seen the row
        if taught.hardware.name != job.cluster.hardware:
            raise JobError(OTHER_HARDWARE)
        try:
            taught.kernels_asked(job)
        except PredictorError as error:
            raise RowError(str(error)) from None
        if is_copy(job, row.measured_s, taught.manifest.get("fitted_rows", ())):
            raise RowError(f"{FITTED}; row {row.row_id} of {row.source} in the manifest of {taught.hardware.name}")
    predictor = without_source(taught, row.source)
    scored = _scored(row, every, predictor, row.source)
    if taught is None or taught is predictor:
        return scored
    published = taught.calibration.published
    assert published is not None
    groups = [
        run.group for run in published.runs if run.source == row.source and is_copy(job, row.measured_s, [run.digest])
    ]
    near = taught.with_published(replace(published.without(group=groups[0] if groups else ()), asked_of=row.source))
    known = _scored(row, every, near, row.source)
    return replace(scored, known=(known.predicted_s, known.low_s, known.high_s))


def _scored(row: Row, every: Sequence[PublishedJob], predictor: Predictor | None, source: str) -> Scored:
    """The geometric mean over the possible jobs of a row, with an interval that covers all of theirs."""
    published, job, measured = every[0], every[0].job, row.measured_s
    calibration = {} if predictor is None else predictor.manifest.get("calibration", {})
    judged = is_copy(job, measured, calibration.get("judged_rows", ()))
    predictions = [predict(one.job, predictor or ROOFLINE, software=row.software) for one in every]
    times = [prediction.iteration_time_s for prediction in predictions]
    seconds = times[0] if len(times) == 1 else math.exp(fmean(map(math.log, times)))
    nearest = min(predictions, key=lambda one: abs(math.log(one.iteration_time_s / seconds)))
    ends = [prediction.interval(without=source, judged=judged) for prediction in predictions]
    low_s, high_s = min(low for low, _ in ends), max(high for _, high in ends)
    share = seconds / nearest.iteration_time_s
    return Scored(
        *(row, job, published.framework, measured, seconds, low_s, high_s),
        ideal_s=nearest.mfu * nearest.iteration_time_s,
        hfu=nearest.hfu / share,
        unsupported_share=1.0 if predictor is None else nearest.unsupported_share,
        breakdown={cause: own * share for cause, own in nearest.breakdown.items()},
        open=published.open,
        software=replace(predictions[0].software_used, profile=published.framework.name),
        fits=any(prediction.memory.fits for prediction in predictions),
    )
