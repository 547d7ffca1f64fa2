"""Tables of the error of a step by model, over jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stepsight.experiments.reports.text_table import Number, table

ASKED_PERCENT = 3.0


@dataclass(frozen=True)
class StepRow:
    """A model's error of a step.

    Attributes:
        model: Which.
        error_percent: Mean over jobs of the absolute error of a step.
        spread: Standard error over jobs.
        worst_percent: Of all jobs.
        within: Jobs whose error is at most ``ASKED_PERCENT``.
        jobs: Error of each job, in percent, by name.
    """

    model: str
    error_percent: float
    spread: float
    worst_percent: float
    within: int
    jobs: Mapping[str, float]


@dataclass(frozen=True)
class StepTable:
    """Rows of a task, and what it judges."""

    task: str
    about: str
    rows: tuple[StepRow, ...]

    def text(self) -> str:
        """For people."""
        count = len(self.rows[0].jobs)
        cells = [
            [row.model, Number(row.error_percent), Number(row.spread), Number(row.worst_percent), row.within]
            for row in self.rows
        ]
        header = ["model", "step error %", "± over jobs", "worst %", f"jobs within {ASKED_PERCENT:.0f} %"]
        return f"{self.task}: {self.about}, {count} jobs\n{table(header, cells)}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def step_table(task: str, about: str, errors: Mapping[str, Mapping[str, float]]) -> StepTable:
    """The table of errors in percent, by model and job."""
    return StepTable(task, about, tuple(_row(name, found) for name, found in errors.items()))


def _row(name: str, errors: Mapping[str, float]) -> StepRow:
    off = np.abs(list(errors.values()))
    spread = float(off.std(ddof=1) / np.sqrt(len(off))) if len(off) > 1 else 0.0
    return StepRow(name, float(off.mean()), spread, float(off.max()), int((off <= ASKED_PERCENT).sum()), dict(errors))
