"""Networks of the benchmark: sums over nodes without edges, and message passing in several designs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.training.context.fit_typed import TypedFit, fit_typed

LABELS = {"nodes' labels only": (1.0, 0.0), "graphs' labels only": (0.0, 1.0), "both labels": (1.0, 1.0)}


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
            recurrent=design.recurrent,
            edge_seconds=design.edge_seconds,
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
