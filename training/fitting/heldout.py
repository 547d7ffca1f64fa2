"""Predicted against measured times, on held-out runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.training.measured.measured import MeasuredRun, read_runs
from stepsight.training.measured.stand_in_runs import predict_run
from stepsight.training.predictor.predictor import Predictor

if TYPE_CHECKING:
    from stepsight.training.context.fit_context import Example

Array = NDArray[np.float64]


@dataclass(frozen=True)
class HeldoutEvaluation:
    """Errors and coverage of a predictor on held-out runs."""

    # one per run: run, job, measured_s, spread_percent, repeat_percent, num_steps, predicted_s, low_s, high_s,
    # error_percent, predicted_without_gnn_s, unsupported, and the run's own op_error_regressor and op_error_with_gnn
    rows: list[dict[str, Any]]
    mape: float  # mean absolute error of the iteration time, percent
    floor: float  # mean of repeat_percent: the error that measuring the runs again would have, percent
    mape_without_gnn: float  # the same by regressors alone, percent
    spearman: float  # rank correlation of predicted and measured iteration times
    coverage: float  # percent of the runs that their interval holds
    op_error_regressor: float  # time-weighted error of ops in context by regressors alone, percent; 0 without traces
    op_error_with_gnn: float  # the same with the context model that ships, whichever it is


def evaluate_heldout(predictor: Predictor, collection: Path, *, role: str = "heldout") -> HeldoutEvaluation:
    """Predict every run of a role and compare the prediction with the measured time.

    Emulated pipeline stages judge only ops, because their iterations are not iterations of a job.

    Raises:
        TraceError: If the collection has no such run to judge iterations by, or one of them trained the predictor.
        PredictorError: If a run was on other hardware.
    """
    runs = read_runs([collection], (role,))
    if not any(run.manifest.whole for run in runs):
        got = f"{len(runs)} that stand in for stages" if runs else "none"
        raise TraceError(f"evaluation needs runs with role {role!r:.80}, got {got} in {collection}")
    trained = set(predictor.manifest.get("runs", ())) & {run.manifest.name for run in runs}
    known = {Path(str(path)).resolve() for path in predictor.manifest.get("collections", ())}
    if trained and role != "train" and collection.resolve() in known:
        raise TraceError(f"runs that trained a predictor cannot judge it, got {', '.join(sorted(trained))}")
    examples = _examples(runs, predictor)
    rows = [
        _row(run, predictor, [e for e in examples if e.run == run.manifest.name]) for run in runs if run.manifest.whole
    ]
    measured = np.array([row["measured_s"] for row in rows])
    predicted = np.array([row["predicted_s"] for row in rows])
    alone = np.array([row["predicted_without_gnn_s"] for row in rows])
    held = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    return HeldoutEvaluation(
        rows,
        _mape(predicted, measured),
        float(np.mean([row["repeat_percent"] for row in rows])),
        _mape(alone, measured),
        spearman(predicted, measured),
        100.0 * float(np.mean(held)),
        *_op_errors(examples, predictor),
    )


def _row(run: MeasuredRun, predictor: Predictor, examples: list[Example]) -> dict[str, Any]:
    manifest = run.manifest
    prediction = predict_run(manifest, predictor)
    alone = predict_run(manifest, predictor.without_context)
    measured = manifest.iteration_time_s
    steps = np.array(manifest.step_seconds)
    by_regressor, with_gnn = _op_errors(examples, predictor)
    return {
        "run": manifest.name,
        "job": manifest.job.name,
        "measured_s": measured,
        "spread_percent": 100 * float(np.std(steps) / measured),
        "repeat_percent": 100 * repeat_error(manifest.rounds),
        "num_steps": len(steps),
        "predicted_s": prediction.iteration_time_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "error_percent": 100 * (prediction.iteration_time_s / measured - 1),
        "predicted_without_gnn_s": alone.iteration_time_s,
        "unsupported": len(prediction.unsupported),
        "op_error_regressor": by_regressor,
        "op_error_with_gnn": with_gnn,
    }


def repeat_error(rounds: Sequence[Sequence[float]]) -> float:
    """Compute how far a round's median lies from the median of all other rounds: the mean over rounds.

    ``rounds``: seconds of each step by round; of one round, each step counts as a round.
    """
    parts = [np.array(steps) for steps in (rounds if len(rounds) > 1 else [[step] for step in rounds[0]])]
    if len(parts) < 2:
        return 0.0
    others = [np.median(np.concatenate(parts[:at] + parts[at + 1 :])) for at in range(len(parts))]
    return float(np.mean([abs(np.median(part) / other - 1) for part, other in zip(parts, others, strict=True)]))


def _op_errors(examples: list[Example], predictor: Predictor) -> tuple[float, float]:
    """Errors of ops in context by regressors alone, and with the context model; 0 without examples."""
    if not examples:
        return 0.0, 0.0
    from stepsight.training.context.fit_context import op_error

    alone = op_error(examples, None, predictor.hardware)
    return alone, op_error(examples, predictor.context, predictor.hardware)


def _examples(runs: list[MeasuredRun], predictor: Predictor) -> list[Example]:
    if not any(run.segments for run in runs):
        return []
    from stepsight.training.context.examples import make_examples

    return make_examples(runs, predictor)


def _mape(predicted: Array, measured: Array) -> float:
    return 100.0 * float(np.mean(np.abs(predicted / measured - 1)))


def spearman(one: Array, two: Array) -> float:
    """Rank correlation, ties ranked by their mean; 1 for fewer than two values."""
    if len(one) < 2:
        return 1.0
    first, second = _ranks(one), _ranks(two)
    if min(first.std(), second.std()) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse])
