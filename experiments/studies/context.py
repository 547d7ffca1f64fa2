"""Compare context models, task by task, on groups that taught none of them.

    stepsight experiment context --data DATA [--task ops] [--seeds 3]

Each model corrects the seconds of ops and collectives alone: physics (a roofline, the regressors), a table by kind and
phase, trees on features of a node and of its neighbours, and the network without and with messages.  DATA holds a
folder for each task: ``runs`` (collections), ``cluster`` (``profile`` and ``judge``, as ``small-to-large`` writes
them) and ``scripts`` (of the task ops, as --collect writes it).  Errors are in parts of the error of the regressors
alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.context_tasks import SCRIPTS, TASKS, Task, collect_families
from stepsight.experiments.studies.study import Study, rows_text
from stepsight.features.graph_features import NUMBERS, RELATIONS, node_feature_names, node_features, topology
from stepsight.gnn.context_model import BOUND
from stepsight.training.context.examples import iteration_times
from stepsight.training.context.fit_context import ITERATION_WEIGHT, Example, Whole, node_weights, op_error
from stepsight.training.context.learn_context import ALONE, CANDIDATES, simplest, standard_error
from stepsight.training.regression.trees import Trees, fit_trees

Array = NDArray[np.float64]
MESSAGES = list(CANDIDATES)[-1]  # the model that hears its neighbours
LEAST_LOG = 1e-4  # smaller mean errors of the regressors alone count as this one


class Roofline:
    """A context model that replaces the seconds alone by those of a roofline."""

    def log_correction(self, program: Program, alone: Array, hardware: Hardware, busy: int) -> Array:
        """As of any context model, ``(n,)``."""
        works = [node.work for node in program.nodes]
        limits = [roofline_seconds(work, hardware) if isinstance(work, Op) else np.nan for work in works]
        return np.nan_to_num(np.log(np.maximum(limits, 1e-9) / alone))


@dataclass(frozen=True)
class TreeContext:
    """Trees on features of nodes, with columns about their neighbours if they hear them."""

    trees: Trees
    names: tuple[str, ...]
    hears: bool

    def log_correction(self, program: Program, alone: Array, hardware: Hardware, busy: int) -> Array:
        """As of any context model, ``(n,)``."""
        rows = rows_of(program, alone, hardware, busy, hears=self.hears)
        return np.clip(self.trees.predict(rows, self.names), -BOUND, BOUND)


def rows_of(program: Program, alone: Array, hardware: Hardware, busy: int, *, hears: bool) -> Array:
    """Features of each node; and, by relation and direction, the number of neighbours and the mean of what they are."""
    own = node_features(program, alone, hardware, busy)
    parts = [own]
    edges = topology(program).edges if hears else {}
    for relation in RELATIONS if hears else ():
        told = own if relation == "stream_order" else own[:, -len(NUMBERS) :]
        for near, far in ((1, 0), (0, 1)):
            count = np.bincount(edges[relation][near], minlength=len(own))[:, None]
            total = np.zeros((len(own), told.shape[1]))
            np.add.at(total, edges[relation][near], told[edges[relation][far]])
            parts += [count.astype(np.float64), total / np.maximum(count, 1)]
    return np.concatenate(parts, axis=1)


def tree_fit(*, hears: bool) -> Any:
    """What trains ``TreeContext``: on nodes, and on iterations, whose error each node on the critical path has."""

    def fit(examples: Sequence[Example], wholes: Sequence[Whole], hardware: Hardware, seed: int) -> TreeContext:
        known = [each for each in examples if each.known.any()]
        rows = [rows_of(e.program, e.alone, hardware, e.busy, hears=hears)[e.known] for e in known]
        targets, weights = [each.target[each.known] for each in known], [node_weights(examples)]
        weights[0] = weights[0] / max(float(weights[0].sum()), 1e-12)
        for whole in wholes:
            alone, bounds = whole.iteration.alone, whole.iteration.bounds
            seconds, counts = whole.iteration.seconds_and_counts(alone)
            parts = zip(whole.iteration.lowered.programs, np.split(alone, bounds[1:-1]), strict=True)
            rows += [rows_of(program, part, hardware, whole.busy, hears=hears) for program, part in parts]
            targets.append(np.full(len(alone), np.log(whole.measured_s / seconds)))
            weights.append(ITERATION_WEIGHT * counts * alone / seconds / len(wholes))
        target, weight = np.concatenate(targets), np.concatenate(weights)
        found = np.concatenate(rows)
        names = (*node_feature_names(), *(f"neighbour{n}" for n in range(found.shape[1] - len(node_feature_names()))))
        grown = fit_trees(found, np.clip(target, -BOUND, BOUND), names, seed, weight / weight.mean() + 1e-9)
        return TreeContext(grown, names, hears)

    return fit


MODELS: Mapping[str, Any] = {  # the simplest first
    "roofline": lambda examples, wholes, hardware, seed: Roofline(),
    **dict(list(CANDIDATES.items())[:2]),
    "trees, own features": tree_fit(hears=False),
    "trees, neighbours' features": tree_fit(hears=True),
    **dict(list(CANDIDATES.items())[2:]),
}


@dataclass
class _Errors:
    """|log| errors of a model by seed and run, ``(seeds, runs)``; NaN where nothing judges."""

    ops: Array
    iterations: Array
    fit_s: list[float]
    answer_s: list[float]


def judge(task: Task, seeds: int, folds: int) -> dict[str, Any]:
    """Train and judge all models.

    Args:
        task: What is predicted.
        seeds: Splits and trainings.
        folds: Parts of the groups, each of which is held out in turn.

    Returns:
        ``task``, ``about``, ``runs``, ``groups``, ``best`` (the simplest model within one standard error) and ``rows``,
        one for each model: mean errors of ops and iterations in percent (None where nothing of the kind judges),
        ``score`` (in parts of the errors of the regressors alone, mean over groups; ``seed_error``: its standard error
        over seeds), ``behind`` (score minus that of the network with messages; ``behind_error``: over groups), and CPU
        time of training on one fold and of the first answer.
    """
    names = list(task.groups)
    errors = {
        model: _Errors(np.full((seeds, len(names)), np.nan), np.full((seeds, len(names)), np.nan), [], [])
        for model in MODELS
    }
    for seed in range(seeds):
        for fold, held in enumerate(_folds(task, folds, seed)):
            print(f"{task.name}: seed {seed}, fold {fold}", file=sys.stderr, flush=True)
            split = task.split(held)
            for model, fit in MODELS.items():
                own, begin = errors[model], time.process_time()
                context = fit(split.examples, split.wholes, task.hardware, seed)
                own.fit_s.append(time.process_time() - begin)
                for name, examples in split.judged.items():
                    begin = time.process_time()
                    own.ops[seed, names.index(name)] = np.log1p(op_error(examples, context, task.hardware) / 100)
                    own.answer_s.append((time.process_time() - begin) / max(len(examples), 1))
                if split.runs and split.predictor is not None:
                    times = iteration_times(split.runs, replace(split.predictor, context=context))
                    for run, seconds in zip(split.runs, times.tolist(), strict=True):
                        off = abs(np.log(seconds / run.manifest.iteration_time_s))
                        own.iterations[seed, names.index(run.name)] = off
    return _outcome(task, errors)


def _folds(task: Task, count: int, seed: int) -> list[frozenset[str]]:
    """Groups that are held out together."""
    groups = sorted(set(task.groups.values()))
    if task.is_fixed:
        return [frozenset(groups)]
    if len(groups) < 2:
        raise TraceError(f"task {task.name} needs at least 2 groups, got {len(groups)}: collect more")
    order = np.random.default_rng(seed).permutation(groups).tolist()
    return [frozenset(order[part::count]) for part in range(min(count, len(order)))]


def _outcome(task: Task, errors: Mapping[str, _Errors]) -> dict[str, Any]:
    groups = np.array(list(task.groups.values()))
    scores = {model: _scores(own, errors[ALONE]) for model, own in errors.items()}
    by_group = {
        model: np.array([np.nanmean(own[:, groups == group]) for group in sorted(set(groups.tolist()))])
        for model, own in scores.items()
    }
    rows = []
    for model, own in errors.items():
        behind = by_group[model] - by_group[MESSAGES]
        row: dict[str, Any] = {"model": model}
        row |= {"op_percent": _percent(own.ops), "iteration_percent": _percent(own.iterations)}
        row["score"] = float(by_group[model].mean())
        row["seed_error"] = standard_error(np.nanmean(scores[model], axis=1))
        row |= {"behind": float(behind.mean()), "behind_error": standard_error(behind)}
        row |= {"fit_s": float(np.mean(own.fit_s)), "answer_s": float(np.median(own.answer_s or [0.0]))}
        rows.append(row)
    return {
        "task": task.name,
        "about": task.about,
        "runs": len(task.groups),
        "groups": len(set(groups.tolist())),
        "rows": rows,
        "best": simplest(by_group),
    }


def _scores(own: _Errors, alone: _Errors) -> Array:
    """Errors in parts of those of the regressors alone, ``(seeds, runs)``; ops and iterations count alike."""
    parts = []
    for errors, usual in ((own.ops, alone.ops), (own.iterations, alone.iterations)):
        if np.isfinite(usual).any():
            parts.append(errors / max(float(np.nanmean(usual)), LEAST_LOG))
    known = np.isfinite(parts)
    return np.asarray(np.where(known, parts, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1))


def _percent(errors: Array) -> float | None:
    return 100 * float(np.expm1(np.nanmean(errors))) if np.isfinite(errors).any() else None


def outcome_text(outcome: Mapping[str, Any]) -> str:
    """A task's table."""
    columns = {"model": "model", "op error %": "op_percent", "iteration error %": "iteration_percent", "score": "score",
               "± seeds": "seed_error", f"behind {MESSAGES}": "behind", "± groups": "behind_error",
               "training s": "fit_s", "first answer ms": "answer_s"}  # fmt: skip
    told = f"{outcome['task']}: {outcome['about']} ({outcome['runs']} runs, {outcome['groups']} groups)"
    best = f"simplest within one standard error of the best: {outcome['best']}"
    return "\n".join([told, rows_text(outcome["rows"], columns, 3), best])


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Judge one task, or all whose data are there."""
    if options.collect:
        collect_families(options.data / SCRIPTS)
    found = [name for name, (folder, _) in TASKS.items() if (options.data / folder).is_dir()]
    names = options.task or found
    if not names:
        raise TraceError(f"--data must be a folder with a folder for a task ({', '.join(TASKS)}), got {options.data}")
    tasks = [TASKS[name][1](options.data / TASKS[name][0]) for name in names]
    outcomes = [judge(task, options.seeds, options.folds) for task in tasks]
    return outcomes, "\n\n".join(map(outcome_text, outcomes))


STUDY = Study(
    "context",
    __doc__ or "",
    run,
    {
        "--data": {"type": Path, "default": Path("runs/context"), "help": "folder with a folder for each task"},
        "--task": {"choices": list(TASKS), "action": "append", "help": "a task alone (repeatable)"},
        "--collect": {"action": "store_true", "help": "first measure the scripts of small models on this machine"},
        "--seeds": {"type": int, "default": 3, "help": "splits and trainings"},
        "--folds": {"type": int, "default": 5, "help": "parts of the groups that are held out in turn"},
    },
)
