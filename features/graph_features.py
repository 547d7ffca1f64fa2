"""Numbers from programs: the features of every node, and the edges between nodes, for the context model.

One row or index per node of the program, ops and collectives alike; streams are groups of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.graph.program import Dependency, Program
from stepsight.dataset.graph.relations import relation_pairs
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds import kinds_version
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS, Op
from stepsight.features.op_features import check_known

Array = NDArray[np.float64]
Edges = NDArray[np.int64]

STREAMS = ("compute", "tp", "dp", "pp")  # other names count as none of them
LABELS = ("forward", "backward", "optimizer")
NUMBERS = (
    "is_collective",
    "log_seconds_alone",
    "log_bytes",
    "log_flops",
    "log_intensity",
    "log_inefficiency",  # seconds alone over the roofline's
    "busy",
    "share",
    "is_first",
    "log_seconds_before",  # of the work issued just before, on any stream
    "log_bytes_before",
    "log_segment_bytes",  # all bytes that the segment moves: whether they fit in caches
    "log_segment_seconds",
)
KIND, LABEL = "kind=", "label="  # how features begin that say what a node is, and what its program
_AFTER_KINDS = (*(f"stream={stream}" for stream in STREAMS), *(f"{LABEL}{label}" for label in LABELS), *NUMBERS)
RELATIONS = ("stream_order", "data", "synchronisation", "may_run_concurrently")
# Heard by networks that are trained now: data edges are worth nothing, and the programs that teach have none.
HEARD = tuple(relation for relation in RELATIONS if relation != "data")


@dataclass(frozen=True)
class SegmentGraph:
    """A segment as context models see it: what runs, and where."""

    program: Program  # ops and collectives in the order of issue, with their streams and edges
    hardware: Hardware  # what they run on
    busy: int  # devices of the node that compute at the same time

    def to_heterodata(self, alone: Array) -> Any:
        """As ``TraceGraphs`` has segments; ``alone``, ``(nodes,)``: seconds, for the first column of ``y``."""
        return self.program.to_heterodata(alone, self.busy, self.hardware.name)


@dataclass(frozen=True)
class Topology:
    """The edges along which nodes of one or several programs exchange messages."""

    num_nodes: int  # of all programs
    edges: Mapping[str, Edges]  # by relation, (2, e), from -> to; every relation of RELATIONS is there
    stream: Edges  # stream of each node, numbered through all programs, (num_nodes,)
    num_streams: int  # of all programs


def _log(value: Array, unit: float, scale: float = 4.0) -> Array:
    """Logarithm in multiples of a typical unit, about -1 to 1."""
    return np.asarray(np.log(np.maximum(value, 1e-3 * unit) / unit) / scale)


def node_feature_names() -> tuple[str, ...]:
    """Names of all features of a node: its kind, its stream, the label of its program, and numbers."""
    return _names(kinds_version())


@cached(4)
def _names(version: tuple[int, int]) -> tuple[str, ...]:
    ops = sorted(OP_KINDS.values(), key=lambda kind: kind.code)
    collectives = sorted(COLLECTIVE_KINDS.values(), key=lambda kind: kind.code)
    names = (*(kind.name for kind in ops), *(kind.name for kind in collectives))
    return (*(f"{KIND}{name}" for name in names), *_AFTER_KINDS)


def check_node_features(names: Sequence[str], model: str) -> None:
    """Raise ``PredictorError`` with the features that a model reads and this version does not compute.

    A kind or a label that is not registered here occurs in no program: its feature is 0.
    """
    check_known([name for name in names if not name.startswith((KIND, LABEL))], _AFTER_KINDS, model)


def node_features(graph: SegmentGraph, alone: Array, names: tuple[str, ...] | None = None) -> Array:
    """Features by name, ``(nodes, len(names))``, all by default; ``alone``: seconds of each node, ``(nodes,)``."""
    column = {name: at for at, name in enumerate(node_feature_names() if names is None else names)}
    program, nodes = graph.program, graph.program.nodes
    features = np.zeros((len(nodes), len(column)))
    if not nodes:
        return features
    for row, node in zip(features, nodes, strict=True):
        for name in (f"{KIND}{node.work.kind}", f"stream={node.stream}", f"{LABEL}{program.label}"):
            if name in column:
                row[column[name]] = 1.0
    for name, values in zip(NUMBERS, _numbers(graph, alone), strict=True):
        if name in column:
            features[:, column[name]] = values
    return features


def _numbers(graph: SegmentGraph, alone: Array) -> tuple[Array, ...]:
    """Numbers of every node in the order of ``NUMBERS``, each ``(nodes,)``."""
    nodes, hardware = graph.program.nodes, graph.hardware
    rows = np.arange(len(nodes))
    is_op = np.array([isinstance(node.work, Op) for node in nodes])
    num_bytes = np.array([float(node.work.num_bytes) for node in nodes])
    flops = np.array([node.work.flops if isinstance(node.work, Op) else 0.0 for node in nodes])
    roofline = np.array([roofline_seconds(node.work, hardware) if isinstance(node.work, Op) else 0.0 for node in nodes])
    before = np.maximum(rows - 1, 0)
    return (
        ~is_op,
        _log(alone, 1e-4),
        _log(num_bytes, 1e6),
        np.where(is_op, _log(flops, 1e7), 0.0),
        np.where(is_op, _log(flops / np.maximum(num_bytes, 1.0), 1.0), 0.0),
        np.where(is_op, np.clip(np.log(alone / np.maximum(roofline, 1e-9)), -3, 3) / 2, 0.0),
        np.full(len(nodes), np.log2(graph.busy)),
        np.array([node.share for node in nodes]),
        rows == 0,
        _log(alone[before], 1e-4),
        _log(num_bytes[before], 1e6),
        np.full(len(nodes), _log(num_bytes.sum(keepdims=True), 1e7)[0]),
        np.full(len(nodes), _log(alone.sum(keepdims=True), 1e-2)[0]),
    )


def directions(relations: Sequence[str]) -> list[tuple[str, int, int]]:
    """Each relation with the end that hears and the one that is heard (0: source, 1: target), in both directions."""
    both = [(relation, near) for relation in relations for near in (1, 0)]
    return [(name, near, 1 - near) for name, near in both if near or name != "may_run_concurrently"]


def topology(program: Program) -> Topology:
    """``RELATIONS`` between the nodes of one program; the rarer ones count as synchronisation."""
    number = {stream: index for index, stream in enumerate(program.streams)}
    stream = np.array([number[node.stream] for node in program.nodes], dtype=np.int64)
    edges = {relation: [np.zeros((2, 0), dtype=np.int64)] for relation in RELATIONS}
    for relation, found in relation_pairs(program).items():
        edges[relation if relation in edges else Dependency.SYNCHRONISATION.value].append(found)
    return Topology(len(stream), {r: np.concatenate(e, axis=1) for r, e in edges.items()}, stream, len(number))


def join(parts: list[Topology]) -> Topology:
    """Several programs as one topology without edges between them."""
    nodes = np.cumsum([0, *(part.num_nodes for part in parts)])
    streams = np.cumsum([0, *(part.num_streams for part in parts)])
    edges = {relation: [np.zeros((2, 0), np.int64)] for relation in RELATIONS}
    stream = [np.zeros(0, np.int64)]
    for part, node, first in zip(parts, nodes, streams, strict=False):
        stream.append(part.stream + first)
        for relation, found in edges.items():
            found.append(part.edges[relation] + node)
    joined = {relation: np.concatenate(found, axis=1) for relation, found in edges.items()}
    return Topology(int(nodes[-1]), joined, np.concatenate(stream), int(streams[-1]))
