"""The graph of one captured rank, from the record of its process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.graph.program import (
    COLLECTIVE,
    EDGE_COLUMNS,
    HOST,
    NODE_COLUMNS,
    OP,
    WHY_NUMBER,
    Dependency,
    Program,
)
from stepsight.dataset.kinds import OP_KINDS
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.kinds.op_kinds import count
from stepsight.dataset.traces.classify import DTYPES, Scope, call_table, intern_op

FORM = 1  # of records
COMPOSITE = "stepsight::op"  # prefix of the signature of an op that the harness annotates
_KIND, _WORK, _STREAM, _PHASE, _NAME, _EVALUATION, _SEQUENCE, _NUMBER = range(8)


@dataclass(frozen=True, eq=False)
class CapturedRank:
    """One captured rank."""

    graph: Program  # what it does in a step; durations are not known and 0
    live_bytes: NDArray[np.int64]  # memory of all tensors when each node is issued, shape (n,)
    # distinct calls, each with its arguments as harness.capturing.recorder writes them; call of a node is an index of
    # it.  Empty for a capture of an earlier version.
    calls: tuple[Any, ...] = ()

    @property
    def rank(self) -> int:
        return self.graph.rank

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors in the step."""
        return int(self.live_bytes.max(initial=0))


def graph_of_record(record: dict[str, Any], local_size: int) -> CapturedRank:
    """Classify the calls that a process recorded, and connect its nodes by their dependencies."""
    if record.get("form") != FORM:
        raise CaptureError(f"a record must have form {FORM}, got {record.get('form')!r:.40}: capture again")
    nodes = _Nodes(record, local_size)
    work, known, group, place = nodes.columns
    _, first = np.unique(place, return_index=True)  # the first part of each node
    count = len(first)
    rows = np.array(record["nodes"], dtype=np.int64).reshape(-1, 8)[first]
    columns = {name: np.zeros(count, dtype=np.int64) for name in NODE_COLUMNS}
    given = {"kind": _KIND, "stream": _STREAM, "phase": _PHASE, "name": _NAME, "seq": _NUMBER}
    columns |= {name: rows[:, at] for name, at in given.items()}
    columns["call"] = np.where(rows[:, _KIND] == OP, rows[:, _WORK], -1)
    columns |= {"work": work[first], "known": known[first], "group": group[first]}
    edges = _edges(record, place, columns)
    graph = Program.of_columns(
        rank=record["rank"], world_size=record["world_size"], device=record.get("device", "cuda"),
        device_name="captured", columns=columns, edge_columns=dict(zip(EDGE_COLUMNS, edges.T, strict=True)),
        streams=tuple(record["streams"]), names=tuple(record["names"]), works=tuple(nodes.works),
        groups=tuple((name, tuple(ranks)) for name, ranks in record["groups"]), steps_s=np.zeros((1, 2)),
        warnings=tuple(record["notes"]), events=len(record["nodes"]),
    )  # fmt: skip
    live_bytes = np.array(record["live_bytes"], dtype=np.int64)[first]
    return CapturedRank(graph, live_bytes, tuple(record["works"]))


