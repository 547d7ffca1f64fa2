"""Networks whose settings an Optuna study chooses on groups held back from those that teach, tracked in MLflow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_coverage import errors_of, residuals_of
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import Fit, Fitted
from stepsight.experiments.studies.context.network_models import network
from stepsight.training.context.fit_typed import TypedFit
from stepsight.training.tracking import tracked

TUNED = ("channels", "rate", "decay", "batches", "delta")  # fields of the training that a study changes
PARTS = 3  # into which the groups that teach are split; one judges the trials


def tuned(design: Design, trials: int, uri: str) -> Fit:
    """A network of a design with the best settings of a study; nothing that judges takes part in it.

    Args:
        design: Its rounds of messages are a setting too, where it has edges.
        trials: Of the study; the first has the usual settings.
        uri: MLflow store with a run for each trial.
    """

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        import optuna

        part, held = _split(task, graphs, seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        usual = {name: value for name, value in asdict(TypedFit()).items() if name in TUNED}
        study.enqueue_trial({**usual, "layers": design.layers, "epochs": task.epochs, "bound": task.bound})

        def objective(trial: Any) -> float:
            own, other, settings = _suggested(trial, task, design)
            with tracked(uri, f"{task.name}, trial {trial.number}") as run:
                answers = network(own, settings=settings)(other, part, seed)(held)
                error = float(errors_of(task, held, residuals_of(task, held, answers))[0].mean())
                run.log(trial.params, {"error_percent": 100 * error}, {"task": task.name, "seed": str(seed)})
            print(f"{task.name} trial {trial.number}: {100 * error:.2f} %", file=sys.stderr, flush=True)
            return error

        study.optimize(objective, n_trials=trials)
        own, other, settings = _suggested(optuna.trial.FixedTrial(study.best_params), task, design)
        return network(own, settings=settings)(other, graphs, seed)

    return fit


def _suggested(trial: Any, task: ContextTask, design: Design) -> tuple[Design, ContextTask, TypedFit]:
    settings = TypedFit(
        channels=trial.suggest_categorical("channels", [8, 16, 32, 64]),
        rate=trial.suggest_float("rate", 1e-3, 2e-2, log=True),
        decay=trial.suggest_float("decay", 1e-3, 0.5, log=True),
        batches=trial.suggest_categorical("batches", [1, 2, 4, 8]),
        delta=trial.suggest_float("delta", 0.02, 0.5, log=True),
    )
    epochs = trial.suggest_int("epochs", max(task.epochs // 4, 1), 2 * task.epochs)
    bound = trial.suggest_float("bound", task.bound / 4, task.bound)
    layers = trial.suggest_int("layers", 1, 3)
    return replace(design, layers=layers), replace(task, epochs=epochs, bound=bound), settings


def _split(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> tuple[list[HeteroData], list[HeteroData]]:
    """Graphs that teach the trials and graphs that judge them: other groups, or other graphs of one group."""
    place = {id(graph): number for number, graph in enumerate(task.graphs)}
    names = [task.groups[place[id(graph)]] for graph in graphs]
    if len(set(names)) < PARTS:
        names = [f"{name} {number}" for number, name in enumerate(names)]
    order = np.random.default_rng(seed).permutation(sorted(set(names) - set(task.always))).tolist()
    back = set(order[::PARTS])
    return (
        [graph for graph, name in zip(graphs, names, strict=True) if name not in back],
        [graph for graph, name in zip(graphs, names, strict=True) if name in back],
    )
