"""``stepsight calibrate``: fit on small runs of a table, judge by its larger ones, write only improvements."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError, StepsightError, TableError
from stepsight.dataset.base.files import digest
from stepsight.experiments.calibration.calibrate_parts import LEAST_GAIN, Change, Report, starting_predictor
from stepsight.experiments.evaluation import error_metrics
from stepsight.experiments.evaluation.error_metrics import FITTED, PredictorOf, Scored, Times
from stepsight.experiments.evaluation.evaluate import Evaluation, evaluate, figures
from stepsight.experiments.evaluation.row_jobs import is_copy
from stepsight.experiments.reports.text_table import table
from stepsight.training.corrections.calibration import RESOURCES
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.fitting.train_tables import CalibrationFit, TimedJob, fit_calibration, off_by
from stepsight.training.predictor.predictor import Predictor

ONE_SIDED = 1.28  # standard deviations of a confidence of 90 %
PRIOR_RUNS, PRIOR_SPREAD = 2.0, 4.0  # percentage points by which gains of single runs usually differ
LEAST_REGRET = 0.1  # percentage points: a smaller rise of regret is chance
MOST_LEFT = 30.0  # percent of mean error that may be left: beyond, the table is not of such hardware, or in other units
LARGER = "larger runs"
COPY = "a copy of a fitted run"
SIZES, ROWS = "each size left out in turn", "each job left out in turn"


@dataclass(frozen=True, kw_only=True)
class Evidence(Change):
    """Errors on runs that were not fitted."""

    by: str  # which runs judged, in words
    sources: dict[str, Change]  # the same by source
    digests: tuple[str, ...]  # of the runs
    off_log: float  # 90th percentile of absolute errors with calibration, log-seconds; 0 if there are too few runs
    sure_gain: float  # lower bound, with 90 % confidence, of the fall of the mean absolute error, in percentage points
    regrets: tuple[float, float]  # of choosing a run by predictions before and after, in percent
    forward: Change  # errors of carrying forward the smallest run of each series, and of ours on the same runs

    @property
    def problems(self) -> list[str]:
        """Why calibrated predictions are no better: the mean error must surely fall by ``LEAST_GAIN``, to ``MOST_LEFT``
        at most, and regret must not rise.
        """
        before, after = self.before.mape or 0.0, self.after.mape or 0.0
        by = f"{before - after:.1f} points, with a confidence of 90 % by {self.sure_gain:.1f} at least"
        shown = f"{self.before.used} runs do not show that the mean error on {self.by} falls by"
        slower = "runs chosen by it would be {1:.1f} % slower than the fastest, {0:.1f} % without".format(*self.regrets)
        rules = {
            f"{shown} {100 * LEAST_GAIN:g} % of it: it falls by {by}": self.sure_gain > LEAST_GAIN * before,
            f"a mean error of {after:.1f} % is left, at most {MOST_LEFT:g} % may be": after <= MOST_LEFT,
            slower: self.regrets[1] <= self.regrets[0] + LEAST_REGRET,
        }
        return [problem for problem, holds in rules.items() if not holds]

    def to_dict(self) -> dict[str, Any]:
        sources = {name: change.to_dict() for name, change in self.sources.items()}
        value = {"by": self.by, **super().to_dict(), "sources": sources, "sure_gain": self.sure_gain}
        value |= dict(zip(("regret_before", "regret_after"), self.regrets, strict=True))
        forward = self.forward.to_dict()
        return {**value, "carried_forward": forward["before"], "ours_where_carried": forward["after"]}


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrationReport(Report):
    """Result of a calibration: its changes, its evidence, and whether it was written."""

    num_fitted: int  # runs that it was fitted on
    evidence: Evidence  # errors before and after on others
    skipped: Mapping[str, int]  # number of rows left out, by reason

    def __repr__(self) -> str:
        before, after = self.evidence.before.mape or 0.0, self.evidence.after.mape or 0.0
        verdict = f"wrote {self.out}" if self.released else "refused"
        return f"CalibrationReport({self.num_fitted} runs, MAPE {before:.1f} to {after:.1f} %, {verdict})"


def calibrate(
    runs: str | Path, predictor: Predictor | str, out: str | Path, *, source: str = "*", max_devices: int = 8
) -> CalibrationReport:
    """Calibrate a predictor on the small runs of a table, and write it if it predicts the larger ones better.

    The fit follows the gradient through the simulator.  It fits factors of resources, and a correction for similar
    jobs.  If the table has no larger runs, sizes or jobs are held out in turn to judge.

    Args:
        runs: Table of measured runs (.csv or .csv.gz), one row each; rows of other hardware are left out.
        predictor: The predictor to start from, or the name of one that comes with the package.
        out: Folder of the predictor to write.
        source: Use only rows whose source matches this pattern or, if none matches, contains it.
        max_devices: Runs of at most this many devices are fitted, or those of a source's smallest size; larger ones
            judge.

    Returns:
        ``.released`` says whether the predictor was written; ``.evidence`` has the errors before and after.

    Raises:
        TableError: If no row can be used.
        PredictorError: If the predictor was fitted on a row before, or ``out`` exists and is no predictor.

    Example:
        >>> report = calibrate("runs.csv", "a100-sxm", "runs/mine")  # doctest: +SKIP
        >>> report.released, report.evidence.after.mape  # doctest: +SKIP
    """
    runs, out = Path(runs), Path(out)
    evaluation = evaluate(runs, predictor := starting_predictor(predictor, out), source=source)
    rows = f"{sum(evaluation.rows.values())} rows in {runs}"
    if FITTED in evaluation.skipped:
        rule = "a calibration begins with a predictor that was fitted on none of its rows"
        raise PredictorError(f"{rule}, got {predictor.source}, fitted on {evaluation.skipped[FITTED]} of {rows}")
    if len(evaluation.scored) < 2:
        left_out = "; ".join(f"{count} x {why}" for why, count in evaluation.skipped.items()) or "none"
        rule = f"a calibration takes at least 2 runs on {predictor.hardware.name} that can be expressed as jobs"
        raise TableError(f"{rule}, got {len(evaluation.scored)} of {rows} (left out: {left_out})")
    fitted, every_larger = split_rows(evaluation.scored, max_devices)
    larger = without_copies(every_larger, fitted)
    fit = with_rows(predictor, fitted)
    by, judging = LARGER, larger or fitted
    if larger:
        after = [error_metrics.score(row.row, lambda _: fit.predictor).predicted_s for row in larger]
    else:  # sizes are held out in turn, or runs if there is one size
        by = SIZES if len({row.row.gpus for row in fitted}) > 1 else ROWS
        off, _ = fit.process.left_out([row.row.gpus if by == SIZES else row.job for row in fitted])
        after = [row.measured_s * float(np.exp(-log)) for row, log in zip(fitted, off, strict=True)]
    evidence = _evidence(by, judging, after, evaluation.scored)
    own = replace(fit.predictor, calibration=replace(fit.predictor.calibration, judged_log=evidence.off_log))
    skipped = Counter(evaluation.skipped) + Counter({COPY: len(every_larger) - len(larger)})  # no zeros
    report = _report(predictor.source, own, out, (len(fitted), evidence, skipped))
    recorded = ("fitted", "constants", "residual", "evidence")
    of = {"judged_rows": list(evidence.digests), "runs": {runs.name: digest(runs.read_bytes())}}
    report.save("calibration", recorded, fit.predictor.manifest["fitted_rows"], **of)
    return report


def _report(source: str, own: Predictor, out: Path, judged: tuple[int, Evidence, Counter[str]]) -> CalibrationReport:
    """Values: errors in percent, factors of resources, widths in log-seconds; and the same as tables for people."""
    (num_fitted, evidence, skipped), found = judged, own.calibration
    factors, residual, names = found.constants.to_dict(), found.residual, ("prior_std_log", "low_log", "high_log")
    least = max(found.left_log, found.judged_log)
    values = {
        "fitted": num_fitted,
        "constants": {
            name: {"factor": factors[name], **{key: getattr(resource, key) for key in names}}
            for name, resource in RESOURCES.items()
        },
        "residual": {} if residual is None else {"spread": residual.spread, "noise": residual.noise},
        "evidence": evidence.to_dict(),
        "least_half_width_log": least,
        "skipped": dict(skipped),
    }
    changes: dict[str, Change] = {**evidence.sources, **({"all": evidence} if len(evidence.sources) > 1 else {})}
    header = ["judged by", "runs", "MAPE before", "after", "max before", "after", "bias before", "after"]
    cells = [[name, change.before.used, *change.cells("mape", "max", "bias")] for name, change in changes.items()]
    constants = ", ".join(f"{name} x {factors[name]:.3f}" for name in RESOURCES)
    lines = [
        f"calibrated {source} on {num_fitted} runs: {constants}",
        f"errors in percent on {evidence.by}:",
        table(header, cells),
    ]
    if least:
        widest = 100 * math.expm1(least)
        lines.append(f"intervals reach {widest:.1f} % up at least: what nine of ten of them were off by")
    carried, ours = evidence.forward.before, evidence.forward.after
    if carried.used:
        beside = f"{carried.used} of these runs, calibrated {ours.mape or 0.0:.1f} %"
        lines.append(
            f"carrying forward the smallest run of each series: mean error {carried.mape or 0.0:.1f} % on {beside}"
        )
    lines += [f"left out {count}: {why}" for why, count in skipped.items()]
    shared: dict[str, Any] = {"source": source, "calibrated": own, "out": out, "problems": evidence.problems}
    told: dict[str, Any] = {"evidence": evidence, "num_fitted": num_fitted, "skipped": skipped}
    return CalibrationReport(**shared, **told, values=values, lines=lines)


def _evidence(by: str, rows: Sequence[Scored], after: Sequence[float], every_row: Sequence[Scored]) -> Evidence:
    before_s, after_s = np.array([row.predicted_s for row in rows]), np.array(after)
    measured_s, choices = np.array([row.measured_s for row in rows]), [row.choice for row in rows]

    def change(at: Sequence[int] | NDArray[np.int64], before: Times) -> Change:
        return Change.of(before, after_s[at], measured_s[at])

    forward = dict(zip(map(id, every_row), error_metrics.carried_forward(every_row), strict=True))
    known = {at: seconds for at, row in enumerate(rows) if (seconds := forward[id(row)]) is not None}
    sources = rows_by(row.row.source for row in rows)
    first, second = (
        error_metrics.regret(choices, list(seconds), measured_s.tolist()) or 0.0 for seconds in (before_s, after_s)
    )
    return Evidence(
        **vars(change(range(len(rows)), before_s)),
        by=by,
        sources={str(name): change(at, before_s[at]) for name, at in sources.items()},
        digests=tuple(row.digest for row in rows),
        off_log=off_by(np.log(measured_s / after_s)),
        sure_gain=sure_gain(rows, after),
        regrets=(first, second),
        forward=change([*known], [*known.values()]),
    )


def sure_gain(rows: Sequence[Scored], after: Sequence[float]) -> float:
    """Percentage points by which the mean absolute error falls at least, with a confidence of 90 %. Few runs show
    little: their spread is joined with a prior one, as if ``PRIOR_RUNS`` more had differed by it.
    """
    pairs = zip(rows, after, strict=True)
    gains = np.array([abs(row.error) - abs(100.0 * (s / row.measured_s - 1.0)) for row, s in pairs])
    count = len(gains)
    spread = (float(((gains - gains.mean()) ** 2).sum()) + PRIOR_RUNS * PRIOR_SPREAD**2) / (count - 1 + PRIOR_RUNS)
    return float(gains.mean()) - ONE_SIDED * math.sqrt(spread / count)


MOST_GPUS = 8


def source_of(row: Scored) -> Hashable:
    """Common properties of the runs of a source's hardware."""
    return row.row.source, row.job.cluster.hardware


