"""Reports of calibrations: errors without and with one, and the calibrated predictor, written only if it is better."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from stepsight.dataset.base.files import digest
from stepsight.experiments.evaluation.error_metrics import Errors, Times, errors
from stepsight.experiments.reports.text_table import Number
from stepsight.training.prediction.prediction import named_predictor
from stepsight.training.predictor.model_tables import check_output
from stepsight.training.predictor.predictor import Predictor

LEAST_GAIN = 0.02  # of the mean error: less is chance


def starting_predictor(predictor: Predictor | str, out: Path) -> Predictor:
    """The predictor that a calibration begins with.

    Raises:
        PredictorError: If there is none of that name, or ``out`` exists and is no predictor.
    """
    check_output(out)
    return named_predictor(predictor) if isinstance(predictor, str) else predictor


@dataclass(frozen=True, kw_only=True)
class Change:
    """Errors on the same measurements, which were not fitted.

    Attributes:
        before, after: Without and with calibration.
    """

    before: Errors
    after: Errors

    @classmethod
    def of(cls, before_s: Times, after_s: Times, measured_s: Times) -> Change:
        """The change of predicted seconds."""
        return cls(before=errors(before_s, measured_s), after=errors(after_s, measured_s))

    @property
    def is_gain(self) -> bool:
        """Whether the mean error falls by ``LEAST_GAIN`` of it."""
        return (self.after.mape or 0.0) < (1 - LEAST_GAIN) * (self.before.mape or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; errors in percent."""
        return {"before": self.before.to_dict(), "after": self.after.to_dict()}

    def cells(self, *names: str) -> list[Number]:
        """Cells of a table: each error before and after."""
        return [Number(getattr(found, name) or 0.0) for name in names for found in (self.before, self.after)]


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """Result of a calibration.

    Attributes:
        source: The predictor before calibration, in words.
        calibrated: The predictor after it.
        out: The folder asked for; it is written only if ``released``.
    """

    KEY: ClassVar[str]  # of the record in the manifest of the calibrated predictor
    RECORDED: ClassVar[tuple[str, ...]]  # keys of ``to_dict`` that the record has

    source: str
    calibrated: Predictor
    out: Path

    @property
    @abstractmethod
    def released(self) -> bool:
        """Whether the calibrated predictor is better, so that it was written."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Plain values of what was fitted and how it was judged."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; errors in percent."""
        value = {"predictor": self.source, **self.values(), "released": self.released}
        return {**value, "out": str(self.out)} if self.released else value

    def save(self, evidence: Sequence[str], **more: Any) -> None:
        """Write the calibrated predictor if it is better, with what fitted and judged it in its manifest.

        Args:
            evidence: Identifies the data, for the digest of the predictor.
            more: Further entries of the record.
        """
        if not self.released:
            return
        value, manifest = self.to_dict(), self.calibrated.manifest
        record = {key: value[key] for key in ("predictor", *self.RECORDED)} | more
        own = digest(str(manifest.get("digest", "")), *evidence)
        replace(self.calibrated, manifest={**manifest, "name": "", "digest": own, self.KEY: record}).save(self.out)
