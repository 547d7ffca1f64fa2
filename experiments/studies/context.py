"""Compare forms of the context network, task by task, on groups that taught none of them.

    stepsight experiment context --data DATA [--task ops] [--seeds 3] [--teach 5]

Each form corrects the seconds of ops and collectives alone: none, a table by kind and phase, own features, messages of
neighbours, and ``auto``, which takes as much of each as runs held back say.  A roofline, and trees on features of a
node and of its neighbours, stand beside them.  The task ``edges`` leaves each kind of edge out of the network and of
the trees instead.  DATA holds a folder for each task: ``runs`` (collections, also of ``edges``), ``cluster``
(``profile`` and ``judge``, as ``small-to-large`` writes them) and ``scripts`` (of the task ops, as --collect writes
it).  Errors are in parts of the error of the regressors alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.hardware.hardware import roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.context_tasks import SCRIPTS, TASKS, Split, Task, collect_families
from stepsight.experiments.studies.study import Study
from stepsight.features.graph_features import (
    NUMBERS,
    RELATIONS,
    SegmentGraph,
    node_feature_names,
    node_features,
    topology,
)
from stepsight.gnn.context_model import BOUND, mean_network
from stepsight.gnn.inference import FORMS
from stepsight.training.context.examples import iteration_times, joined
from stepsight.training.context.fit_context import ITERATION_WEIGHT, fit_context, node_weights, op_error
from stepsight.training.context.learn_context import AUTO, hold_back, standard_error
from stepsight.training.predictor.own_context import OwnContext
from stepsight.training.regression.trees import Trees, fit_trees

Array = NDArray[np.float64]
LEAST_LOG = 1e-4  # smaller mean errors of the regressors alone count as this one
TREES = {"trees, own features": (), "trees, neighbours' features": RELATIONS}
EVERY = "every edge"
HEARING: dict[str, tuple[str, ...]] = {
    EVERY: RELATIONS,
    **{f"without {left}": tuple(each for each in RELATIONS if each != left) for left in RELATIONS},
    "no edge": (),
}


def roofline(graph: SegmentGraph, alone: Array) -> Array:
    """A context model that replaces the seconds alone by those of a roofline."""
    works = [node.work for node in graph.program.nodes]
    limits = np.array([roofline_seconds(w, graph.hardware) if isinstance(w, Op) else np.nan for w in works])
    return np.where(np.isnan(limits), alone, np.maximum(limits, 1e-9))


@dataclass(frozen=True)
class TreeContext:
    """Trees on features of nodes, with columns about their neighbours along some relations."""

    trees: Trees
    names: tuple[str, ...]
    relations: tuple[str, ...]

    def __call__(self, graph: SegmentGraph, alone: Array) -> Array:
        """As of any context model, ``(n,)``."""
        rows = rows_of(graph, alone, self.relations)
        return np.asarray(alone * np.exp(np.clip(self.trees.predict(rows, self.names), -BOUND, BOUND)))


def rows_of(graph: SegmentGraph, alone: Array, relations: Sequence[str]) -> Array:
    """Features of each node; and, by relation and direction, the number of neighbours and the mean of what they are."""
    own = node_features(graph, alone)
    parts = [own]
    edges = topology(graph.program).edges if relations else {}
    for relation in relations:
        told = own if relation == "stream_order" else own[:, -len(NUMBERS) :]
        for near, far in ((1, 0), (0, 1)):
            count = np.bincount(edges[relation][near], minlength=len(own))[:, None]
            total = np.zeros((len(own), told.shape[1]))
            np.add.at(total, edges[relation][near], told[edges[relation][far]])
            parts += [count.astype(np.float64), total / np.maximum(count, 1)]
    return np.concatenate(parts, axis=1)


def fit_tree_context(split: Split, seed: int, relations: tuple[str, ...]) -> TreeContext:
    """Train ``TreeContext`` on nodes, and on iterations, whose error each node on the critical path has."""
    examples, wholes = joined(split.seen)
    known = [each for each in examples if each.known.any()]
    rows = [rows_of(e.graph, e.alone, relations)[e.known] for e in known]
    targets, weights = [each.target[each.known] for each in known], [node_weights(examples)]
    weights[0] = weights[0] / max(float(weights[0].sum()), 1e-12)
    for whole in wholes:
        alone, bounds = whole.iteration.alone, whole.iteration.bounds
        seconds, counts = whole.iteration.seconds_and_counts(alone)
        parts = zip(whole.iteration.lowered.programs, np.split(alone, bounds[1:-1]), strict=True)
        hardware = whole.iteration.latency.hardware
        rows += [rows_of(SegmentGraph(program, hardware, whole.busy), part, relations) for program, part in parts]
        targets.append(np.full(len(alone), np.log(whole.measured_s / seconds)))
        weights.append(ITERATION_WEIGHT * counts * alone / seconds / len(wholes))
    target, weight = np.concatenate(targets), np.concatenate(weights)
    found = np.concatenate(rows)
    names = (*node_feature_names(), *(f"neighbour{n}" for n in range(found.shape[1] - len(node_feature_names()))))
    grown = fit_trees(found, np.clip(target, -BOUND, BOUND), names, seed, weight / weight.mean() + 1e-9)
    return TreeContext(grown, names, relations)


def fit_edges(split: Split, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The graph network and trees without each kind of edge, trained on a split, and the CPU seconds of each."""
    models: dict[str, Any] = {"none": None}
    spent = {"none": 0.0}
    examples, wholes = joined(split.seen)
    for name, relations in HEARING.items():
        begin = time.process_time()
        network = fit_context(examples, wholes, seed=seed, relations=relations)
        models[name], spent[name] = mean_network([network], FORMS["graph"]), time.process_time() - begin
        begin, trees = time.process_time(), f"trees, {name}"
        models[trees] = OwnContext(fit_tree_context(split, seed, relations))
        spent[trees] = time.process_time() - begin
    return models, spent


