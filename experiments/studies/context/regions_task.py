"""Task *regions*: seconds of a compiled region before it is compiled, families of regions held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.region_collecting import MeasuredRegion, read_collected
from stepsight.features.region_features import region_numbers

NODES = ("op", "loop", "kernel")


def regions_task(folder: Path) -> ContextTask:
    """The task, from what ``--collect`` measured."""
    measured = [each for each in read_collected(folder) if each.region.loops]
    again = np.array([np.log(each.seconds / each.seconds_again) for each in measured])
    return ContextTask(
        "regions",
        "mean |log| error of the seconds of compiled regions, families held out",
        [region_graph(each) for each in measured],
        [each.family for each in measured],
        readout="kernel",
        simple="op",
        whole=True,
        floor=float(np.abs(again).mean()),
        designs={
            "kernels, data and reuse edges": Design("kernel", ("kernel",)),
            "loops, data and reuse edges": Design("loop", ("loop",)),
            "loops to kernels": Design("kernel", ("loop", "kernel"), ("part_of",), layers=1),
            "loops and kernels, all edges": Design("kernel", ("loop", "kernel")),
        },
        edgeless=NODES,
    )


def region_graph(measured: MeasuredRegion) -> HeteroData:
    """A region as a graph of framework ops, loops and fused kernels."""
    numbers = region_numbers(measured.region)
    graph = HeteroData()
    for name in NODES:
        graph[name].x = torch.from_numpy(numbers.x[name]).float()
        graph[name].parts = torch.from_numpy(numbers.parts[name]).float()
        graph[name].roofline = graph[name].parts.sum(dim=1)
        graph[name].baseline = graph[name].roofline
        graph[name].key = torch.from_numpy(numbers.key[name])
    for kind, (where, about) in numbers.edges.items():
        graph[kind].edge_index = torch.from_numpy(where)
        graph[kind].edge_attr = torch.from_numpy(about).float()
    graph["kernel"].seconds = torch.from_numpy(_kernel_seconds(measured)).float()
    graph["kernel"].weight = torch.ones(graph["kernel"].num_nodes)
    graph.total = torch.tensor([np.sqrt(measured.seconds * measured.seconds_again)]).float()
    return graph


def _kernel_seconds(measured: MeasuredRegion) -> np.ndarray:
    """Seconds of kernels that have a compiled function of their own, NaN for others."""
    kernels = sorted({loop.kernel for loop in measured.region.loops})
    calls = {loop.kernel: loop.call for loop in measured.region.loops}
    shared = [name for name in calls.values() if list(calls.values()).count(name) > 1]
    return np.array([np.nan if calls[k] in shared else measured.calls.get(calls[k], np.nan) for k in kernels])
