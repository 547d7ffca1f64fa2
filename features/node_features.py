"""Numbers from ops: physical terms of their time, and features for trees.  Numbers from programs: features of every
node and edges between nodes, for context models; streams are groups of nodes.

Pure functions of nouns; every array has one row per op, or per node of a program, ops and collectives alike.  A model
says which features it reads, and gets those columns.  A name always means one formula: a feature with another formula
gets another name.  ``FEATURE_VERSION`` goes up only where that cannot be, and then predictors of earlier versions are
refused.

Tiles: a product's output is cut into tiles, each computed by one processor; a last wave that fills only part of the
processors, and tiles that stick out over the edge, take as long as full ones (NVIDIA, "Matrix Multiplication Background
User's Guide", 2023).  Which tile a library takes is not known, so every usual one has a feature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.graph.program import Dependency, Program
from stepsight.dataset.graph.relations import relation_pairs
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, DTYPE_BYTES, OP_KINDS, Op

TILES = ((256, 128), (128, 256), (128, 128), (64, 64), (128, 64), (64, 128), (64, 256), (256, 64), (192, 128))
TILE_FEATURES = (*(f"log_waste_{rows}x{columns}" for rows, columns in TILES), "log_tiles_per_processor")


def tile_features(op: Op, num_processors: int) -> tuple[float, ...]:
    """Compute ``TILE_FEATURES``: log of computed over useful output; zeros where tiles are unknown."""
    outputs = op.record.grid
    if outputs is None or not num_processors or not min(grid := outputs(*op.dims)):
        return (0.0,) * len(TILE_FEATURES)
    count, m, n = grid  # independent outputs, and rows and columns of each
    found = []
    for rows, columns in TILES:
        waves = -(-count * -(-m // rows) * -(-n // columns) // num_processors)
        found.append(log(waves * num_processors * rows * columns / (count * m * n)))
    return (*found, log(count * -(-m // 128) * -(-n // 128) / num_processors))


FEATURE_VERSION = 1


def columns_of(asked: Sequence[str], known: Sequence[str], model: str) -> list[int]:
    """Index in ``known`` of each feature that a model reads; raises ``PredictorError`` with those that are not."""
    check_known(asked, known, model)
    place = {name: index for index, name in enumerate(known)}
    return [place[name] for name in asked]


def check_known(asked: Collection[str], known: Collection[str], model: str) -> None:
    """Raise ``PredictorError`` with the features that a model reads and this version does not compute."""
    missing = sorted(set(asked) - set(known))
    if missing:
        raise PredictorError(
            f"{model} reads features that this version does not have: {', '.join(missing)}: register the kinds that "
            "they belong to, use the version that it was trained with, or train it again"
        )


def check_version(saved: Any, model: str) -> None:
    """Check the version of features that a model was saved with.  Raises ``PredictorError`` if it is another one."""
    if saved != FEATURE_VERSION:
        raise PredictorError(
            f"{model} must read features of version {FEATURE_VERSION}, got version {saved!r:.40}: use the version of "
            "stepsight that it was trained with, or train it again"
        )


Array = NDArray[np.float64]

OP_TERMS = ("calls", "flop", "bytes", "bytes_b", "bytes_c", "rows")
_BEFORE_DIMS = ("kind", "dtype_bytes", "log_busy", "log_flops", "log_bytes", "log_intensity", "log_roofline_s")
_AFTER_DIMS = ("alignment", *TILE_FEATURES, "variant")
_DIMS = len(_BEFORE_DIMS)


def op_feature_names() -> tuple[str, ...]:
    """Names of the columns of ``op_features``: one for each dim of the kind with the most dims, and others."""
    return _names(OP_KINDS.version, COLLECTIVE_KINDS.version)[0]


@cached(4)
def _names(ops_version: int, collectives_version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the features of ops, and of those of nodes."""
    ops = sorted(OP_KINDS.values(), key=lambda kind: kind.code)
    collectives = sorted(COLLECTIVE_KINDS.values(), key=lambda kind: kind.code)
    dims = (f"log_dim{place}" for place in range(max(len(kind.dim_names) for kind in ops)))
    kinds = (f"{KIND}{name}" for name in (*(kind.name for kind in ops), *(kind.name for kind in collectives)))
    return (*_BEFORE_DIMS, *dims, *_AFTER_DIMS), (*kinds, *_AFTER_KINDS)


def op_terms(op: Op) -> tuple[float, ...]:
    """Quantities whose weighted sum is an op's time, in the order of ``OP_TERMS``.

    Operands that caches treat differently have a term each, as the three of a matrix product.  Row-wise kinds pay per
    row, fused optimizers per tensor: ``OpKind.units``.
    """
    kind = op.record
    units = float(kind.units(*op.dims))
    if kind.operands is None:
        return (1.0, op.flops, op.num_bytes, 0.0, 0.0, units)
    size = DTYPE_BYTES[op.dtype]
    a, b, c = kind.operands(*op.dims)
    return (1.0, op.flops, float(a * size), float(b * size), float(c * size), units)


