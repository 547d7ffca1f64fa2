"""Context model, calibration and intervals of a predictor, each judged on runs held back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.gnn.context_model import LAYERS
from stepsight.gnn.context_table import Context
from stepsight.training.context.examples import Taught, family_errors, iteration_times, make_examples, make_wholes
from stepsight.training.context.fit_context import Example, Whole, fit_context, fit_table, op_error
from stepsight.training.corrections.calibration import fit_scale
from stepsight.training.intervals.published_errors import fit_intervals
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import MeasuredRun
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
FOLDS = 5
ALONE = "regressors alone"
_LEAST = 1e-4  # log units; smaller errors count as this one

Fit = Callable[[Sequence[Example], Sequence[Whole], Hardware, int], Context | None]
CANDIDATES: dict[str, Fit] = {  # the simplest first
    ALONE: lambda examples, wholes, hardware, seed: None,
    "table by kind and phase": lambda examples, wholes, hardware, seed: fit_table(examples, wholes),
    "network without edges": lambda *given: fit_context(*given[:3], seed=given[3], layers=0),
    "graph network": lambda *given: fit_context(*given[:3], seed=given[3], layers=LAYERS),
}


@dataclass(frozen=True)
class HeldBack:
    """Errors of every candidate on runs that it never saw.

    Attributes:
        measured: Iteration times of the runs that are whole, ``(whole runs,)``.
        predicted: By candidate: iteration times predicted for them, same shape.
        op_errors: By candidate: mean absolute log error of ops of each run, weighted by time, ``(runs,)``; NaN without
            traces.
        whole: ``(runs,)``: which runs are whole.
    """

    measured: Array
    predicted: Mapping[str, Array]
    op_errors: Mapping[str, Array]
    whole: NDArray[np.bool_]

    @property
    def scores(self) -> dict[str, Array]:
        """By candidate: errors of each run over the mean errors of regressors alone, ``(runs,)``; 1: no better.

        Errors of iterations and of ops count alike where a run has both.
        """
        iterations = {name: np.full(len(self.whole), np.nan) for name in self.predicted}
        for name, seconds in self.predicted.items():
            iterations[name][self.whole] = np.abs(np.log(seconds / self.measured))
        found = {}
        for name in self.predicted:
            parts = []
            for errors in (iterations, self.op_errors):
                usual = errors[ALONE][np.isfinite(errors[ALONE])]
                parts.append(errors[name] / max(float(usual.mean()), _LEAST) if len(usual) else errors[name])
            known = np.isfinite(parts)
            found[name] = np.where(known, parts, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        return found

    @property
    def chosen(self) -> str:
        """The simplest candidate that is within one standard error of the best."""
        return simplest(self.scores)

    def op_percent(self, name: str) -> float:
        """Error of ops, mean over runs, percent; 0 without traces."""
        known = self.op_errors[name][np.isfinite(self.op_errors[name])]
        return 100 * float(np.expm1(known.mean())) if len(known) else 0.0

    def mape(self, name: str) -> float:
        """Mean absolute error of iteration times, percent; 0 where no run is whole."""
        return 100 * float(np.abs(self.predicted[name] / self.measured - 1).mean()) if len(self.measured) else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Every candidate's figures, as the manifest has them."""
        scores = self.scores
        best = min(scores, key=lambda name: float(scores[name].mean()))
        return [
            {
                "model": name,
                "op_error_percent": self.op_percent(name),
                "mape_percent": self.mape(name),
                "score": float(own.mean()),
                "behind_best": float((own - scores[best]).mean()),
                "standard_error": standard_error(own - scores[best]),
            }
            for name, own in scores.items()
        ]


def simplest(scores: Mapping[str, Array]) -> str:
    """The first name, the simplest come first, whose mean is within one standard error of the least.

    Args:
        scores: By name, ``(runs,)``; the standard error is that of paired differences.
    """
    best = min(scores, key=lambda name: float(scores[name].mean()))
    for name, own in scores.items():
        off = own - scores[best]
        if off.mean() <= standard_error(off):
            return name
    return best


def standard_error(values: Array) -> float:
    """Of the mean; 0 for fewer than two values."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def hold_back(
    runs: Sequence[Taught],
    examples: Sequence[Example],
    wholes: Sequence[Whole],
    predictor: Predictor,
    *,
    seed: int,
    on_fold: Callable[[int, int], None],
) -> HeldBack:
    """Cross-validate over runs; what is held back counts as never measured, its ops and collectives included.

    Args:
        runs: To hold back in turn.
        examples, wholes: Of the runs, for training.
        predictor: Fitted regressors, no context model.
        seed: Of folds and weights.
        on_fold: Called with the number of the fold and of all folds.
    """
    folds = np.random.default_rng(seed).permutation(len(runs)) % min(FOLDS, len(runs))
    unseen = predictor.left_out
    whole = np.array([run.whole for run in runs], dtype=np.bool_)
    predicted = {name: np.zeros(len(runs)) for name in CANDIDATES}
    errors = {name: np.full(len(runs), np.nan) for name in CANDIDATES}
    for fold in range(folds.max() + 1):
        on_fold(fold, int(folds.max()) + 1)
        own = np.flatnonzero(folds == fold)
        places: list[int] = own.tolist()
        names = {runs[place].name for place in places}
        taught = [example for example in examples if example.run not in names]
        taught_wholes = [each for each in wholes if each.run not in names]
        left_out = {place: make_examples([runs[place]], unseen) for place in places}
        for name, fit in CANDIDATES.items():
            context = fit(taught, taught_wholes, predictor.hardware, seed)
            judged = [runs[place] for place in places if whole[place]]
            predicted[name][own[whole[own]]] = iteration_times(_measured(judged), replace(unseen, context=context))
            for place, of_run in left_out.items():
                if any(example.known.any() for example in of_run):
                    errors[name][place] = np.log1p(op_error(of_run, context, predictor.hardware) / 100)
    measured = np.array([run.manifest.iteration_time_s for run in _measured(runs)])
    return HeldBack(measured, {name: each[whole] for name, each in predicted.items()}, errors, whole)


def _measured(runs: Sequence[Taught]) -> list[MeasuredRun]:
    return [run for run in runs if isinstance(run, MeasuredRun) and run.whole]


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
    context = CANDIDATES[held.chosen](examples, wholes, predictor.hardware, seed)
    metrics = predictor.manifest["metrics"] | _errors(held, judged)
    for family, error in family_errors(examples, context, predictor).items():
        metrics[f"in_context_fit_{family}_percent"] = error
    say(_text(held, judged))
    manifest = {"metrics": metrics, "context_model": {"ships": held.chosen, "rule": _RULE, "held_back": held.rows()}}
    if judged < MIN_RUNS:
        say(f"{judged} iterations were timed, {MIN_RUNS} are needed for an interval: a wide default one")
        return replace(predictor, context=context, manifest=manifest)
    return _with_interval(replace(predictor, context=context, manifest=manifest), held, runs, say)


def _with_interval(predictor: Predictor, held: HeldBack, runs: Sequence[MeasuredRun], say: Say) -> Predictor:
    """The predictor with a scale and an interval from runs held back."""
    predicted = held.predicted[held.chosen]
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
    return f"errors on runs held back: {'; '.join(told)}. Ships: {held.chosen} ({_RULE})"


def _mape(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return 100 * float(np.mean(np.abs(predicted / measured - 1)))