def split_rows(
    rows: Sequence[Scored], most_gpus: int = MOST_GPUS, set_of: Callable[[Scored], Hashable] = source_of
) -> tuple[list[Scored], list[Scored]]:
    """Rows to fit, of at most ``most_gpus`` devices or of a set's smallest size, and larger ones to judge."""
    fitted = set[int]()
    for indices in rows_by(map(set_of, rows)).values():
        limit = max(most_gpus, min(rows[i].row.gpus for i in indices))
        fitted.update(i for i in indices if rows[i].row.gpus <= limit)
    return [rows[i] for i in sorted(fitted)], [row for i, row in enumerate(rows) if i not in fitted]


def without_copies(judging: Sequence[Scored], fitted: Sequence[Scored]) -> list[Scored]:
    """Rows to judge, without runs that were fitted and are listed twice."""
    known = {row.digest for row in fitted}
    return [row for row in judging if not is_copy(row.job, row.measured_s, known)]


def read_most_gpus(text: str) -> int:
    """The number in ``8``, ``8gpus`` or ``<=8gpus``."""
    found = re.fullmatch(r"\s*(?:<=|≤)?\s*([1-9]\d{0,8})\s*(?:gpus?|devices?)?\s*", text, re.IGNORECASE)
    if found is None:
        raise StepsightError(f"--calibrate takes a number of devices below 10^9, as in 8gpus, got {text!r:.40}")
    return int(found[1])