def fit_all(split: Split, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Every model by name, trained on a split, and the CPU seconds that each took."""
    begin = time.process_time()
    held, networks = hold_back(split.seen, split.unseen, seed, lambda at, of: None)
    took = time.process_time() - begin
    forms = {**FORMS, AUTO: tuple(held.strengths.tolist())}
    print(f"strengths {held.strengths.round(2).tolist()}", file=sys.stderr, flush=True)
    models: dict[str, Any] = {form: mean_network(networks, own) if any(own) else None for form, own in forms.items()}
    spent = dict.fromkeys(models, took) | {"none": 0.0, "roofline": 0.0}
    models["roofline"] = OwnContext(roofline)
    for name, relations in TREES.items():
        begin = time.process_time()
        models[name] = OwnContext(fit_tree_context(split, seed, relations))
        spent[name] = time.process_time() - begin
    return models, spent


# By what a task compares: what fits the models, their names, and the one that stands beside each.
QUESTIONS: Mapping[str, tuple[Callable[[Split, int], Any], tuple[str, ...], str]] = {
    "forms": (fit_all, ("roofline", *FORMS, AUTO, *TREES), AUTO),
    "edges": (fit_edges, ("none", *HEARING, *(f"trees, {name}" for name in HEARING)), EVERY),
}


@dataclass
class _Errors:
    """|log| errors of a model by seed and run, ``(seeds, runs)``; NaN where nothing judges."""

    ops: Array
    iterations: Array
    fit_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)


def judge(task: Task, seeds: int, folds: int, teach: int = 0) -> dict[str, Any]:
    """Train and judge all models.

    Returns:
        ``task``, ``about``, ``runs``, ``groups`` and ``rows``, one for each model: mean errors of ops and iterations in
        percent (None where nothing of the kind judges), ``score`` (in parts of the errors of the regressors alone, mean
        over groups; ``seed_error``: its standard error over seeds), ``behind`` (score minus that of ``reference``;
        ``behind_error``: over groups), and CPU time of training and of the first answer for a segment.
    """
    names, (fit, models_asked, _) = list(task.groups), QUESTIONS[task.compares]
    errors = {model: _Errors(*np.full((2, seeds, len(names)), np.nan)) for model in models_asked}
    for seed in range(seeds):
        for fold, held in enumerate(_folds(task, folds, seed, teach)):
            print(f"{task.name}: seed {seed}, fold {fold}", file=sys.stderr, flush=True)
            split = task.split(held)
            models, spent = fit(split, seed)
            for model, own in errors.items():
                own.fit_s.append(spent[model])
                _judge(split, models[model], own, {name: (seed, place) for place, name in enumerate(names)})
    return _outcome(task, errors)


def _judge(split: Split, context: Any, errors: _Errors, places: Mapping[str, tuple[int, int]]) -> None:
    """Write the errors of a model on what judges; ``places`` of runs in the arrays."""
    for name, examples in split.judged.items():
        begin = time.process_time()
        errors.ops[places[name]] = np.log1p(op_error(examples, context) / 100)
        errors.answer_s.append((time.process_time() - begin) / max(len(examples), 1))
    if split.runs and split.predictor is not None:
        times = iteration_times(split.runs, replace(split.predictor, context=context))
        for run, seconds in zip(split.runs, times.tolist(), strict=True):
            errors.iterations[places[run.name]] = abs(np.log(seconds / run.manifest.iteration_time_s))


def _folds(task: Task, count: int, seed: int, teach: int) -> list[frozenset[str]]:
    """Groups that are held out together."""
    groups = sorted(set(task.groups.values()))
    if task.is_fixed:
        return [frozenset(groups)]
    if len(groups) < max(2, teach + 1):
        raise TraceError(f"task {task.name} needs at least {max(2, teach + 1)} groups, got {len(groups)}: collect more")
    order = np.random.default_rng(seed).permutation(groups).tolist()
    if teach:
        return [frozenset(order[teach:])]
    return [frozenset(order[part::count]) for part in range(min(count, len(order)))]


def _outcome(task: Task, errors: Mapping[str, _Errors]) -> dict[str, Any]:
    groups = np.array(list(task.groups.values()))
    scores = {model: _scores(own, errors["none"]) for model, own in errors.items()}
    judged = [group for group in sorted(set(groups.tolist())) if np.isfinite(scores["none"][:, groups == group]).any()]
    by_group = {
        model: np.array([np.nanmean(own[:, groups == group]) for group in judged]) for model, own in scores.items()
    }
    rows, reference = [], QUESTIONS[task.compares][2]
    for model, own in errors.items():
        beside = f"trees, {reference}" if model.startswith("trees") and reference != AUTO else reference
        behind = by_group[model] - by_group[beside]
        row: dict[str, Any] = {"model": model}
        row |= {"op_percent": _percent(own.ops), "iteration_percent": _percent(own.iterations)}
        row["score"] = float(np.nanmean(scores[model]))
        row["seed_error"] = standard_error(np.nanmean(scores[model], axis=1))
        row |= {"behind": float(behind.mean()), "behind_error": standard_error(behind)}
        row |= {"fit_s": float(np.mean(own.fit_s)), "answer_s": float(np.median(own.answer_s or [0.0]))}
        rows.append(row)
    told = {"task": task.name, "about": task.about, "runs": len(task.groups), "groups": len(judged)}
    return {**told, "reference": reference, "rows": rows}


def _scores(own: _Errors, alone: _Errors) -> Array:
    """Errors in parts of those of the regressors alone, ``(seeds, runs)``; ops and iterations count alike."""
    parts = []
    for errors, usual in ((own.ops, alone.ops), (own.iterations, alone.iterations)):
        if np.isfinite(usual).any():
            parts.append(errors / max(float(np.nanmean(usual)), LEAST_LOG))
    known = np.isfinite(parts)
    return np.asarray(np.where(known, parts, 0.0).sum(axis=0) / np.where(known.any(axis=0), known.sum(axis=0), np.nan))


def _percent(errors: Array) -> float | None:
    return 100 * float(np.expm1(np.nanmean(errors))) if np.isfinite(errors).any() else None


def outcome_text(outcome: Mapping[str, Any]) -> str:
    """A task's table."""
    columns = {"model": "model", "op error %": "op_percent", "iteration error %": "iteration_percent", "score": "score",
               "± seeds": "seed_error", f"behind {outcome['reference']}": "behind", "± groups": "behind_error",
               "training s": "fit_s", "first answer ms": "answer_s"}  # fmt: skip
    told = f"{outcome['task']}: {outcome['about']} ({outcome['runs']} runs, {outcome['groups']} groups judge)"
    return "\n".join([told, table_of(outcome["rows"], columns, 3)])


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Judge one task, or all whose data are there."""
    if options.collect:
        collect_families(options.data / SCRIPTS)
    found = [name for name, (folder, _) in TASKS.items() if (options.data / folder).is_dir()]
    names = options.task or found
    if not names:
        raise TraceError(f"--data must be a folder with a folder for a task ({', '.join(TASKS)}), got {options.data}")
    tasks = [TASKS[name][1](options.data / TASKS[name][0]) for name in names]
    outcomes = [judge(task, options.seeds, options.folds, options.teach) for task in tasks]
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
        "--teach": {"type": int, "default": 0, "help": "groups that teach, drawn at random; 0: all but a part"},
        "--folds": {"type": int, "default": 5, "help": "parts of the groups that are held out in turn"},
    },
)
