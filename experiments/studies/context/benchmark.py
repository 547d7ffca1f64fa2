"""Judge every model of a task on groups that taught it nothing, over several seeds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.experiments.studies.context.context_coverage import Covered, Doubt, Residuals, errors_of, residuals_of
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import MODELS, Fit
from stepsight.experiments.studies.context.judged_cache import Judged, JudgedCache
from stepsight.experiments.studies.context.network_models import LABELS, ablations, network, without_edges
from stepsight.experiments.studies.context.tuned_models import tuned

Array = NDArray[np.float64]
FOLDS = 3
CLEAR = 2.0  # standard errors by which a task is won
GNN = "GNN"
HELD_BACK = 3  # parts of the groups that teach, held back in turn


@dataclass(frozen=True)
class Row:
    """A model's errors on a task.

    Attributes:
        model: Which.
        error: Mean over seeds of the weighted mean |log| error.
        seed_error: Standard error over seeds.
        mape: Mean absolute error in percent, weighted alike.
        worst: Largest error of a graph, percent; mean over seeds.
        difference: Mean error minus that of the best model without messages, paired by graph.
        difference_error: Its standard error over groups.
        seconds: CPU time of training on one fold, mean.
        hears: Whether it passes messages.
        coverage: Share of graphs whose seconds lie in the 90 % interval that groups held back gave, of the first seed;
            None for variants.
        half_width: Half of the interval's width, mean, log units.
        node_coverage, node_half_width: The same of nodes, weighted by time; None where whole graphs are judged.
        answer_ms: CPU time of the first answer on one graph, median over folds, milliseconds.
    """

    model: str
    error: float
    seed_error: float
    mape: float
    worst: float
    difference: float
    difference_error: float
    seconds: float
    hears: bool
    coverage: float | None = None
    half_width: float | None = None
    node_coverage: float | None = None
    node_half_width: float | None = None
    answer_ms: float = 0.0


@dataclass(frozen=True)
class GroupRow:
    """Mean errors on one group of the network and of the best model without messages."""

    group: str
    graphs: int
    gnn: float
    best_other: float


@dataclass(frozen=True)
class Outcome:
    """A task's table.

    Attributes:
        task, about, floor, notes: Of the task.
        graphs: How many.
        groups: How many.
        seeds: Over which the rows are means.
        rows: One for each model.
        gnn: The network with edges that counts: the design with the least error.
        best_other: The best model without messages.
        difference: Mean error of ``gnn`` minus that of ``best_other``, paired by graph.
        difference_error: Its standard error over groups.
        won: Whether the difference is below minus two standard errors.
        by_group: Both models on every group that judges.
        ships: The model that held-back groups of the teaching part choose, and in how many folds.
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
    by_group: tuple[GroupRow, ...] = ()
    ships: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def models_of(task: ContextTask) -> tuple[dict[str, Fit], dict[str, Fit], dict[str, Fit]]:
    """Models without messages, designs with messages, and variants of the first design."""
    plain = dict(MODELS)
    same = all((g[task.readout].roofline == g[task.readout].baseline).all() for g in task.graphs)
    if same:
        del plain["regressors"]  # there are none for this task
    plain |= task.plain_models
    plain |= {f"sum over {node}s, no edges": without_edges(node) for node in task.edgeless}
    designs = {f"{GNN}: {name}": network(design) for name, design in task.designs.items()} | dict(task.networks)
    if not task.designs:
        return plain, designs, {}
    main = next(iter(task.designs.values()))
    variants = ablations(task, main)
    labelled = all("seconds" in g[main.readout] and "total" in g for g in task.graphs)
    if labelled:
        variants |= {f"{GNN}, {name}": network(main, labels=each) for name, each in LABELS.items()}
    return plain, designs, variants


class _Errors:
    """Errors of one model by seed and graph."""

    def __init__(self, seeds: int, graphs: int) -> None:
        self.logs, self.relative = np.zeros((seeds, graphs)), np.zeros((seeds, graphs))
        self.seconds: list[float] = []
        self.answers: list[float] = []
        self.covered: Covered | None = None  # of the first seed, where the model may ship