# The sets into which a table is split, each with rows to fit and rows that judge; and what is fitted, for people.
SPLITS: dict[str, Callable[[Scored], Hashable]] = {
    "calibrated": error_metrics.series_of,
    "calibrated_by_source": source_of,
}
FITTED_ON = {
    "calibrated": "rows of at most {} devices, and the smallest runs of series that have none",
    "calibrated_by_source": "rows of at most {} devices alone, or a source's smallest size where it has none",
}


# A larger row, as shipped, calibrated, and carried forward (None where it is of the smallest size).
_Judged = tuple[Scored, Scored, float | None]


def calibrate_small(
    evaluation: Evaluation,
    predictor_of: PredictorOf,
    most_gpus: int,
    set_of: Callable[[Scored], Hashable],
    on_set: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Fit and judge every source's hardware; figures of calibrated and shipped predictions by source and kind."""
    carried = dict(zip(map(id, evaluation.scored), error_metrics.carried_forward(evaluation.scored), strict=True))
    fitted_of, judged = Counter[str](), dict[str, list[_Judged]]()
    sets = evaluation.by(lambda row: f"{row.row.source}/{row.job.cluster.hardware}")
    for number, rows in enumerate(sets.values(), 1):
        if on_set is not None:
            on_set(number, len(sets))
        source = rows[0].row.source
        predictor = error_metrics.without_source(predictor_of(rows[0].job.cluster.hardware), source)
        fitted, judging = split_rows(rows, most_gpus, set_of)
        judging = without_copies(judging, fitted)
        if predictor is None or not judging:
            continue
        own = with_rows(predictor, fitted).predictor
        fitted_of[source] += len(fitted)
        again = [error_metrics.score(row.row, lambda hardware, own=own: own) for row in judging]  # type: ignore[misc]
        found = [(row, after, carried[id(row)]) for row, after in zip(judging, again, strict=True)]
        judged.setdefault(source, []).extend(found)
    every = [row for found in judged.values() for row in found]
    kinds = rows_by(f"{row.row.source}: {row.kind}" for row, _, _ in every)
    return {
        "sources": {name: {"fitted": fitted_of[name], **_beside(found)} for name, found in judged.items()},
        "overall": {"fitted": fitted_of.total(), **_beside(every)},
        "kinds": {name: _beside([every[at] for at in index]) for name, index in kinds.items()},
        "predictions": [calibrated.to_dict() for _, calibrated, _ in every],
    }


def _beside(rows: Sequence[_Judged]) -> dict[str, Any]:
    carried = [replace(row, predicted_s=seconds) for row, _, seconds in rows if seconds is not None]
    return {
        **figures([calibrated for _, calibrated, _ in rows]),
        "as_shipped": figures([row for row, _, _ in rows]),
        "carried_forward": figures(carried) if len(carried) == len(rows) else None,
    }


def with_rows(predictor: Predictor, rows: Sequence[Scored]) -> CalibrationFit:
    """The predictor calibrated on some rows (of those with open cells only if all have), which its manifest names."""
    sure = [row for row in rows if not row.open] or rows
    fit = fit_calibration(predictor, [TimedJob(row.job, row.measured_s, row.row.software) for row in sure])
    seen = {*predictor.manifest.get("fitted_rows", ()), *(row.digest for row in rows)}
    return replace(fit, predictor=replace(fit.predictor, manifest={**predictor.manifest, "fitted_rows": sorted(seen)}))