class _Nodes:
    """The work of each node of a record.

    Attributes:
        works: Distinct signatures.
        columns: Of each node of the record its work, whether that is known, its group, and the node of the graph that
            it is (a part of); what is no work is a part of what came before it on its stream.
    """

    def __init__(self, record: dict[str, Any], local_size: int) -> None:
        self.works: dict[Op | Collective, int] = {}
        self._scopes: dict[int, Scope] = {}
        self._forward: dict[int, tuple[int, ...]] = {}
        self._plain: dict[int, tuple[Op | None, bool]] = {}
        newest: dict[int, tuple[int, int, int]] = {}  # by stream: place, work, signature
        found, places = list[tuple[int, bool, int, int]](), 0
        for row in record["nodes"]:
            kind, number, stream = row[:3]
            work: Op | Collective | None = None
            known, group = True, -1
            if kind == OP:
                op, known = self._op(row, record["works"][number])
                before = newest.get(stream, (-1, -1, -1))
                in_parts = op is not None and op.record.in_parts and number != before[2]
                if before[0] >= 0 and (op is None or (in_parts and self.works.get(op) == before[1])):
                    found.append((-1, True, -1, before[0]))
                    continue
                work = op or intern_op("fill", (1,), "fp32")
            elif kind == COLLECTIVE:
                _, name, num_bytes, group = record["works"][number]
                ranks = record["groups"][group][1]
                nodes = len({rank // local_size for rank in ranks})
                work = Collective(name, num_bytes, len(ranks), -(-len(ranks) // nodes))
            signature = -1 if work is None else self.works.setdefault(work, len(self.works))
            found.append((signature, known, group, places))
            newest[stream] = places, signature, number
            places += 1
        self.columns = np.array(found, dtype=np.int64).reshape(-1, 4).T

    def _op(self, row: list[int], signature: Any) -> tuple[Op | None, bool]:
        evaluation, sequence = row[_EVALUATION], row[_SEQUENCE]
        if signature[0] == COMPOSITE:
            return intern_op(signature[1], tuple(signature[2]), signature[3]), all(signature[4:])
        if evaluation < 0:
            if row[_WORK] not in self._plain:
                self._plain[row[_WORK]] = op_of_call(signature, Scope())
            op, known = self._plain[row[_WORK]]
            if op is not None and op.kind == "linear":
                self._forward[sequence] = op.dims
            return op, known
        if evaluation not in self._scopes:
            self._scopes[evaluation] = Scope("backward", self._forward.get(sequence, ()))
        return op_of_call(signature, self._scopes[evaluation])


def _edges(record: dict[str, Any], place: NDArray[np.int64], columns: dict[str, Any]) -> NDArray[np.int64]:
    """Source, target and kind of each dependency, including stream order; each pair once."""
    rows = [(source, target, WHY_NUMBER[Dependency(why)]) for source, target, why in record["edges"]]
    given = np.array(rows, dtype=np.int64).reshape(-1, 3)
    found = [np.column_stack([place[given[:, :2]], given[:, 2]])]
    for stream in range(len(record["streams"])):
        nodes = np.flatnonzero((columns["stream"] == stream) & (columns["kind"] != HOST))
        kind = np.full(len(nodes) - 1 if len(nodes) else 0, WHY_NUMBER[Dependency.STREAM_ORDER])
        found.append(np.stack([nodes[:-1], nodes[1:], kind], axis=1))
    edges = np.concatenate(found)
    edges = edges[edges[:, 0] < edges[:, 1]]
    _, once = np.unique(edges[:, :2], axis=0, return_index=True)
    return np.asarray(edges[np.sort(once)])


_FILL_NAMES = "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full scalar_tensor eye"
_FILLS = frozenset(f"aten::{name}" for name in _FILL_NAMES.split())
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::clone")
_LISTS = ("aten::_foreach_copy_", "aten::_chunk_cat", "fsdp::chunk_cat")  # whose first and last tensors tell types
_NARROW = {"bf16", "fp16"}


def op_of_call(signature: Sequence[Any], scope: Scope) -> tuple[Op | None, bool]:
    """The op of a call, None if it moves at most one element or is no work; and whether its kind is known.

    ``signature``: name, dims, types, strides, literals, and dims, type and number of the outputs (see
    ``harness.capturing.recorder``).  ``scope``: the autograd evaluation around it.
    """
    name, dims, types, strides, literals, made = signature
    args: Mapping[str, Any] = MappingProxyType(
        {"Input Dims": dims, "Input type": types, "Input Strides": strides, "Concrete Inputs": literals}
    )
    read = [kind.removeprefix("TensorList ") for kind in types if kind != "Scalar"]
    out_numel, out_type = (math.prod(made[0]), made[1]) if made else (0, "float")
    dtype, weight = DTYPES[read[0] if read else out_type]
    if name in _FILLS:
        return _op("fill", (out_numel,), DTYPES[out_type]), True
    if name in _COPIES and read and made and (cast := _cast(read[-1], out_type)):
        return _op("cast", (out_numel,), (cast, 1.0)), True
    if name in _LISTS and len(read) > 1 and (cast := _cast(read[0], read[-1])):
        return _op("cast", (count(dims[0]),), (cast, 1.0)), True
    known = call_table().get(name)
    found = None if known is None else known(args, scope)
    if known is not None and found is None:
        return None, True
    if found is None or len(found[1]) != len(OP_KINDS[found[0]].dim_names) or max(found[1]) <= 0:
        largest = max([*(count(shape) for shape in dims if shape), out_numel])
        return _op("elementwise", (largest,), (dtype, weight)), largest <= 1
    kind, sizes = found
    if len(sizes) == 1:
        sizes = (max(sizes[0], out_numel if made and made[2] == 1 else 0),)
    return _op(kind, tuple(sizes), (dtype, weight)), True


def _op(kind: str, dims: tuple[int, ...], typed: tuple[str, float]) -> Op | None:
    dtype, weight = typed
    if len(dims) == 1:
        dims = (int(dims[0] * weight),) if dims[0] > 1 else ()
    return intern_op(kind, dims, dtype) if dims else None


def _cast(source: str, target: str) -> str:
    """The 16-bit type of a conversion from or to fp32; empty for other conversions."""
    kinds = {DTYPES[source][0], DTYPES[target][0]}
    narrow = kinds & _NARROW
    return narrow.pop() if kinds - narrow == {"fp32"} and narrow else ""
