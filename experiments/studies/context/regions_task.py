"""Task *regions*: seconds of a compiled region before it is compiled, families of regions held out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import Fit, trees
from stepsight.experiments.studies.context.neighbour_features import neighbour_features
from stepsight.experiments.studies.context.network_models import network
from stepsight.experiments.studies.context.probe_families import is_probe
from stepsight.experiments.studies.context.region_collecting import MeasuredRegion, read_collected
from stepsight.experiments.studies.context.region_models import (
    LAUNCH_SECONDS,
    NEST,
    REUSE,
    STATEMENT,
    over_physics,
    physics,
    shrunk,
)
from stepsight.experiments.studies.context.unseen_families import UNSEEN
from stepsight.features.nest_features import TERM_SECONDS, nest_numbers, part_sums
from stepsight.features.region_features import op_numbers
from stepsight.features.statement_features import StatementNumbers
from stepsight.training.context.fit_typed import TypedFit

SETTINGS, EPOCHS = TypedFit(decay=1.0, rate=0.004), 25
BOUND = 0.6
WHOLE = "region"


def unseen_regions_task(folder: Path) -> ContextTask:
    """The families that judge once: all others teach."""
    task = regions_task(folder, unseen=True)
    teachers = tuple(sorted(set(task.groups) - set(UNSEEN)))
    return replace(task, name="unseen-regions", teachers=teachers)


def regions_task(folder: Path, *, unseen: bool = False) -> ContextTask:
    """The task, from what ``--collect`` measured; ``unseen``: with the families that judge once."""
    measured = [each for each in read_collected(folder) if each.region.launches]
    measured = [each for each in measured if unseen or each.family not in UNSEEN]
    families = [each.family for each in measured]
    graphs = [region_graph(each, number) for number, each in enumerate(measured)]
    judged = [each for each in measured if not is_probe(each.family) and (not unseen or each.family in UNSEEN)]
    again = np.array([np.log(each.seconds / each.seconds_again) for each in judged])

    def corrected(design: Design, **options: bool) -> Fit:
        return over_physics(shrunk(network(design, settings=SETTINGS)), **options)

    return ContextTask(
        "regions",
        "mean |log| error of the seconds of compiled regions, families held out",
        graphs,
        families,
        readout=NEST,
        simple="op",
        whole=True,
        floor=float(np.abs(again).mean()),
        edgeless=(),
        always=tuple(sorted({family for family in families if is_probe(family)})),
        bound=BOUND,
        epochs=EPOCHS,
        rest=False,
        plain_models={
            "physics of the code": physics(reuse=False),
            "physics of the code, reuse distance by hand": physics(reuse=True),
            "trees over physics, neighbours' features": over_physics(trees(neighbour_features)),
            "sum over nests over physics": corrected(Design(NEST, (NEST,), ()), told=True),
            "sum over statements over physics": corrected(Design(STATEMENT, (STATEMENT,), ())),
            "sum over statements that know their nest": corrected(Design(STATEMENT, (STATEMENT,), ()), nests=True),
        },
        networks={
            "GNN: nests and region": corrected(Design(NEST, (NEST, WHOLE))),
            "GNN: data flow of statements": corrected(Design(STATEMENT, (STATEMENT,))),
            "GNN: statements in nests": corrected(Design(STATEMENT, (STATEMENT, NEST))),
        },
        notes=(f"{len(measured) - len(judged)} probes teach every model and judge none",),
    )


def region_graph(measured: MeasuredRegion, number: int = 0) -> HeteroData:
    """A region as a graph of framework ops, loop nests and the whole."""
    numbers, ops = nest_numbers(measured.region), op_numbers(measured.region)
    graph = HeteroData()
    seconds = part_sums(numbers.terms * TERM_SECONDS)
    count, calls = len(seconds), len(measured.region.launches)
    written = len({access.buffer for loop in measured.region.loops for access in loop.writes})
    launching = np.array([calls, len(measured.region.inputs), written, 1.0])
    seconds[:, -1] += launching @ LAUNCH_SECONDS / count
    named = {"op": (ops.x, ops.parts, ops.key), NEST: (numbers.x, seconds, numbers.key)}
    for name, (x, parts, key) in named.items():
        graph[name].x = torch.from_numpy(x).float()
        graph[name].parts = torch.from_numpy(parts).float()
        graph[name].baseline = graph[name].roofline = graph[name].parts.sum(dim=1)
        graph[name].key = torch.from_numpy(key)
    graph[NEST].terms, graph[NEST].levels = torch.from_numpy(numbers.terms), torch.from_numpy(numbers.levels)
    _add_statements(graph, numbers.statements)
    kinds = np.eye(len(numbers.edges))
    where = np.concatenate([each for each, _ in numbers.edges.values()], axis=1)
    about = [np.concatenate([a, kinds[[k] * len(a)]], axis=1) for k, (_, a) in enumerate(numbers.edges.values())]
    graph[NEST, REUSE, NEST].edge_index = torch.from_numpy(where)
    graph[NEST, REUSE, NEST].edge_attr = torch.from_numpy(np.concatenate(about)).float()
    graph[WHOLE].x = torch.tensor([[np.log1p(numbers.footprint), np.log(count), np.log(calls)]]).float()
    graph[NEST, "part_of", WHOLE].edge_index = torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.long)])
    graph[NEST, "part_of", WHOLE].edge_attr = torch.from_numpy(seconds.sum(axis=1) / seconds.sum()).float()[:, None]
    graph.total = torch.tensor([min(measured.seconds, measured.seconds_again)]).float()
    graph.launching, graph.number = torch.from_numpy(launching)[None], torch.tensor([number])
    return graph


def _add_statements(graph: HeteroData, numbers: StatementNumbers) -> None:
    """The operations within the nests, what they take, and the nest that each is in."""
    graph[STATEMENT].x = torch.from_numpy(numbers.x).float()
    graph[STATEMENT].terms = torch.from_numpy(numbers.terms).float()
    graph[STATEMENT].levels = torch.from_numpy(numbers.levels)
    graph[STATEMENT, "data", STATEMENT].edge_index = torch.from_numpy(numbers.edges)
    graph[STATEMENT, "data", STATEMENT].edge_attr = torch.from_numpy(numbers.about).float()
    of = torch.from_numpy(numbers.nest)
    graph[STATEMENT, "in", NEST].edge_index = torch.stack([torch.arange(len(of)), of])
    graph[STATEMENT, "in", NEST].edge_attr = torch.zeros(len(of), 2)