def judge(
    task: ContextTask,
    *,
    seeds: int = 3,
    folds: int = FOLDS,
    only: Sequence[str] = (),
    variants: bool = True,
    cache: Path | None = None,
    trials: int = 0,
    tracking_uri: str = "",
) -> Outcome:
    """Train and judge all models of a task.

    Args:
        task: What is judged.
        seeds: How many splits and trainings.
        folds: Parts of each split.
        only: Models whose names hold one of these words; all if empty.
        variants: Whether networks without each kind of edge and with other labels are judged too.
        cache: Folder of what was judged before; None: everything is judged anew.
        trials: Of an Optuna study for the settings of the first design, and of the sum without edges; 0: no study.
        tracking_uri: MLflow store of its trials.
    """
    plain, designs, others = models_of(task)
    if trials and task.designs:
        main, node = next(iter(task.designs.items())), task.edgeless[0]
        plain[f"sum over {node}s, no edges, {trials} trials"] = tuned(Design(node, (node,), ()), trials, tracking_uri)
        designs[f"{GNN}: {main[0]}, {trials} trials"] = tuned(main[1], trials, tracking_uri)
    every = {**plain, **designs, **(others if variants else {})}
    every = {name: fit for name, fit in every.items() if not only or any(word in name for word in only)}
    known = JudgedCache(cache, task)
    errors = {name: _Errors(seeds, len(task.graphs)) for name in every}
    chosen: dict[str, int] = {}
    for seed in range(seeds):
        for number, (taught, held) in enumerate(task.folds(folds, seed)):
            for name, fit in every.items():
                print(f"{task.name} seed {seed} fold {number}: {name}", file=sys.stderr, flush=True)
                own = errors[name]
                judged = _judged(task, known, (name, fit), (taught, held), seed)
                own.logs[seed, held], own.relative[seed, held] = judged.logs, judged.relative
                own.seconds.append(judged.seconds)
                own.answers.append(judged.answer_s)
            if seed == 0:
                print(f"{task.name} fold {number}: models on groups held back of the rest", file=sys.stderr, flush=True)
                able = {name: fit for name, fit in every.items() if name in plain or name in designs}
                found = _choose(task, known, able, (taught, held), errors)
                chosen[found] = chosen.get(found, 0) + 1
    return _outcome(task, errors, set(plain), set(designs), chosen)


def _judged(
    task: ContextTask,
    known: JudgedCache,
    model: tuple[str, Fit],
    fold: tuple[Sequence[int], Sequence[int]],
    seed: int,
) -> Judged:
    """Errors of a model that some graphs taught on others."""
    (name, fit), (taught, held) = model, fold

    def judge_now() -> Judged:
        begin = time.process_time()
        graphs = [task.graphs[place] for place in held]
        fitted = fit(task, [task.graphs[place] for place in taught], seed)
        trained = time.process_time()
        fitted(graphs[:1])
        answered = time.process_time()
        off = residuals_of(task, graphs, fitted(graphs))
        return Judged(*errors_of(task, graphs, off), off, trained - begin, answered - trained)

    return known.get((name, seed, list(taught), list(held)), judge_now)


def _choose(
    task: ContextTask,
    known: JudgedCache,
    models: Mapping[str, Fit],
    fold: tuple[Sequence[int], Sequence[int]],
    errors: Mapping[str, _Errors],
) -> str:
    """The first model, the simplest come first, within a standard error of the best on groups that are held back.

    Thirds of the groups that teach are held back in turn.  What the models are off by there also gives the intervals
    whose coverage is judged on the groups that judge.
    """
    taught, judging = fold
    groups = list(task.groups)
    if task.teachers:  # they are one group: its graphs are held back one by one
        groups = [f"{group} {place}" for place, group in enumerate(groups)]
    names = sorted({groups[place] for place in taught} - set(task.always))
    thirds = [set(names[turn::HELD_BACK]) for turn in range(min(HELD_BACK, len(names)))]
    places = [place for back in thirds for place in taught if groups[place] in back]
    logs = np.zeros((len(models), len(task.graphs)))
    for row, (name, fit) in zip(logs, models.items(), strict=True):
        nodes, totals = [], []
        for back in thirds:
            held = [place for place in taught if groups[place] in back]
            part = [place for place in taught if groups[place] not in back]
            judged = _judged(task, known, (name, fit), (part, held), 0)
            row[held] = judged.logs
            nodes += judged.off.nodes
            totals.append(judged.off.totals)
        doubt = Doubt(task, places, Residuals(nodes, np.concatenate(totals)))
        own = errors[name]
        own.covered = own.covered or Covered.empty(len(task.graphs))
        own.covered.put(judging, doubt.covered(judging, _judged(task, known, (name, fit), fold, 0).off))
    inside = np.isin(np.arange(len(task.graphs)), places)
    weights = np.where(inside, task.weights() if task.weights()[places].any() else 1.0, 0.0)
    best = logs[np.argmin(logs @ weights)]
    for row, name in zip(logs, models, strict=True):
        mean, doubt_of_mean = _paired(groups, weights, row, best)
        if mean <= doubt_of_mean:
            return name
    raise AssertionError("the best model is as good as itself")


