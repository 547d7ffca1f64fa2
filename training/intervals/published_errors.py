"""How wide intervals of predictors from public tables are: what they were off by on published runs of other sources.

Such a predictor has no runs of its own to hold back.  Its errors on published runs are kept by source and by what jobs
use (experts, 8-bit products, fused attention), and a job's interval is the conformal one over the runs most like it.
Where a source's own runs are judged, its errors do not count: no interval depends on the source that it is judged by.
``python -m stepsight.experiments.evaluation.interval_widths RUNS`` writes the preset again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.caching import cached
from stepsight.dataset.files import read_json
from stepsight.dataset.job import Job
from stepsight.dataset.specs import QUANTIZED
from stepsight.training.intervals.conformal import COVERAGE, MOST_LOG, conformal_quantile

PRESET = Path(__file__).with_name("published_widths.json")
MIN_ROWS, MIN_SOURCES = 20, 2  # of a class; else a coarser one counts
SHARE_WEIGHT = 1.0  # an error counts half where all of an iteration lies outside of what was measured


def class_of(job: Job) -> tuple[str, ...]:
    """What of a job makes predictions of it good or bad, the coarsest first."""
    return (
        "mixture" if job.model.experts else "dense",
        "8-bit" if job.batch.precision in QUANTIZED else "16-bit or more",
        "fused" if job.model.fused_attention else "unfused",
    )


def stretch(unsupported_share: float) -> float:
    """How much wider an interval is for the part of an iteration that lies outside of what was measured."""
    return 1.0 + SHARE_WEIGHT * min(max(unsupported_share, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Off:
    """One published run.

    Attributes:
        digest: Of its row.
        kind: Its job's ``class_of``.
        score: ``|log(measured / predicted)|`` over its ``stretch``.
    """

    digest: str
    kind: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Widths:
    """Errors on published runs, by source."""

    sources: Mapping[str, tuple[Off, ...]]
    _known: dict[tuple[tuple[str, ...], str], float] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def half_width(self, job: Job, unsupported_share: float, without: str = "") -> float:
        """Half of a job's interval in log-seconds, by the errors of all sources but ``without``."""
        return self.half_width_of(class_of(job), unsupported_share, without)

    def half_width_of(self, kind: tuple[str, ...], unsupported_share: float, without: str = "") -> float:
        """The same for anything of a class, see ``class_of``."""
        key = kind, without
        if key not in self._known:
            self._known[key] = self._quantile(*key)
        return self._known[key] * stretch(unsupported_share)

    def _quantile(self, kind: tuple[str, ...], without: str) -> float:
        alike: list[tuple[str, float]] = []
        for level in range(len(kind), -1, -1):
            alike = [
                (name, off.score)
                for name, rows in self.sources.items()
                for off in rows
                if name != without and off.kind[:level] == kind[:level]
            ]
            if len(alike) >= MIN_ROWS and len({name for name, _ in alike}) >= MIN_SOURCES:
                break
        return conformal_quantile([score for _, score in alike])

    def to_dict(self) -> dict[str, Any]:
        rows = {name: [[o.digest, *o.kind, round(o.score, 4)] for o in offs] for name, offs in self.sources.items()}
        return {"coverage": COVERAGE, "sources": rows}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Widths:
        sources = {
            name: tuple(Off(str(row[0]), tuple(map(str, row[1:-1])), float(row[-1])) for row in rows)
            for name, rows in value["sources"].items()
        }
        for name, rows in sources.items():
            for row in rows:
                if not 0 <= row.score < MOST_LOG:
                    raise ValueError(f"an error of {name} must lie from 0 to {MOST_LOG}, got {row.score}")
        return cls(sources)


@cached(1)
def published_widths() -> Widths:
    """The preset that comes with the package."""
    return Widths.from_dict(read_json(PRESET))
