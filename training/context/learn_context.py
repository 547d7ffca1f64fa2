"""Context model, calibration and intervals of a predictor, each judged on runs held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.training.context.examples import Taught, family_errors, make_examples, make_wholes
from stepsight.training.context.fit_table import fit_table
from stepsight.training.context.held_back import ALONE, CANDIDATES, HeldBack, hold_back
from stepsight.training.corrections.calibration import fit_scale
from stepsight.training.intervals.conformal import fit_intervals
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import MeasuredRun
from stepsight.training.predictor.predictor import Predictor

Say = Callable[[str], None]
MIN_RUNS = 4  # fewer cannot be held back in turn
_METRICS = {
    ALONE: "regressor", "table by kind and phase": "with_table", "network without edges": "without_edges",
    "graph network": "with_gnn",
}  # fmt: skip
_RULE = "the simplest model within one standard error of the best, on runs held back in turn"


def learn_context(
    predictor: Predictor,
    runs: Sequence[MeasuredRun],
    imported: Sequence[ImportedSegments],
    seed: int,
    say: Say,
) -> Predictor:
    """Choose the context model that ships, and learn it, the calibration and the interval.

    Args:
        predictor: Regressors, no context model.
        runs, imported: What was measured.
        seed: Of folds and weights.
        say: Told what is going on.
    """
    every: list[Taught] = [*runs, *imported]
    judged = sum(run.whole for run in runs)
    examples, wholes = make_examples(every, predictor), make_wholes(runs, predictor)
    say(f"context: {len(every)} runs, {len(examples)} distinct segments")
    if judged < MIN_RUNS and len(every) < MIN_RUNS:
        say(f"only {judged} runs, {MIN_RUNS} are needed to hold some back: errors unknown, a wide default interval")
        few = fit_table(examples, wholes)
        told = {"ships": few.name, "rule": f"fewer than {MIN_RUNS} runs cannot judge a network"}
        return replace(predictor, context=few, manifest={**predictor.manifest, "context_model": told})
    held = hold_back(
        every, examples, wholes, predictor, seed=seed, on_fold=lambda at, of: say(f"context: fold {at + 1} of {of}")
    )
    context = CANDIDATES[held.ships](examples, wholes, predictor.hardware, seed)
    metrics = predictor.manifest["metrics"] | _errors(held, judged)
    for family, error in family_errors(examples, context, predictor).items():
        metrics[f"in_context_fit_{family}_percent"] = error
    say(_text(held, judged))
    manifest = {"metrics": metrics, "context_model": {"ships": held.ships, "rule": _RULE, "held_back": held.rows()}}
    if judged < MIN_RUNS:
        say(f"{judged} iterations were timed, {MIN_RUNS} are needed for an interval: a wide default one")
        return replace(predictor, context=context, manifest=manifest)
    return _with_interval(replace(predictor, context=context, manifest=manifest), held, runs, say)


def _with_interval(predictor: Predictor, held: HeldBack, runs: Sequence[MeasuredRun], say: Say) -> Predictor:
    """The predictor with a scale and an interval from runs held back."""
    predicted = held.predicted[held.ships]
    calibration = fit_scale(predicted, held.measured)
    off = np.log(held.measured / (predicted * calibration.scale))
    intervals = fit_intervals(off, 2 * float(np.median([run.spread_log for run in runs])))
    metrics = predictor.manifest["metrics"] | {
        "mape_percent": _mape(predicted * calibration.scale, held.measured),
        "calibration_scale": calibration.scale,
        "interval_half_width_percent": 100 * float(np.expm1(intervals.half_width_log)),
    }
    say(f"runs held back: iteration time {metrics['mape_percent']:.1f} % after calibration")
    manifest = {**predictor.manifest, "metrics": metrics}
    return replace(predictor, calibration=calibration, intervals=intervals, manifest=manifest)


def _errors(held: HeldBack, judged: int) -> dict[str, float]:
    """Metrics of every candidate."""
    found = {f"op_error_{_METRICS[name]}_percent": held.op_percent(name) for name in CANDIDATES}
    if judged >= MIN_RUNS:
        found |= {f"mape_{_METRICS[name]}_percent": held.mape(name) for name in CANDIDATES}
    return found


def _text(held: HeldBack, judged: int) -> str:
    """Figures of every candidate, and which one ships."""
    told = []
    for name in CANDIDATES:
        parts = []
        if np.isfinite(held.op_errors[name]).any():
            parts.append(f"ops {held.op_percent(name):.1f} %")
        if judged:
            parts.append(f"iterations {held.mape(name):.1f} %")
        told.append(f"{name}: {', '.join(parts)}")
    return f"errors on runs held back: {'; '.join(told)}. Ships: {held.ships} ({_RULE})"


def _mape(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return 100 * float(np.mean(np.abs(predicted / measured - 1)))
