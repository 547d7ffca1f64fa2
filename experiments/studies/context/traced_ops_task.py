"""Task *ops*: seconds of ops within traced steps of any model; families of models, or runs, held out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.errors import TraceError
from stepsight.dataset.graph_data import relation_pairs
from stepsight.dataset.hardware import Hardware, find_hardware
from stepsight.dataset.imported.graph_schema import kind_names, work_numbers
from stepsight.dataset.imported.imported_run import has_traces, run_folders
from stepsight.dataset.op import Op
from stepsight.dataset.physics import roofline_seconds
from stepsight.dataset.program import Program
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.features.graph_features import LABELS, node_features
from stepsight.training.measured.graph_segments import read_graphs
from stepsight.training.measured.measured import MeanSegment, average

Array = NDArray[np.float64]
LEAST_S = 1e-6
_NUMBER = re.compile(r"[-_]\d+$")


def ops_task(folder: Path) -> ContextTask:
    """The task, from a folder of collections whose names are ``FAMILY-NUMBER``; collections of a family are a group.

    Raises:
        TraceError: If no collection holds a traced run.
    """
    hardware = find_hardware("local-cpu")
    assert hardware is not None
    graphs, groups = [], []
    for collection in sorted(path for path in folder.iterdir() if path.is_dir()):
        runs = [run for run in run_folders(collection) if has_traces(run)]
        for segments, _ in read_graphs(runs):
            own = [segment_graph(mean, hardware) for mean in average(segments) if len(mean.program)]
            total = sum(float(torch.nansum(graph["op"].seconds)) for graph in own)
            for graph in own:
                graph["op"].weight = torch.nan_to_num(graph["op"].seconds) / max(total, 1e-12)
            graphs += own
            groups += [_NUMBER.sub("", collection.name)] * len(own)
    if not graphs:
        raise TraceError(f"{folder} must hold collections with traced runs, got none")
    _drop_empty(graphs)
    return ContextTask(
        "ops",
        "time-weighted |log| error of ops within traced steps, families held out",
        graphs,
        groups,
        designs={"data, order and synchronisation edges": Design("op"), "data edges": Design("op", None, ("data",))},
    )


def segment_graph(mean: MeanSegment, hardware: Hardware) -> HeteroData:
    """A segment as a graph: features of ops and collectives, and every relation between them."""
    program = mean.program
    works = [node.work for node in program.nodes]
    share = np.array([node.share for node in program.nodes])
    roofline = np.array([roofline_seconds(w, hardware) if isinstance(w, Op) else 0.0 for w in works]) * share
    baseline = LEAST_S + roofline
    names = {name: number for number, name in enumerate(kind_names())}
    label = LABELS.index(program.label) if program.label in LABELS else len(LABELS)
    is_op = np.array([isinstance(work, Op) for work in works])
    graph = HeteroData()
    numbers = node_features(program, baseline, hardware, mean.busy)
    graph["op"].x = torch.from_numpy(np.concatenate([numbers, work_numbers(works)[:-1]], axis=1)).float()
    graph["op"].baseline = torch.from_numpy(baseline).float()
    graph["op"].roofline = graph["op"].baseline
    graph["op"].key = torch.tensor([4 * names[work.kind] + label for work in works])
    seconds = np.where(is_op, np.maximum(mean.slot_s, 1e-8), np.nan)
    graph["op"].seconds = torch.from_numpy(seconds).float()
    for relation, pairs in relation_pairs(program).items():
        graph["op", relation, "op"].edge_index = torch.from_numpy(np.ascontiguousarray(pairs))
        graph["op", relation, "op"].edge_attr = torch.from_numpy(_about(program, pairs)).float()
    return graph


def _about(program: Program, pairs: NDArray[np.int64]) -> Array:
    """Of each edge: bytes of the source, nodes between, and bytes moved since."""
    moved = np.array([float(node.work.num_bytes) for node in program.nodes])
    before = np.concatenate([[0.0], np.cumsum(moved)])
    source, target = pairs
    since = np.abs(before[target] - before[np.minimum(source + 1, len(moved))])
    return np.stack([np.log1p(moved[source]), np.log1p(np.abs(target - source)), np.log1p(since)], axis=1)


def _drop_empty(graphs: list[HeteroData]) -> None:
    """Leave out relations that occur in no graph."""
    for kind in graphs[0].edge_types:
        if not any(graph[kind].num_edges for graph in graphs):
            for graph in graphs:
                del graph[kind]
