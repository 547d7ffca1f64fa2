"""Context network, calibration and intervals of a predictor, each judged on runs held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Op
from stepsight.gnn.context_model import BOUND, ITERATION_DELTA, NODE_DELTA, ContextModel, mean_network
from stepsight.gnn.contexts import FORMS, LEVELS, form_of
from stepsight.training.context.fit_context import (
    ITERATION_WEIGHT,
    Batch,
    Example,
    Iteration,
    Measured,
    Taught,
    fit_context,
    joined,
    measured_runs,
    node_weights,
)
from stepsight.training.corrections.calibration import fit_scale
from stepsight.training.corrections.intervals import HeldBackErrors, NodeDoubts, fit_doubts, fit_intervals
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import MeasuredRun
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
FOLDS = 5
MIN_RUNS = 4  # fewer cannot be held back in turn
STEPS = 4  # of reweighted least squares
# As much evidence as this many runs says that a level counts in full: networks of a fold lack some of the runs, and are
# noisier than the mean that serves, so runs held back underrate them.
PRIOR_RUNS = 3
AUTO = "auto"
_LEAST = 1e-4  # log units; smaller errors count as this one


@dataclass(frozen=True)
class HeldBackRun:
    """What a network says of a run that did not teach it: ``table``, ``features - table`` and ``graph - features``."""

    target: Array  # log of measured seconds over seconds alone of its nodes, (n,)
    weight: Array  # of each node, in sum 1, (n,); of ops alone, by time, in sum 1: op_weight
    op_weight: Array
    parts: Array  # log-corrections of each node, (n, 3)
    whole: Iteration | None  # its iteration, None if that was not timed; whole_parts of its nodes, (m, 3)
    whole_parts: Array
    kinds: tuple[str, ...] = ()  # of each node
    phases: tuple[str, ...] = ()  # of each node

    @classmethod
    def of(cls, model: ContextModel | None, examples: Sequence[Example], wholes: Sequence[Iteration]) -> HeldBackRun:
        """Of a run's distinct segments, and its iteration if that was timed; without a model no level says anything."""
        batch = Batch(examples, wholes)
        parts = np.zeros((len(batch.features), len(LEVELS)))
        if model is not None:
            with torch.no_grad():
                parts = np.diff(model(batch.features, batch.graph).double().numpy().T, axis=1, prepend=0.0)
        rows = [np.zeros((3, 0))]
        for each in examples:
            ops = np.array([isinstance(node.work, Op) for node in each.graph.program.nodes])
            rows.append(np.stack([each.inside, each.alone, each.repeats * ops * each.inside])[:, each.known])
        inside, alone, time = np.concatenate(rows, axis=1)
        own = np.concatenate([np.zeros(0, np.int64), *(nodes.numpy() for _, nodes, _ in batch.wholes)])
        programs = [(example.graph.program, example.known) for example in examples]
        nodes = [(p.nodes[at].work.kind, p.label) for p, known in programs for at in np.flatnonzero(known).tolist()]
        return cls(
            np.log(np.maximum(inside, 1e-9) / alone),
            node_weights(examples),
            time / max(float(time.sum()), 1e-30),
            parts[batch.index.numpy()],
            wholes[0] if wholes else None,
            parts[own],
            tuple(kind for kind, _ in nodes),
            tuple(phase for _, phase in nodes),
        )

    def off(self, strengths: Array) -> Array:
        """``log(measured / predicted)`` of its nodes with some strengths, ``(n,)``."""
        return np.asarray(self.target - np.clip(self.parts @ strengths, -BOUND, BOUND))

    def op_error(self, strengths: Array) -> float:
        """Mean absolute log error of ops, weighted by time; NaN without traces."""
        return float(self.op_weight @ np.abs(self.off(strengths))) if self.op_weight.any() else float("nan")

    def iteration(self, strengths: Array) -> tuple[float, Array]:
        """Seconds of the iteration, and the slope of their logarithm by strengths, ``(3,)``."""
        assert self.whole is not None
        iteration = self.whole
        inside = iteration.alone * np.exp(np.clip(self.whole_parts @ strengths, -BOUND, BOUND))
        seconds, counts = iteration.seconds_and_counts(inside)
        return seconds, (counts * inside / seconds) @ self.whole_parts

    def rows(self, strengths: Array) -> tuple[Array, Array, Array]:
        """Rows of Huber's reweighted least squares: slopes ``(r, 3)``, what they should give, and weights ``(r,)``."""
        slopes, goals = self.parts, self.target
        weights = self.weight / np.maximum(np.abs(goals - slopes @ strengths), NODE_DELTA)
        if self.whole is not None:
            seconds, slope = self.iteration(strengths)
            off = np.log(self.whole.measured_s / seconds)
            slopes, goals = np.vstack([slopes, slope]), np.append(goals, off + slope @ strengths)
            weights = np.append(weights, ITERATION_WEIGHT / max(abs(off), ITERATION_DELTA))
        return slopes, goals, weights


