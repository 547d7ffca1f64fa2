"""Warnings of a prediction."""

from __future__ import annotations

from typing import Protocol

from stepsight.dataset.job.job import Job
from stepsight.training.prediction.prediction_views import seconds_text
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.software_used import SoftwareUsed

POSSIBLE_MFU = 1.5  # differences in clocks and precision explain no more


class Warned(Protocol):
    """The fields of a ``Prediction`` that the warnings need."""

    @property
    def job(self) -> Job: ...
    @property
    def mfu(self) -> float: ...
    @property
    def predictor(self) -> Predictor | None: ...
    @property
    def software(self) -> str: ...
    @property
    def software_used(self) -> SoftwareUsed: ...
    @property
    def iteration_time_s(self) -> float: ...
    @property
    def interleaved(self) -> Warned | None: ...


def warnings_of(prediction: Warned) -> tuple[str, ...]:
    """Warnings about a job and the predictor, for people."""
    found = list(prediction.job.warnings)
    execution = prediction.job.execution
    found += prediction.software_used.doubts if execution.kernels or execution.nccl or execution.date else ()
    other = prediction.interleaved
    if other is not None:
        found.append(
            f"parallel.virtual_stages is not stated, and {prediction.job.framework} usually interleaves: 1 is taken; "
            f"{other.job.parallel.virtual_stages} would take {seconds_text(other.iteration_time_s)}, and the interval "
            "covers both; state it for a narrower one"
        )
    if prediction.mfu > POSSIBLE_MFU:
        found.append(
            f"devices reach at most {100 * POSSIBLE_MFU:.0f} % of their peak, got {100 * prediction.mfu:.0f} %: the "
            "peak FLOP/s or the times of this predictor are wrong"
        )
    residual = None if prediction.predictor is None else prediction.predictor.calibration.residual
    if residual is not None and prediction.software not in residual.software:
        software = prediction.software
        named = f"framework {software!r:.80}" if software else "a framework that is not named"
        found.append(
            f"{named} ran none of the runs that this predictor was calibrated on: their correction counts for less "
            f"(theirs: {', '.join(map(repr, residual.software))})"
        )
    return tuple(found)
