"""One row with its prediction, of which all figures are made, and the predictor of its hardware."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from stepsight.dataset.job.frameworks import Framework
from stepsight.dataset.job.job import Job
from stepsight.experiments.evaluation.row_jobs import is_copy, run_digest
from stepsight.experiments.evaluation.runs_table import Row
from stepsight.training.prediction.prediction import ROOFLINE, named_predictor
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.software_used import SoftwareUsed
from stepsight.training.shipped.catalogue import shipped_predictor, shipped_without

NOTABLE_SHARE = 0.2  # what takes a fifth of an iteration can be wrong by half before that costs ten percent


@dataclass(frozen=True, slots=True)
class Scored:
    """A row that was predicted.

    Attributes:
        row, job, framework: What ran.
        measured_s, predicted_s, low_s, high_s: Iteration times.
        ideal_s: Time of the model's FLOP at the devices' peak.
        unsupported_share: Part of the predicted time in what lies outside of what was measured, 0 ... 1.
        breakdown: Seconds by cause.
        open: Columns that the row leaves open, each with the values that were predicted; empty: none.
        software: Whose kernels answered, and what the row states of its software without effect.
    """

    row: Row
    job: Job
    framework: Framework
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    ideal_s: float
    unsupported_share: float
    breakdown: dict[str, float] = field(repr=False)
    open: str = ""
    software: SoftwareUsed = field(default_factory=SoftwareUsed)

    @property
    def digest(self) -> str:
        """Identity of the run; see ``run_digest``."""
        return run_digest(self.job, self.measured_s)

    def is_among(self, digests: Collection[str]) -> bool:
        """Whether the run, its time rounded either way, is among some digests."""
        return is_copy(self.job, self.measured_s, digests)

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
        return self.unsupported_share > NOTABLE_SHARE

    @property
    def choice(self) -> Hashable:
        """Common properties of rows that a user could choose between: model, devices and global batch."""
        m, batch = self.job.model, self.job.batch
        model = self.row.text("model_name") or (m.layers, m.hidden, m.heads)
        devices = (self.job.cluster.hardware, self.row.gpus)
        return self.row.source, model, m.seq_len, devices, batch.global_batch, batch.precision

    @property
    def kind(self) -> str:
        """Rows of a source fall into kinds that are hard in different ways: precision, mixtures of experts."""
        mixture = "moe" if self.job.model.experts else "dense"
        return f"{self.job.batch.precision} {mixture}"

    def _times(self) -> dict[str, float]:
        names = ("measured_s", "predicted_s", "low_s", "high_s")
        return {name: getattr(self, name) for name in names}

    def to_flat_dict(self) -> dict[str, Any]:
        """One row of a table: the run, its times in seconds, its error in percent, its breakdown in seconds."""
        return {
            "source": self.row.source,
            "row_id": self.row.row_id,
            "job": self.job.name,
            "framework": self.framework.name,
            "hardware": self.job.cluster.hardware,
            "devices": self.job.cluster.num_devices,
            **self._times(),
            "error_percent": self.error,
            "in_interval": self.in_interval,
            "open": self.open,
            "kernels": "; ".join(f"{family} by {name}" for family, name in self.software.kernels.items()),
            "unused_software": "; ".join(self.software.unused),
            "unsupported_share": self.unsupported_share,
            **{f"{cause}_s": seconds for cause, seconds in self.breakdown.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """The measured and predicted times in seconds and the profile, for JSON."""
        open_cells = {"open": self.open} if self.open else {}
        return {"row_id": self.row.row_id, "profile": self.framework.name, **self._times(), **open_cells}


PredictorOf = Callable[[str], Predictor | None]  # of a hardware's name; None: hardware facts answer


def without_source(predictor: Predictor | None, source: str) -> Predictor | None:
    """A shipped predictor without what it learned from one source of published runs; other predictors unchanged."""
    if predictor is None or predictor is not shipped_predictor(predictor.hardware.name):
        return predictor
    return shipped_without(predictor.hardware.name, source)


def predictor_by_hardware(asked: Predictor | str | None = None) -> PredictorOf:
    """The given predictor (or hardware facts) for every row; if none is given, the shipped one for each hardware.

    Raises:
        PredictorError: If the package has no predictor of that name.
    """
    if asked is None:
        return shipped_predictor
    if asked == ROOFLINE:
        return lambda hardware: None
    predictor = named_predictor(asked) if isinstance(asked, str) else asked
    return lambda hardware: predictor