def solve_strengths(runs: Sequence[HeldBackRun]) -> Array:
    """Strengths of the levels, each from 0 to 1, ``(3,)``, that minimise the losses of training on some runs, and their
    distance from 1, which counts as much as ``PRIOR_RUNS`` of the runs.
    """
    from scipy.optimize import lsq_linear

    strengths: Array = np.ones(len(LEVELS))
    for _ in range(STEPS):
        slopes, goals, weights = (np.concatenate(each) for each in zip(*(r.rows(strengths) for r in runs), strict=True))
        root = np.sqrt(weights)
        rows = slopes * root[:, None]
        prior = np.sqrt((rows**2).sum(axis=0) * PRIOR_RUNS / len(runs))
        every = np.vstack([rows, np.diag(prior)]), np.append(goals * root, prior)
        strengths = lsq_linear(*every, bounds=(0.0, 1.0)).x
    return strengths


class Errors(NamedTuple):
    """Errors of one form of the network on runs held back, ``(runs,)`` each.

    ``ops``: mean absolute log error of ops, NaN without traces; ``seconds``: predicted for the iteration, NaN where it
    was not timed; ``scores``: errors over the mean errors without a model, where ops and iterations count alike.
    """

    ops: Array
    seconds: Array
    scores: Array


class HeldBack:
    """Runs held back in turn (those of one of ``folds`` together): measured iterations (NaN where not timed), the
    errors of each form of the context network (``auto``: with strengths by the other folds), and the strengths by all
    runs.  Without ``folds`` there is no network, and ``none`` is the only form.
    """

    def __init__(self, runs: Sequence[HeldBackRun], folds: NDArray[np.int64] | None) -> None:
        self._runs = runs
        self.measured = np.array([np.nan if run.whole is None else run.whole.measured_s for run in runs])
        self.errors: dict[str, Errors] = {}
        self.strengths: Array = np.zeros(len(LEVELS))
        for form in FORMS if folds is not None else ["none"]:  # the first is that without a model
            self.errors[form] = self._judge(np.tile(FORMS[form], (len(runs), 1)))
        if folds is None:
            return
        strengths = np.zeros((len(runs), len(LEVELS)))
        for fold in set(folds.tolist()):
            own = (folds == fold).tolist()
            strengths[own] = solve_strengths([run for run, held in zip(runs, own, strict=True) if not held])
        self.errors[AUTO] = self._judge(strengths)
        self._by_others = strengths
        self.strengths = solve_strengths(runs)

    def doubts(self, form: str) -> NodeDoubts:
        """Of single nodes by one form of the network, from the runs' errors."""
        strengths = [FORMS[form]] * len(self._runs) if form in FORMS else self._by_others
        pairs = zip(self._runs, strengths, strict=True)
        return fit_doubts([HeldBackErrors(r.kinds, r.phases, r.off(np.array(own)), r.weight) for r, own in pairs])

    def _judge(self, strengths: Array) -> Errors:
        """Errors where each run has its own strengths, ``(runs, 3)``."""
        pairs = list(zip(self._runs, strengths, strict=True))
        ops = np.array([run.op_error(own) for run, own in pairs])
        seconds = np.array([np.nan if run.whole is None else run.iteration(own)[0] for run, own in pairs])
        usual = self.errors.get("none", Errors(ops, seconds, ops))
        off, usually = (np.abs(np.log(each / self.measured)) for each in (seconds, usual.seconds))
        least = np.ma.masked_invalid([usual.ops, usually]).mean(axis=1, keepdims=True).clip(_LEAST)
        return Errors(ops, seconds, (np.ma.masked_invalid([ops, off]) / least).mean(axis=0).filled(0.0))

    def metrics(self) -> dict[str, float]:
        """Errors of every form in percent, where something was measured."""
        found = {}
        for form, errors in self.errors.items():
            found[f"context_held_back_{form}"] = float(errors.scores.mean())
            if np.isfinite(errors.ops).any():
                found[f"op_error_{form}_percent"] = 100 * float(np.expm1(np.nanmean(errors.ops)))
            if np.isfinite(errors.seconds).sum() >= MIN_RUNS:
                found[f"mape_{form}_percent"] = 100 * float(np.nanmean(np.abs(errors.seconds / self.measured - 1)))
        return found