def _outcome(
    task: ContextTask,
    errors: Mapping[str, _Errors],
    plain: set[str],
    designs: set[str],
    chosen: dict[str, int],
) -> Outcome:
    weights = task.weights()
    means = {name: each.logs.mean(axis=0) for name, each in errors.items()}
    total = {name: float(mean @ weights / weights.sum()) for name, mean in means.items()}
    best = min((name for name in total if name in plain), key=total.__getitem__, default="")
    gnn = min((name for name in total if name in designs), key=total.__getitem__, default="")
    rows = [
        _row(
            name, each, weights, _paired(task.groups, weights, means[name], means[best]) if best else (0.0, 0.0), plain
        )
        for name, each in errors.items()
    ]
    mean, doubt = _paired(task.groups, weights, means[gnn], means[best]) if best and gnn else (0.0, 0.0)
    judging = [group for group in sorted(set(task.groups)) if group not in task.teachers]
    by_group = []
    for group in judging if best and gnn else ():
        own = np.array([each == group for each in task.groups])
        share = weights * own / max(float((weights * own).sum()), 1e-12)
        by_group.append(GroupRow(group, int(own.sum()), float(means[gnn] @ share), float(means[best] @ share)))
    seeds = len(next(iter(errors.values())).logs)
    return Outcome(
        task.name, task.about, len(task.graphs), len(judging), seeds, task.floor, tuple(rows), gnn, best, mean, doubt,
        bool(best and gnn) and mean < -CLEAR * doubt, tuple(by_group), chosen, task.notes,
    )  # fmt: skip


def _row(name: str, errors: _Errors, weights: Array, paired: tuple[float, float], plain: set[str]) -> Row:
    share = weights / weights.sum()
    by_seed = errors.logs @ share
    spread = float(by_seed.std(ddof=1) / np.sqrt(len(by_seed))) if len(by_seed) > 1 else 0.0
    relative = 100 * errors.relative
    worst = float(relative[:, weights > 0].max(axis=1).mean())
    coverage, half_width, node_coverage, node_half_width = _covered(errors.covered, share)
    return Row(
        name, float(by_seed.mean()), spread, float((relative @ share).mean()), worst, *paired,
        float(np.mean(errors.seconds)), name not in plain, coverage, half_width, node_coverage, node_half_width,
        1e3 * float(np.median(errors.answers)),
    )  # fmt: skip


def _covered(covered: Covered | None, share: Array) -> tuple[float | None, float | None, float | None, float | None]:
    """Coverage and half width of graphs, and of nodes, means over graphs that judge."""
    if covered is None:
        return None, None, None, None

    def mean(values: Array) -> float | None:
        known = np.isfinite(values) & (share > 0)
        return float(np.average(values[known], weights=share[known])) if known.any() else None

    return mean(covered.totals), mean(covered.total_widths), mean(covered.nodes), mean(covered.node_widths)


def _paired(labels: Sequence[str], weights: Array, one: Array, other: Array) -> tuple[float, float]:
    """Difference of mean errors, and its standard error where graphs of a group are alike; errors ``(graphs,)``."""
    share = weights / weights.sum()
    each = share * (one - other)
    mean = float(each.sum())
    names = sorted({group for group, part in zip(labels, share, strict=True) if part > 0})
    groups = np.array([names.index(group) if group in names else 0 for group in labels])
    by_group = np.bincount(groups, each - share * mean, minlength=len(names))
    count = len(names)
    return mean, float(np.sqrt((by_group**2).sum() * count / max(count - 1, 1)))
