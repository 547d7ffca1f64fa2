"""Networks of the benchmark: sums over nodes without edges, and message passing in several designs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_coverage import errors_of, residuals_of
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.training.context.fit_typed import TypedFit, fit_typed

LABELS = {"nodes' labels only": (1.0, 0.0), "graphs' labels only": (0.0, 1.0), "both labels": (1.0, 1.0)}
SETTINGS = (TypedFit(channels=8, decay=0.3, rate=0.01), TypedFit(channels=24, decay=0.05, rate=0.005))
WAYS = ("additive", "demand", "mutual")  # of messages in ``gnn.concurrency_network``
HELD_BACK = 3  # of so many groups that teach, one chooses the settings


def network(design: Design, *, labels: tuple[float, float] | None = None, settings: TypedFit | None = None) -> Fit:
    """A network of a design.

    Args:
        design: What it reads out, sees and hears.
        labels: Weights of the losses on nodes and on whole graphs; None: what the task judges.
        settings: Sizes and steps of the training.
    """

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        node, whole = labels or ((0.0, 1.0) if task.whole else (1.0, 0.0))
        how = replace(
            settings or TypedFit(),
            readout=design.readout,
            node_types=design.node_types,
            relations=design.relations,
            layers=design.layers,
            concurrency=design.concurrency,
            head=task.head,
            rest=task.whole if task.rest is None else task.rest,
            bound=task.bound,
            epochs=task.epochs,
            node_weight=node,
            total_weight=whole,
        )
        fitted = fit_typed(graphs, how, seed)

        def answer(asked: Sequence[HeteroData]) -> Answers:
            return fitted.seconds(asked)

        return answer

    return fit


def nested(fits: Sequence[Fit]) -> Fit:
    """The fit with the least error on groups held back of those that teach."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        group_of = {id(graph): group for graph, group in zip(task.graphs, task.groups, strict=True)}
        weight_of = dict(zip(map(id, task.graphs), task.weights().tolist(), strict=True))
        names = sorted({group_of[id(graph)] for graph in graphs})
        back = set(names[seed % HELD_BACK :: HELD_BACK])
        held = [graph for graph in graphs if group_of[id(graph)] in back]
        rest = [graph for graph in graphs if group_of[id(graph)] not in back]
        weights = np.array([weight_of[id(graph)] for graph in held])
        if len(names) < HELD_BACK or not weights.any():
            return fits[0](task, graphs, seed)
        errors = [
            errors_of(task, held, residuals_of(task, held, each(task, rest, seed)(held)))[0] @ weights for each in fits
        ]
        return fits[int(np.argmin(errors))](task, graphs, seed)

    return fit


def concurrency_networks() -> Mapping[str, Fit]:
    """Networks of ``concurrency_network``, settings chosen by groups held back of those that teach."""
    return {
        f"GNN: concurrency, {way}": nested(
            [network(Design("op", None, ("beside",), concurrency=way), settings=each) for each in SETTINGS]
        )
        for way in WAYS
    }


def without_edges(node: str) -> Fit:
    """A sum over nodes of one type, each by its own features: DeepSets of whole graphs, an MLP of nodes."""
    return network(Design(node, (node,), ()))


def relations_of(task: ContextTask, design: Design) -> list[str]:
    """Names of the types of edges that a design hears."""
    seen = set(task.graphs[0].node_types) if design.node_types is None else {*design.node_types, design.readout}
    kinds = [kind for kind in task.graphs[0].edge_types if {kind[0], kind[2]} <= seen]
    names = dict.fromkeys(kind[1] for kind in kinds if design.relations is None or kind[1] in design.relations)
    return list(names)


def ablations(task: ContextTask, design: Design) -> dict[str, Fit]:
    """The design without each type of edge."""
    names = relations_of(task, design)
    if len(names) < 2:
        return {}
    return {
        f"GNN without {name} edges": network(replace(design, relations=tuple(n for n in names if n != name)))
        for name in names
    }
