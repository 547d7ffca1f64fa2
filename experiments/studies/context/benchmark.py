"""Judge every model of a task on groups that taught it nothing, over several seeds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.edgeless_models import MODELS, Answers, Fit
from stepsight.experiments.studies.context.network_models import LABELS, ablations, network, without_edges

Array = NDArray[np.float64]
FOLDS = 3
AS_GOOD = 1.02  # times the error of the best
CLEAR = 2.0  # standard errors by which a task is won
GNN = "GNN"


@dataclass(frozen=True)
class Row:
    """A model's errors on a task.

    Attributes:
        model: Which.
        error: Mean over seeds of the weighted mean |log| error.
        seed_error: Standard error over seeds.
        mape: Mean absolute error in percent, weighted alike.
        seconds: Training and prediction of one fold, mean.
        hears: Whether it passes messages.
    """

    model: str
    error: float
    seed_error: float
    mape: float
    seconds: float
    hears: bool


@dataclass(frozen=True)
class Outcome:
    """A task's table.

    Attributes:
        task, about, floor, notes: Of the task.
        graphs: How many.
        groups: How many.
        seeds: Over which the rows are means.
        rows: One for each model.
        gnn: The network with edges that counts: the design chosen on held-back groups.
        best_other: The best model without messages.
        difference: Mean error of ``gnn`` minus that of ``best_other``, paired by graph.
        difference_error: Its standard error over groups.
        won: Whether the difference is below minus two standard errors.
        ships: The model that held-back groups choose, fold by fold.
    """

    task: str
    about: str
    graphs: int
    groups: int
    seeds: int
    floor: float | None
    rows: tuple[Row, ...]
    gnn: str
    best_other: str
    difference: float
    difference_error: float
    won: bool
    ships: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def models_of(task: ContextTask) -> tuple[dict[str, Fit], dict[str, Fit], dict[str, Fit]]:
    """Models without messages, designs with messages, and variants of the first design."""
    plain = dict(MODELS)
    same = all((g[task.readout].roofline == g[task.readout].baseline).all() for g in task.graphs)
    if same:
        del plain["regressors"]  # there are none for this task
    plain |= {f"sum over {node}s, no edges": without_edges(node) for node in task.edgeless}
    designs = {f"{GNN}: {name}": network(design) for name, design in task.designs.items()}
    main = next(iter(task.designs.values()))
    variants = ablations(task, main)
    labelled = all("seconds" in g[main.readout] and "total" in g for g in task.graphs)
    if labelled:
        variants |= {f"{GNN}, {name}": network(main, labels=each) for name, each in LABELS.items()}
    return plain, designs, variants


def errors_of(task: ContextTask, graphs: Sequence[HeteroData], answers: Answers) -> tuple[Array, Array]:
    """Mean |log| error, and mean relative error, of each graph."""
    nodes, totals = answers
    if task.whole:
        off = np.log(totals / np.array([float(graph.total) for graph in graphs]))
        return np.abs(off), np.abs(np.expm1(off))
    logs, relative = [], []
    for graph, seconds in zip(graphs, nodes, strict=True):
        truth = graph[task.readout].seconds.double().numpy()
        known = np.isfinite(truth)
        off = np.log(seconds[known] / truth[known])
        weight = graph[task.readout].weight.double().numpy()[known] + 1e-15
        logs.append(float(np.average(np.abs(off), weights=weight)) if known.any() else 0.0)
        relative.append(float(np.average(np.abs(np.expm1(off)), weights=weight)) if known.any() else 0.0)
    return np.array(logs), np.array(relative)


class _Judged:
    """Errors of one model by seed and graph."""

    def __init__(self, seeds: int, graphs: int) -> None:
        self.logs, self.relative = np.full((seeds, graphs), np.nan), np.full((seeds, graphs), np.nan)
        self.seconds: list[float] = []


def judge(
    task: ContextTask, *, seeds: int = 3, folds: int = FOLDS, only: Sequence[str] = (), variants: bool = True
) -> Outcome:
    """Train and judge all models of a task.

    Args:
        task: What is judged.
        seeds: How many splits and trainings.
        folds: Parts of each split.
        only: Models whose names hold one of these words; all if empty.
        variants: Whether networks without each kind of edge and with other labels are judged too.
    """
    plain, designs, others = models_of(task)
    every = {**plain, **designs, **(others if variants else {})}
    every = {name: fit for name, fit in every.items() if not only or any(word in name for word in only)}
    judged = {name: _Judged(seeds, len(task.graphs)) for name in every}
    chosen: dict[str, int] = {}
    for seed in range(seeds):
        for number, (taught, held) in enumerate(task.folds(folds, seed)):
            for name, fit in every.items():
                _run(task, fit, (taught, held), seed, judged[name])
                print(f"{task.name} seed {seed} fold {number}: {name}", file=sys.stderr, flush=True)
            if seed == 0:
                found = _choose(task, {n: f for n, f in every.items() if n in plain or n in designs}, taught)
                chosen[found] = chosen.get(found, 0) + 1
    return _outcome(task, judged, set(plain), set(designs), chosen)


def _run(task: ContextTask, fit: Fit, fold: tuple[Sequence[int], Sequence[int]], seed: int, judged: _Judged) -> None:
    taught, held = fold
    begin = time.process_time()
    graphs = [task.graphs[place] for place in held]
    answers = fit(task, [task.graphs[place] for place in taught], seed)(graphs)
    judged.seconds.append(time.process_time() - begin)
    judged.logs[seed, held], judged.relative[seed, held] = errors_of(task, graphs, answers)


def _choose(task: ContextTask, models: Mapping[str, Fit], taught: Sequence[int]) -> str:
    """The first model, the simplest come first, that is as good as the best on groups that are held back."""
    names = sorted({task.groups[place] for place in taught})
    back = set(names[::3])
    part = [place for place in taught if task.groups[place] not in back]
    held = [place for place in taught if task.groups[place] in back]
    weights = task.weights()[held]
    found: dict[str, float] = {}
    for name, fit in models.items():
        graphs = [task.graphs[place] for place in held]
        logs, _ = errors_of(task, graphs, fit(task, [task.graphs[place] for place in part], 0)(graphs))
        found[name] = float(np.average(logs, weights=weights))
    best = min(found, key=lambda name: found[name])
    return next(name for name in found if found[name] <= AS_GOOD * found[best])


def _outcome(
    task: ContextTask,
    judged: Mapping[str, _Judged],
    plain: set[str],
    designs: set[str],
    chosen: dict[str, int],
) -> Outcome:
    weights = task.weights()
    rows = []
    for name, each in judged.items():
        by_seed = each.logs @ weights / weights.sum()
        spread = float(by_seed.std(ddof=1) / np.sqrt(len(by_seed))) if len(by_seed) > 1 else 0.0
        mape = 100 * float((each.relative @ weights / weights.sum()).mean())
        seconds = float(np.mean(each.seconds))
        rows.append(Row(name, float(by_seed.mean()), spread, mape, seconds, name not in plain))
    error = {row.model: row.error for row in rows}
    best = min((name for name in error if name in plain), key=error.__getitem__, default="")
    gnn = min((name for name in error if name in designs), key=error.__getitem__, default="")
    mean, doubt = _paired(task, judged, gnn, best) if best and gnn else (0.0, 0.0)
    return Outcome(
        task.name, task.about, len(task.graphs), len(set(task.groups)), len(next(iter(judged.values())).logs),
        task.floor, tuple(rows), gnn, best, mean, doubt, bool(best and gnn) and mean < -CLEAR * doubt, chosen,
        task.notes,
    )  # fmt: skip


def _paired(task: ContextTask, judged: Mapping[str, _Judged], one: str, other: str) -> tuple[float, float]:
    """Difference of mean errors, and its standard error where graphs of a group are alike."""
    weights = task.weights() / task.weights().sum()
    each = weights * (judged[one].logs.mean(axis=0) - judged[other].logs.mean(axis=0))
    mean = float(each.sum())
    names = sorted(set(task.groups))
    groups = np.array([names.index(group) for group in task.groups])
    by_group = np.bincount(groups, each - weights * mean, minlength=len(names))
    count = len(names)
    return mean, float(np.sqrt((by_group**2).sum() * count / max(count - 1, 1)))


def outcome_text(outcome: Outcome) -> str:
    """A task's table."""
    cells = [
        [row.model, Number(100 * row.error), Number(100 * row.seed_error), Number(row.mape), Number(row.seconds)]
        for row in outcome.rows
    ]
    header = ["model", "mean |log| error %", "± over seeds", "MAPE %", "CPU s a fold"]
    floor = "" if outcome.floor is None else f"; two measurements differ by {100 * outcome.floor:.1f} %"
    verdict = "won" if outcome.won else "not won"
    chosen = ", ".join(f"{name} ({count})" for name, count in outcome.ships.items())
    lines = [
        f"{outcome.task}: {outcome.about}",
        f"{outcome.graphs} graphs of {outcome.groups} groups, {outcome.seeds} seeds{floor}",
        table(header, cells),
        f"{verdict}: {outcome.gnn} against {outcome.best_other}: {100 * outcome.difference:+.1f} "
        f"± {100 * outcome.difference_error:.1f} points (paired, standard error over groups)",
        f"held-back groups choose: {chosen}",
        *outcome.notes,
    ]
    return "\n".join(lines)


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    return asdict(outcome)
