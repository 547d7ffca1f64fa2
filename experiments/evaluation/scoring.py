"""Predicts a row of a table of runs: by a predictor that did not learn from it, and as ``predict`` answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from stepsight.dataset.base.errors import JobError, PredictorError
from stepsight.dataset.job.job import Job
from stepsight.experiments.evaluation.error_metrics import Scored
from stepsight.experiments.evaluation.row_jobs import PublishedJob, is_copy, jobs_of
from stepsight.experiments.evaluation.runs_table import Row, RowError
from stepsight.training.prediction.prediction import ROOFLINE, asked_predictor, is_word, predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.software_used import kernels_asked
from stepsight.training.shipped.catalogue import shipped_predictor, shipped_without
from stepsight.training.tracking.store import load_predictor

OTHER_HARDWARE = "the predictor is for other hardware"
FITTED = "the predictor was fitted on it"
PredictorOf = Callable[[str], Predictor | None]  # of a hardware's name; None: hardware facts answer


class FittedRowError(PredictorError):
    """A row that cannot judge a predictor because the predictor was fitted on it."""


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
    if taught is not None:
        _check_lawful(row, job, taught)
    predictor = without_source(taught, row.source)
    scored = _scored(row, every, predictor, row.source)
    if taught is None or taught is predictor:
        return scored
    published = taught.calibration.published
    assert published is not None
    groups = [
        run.group for run in published.runs if run.source == row.source and is_copy(job, row.measured_s, [run.digest])
    ]
    near = taught.with_published(published.without(group=groups[0])) if groups else taught
    known = _scored(row, every, near, row.source)
    return replace(scored, known=(known.predicted_s, known.low_s, known.high_s))


def _scored(row: Row, every: Sequence[PublishedJob], predictor: Predictor | None, source: str) -> Scored:
    """The geometric mean over the possible jobs of a row, with an interval that covers all of theirs."""
    published, measured = every[0], row.measured_s
    job = published.job
    calibration = {} if predictor is None else predictor.manifest.get("calibration", {})
    judged = is_copy(job, measured, calibration.get("judged_rows", ()))
    predictions = [predict(one.job, predictor or ROOFLINE, software=row.software) for one in every]
    times = [prediction.iteration_time_s for prediction in predictions]
    seconds = times[0] if len(times) == 1 else math.exp(fmean(map(math.log, times)))
    nearest = min(predictions, key=lambda one: abs(math.log(one.iteration_time_s / seconds)))
    ends = [prediction.interval(without=source, judged=judged) for prediction in predictions]
    share = seconds / nearest.iteration_time_s
    return Scored(
        row,
        job,
        published.framework,
        measured,
        seconds,
        min(low for low, _ in ends),
        max(high for _, high in ends),
        nearest.mfu * nearest.iteration_time_s,
        1.0 if predictor is None else nearest.unsupported_share,
        {cause: own * share for cause, own in nearest.breakdown.items()},
        published.open,
        replace(predictions[0].software_used, profile=published.framework.name),
        any(prediction.memory.fits for prediction in predictions),
    )


def _check_lawful(row: Row, job: Job, predictor: Predictor) -> None:
    """The predictor serves this hardware, knows the software that the row asks for, and has not seen the row."""
    if predictor.hardware.name != job.cluster.hardware:
        raise JobError(OTHER_HARDWARE)
    try:
        kernels_asked(predictor, job)
    except PredictorError as error:
        raise RowError(str(error)) from None
    if is_copy(job, row.measured_s, predictor.manifest.get("fitted_rows", ())):
        raise FittedRowError(
            f"rows that a predictor was fitted on cannot judge it, got row {row.row_id} of {row.source} "
            f"in the manifest of {predictor.hardware.name}"
        )