def hold_back(
    seen: Sequence[Measured], unseen: Sequence[Measured], seed: int, on_fold: Callable[[int, int], None]
) -> tuple[HeldBack, list[ContextModel]]:
    """Train a network without each part of the runs; of those, ``unseen`` has seconds by regressors without them."""
    folds = np.random.default_rng(seed).permutation(len(seen)) % min(FOLDS, len(seen))
    held: dict[int, HeldBackRun] = {}
    models = []
    for fold in range(folds.max() + 1):
        on_fold(fold, int(folds.max()) + 1)
        teach = np.flatnonzero(folds != fold).tolist()
        models.append(fit_context(*joined(seen[place] for place in teach), seed=seed))
        for place in np.flatnonzero(folds == fold).tolist():
            held[place] = HeldBackRun.of(models[-1], *unseen[place])
    return HeldBack([held[place] for place in range(len(seen))], folds), models


def learn_context(
    predictor: Predictor,
    runs: Sequence[MeasuredRun],
    imported: Sequence[ImportedSegments],
    seed: int,
    say: Callable[[str], None],
    form: str = AUTO,
) -> Predictor:
    """Learn the context network, its strengths (``form``: one of ``FORMS``, or ``auto``), calibration and interval."""
    every: list[Taught] = [*runs, *imported]
    judged = sum(run.whole for run in runs)
    say(f"context: {len(every)} runs")
    held: HeldBack | None = None
    models: list[ContextModel] = []
    if judged < MIN_RUNS and len(every) < MIN_RUNS:
        say(f"only {judged} runs, {MIN_RUNS} are needed to hold some back: errors unknown, a wide default interval")
        if form != "none":
            models = [fit_context(*joined(measured_runs(every, predictor)), seed=seed)]
    elif form == "none":
        seen = measured_runs(every, predictor.left_out)
        held = HeldBack([HeldBackRun.of(None, *run) for run in seen], None)
    else:
        seen, unseen = (measured_runs(every, each) for each in (predictor, predictor.left_out))
        held, models = hold_back(seen, unseen, seed, lambda at, of: say(f"context: fold {at + 1} of {of}"))
    solved = FORMS["table"] if held is None else tuple(held.strengths.tolist())
    strengths = FORMS.get(form, solved)
    of_levels = dict(zip(LEVELS, strengths, strict=True))
    metrics = predictor.manifest["metrics"] | (held.metrics() if held else {})
    metrics |= {f"context_strength_{level}": own for level, own in of_levels.items()}
    told: dict[str, Any] = {
        "asked": form,
        "form": form_of(strengths),
        "strengths": of_levels,
        "held_back": {name: float(errors.scores.mean()) for name, errors in held.errors.items()} if held else {},
    }
    text = "strengths " + ", ".join(f"{level} {part:.2f}" for level, part in of_levels.items())
    errors = ", ".join(f"{name} {error:.2f}" for name, error in told["held_back"].items())
    more = f"; errors on runs held back, in parts of those without it: {errors}" if errors else ""
    say(f"context network: {text}{more}")
    context = mean_network(models, strengths) if any(strengths) else None
    doubts = None if held is None or not any(len(examples) for examples, _ in seen) else held.doubts(form)
    manifest = {"metrics": metrics, "context": told}
    learned = replace(predictor, context=context, doubts=doubts, manifest=manifest)
    if held is None or judged < MIN_RUNS:
        say(f"{judged} iterations were timed, {MIN_RUNS} are needed for an interval: a wide default one")
        return learned
    return _with_interval(learned, held.errors[form].seconds, held.measured, runs, say)


def _with_interval(
    predictor: Predictor, seconds: Array, measured: Array, runs: Sequence[MeasuredRun], say: Callable[[str], None]
) -> Predictor:
    """The predictor with a scale and an interval from runs held back."""
    timed = np.isfinite(measured)
    predicted, measured = seconds[timed], measured[timed]
    calibration = fit_scale(predicted, measured)
    off = np.log(measured / (predicted * calibration.scale))
    intervals = fit_intervals(off, 2 * float(np.median([run.spread_log for run in runs])))
    metrics = predictor.manifest["metrics"] | {
        "mape_percent": 100 * float(np.mean(np.abs(np.expm1(-off)))),
        "calibration_scale": calibration.scale,
        "interval_half_width_percent": 100 * float(np.expm1(intervals.half_width_log)),
    }
    say(f"runs held back: iteration time {metrics['mape_percent']:.1f} % after calibration")
    manifest = {**predictor.manifest, "metrics": metrics}
    return replace(predictor, calibration=calibration, intervals=intervals, manifest=manifest)
