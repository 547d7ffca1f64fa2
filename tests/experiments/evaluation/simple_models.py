"""Simple models beside the predictions of published runs: a roofline, a closed form, and a constant utilisation.

*roofline*: the simulator with hardware facts alone.  *analytic*: a sum of terms, without simulating a schedule, from
the same rates of ops and collectives that answer for the job.  *mfu*: the model's FLOP at one utilisation for each chip
and precision, times the pipeline's bubble; the utilisation is the best one for the very rows that it is judged on.

``python -m tests.experiments.evaluation.simple_models RUNS`` prints their errors on a table of runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError, PredictorError
from stepsight.experiments.evaluation import error_metrics
from stepsight.experiments.evaluation.error_metrics import PredictorOf, Scored
from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.small_to_large import closed_form
from stepsight.training.prediction.prediction import ROOFLINE, predict

ANALYTIC, MFU = "analytic", "mfu"
BASELINES = (ROOFLINE, ANALYTIC, MFU)


def baseline_figures(rows: Sequence[Scored], predictor_of: PredictorOf, names: Sequence[str]) -> dict[str, Any]:
    """Errors and regret of baselines on rows by name, in percent, and as ``ours`` those of the predictions of the rows
    that each answers.
    """

    def seconds_of(name: str, row: Scored) -> float | None:
        taught = predictor_of(row.job.cluster.hardware) if name == ANALYTIC else None
        asked = error_metrics.without_source(taught, row.row.source)
        with suppress(JobError, PredictorError):  # it says nothing
            found = predict(row.job, asked or ROOFLINE, software=row.row.software)
            return sum(closed_form(found.simulation).values()) if name == ANALYTIC else found.iteration_time_s
        return None

    def figures(of: Sequence[Scored], seconds: Sequence[float]) -> dict[str, Any]:
        measured = [row.measured_s for row in of]
        return {
            **error_metrics.errors(seconds, measured).to_dict(),
            "regret": error_metrics.regret([row.choice for row in of], seconds, measured),
        }

    found = {}
    for name in names:
        mfu = error_metrics.constant_mfu(rows, by_source=False) if name == MFU else None
        seconds: Sequence[float | None] = mfu or [seconds_of(name, row) for row in rows]
        pairs = [(row, value) for row, value in zip(rows, seconds, strict=True) if value is not None]
        known = [row for row, _ in pairs]
        ours = figures(known, [row.predicted_s for row in known])
        found[name] = {**figures(known, [value for _, value in pairs]), "ours": ours}
    return found


def baselines_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each baseline, and ours on the same rows."""
    pairs = [((name, each), ("  ours", each["ours"])) for name, each in found.items()]
    rows = [{"model": name, **of} for pair in pairs for name, of in pair]
    keys = ("mape", "median", "p90", "max", "bias", "regret")
    columns = {"baseline, percent": "model", "rows": "used", **{key: key for key in keys}}
    return table_of(rows, columns)


def main(runs: str) -> None:
    scored = evaluate(Path(runs)).scored
    print(baselines_text(baseline_figures(scored, error_metrics.predictor_by_hardware(), BASELINES)))


if __name__ == "__main__":
    main(*sys.argv[1:])