def op_features(
    ops: Sequence[Op],
    hardware: Hardware,
    busy: Sequence[int] | int,
    variants: Sequence[int] | NDArray[np.int64] | int = 0,
) -> Array:
    """Features for trees, shape ``(len(ops), len(op_feature_names()))``.

    ``hardware``: for rooflines and tiles.  ``busy``: devices of the node that compute at the same time, one number or
    one per op.  ``variants``: which software ran it, one number or one per op; 0 is the one to predict for.
    """
    busies = np.broadcast_to(np.asarray(busy, dtype=np.float64), (len(ops),))
    names = op_feature_names()
    alignment = len(names) - len(_AFTER_DIMS)
    rows = np.zeros((len(ops), len(names)))
    rows[:, -1] = variants
    for row, op, num_busy in zip(rows, ops, busies, strict=True):
        flops, num_bytes = max(op.flops, 1.0), max(op.num_bytes, 1.0)
        row[:_DIMS] = (
            op.record.code,
            DTYPE_BYTES[op.dtype],
            np.log(num_busy),
            np.log(flops),
            np.log(num_bytes),
            np.log(flops / num_bytes),
            np.log(roofline_seconds(op, hardware) + 1e-9),
        )
        row[_DIMS : _DIMS + len(op.dims)] = np.log1p(op.dims)
        kind = op.record  # the largest power of two, up to 64, that divides every aligned dim
        sizes = [size for name, size in zip(kind.dim_names, op.dims, strict=True) if name in (kind.aligned or ())]
        row[alignment] = min((min((size & -size).bit_length() - 1, 6) for size in sizes), default=0)
        row[alignment + 1 : -1] = tile_features(op, hardware.num_processors)
    return rows


def op_position(op: Op) -> Array:
    """Position of an op among its kind: log of every dim and of its bytes, for distances and supports."""
    return np.log(np.maximum([*op.dims, op.flops, op.num_bytes], 1.0))


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
# Heard by networks that are trained now: data edges are worth nothing that is clear (docs/results/context.md).
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
    return _names(OP_KINDS.version, COLLECTIVE_KINDS.version)[1]


def check_node_features(names: Sequence[str], model: str) -> None:
    """Raise ``PredictorError`` with the features that a model reads and this version does not compute.

    A kind or a label that is not registered here occurs in no program: its feature is 0.
    """
    check_known([name for name in names if not name.startswith((KIND, LABEL))], _AFTER_KINDS, model)


def node_features(graph: SegmentGraph, alone: Array, names: tuple[str, ...] | None = None) -> Array:
    """Features by name, ``(nodes, len(names))``, all by default; ``alone``: seconds of each node, ``(nodes,)``."""
    column = {name: at for at, name in enumerate(node_feature_names() if names is None else names)}
    program, nodes, hardware = graph.program, graph.program.nodes, graph.hardware
    features = np.zeros((len(nodes), len(column)))
    if not nodes:
        return features
    for row, node in zip(features, nodes, strict=True):
        for name in (f"{KIND}{node.work.kind}", f"stream={node.stream}", f"{LABEL}{program.label}"):
            if name in column:
                row[column[name]] = 1.0
    rows = np.arange(len(nodes))
    before = np.maximum(rows - 1, 0)
    is_op = np.array([isinstance(node.work, Op) for node in nodes])
    num_bytes = np.array([float(node.work.num_bytes) for node in nodes])
    flops = np.array([node.work.flops if isinstance(node.work, Op) else 0.0 for node in nodes])
    roofline = np.array([roofline_seconds(node.work, hardware) if isinstance(node.work, Op) else 0.0 for node in nodes])
    numbers = (
        ~is_op,
        _log(alone, 1e-4),
        _log(num_bytes, 1e6),
        np.where(is_op, _log(flops, 1e7), 0.0),
        np.where(is_op, _log(flops / np.maximum(num_bytes, 1.0), 1.0), 0.0),
        np.where(is_op, np.clip(np.log(alone / np.maximum(roofline, 1e-9)), -3, 3) / 2, 0.0),
        np.log2(graph.busy),
        np.array([node.share for node in nodes]),
        rows == 0,
        _log(alone[before], 1e-4),
        _log(num_bytes[before], 1e6),
        _log(num_bytes.sum(keepdims=True), 1e7),
        _log(alone.sum(keepdims=True), 1e-2),
    )
    for name, values in zip(NUMBERS, numbers, strict=True):
        if name in column:
            features[:, column[name]] = values
    return features


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
    none = np.zeros((2, 0), np.int64)
    moved = [{r: part.edges[r] + node for r in RELATIONS} for part, node in zip(parts, nodes, strict=False)]
    edges = {r: np.concatenate([none, *(own[r] for own in moved)], axis=1) for r in RELATIONS}
    stream = [np.zeros(0, np.int64), *(part.stream + first for part, first in zip(parts, streams, strict=False))]
    return Topology(int(nodes[-1]), edges, np.concatenate(stream), int(streams[-1]))
