"""Compare forms of the context network, task by task, on groups that taught none of them.

    stepsight experiment context --data DATA [--task runs] [--seeds 3] [--teach 5]

Each form corrects the seconds of ops and collectives alone: none, a table by kind and phase, own features, messages of
neighbours, and ``auto``, which takes as much of each as runs held back say.  Trees on features of a node and of its
neighbours stand beside them.  DATA holds a folder for each task: ``runs`` (collections) and
``cluster`` (``profile`` and ``judge``, as ``small-to-large`` writes them).  Errors are in parts of the error of the
regressors alone.  ``--edges`` compares networks and trees without each kind of edge with those that have every one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.hardware.hardware import find_fabric, usual_fabric
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Options, Row, Study
from stepsight.features import node_features as features
from stepsight.features.node_features import RELATIONS, SegmentGraph
from stepsight.gnn.context_model import BOUND, mean_network
from stepsight.gnn.contexts import FORMS, OwnContext
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.context import fit_context
from stepsight.training.context.fit_context import Example, Measured, Taught
from stepsight.training.context.learn_context import AUTO, hold_back
from stepsight.training.fitting.train_runs import measured_hardware
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured import measured
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.regression.trees import fit_trees

Array = NDArray[np.float64]
Fitted = dict[str, tuple[Any, float]]  # by name: a context model, and the CPU seconds that its training took
LEAST_LOG = 1e-4  # smaller mean errors of the regressors alone count as this one
_NOTHING = dict.fromkeys(("ops", "iteration", "answer_s"), np.nan)
EVERY = "every edge"
TREES = {"trees, own features": (), "trees, neighbours' features": RELATIONS}


@dataclass(frozen=True)
class Split:
    """What models learn from, and what judges them."""

    seen: Sequence[Measured]  # what each teaching run measured, with seconds alone for training
    unseen: Sequence[Measured]  # the same, with seconds alone by regressors that never saw them
    judged: Mapping[str, Sequence[Example]]  # nodes that judge, by run
    runs: Sequence[measured.MeasuredRun] = ()  # runs whose iterations judge
    predictor: Predictor | None = None  # gives the seconds alone of these iterations


@dataclass(frozen=True)
class Task:
    """What context models are asked."""

    name: str
    about: str  # what is predicted, and what is held out
    names: Sequence[str]  # of the runs that judge
    split: Callable[[frozenset[str]], Split]  # from the runs that are held out
    is_fixed: bool = False  # all runs are judged at once, by models that other runs taught


def runs_task(folder: Path) -> Task:
    """Ops in context and iterations of collections, as ``train`` reads them; runs of one name are held out together."""
    predictor, runs = _regressors(_collections(folder))
    seen, unseen = (fit_context.measured_runs(runs, each) for each in (predictor, predictor.left_out))
    names = list(dict.fromkeys(run.name for run in runs))

    def split(held: frozenset[str]) -> Split:
        teach = [at for at, run in enumerate(runs) if run.name not in held]
        judged: dict[str, list[Example]] = {name: [] for name in names if name in held}
        for run, (examples, _) in zip(runs, unseen, strict=True):
            judged.get(run.name, []).extend(examples)
        return Split(
            [seen[at] for at in teach],
            [unseen[at] for at in teach],
            judged,
            [run for run in runs if run.name in held and isinstance(run, measured.MeasuredRun) and run.whole],
            predictor.left_out,
        )

    about = "ops in context and iterations of collected runs; runs held out"
    return Task("runs", about, names, split)


def cluster_task(folder: Path) -> Task:
    """Iterations of 8 and 16 ranks in boxes (``judge``), learned from boxes of at most 4 (``profile``)."""
    predictor, small = _regressors(_collections(folder / "profile"))
    found = [run for each in _collections(folder / "judge") for run in read_collection(each).runs]
    spread = lambda run: (max(run.step_seconds) - min(run.step_seconds)) / run.iteration_time_s
    large = {run.name: measured.MeasuredRun(run, ()) for run in sorted(found, key=spread, reverse=True) if run.whole}
    seen, unseen = (fit_context.measured_runs(small, each) for each in (predictor, predictor.left_out))
    split = Split(seen, unseen, {}, list(large.values()), predictor)
    about = "iterations of 8 and 16 ranks in boxes, learned from at most 4; the steadiest run of a job judges"
    return Task("cluster", about, list(large), lambda held: split, is_fixed=True)


TASKS: Mapping[str, Callable[[Path], Task]] = {"runs": runs_task, "cluster": cluster_task}  # by folder of their data


def _collections(folder: Path) -> list[Path]:
    """The folder, if it is a collection, else those in it that are."""
    within = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    found = [path for path in within if (path / "runs").is_dir() or (path / "plan.json").exists()]  # of runs or events
    if not found:
        raise TraceError(f"{folder} must be a collection or hold some, got none")
    return found


def _regressors(collections: Sequence[Path]) -> tuple[Predictor, list[Taught]]:
    """A predictor without a context model, and the runs that taught it, as ``train`` makes it."""
    runs = measured.read_runs(collections, ("train",))
    name = runs[0].manifest.job.hardware_name if runs else "local-cpu"
    imported = measured.read_imported_runs(collections, name)
    profile = measured.read_profiles(collections, find_fabric(usual_fabric(name)), imported)
    hardware = measured_hardware(name, profile, runs, imported)
    measured.fill_from_traces(profile, runs)
    kernel = fit_kernels(profile.ops, profile.op_busy, np.array(profile.op_seconds), hardware, seed=0)
    collective = fit_collectives(profile.collectives, profile.fabrics, np.array(profile.collective_seconds), seed=0)
    return Predictor(hardware, kernel, collective), [*runs, *imported]


def rows_of(graph: SegmentGraph, alone: Array, relations: Sequence[str]) -> Array:
    """Features of each node; and, by relation and direction, the number of neighbours and the mean of what they are."""
    own = features.node_features(graph, alone)
    parts = [own]
    edges = features.topology(graph.program).edges if relations else {}
    for relation in relations:
        told = own if relation == "stream_order" else own[:, -len(features.NUMBERS) :]
        for near, far in ((1, 0), (0, 1)):
            count = np.bincount(edges[relation][near], minlength=len(own))[:, None]
            total = np.zeros((len(own), told.shape[1]))
            np.add.at(total, edges[relation][near], told[edges[relation][far]])
            parts += [count.astype(np.float64), total / np.maximum(count, 1)]
    return np.concatenate(parts, axis=1)


def fit_tree_context(split: Split, seed: int, relations: tuple[str, ...]) -> tuple[OwnContext, float]:
    """Train trees on features of nodes and of their neighbours along some relations; they learn from nodes, and from
    iterations, whose error each node on the critical path has.
    """
    begin, (examples, wholes) = time.process_time(), fit_context.joined(split.seen)
    known = [each for each in examples if each.known.any()]
    rows = [rows_of(e.graph, e.alone, relations)[e.known] for e in known]
    targets, weights = [each.target[each.known] for each in known], [fit_context.node_weights(examples)]
    weights[0] = weights[0] / max(float(weights[0].sum()), 1e-12)
    for whole in wholes:
        alone, bounds = whole.alone, whole.bounds
        seconds, counts = whole.seconds_and_counts(alone)
        parts = zip(whole.lowered.programs, np.split(alone, bounds[1:-1]), strict=True)
        hardware = whole.latency.hardware
        rows += [rows_of(SegmentGraph(program, hardware, whole.busy), part, relations) for program, part in parts]
        targets.append(np.full(len(alone), np.log(whole.measured_s / seconds)))
        weights.append(fit_context.ITERATION_WEIGHT * counts * alone / seconds / len(wholes))
    target, weight, found = map(np.concatenate, (targets, weights, rows))
    names = tuple(map(str, range(found.shape[1])))
    grown = fit_trees(found, np.clip(target, -BOUND, BOUND), names, seed, weight / weight.mean() + 1e-9)

    def context(graph: SegmentGraph, alone: Array) -> Array:
        rows = rows_of(graph, alone, relations)
        return np.asarray(alone * np.exp(np.clip(grown.predict(rows, names), -BOUND, BOUND)))

    return OwnContext(context), time.process_time() - begin


def fit_all(split: Split, seed: int) -> Fitted:
    """The forms of the network that runs held back choose between, and trees, trained on a split."""
    begin = time.process_time()
    held, networks = hold_back(split.seen, split.unseen, seed, lambda at, of: None)
    took = time.process_time() - begin
    print(f"strengths {held.strengths.round(2).tolist()}", file=sys.stderr, flush=True)
    models: Fitted = {}
    for form, own in {**FORMS, AUTO: tuple(held.strengths.tolist())}.items():
        models[form] = (mean_network(networks, own), took) if any(own) else (None, took * (form != "none"))
    return models | {name: fit_tree_context(split, seed, relations) for name, relations in TREES.items()}


def fit_edges(split: Split, seed: int) -> Fitted:
    """A network and trees with every kind of edge, without each kind, and with none."""
    less = {f"without {each}": tuple([other for other in RELATIONS if other != each]) for each in RELATIONS}
    kinds: Mapping[str, tuple[str, ...]] = {EVERY: RELATIONS, **less, "none": ()}
    models: Fitted = {"none": (None, 0.0)}
    for name, relations in kinds.items():
        begin = time.process_time()
        network = fit_context.fit_context(*fit_context.joined(split.seen), seed=seed, relations=relations)
        models[f"network, {name}"] = mean_network([network], FORMS["graph"]), time.process_time() - begin
        models[f"trees, {name}"] = fit_tree_context(split, seed, relations)
    return models


def judge(task: Task, seeds: int, folds: int, teach: int = 0, *, edges: bool = False) -> Row:
    """Train and judge all models: for each, mean errors of ops and iterations in percent (None where nothing of the
    kind judges), ``score`` (in parts of the errors of the regressors alone, mean over groups; ``seed_error``: its
    standard error over seeds), ``behind`` (score minus that of ``reference``; ``behind_error``: over groups), and CPU
    time of training and of the first answer for a segment.  ``edges``: of networks and trees by their kinds of edges.
    """
    fit, reference = (fit_edges, EVERY) if edges else (fit_all, AUTO)
    parts = [(seed, held) for seed in range(seeds) for held in _folds(task, folds, seed, teach)]
    found = pd.DataFrame([row for seed, held in parts for row in _judged(task, held, seed, fit)])
    errors = found[["ops", "iteration"]]
    usual = errors[found["model"] == "none"].mean().clip(lower=LEAST_LOG)
    found["score"] = (errors / usual).mean(axis=1)  # ops and iterations count alike
    by_run = found.pivot_table("score", "run", "model")
    rows = []
    for model, own in found.groupby("model", sort=False):
        beside = reference if reference in by_run else f"{str(model).partition(',')[0]}, {reference}"
        behind = by_run[model] - by_run.get(beside, np.nan)
        figures = {
            "op_percent": 100 * np.expm1(own["ops"].mean()),
            "iteration_percent": 100 * np.expm1(own["iteration"].mean()),
            "score": own["score"].mean(),
            "seed_error": own.groupby("seed")["score"].mean().sem(),
            "behind": behind.mean(),
            "behind_error": behind.sem(),
            "fit_s": own["fit_s"].mean(),
            "answer_s": own["answer_s"].median(),
        }
        rows.append({"model": model, **{name: float(v) if np.isfinite(v) else None for name, v in figures.items()}})
    told = {"task": task.name, "about": task.about, "runs": len(task.names), "groups": len(by_run)}
    return {**told, "reference": reference, "rows": rows}


def _judged(task: Task, held: frozenset[str], seed: int, fit: Callable[[Split, int], Fitted]) -> list[Row]:
    """Absolute log errors of each model on each run that is held out; NaN where nothing judges."""
    print(f"{task.name}: seed {seed}, {len(held)} runs judge", file=sys.stderr, flush=True)
    split, rows = task.split(held), list[Row]()
    for model, (context, took) in fit(split, seed).items():
        own = {name: Row(model=model, run=name, seed=seed, fit_s=took, **_NOTHING) for name in sorted(held)}
        for name, examples in split.judged.items():
            begin = time.process_time()
            own[name]["ops"] = np.log1p(fit_context.op_error(examples, context) / 100)
            own[name]["answer_s"] = (time.process_time() - begin) / max(len(examples), 1)
        if split.runs and split.predictor is not None:
            times = fit_context.iteration_times(split.runs, replace(split.predictor, context=context))
            for run, seconds in zip(split.runs, times.tolist(), strict=True):
                own[run.name]["iteration"] = abs(np.log(seconds / run.manifest.iteration_time_s))
        rows += own.values()
    return rows


def _folds(task: Task, count: int, seed: int, teach: int) -> list[frozenset[str]]:
    """Runs that are held out together."""
    groups = sorted(task.names)
    if task.is_fixed:
        return [frozenset(groups)]
    if len(groups) < max(2, teach + 1):
        raise TraceError(f"task {task.name} needs at least {max(2, teach + 1)} groups, got {len(groups)}: collect more")
    order = np.random.default_rng(seed).permutation(groups).tolist()
    if teach:
        return [frozenset(order[teach:])]
    return [frozenset(order[part::count]) for part in range(min(count, len(order)))]


def outcome_text(outcome: Mapping[str, Any]) -> str:
    """A task's table."""
    columns = {"model": "model", "op error %": "op_percent", "iteration error %": "iteration_percent", "score": "score",
               "± seeds": "seed_error", f"behind {outcome['reference']}": "behind", "± groups": "behind_error",
               "training s": "fit_s", "first answer ms": "answer_s"}  # fmt: skip
    told = f"{outcome['task']}: {outcome['about']} ({outcome['runs']} runs, {outcome['groups']} groups judge)"
    return "\n".join([told, table_of(outcome["rows"], columns, 3)])


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Judge one task, or all whose data are there."""
    names = options.task or [name for name in TASKS if (options.data / name).is_dir()]
    if not names:
        raise TraceError(f"--data must be a folder with a folder for a task ({', '.join(TASKS)}), got {options.data}")
    tasks = [TASKS[name](options.data / name) for name in names]
    outcomes = [judge(task, options.seeds, options.folds, options.teach, edges=options.edges) for task in tasks]
    return outcomes, "\n\n".join(map(outcome_text, outcomes))


OPTIONS: Options = {
    "--data": {"type": Path, "default": Path("runs/context"), "help": "folder with a folder for each task"},
    "--task": {"choices": list(TASKS), "action": "append", "help": "a task alone (repeatable)"},
    "--seeds": {"type": int, "default": 3, "help": "splits and trainings"},
    "--teach": {"type": int, "default": 0, "help": "groups that teach, drawn at random; 0: all but a part"},
    "--folds": {"type": int, "default": 5, "help": "parts of the groups that are held out in turn"},
    "--edges": {"action": "store_true", "help": "compare kinds of edges instead of forms"},
}
STUDY = Study("context", __doc__ or "", run, OPTIONS)
