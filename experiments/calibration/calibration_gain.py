"""The gain on larger runs by calibration on small ones, separately for every source and hardware.

Nothing of the rows that judge is used: neither to fit nor to choose, and a fit that makes them worse is shown as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.experiments.evaluation.error_metrics import Scored, carried_forward, series_of
from stepsight.experiments.evaluation.evaluate import Evaluation, PredictorOf, figures, score, without_source
from stepsight.training.fitting.fit_calibration import CalibrationFit, TimedJob, fit_calibration
from stepsight.training.predictor.predictor import Predictor

MOST_GPUS = 8
Split = tuple[list[Scored], list[Scored]]


def split_by_size(rows: Sequence[Scored], most_gpus: int = MOST_GPUS) -> Split:
    """Rows to fit and rows to judge, of every source's hardware for itself.

    Its rows of at most ``most_gpus`` devices are fitted, or those of its smallest size where it has none; its larger
    ones judge.
    """
    return _split(rows, most_gpus, lambda row: (row.row.source, row.job.cluster.hardware))


def split_by_series(rows: Sequence[Scored], most_gpus: int = MOST_GPUS) -> Split:
    """Split every series: a model in one strategy; the smallest size of a larger model begins one too."""
    return _split(rows, most_gpus, series_of)


def _split(rows: Sequence[Scored], most_gpus: int, set_of: Callable[[Scored], Hashable]) -> Split:
    smallest: dict[Hashable, int] = {}
    for row in rows:
        name = set_of(row)
        smallest[name] = min(smallest.get(name, row.row.gpus), row.row.gpus)
    fitted: list[Scored] = []
    judging: list[Scored] = []
    for row in rows:
        limit = max(most_gpus, smallest[set_of(row)])
        (fitted if row.row.gpus <= limit else judging).append(row)
    return fitted, judging


def without_copies(judging: Sequence[Scored], fitted: Sequence[Scored]) -> list[Scored]:
    """Rows to judge, without runs that were fitted and are listed twice."""
    known = {row.digest for row in fitted}
    return [row for row in judging if not row.is_among(known)]


def read_most_gpus(text: str) -> int:
    """The number in ``8``, ``8gpus`` or ``<=8gpus``.

    Raises:
        StepsightError: If it is no such text.
    """
    found = re.fullmatch(r"\s*(?:<=|≤)?\s*([1-9]\d{0,8})\s*(?:gpus?|devices?)?\s*", text, re.IGNORECASE)
    if found is None:
        raise StepsightError(f"--calibrate takes a number of devices below 10^9, as in 8gpus, got {text!r:.40}")
    return int(found[1])


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
