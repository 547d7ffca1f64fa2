"""The gain on larger runs by calibration on small ones, separately for every source and hardware.

Nothing of the rows that judge is used: neither to fit nor to choose, and a fit that makes them worse is shown as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepsight.experiments.calibration.calibration_split import Split, split_by_series, split_by_size, without_copies
from stepsight.experiments.evaluation.error_metrics import carried_forward
from stepsight.experiments.evaluation.evaluate import Evaluation, figures, score
from stepsight.experiments.evaluation.scored_row import PredictorOf, Scored, without_source
from stepsight.training.fitting.fit_calibration import CalibrationFit, TimedJob, fit_calibration
from stepsight.training.predictor.predictor import Predictor

# What is fitted, for people: how a table is split into rows to fit and rows that judge.
SPLITS: dict[str, Callable[[Sequence[Scored], int], Split]] = {
    "calibrated": split_by_series,
    "calibrated_by_source": split_by_size,
}
FITTED_ON = {
    "calibrated": "rows of at most {} devices, and the smallest runs of series that have none",
    "calibrated_by_source": "rows of at most {} devices alone, or a source's smallest size where it has none",
}


@dataclass(frozen=True)
class CalibratedRow:
    """A larger row, as shipped and calibrated.

    Attributes:
        carried_s: The smallest run of its series carried forward; None where the row is of the smallest size.
    """

    as_shipped: Scored
    calibrated: Scored
    carried_s: float | None


@dataclass
class Calibrated:
    """Errors before and after calibration.

    Attributes:
        fitted: Number of rows fitted, by source.
        rows: Larger rows by source.
    """

    fitted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rows: dict[str, list[CalibratedRow]] = field(default_factory=lambda: defaultdict(list))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: figures of the calibrated predictions, with those as shipped of the same rows."""
        every = [row for rows in self.rows.values() for row in rows]
        kinds: dict[str, list[CalibratedRow]] = defaultdict(list)
        for row in every:
            kinds[f"{row.as_shipped.row.source}: {row.as_shipped.kind}"].append(row)
        return {
            "sources": {name: {"fitted": self.fitted[name], **_beside(rows)} for name, rows in self.rows.items()},
            "overall": {"fitted": sum(self.fitted[name] for name in self.rows), **_beside(every)},
            "kinds": {name: _beside(rows) for name, rows in kinds.items()},
            "predictions": [row.calibrated.to_dict() for row in every],
        }


def _beside(rows: Sequence[CalibratedRow]) -> dict[str, Any]:
    carried = [replace(r.as_shipped, predicted_s=r.carried_s) for r in rows if r.carried_s is not None]
    return {
        **figures([row.calibrated for row in rows]),
        "as_shipped": figures([row.as_shipped for row in rows]),
        "carried_forward": figures(carried) if len(carried) == len(rows) else None,
    }


def calibrate_small(
    evaluation: Evaluation,
    predictor_of: PredictorOf,
    most_gpus: int,
    split: Callable[[Sequence[Scored], int], Split],
    on_set: Callable[[int, int], None] | None = None,
) -> Calibrated:
    """Fit and judge every source's hardware for which there is a predictor.

    Args:
        split: One of ``SPLITS``.
        on_set: Called with how many sources' hardware are done, of how many.
    """
    carried = dict(zip(map(id, evaluation.scored), carried_forward(evaluation.scored), strict=True))
    result = Calibrated()
    sets = evaluation.by(lambda row: f"{row.row.source}/{row.job.cluster.hardware}")
    for number, rows in enumerate(sets.values(), 1):
        if on_set is not None:
            on_set(number, len(sets))
        predictor = without_source(predictor_of(rows[0].job.cluster.hardware), rows[0].row.source)
        fitted, judging = split(rows, most_gpus)
        judging = without_copies(judging, fitted)
        if predictor is None or not judging:
            continue
        own = with_rows(predictor, fitted).predictor
        source = rows[0].row.source
        result.fitted[source] += len(fitted)
        result.rows[source] += [
            CalibratedRow(row, score(row.row, lambda hardware, own=own: own), carried[id(row)])  # type: ignore[misc]
            for row in judging
        ]
    return result


def with_rows(predictor: Predictor, rows: Sequence[Scored]) -> CalibrationFit:
    """The predictor calibrated on some rows, which its manifest names from then on.

    Rows that leave open what ran do not teach, unless all do.
    """
    sure = [row for row in rows if not row.open] or rows
    fit = fit_calibration(predictor, [TimedJob(row.job, row.measured_s, row.row.software) for row in sure])
    seen = {*predictor.manifest.get("fitted_rows", ()), *(row.digest for row in rows)}
    return replace(fit, predictor=replace(fit.predictor, manifest={**predictor.manifest, "fitted_rows": sorted(seen)}))
