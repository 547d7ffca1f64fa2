"""``stepsight calibrate``: fit on small runs of a table, judge by its larger ones, write only what is better."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.bounded import read_file
from stepsight.dataset.errors import PredictorError, TableError
from stepsight.dataset.files import digest
from stepsight.experiments.evaluation.calibration_gain import with_rows
from stepsight.experiments.evaluation.calibration_split import split_by_size, without_copies
from stepsight.experiments.evaluation.error_metrics import Errors, errors
from stepsight.experiments.evaluation.evaluate import FITTED, evaluate, score
from stepsight.experiments.evaluation.scored_row import Scored
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.calibration.constants import RESOURCES
from stepsight.training.calibration.fit_calibration import CalibrationFit, off_by
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.predictor_manifest import check_output

LEAST_GAIN = 0.02  # of the mean error: less is chance
MOST_LEFT = 30.0  # percent of mean error that may be left: beyond, the table is not of such hardware, or in other units
LARGER = "larger runs"
COPY = "a copy of a fitted run"
SIZES, ROWS = "each size left out in turn", "each job left out in turn"


@dataclass(frozen=True)
class Evidence:
    """Errors on runs that a fit did not see.

    Attributes:
        by: Which runs those are.
        before, after: Errors without and with calibration.
        sources: The same by source.
        digests: Of the runs.
        off_log: What 90 % of them are off by at most with calibration, in log-seconds; 0 of too few.
    """

    by: str
    before: Errors
    after: Errors
    sources: dict[str, tuple[Errors, Errors]]
    digests: tuple[str, ...]
    off_log: float

    @property
    def better(self) -> bool:
        """Whether the mean error is lower, and low."""
        before, after = self.before.mape or 0.0, self.after.mape or 0.0
        return after < (1 - LEAST_GAIN) * before and after <= MOST_LEFT

    def to_dict(self) -> dict[str, Any]:
        pairs = {name: {"before": b.to_dict(), "after": a.to_dict()} for name, (b, a) in self.sources.items()}
        return {"by": self.by, "before": self.before.to_dict(), "after": self.after.to_dict(), "sources": pairs}


def calibrate_runs(
    runs: Path, predictor: Predictor, out: Path, *, source: str = "*", most_gpus: int = 8
) -> dict[str, Any]:
    """Calibrate a predictor on small runs and write it if it predicts larger ones well, and better than before.

    Args:
        runs: Table of runs (see ``read_runs``); those of other hardware are left out.
        predictor: To start from.
        out: Folder of the predictor to write.
        source: Only rows whose source matches this pattern.
        most_gpus: Rows of at most so many devices are fitted, or those of a source's smallest size; larger ones judge.

    Returns:
        What ``--json`` prints, and ``text``; ``released`` says whether the predictor was written.

    Raises:
        TableError: If no row can be used.
        PredictorError: If the predictor was fitted on a row before, or ``out`` is something else.
    """
    check_output(out)
    evaluation = evaluate(runs, lambda hardware: predictor, source=source)
    if FITTED in evaluation.skipped:
        raise PredictorError(
            f"a calibration begins with a predictor that was fitted on none of its rows, got {predictor.source}, "
            f"fitted on {evaluation.skipped[FITTED]} of {sum(evaluation.rows.values())} rows in {runs}"
        )
    if len(evaluation.scored) < 2:
        raise TableError(
            f"a calibration takes at least 2 runs on {predictor.hardware.name} that can be said as jobs, "
            f"got {len(evaluation.scored)} of {sum(evaluation.rows.values())} rows in {runs} "
            f"(left out: {'; '.join(f'{count} x {why}' for why, count in evaluation.skipped.items()) or 'none'})"
        )
    fitted, every_larger = split_by_size(evaluation.scored, most_gpus)
    larger = without_copies(every_larger, fitted)
    copies = {COPY: len(every_larger) - len(larger)} if len(larger) < len(every_larger) else {}
    fit = with_rows(predictor, fitted)
    evidence = _on_larger(fit.predictor, larger) if larger else _left_out(fit, fitted)
    found = replace(fit.predictor.calibration, judged_log=evidence.off_log)
    value: dict[str, Any] = {
        "predictor": predictor.source,
        "fitted": len(fitted),
        "constants": {
            name: {
                "factor": found.constants.to_dict()[name],
                "prior_std_log": resource.prior_std_log,
                "low_log": resource.low_log,
                "high_log": resource.high_log,
            }
            for name, resource in RESOURCES.items()
        },
        "residual": {} if found.residual is None else {"spread": found.residual.spread, "noise": found.residual.noise},
        "evidence": evidence.to_dict(),
        "least_half_width_log": max(found.left_log, found.judged_log),
        "released": evidence.better,
        "skipped": {**evaluation.skipped, **copies},
    }
    if evidence.better:
        record = {key: value[key] for key in ("predictor", "fitted", "constants", "residual", "evidence")}
        judged = {"judged_rows": list(evidence.digests), "runs": {runs.name: digest(read_file(runs))}}
        manifest = fit.predictor.manifest
        changed = {
            "name": "",  # no longer the one that comes with the package
            "digest": digest(str(manifest.get("digest", "")), *manifest["fitted_rows"]),
            "calibration": {**record, **judged},
        }
        replace(fit.predictor, calibration=found, manifest={**manifest, **changed}).save(out)
        value["out"] = str(out)
    return {**value, "text": _text(value, evidence, out)}


def _on_larger(predictor: Predictor, rows: Sequence[Scored]) -> Evidence:
    after = [score(row.row, lambda hardware: predictor).predicted_s for row in rows]
    return _evidence(LARGER, rows, after)


def _left_out(fit: CalibrationFit, rows: Sequence[Scored]) -> Evidence:
    """Where no run is larger: sizes in turn, or runs where there is one size."""
    sizes: list[Hashable] = [row.row.gpus for row in rows]
    by = SIZES if len(set(sizes)) > 1 else ROWS
    off, _ = fit.process.left_out(sizes if by == SIZES else [row.job for row in rows])
    return _evidence(by, rows, [row.measured_s * float(np.exp(-log)) for row, log in zip(rows, off, strict=True)])


def _evidence(by: str, rows: Sequence[Scored], after: Sequence[float]) -> Evidence:
    sources = {}
    for name in dict.fromkeys(row.row.source for row in rows):
        index = [i for i, row in enumerate(rows) if row.row.source == name]
        sources[name] = _pair([rows[i] for i in index], [after[i] for i in index])
    off = off_by(np.log([row.measured_s / seconds for row, seconds in zip(rows, after, strict=True)]))
    return Evidence(by, *_pair(rows, after), sources, tuple(row.digest for row in rows), off)


def _pair(rows: Sequence[Scored], after: Sequence[float]) -> tuple[Errors, Errors]:
    measured = [row.measured_s for row in rows]
    return errors([row.predicted_s for row in rows], measured), errors(after, measured)


def _text(value: dict[str, Any], evidence: Evidence, out: Path) -> str:
    constants = ", ".join(f"{name} x {c['factor']:.3f}" for name, c in value["constants"].items())
    lines = [(*pair, name) for name, pair in evidence.sources.items()]
    if len(lines) > 1:
        lines.append((evidence.before, evidence.after, "all"))
    header = ["judged by", "runs", "MAPE before", "after", "max before", "after", "bias before", "after"]
    cells = [
        [name, before.used, *(Number(x or 0.0) for key in ("mape", "max", "bias") for x in _both(before, after, key))]
        for before, after, name in lines
    ]
    verdict = (
        f"wrote {out}"
        if evidence.better
        else f"REFUSED, nothing was written: it does not lower the mean error on {evidence.by} by "
        f"{100 * LEAST_GAIN:g} % of it, to {MOST_LEFT:g} % at most"
    )
    widest = 100 * math.expm1(value["least_half_width_log"])
    least = [f"intervals reach {widest:.1f} % up at least: what nine of ten of them were off by"] if widest else []
    return "\n".join(
        [
            f"calibrated {value['predictor']} on {value['fitted']} runs: {constants}",
            f"errors in percent on {evidence.by}:",
            table(header, cells),
            *least,
            *(f"left out {count}: {why}" for why, count in value["skipped"].items()),
            verdict,
        ]
    )


def _both(before: Errors, after: Errors, key: str) -> tuple[float | None, float | None]:
    return getattr(before, key), getattr(after, key)
