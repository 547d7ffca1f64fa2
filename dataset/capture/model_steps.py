"""A model read from a file: its forward as steps, and the training or inference step derived from it.

Backward is derived: of each step in reverse order the op that computes the gradients, and an addition where several
steps read a tensor.  Replicas all-reduce gradients in DDP's buckets beside backward, and AdamW updates all parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepsight.dataset.capture.record_graph import COMPOSITE, FORM, CapturedRank, graph_of_record
from stepsight.dataset.graph.program import COLLECTIVE, OP
from stepsight.dataset.kinds.op import DTYPE_BYTES, OP_KINDS, Op

FORWARD, BACKWARD, OPTIMIZER = range(3)
COMPUTE, REPLICAS = range(2)  # streams
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bucket sizes of DDP in bytes: the first one, and all others
_NO_GRADIENT = frozenset({"add", "fill", "random", "sort"})  # forward ops without backward ops
_STATES = 3  # copies of the parameters during training: gradients and two moments


@dataclass(frozen=True)
class ModelStep:
    """One op of a model's forward: its name in the file, its signature, and the names of tensors that it reads and
    writes.
    """

    name: str
    op: Op
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    known: bool = True


@dataclass(frozen=True)
class ModelSteps:
    """The forward of a model.

    Attributes:
        steps: In order.
        numel: Elements of each tensor.
        parameters: Names of the tensors that training updates.
        dtype: Of parameters and most activations.
        notes: What the user should know.
    """

    steps: tuple[ModelStep, ...]
    numel: Mapping[str, int]
    parameters: frozenset[str]
    dtype: str
    notes: tuple[str, ...] = ()


class ModelReader:
    """What readers of a model's graph share.

    Attributes:
        shapes: Of all tensors, by name.
        parameters: Names of the tensors that training updates.
        notes: What the user should know.
        unknown: Ops of no known kind.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, list[int]] = {}
        self.parameters: frozenset[str] = frozenset()
        self.notes: list[str] = []
        self.unknown: dict[str, None] = {}
        self._viewed: dict[str, str] = {}

    def add_views(self, views: Iterable[str], of: Sequence[str]) -> None:
        """Let tensors be views of the first of others, if there is one."""
        self._viewed |= dict.fromkeys(views, of[0]) if of else {}

    def root(self, name: str) -> str:
        """The tensor that a name is a view of, or its own."""
        while name in self._viewed:
            name = self._viewed[name]
        return name

    def of_steps(self, steps: Iterable[ModelStep], dtypes: Sequence[str]) -> ModelSteps:
        """The model with these steps; ``dtypes`` are those of its parameters."""
        if self.unknown:
            self.notes.append(f"ops that are not known, counted as element-wise: {', '.join(self.unknown)}")
        numel = {name: math.prod(shape) for name, shape in self.shapes.items()}
        dtypes = dtypes or ["fp32"]
        return ModelSteps(tuple(steps), numel, self.parameters, max(dtypes, key=dtypes.count), tuple(self.notes))


def rank_of_model(model: ModelSteps, world_size: int, local_size: int, *, training: bool) -> CapturedRank:
    """The step of each of ``world_size`` equal replicas; training adds backward, reductions and the optimizer."""
    record = _Record(model, world_size)
    record.forward(keeps=training)
    if training:
        record.backward()
        record.optimizer()
    return graph_of_record(record.to_dict(), local_size)


@dataclass
class _Record:
    """Nodes in the form in which a captured process writes them."""

    model: ModelSteps
    world_size: int
    _works: dict[Any, int] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)
    _nodes: list[list[int]] = field(default_factory=list)
    _edges: list[list[Any]] = field(default_factory=list)
    _live: list[int] = field(default_factory=list)
    _bytes: int = 0
    _sent: list[int] = field(default_factory=list)  # nodes of reductions

    def forward(self, *, keeps: bool) -> None:
        """Forward of all steps; ``keeps``: activations are kept for backward."""
        model, writer = self.model, dict[str, int]()
        self._bytes = sum(map(self._size, model.parameters)) * (1 + _STATES * keeps)
        last = {name: place for place, step in enumerate(model.steps) for name in step.reads}
        for place, step in enumerate(model.steps):
            self._bytes += sum(map(self._size, step.writes))
            node = self._op(step.op, FORWARD, step.name, known=step.known)
            for name in step.reads:
                if name in writer:
                    self._edges.append([writer[name], node, "data"])
            writer |= dict.fromkeys(step.writes, node)
            if not keeps:
                gone = [name for name in {*step.reads} - model.parameters if last[name] == place]
                self._bytes -= sum(self._size(name) for name in gone if name in writer)

    def backward(self) -> None:
        """The gradients of all steps in reverse order, with the replicas' reductions."""
        model = self.model
        wanted = _with_gradients(model)
        left = Counter(name for step in model.steps for name in {*step.reads} & wanted)
        readers = Counter(left)
        bucket, limit = 0, FIRST_BUCKET
        for step in reversed(model.steps):
            if not wanted & {*step.reads}:
                continue
            for op in gradients_of(step, wanted, model.parameters):
                self._op(op, BACKWARD, step.name, known=step.known)
            for name in {*step.reads} & wanted:
                left[name] -= 1
                if left[name] < readers[name] - 1 and name in self.model.numel:
                    self._op(Op("add", (self.model.numel[name],), step.op.dtype), BACKWARD, step.name)
                if not left[name] and name in model.parameters:
                    bucket += self._size(name)
            self._bytes -= sum(map(self._size, step.writes))
            if bucket >= limit:
                self._reduce(bucket)
                bucket, limit = 0, BUCKET
        self._reduce(bucket)

    def optimizer(self) -> None:
        """AdamW on all parameters, after all gradients are ready."""
        used = [name for name in self.model.parameters if self.model.numel[name]]
        op = Op("adamw", (sum(self.model.numel[name] for name in used), len(used)), self.model.dtype)
        node = self._op(op, OPTIMIZER, "adamw")
        self._edges += [[sent, node, "synchronisation"] for sent in self._sent]

    def to_dict(self) -> dict[str, Any]:
        """The record."""
        return {
            "form": FORM,
            "rank": 0,
            "world_size": self.world_size,
            "works": list(self._works),
            "names": list(self._names),
            "streams": ["compute", "dp"],
            "nodes": self._nodes,
            "live_bytes": self._live,
            "edges": self._edges,
            "groups": [["dp", list(range(self.world_size))]],
            "notes": list(self.model.notes),
        }

    def _reduce(self, num_bytes: int) -> None:
        if self.world_size == 1 or not num_bytes:
            return
        node = self._add((COLLECTIVE, ("collective", "all_reduce", num_bytes, 0), REPLICAS), BACKWARD, "all_reduce")
        self._nodes[node][-1] = len(self._sent)
        self._edges.append([node - 1, node, "synchronisation"])
        self._sent.append(node)

    def _op(self, op: Op, phase: int, name: str, *, known: bool = True) -> int:
        return self._add((OP, (COMPOSITE, op.kind, op.dims, op.dtype, known), COMPUTE), phase, name)

    def _add(self, what: tuple[int, Any, int], phase: int, name: str) -> int:
        kind, work, stream = what
        numbers = self._works.setdefault(work, len(self._works)), self._names.setdefault(name, len(self._names))
        self._nodes.append([kind, numbers[0], stream, phase, numbers[1], -1, -1, -1])
        self._live.append(self._bytes)
        return len(self._nodes) - 1

    def _size(self, name: str) -> int:
        return int(self.model.numel.get(name, 0) * DTYPE_BYTES[self.model.dtype])


def _with_gradients(model: ModelSteps) -> frozenset[str]:
    """Parameters, and tensors computed from them."""
    found = set(model.parameters)
    for step in model.steps:
        if found & {*step.reads}:
            found |= {*step.writes}
    return frozenset(found)


def gradients_of(step: ModelStep, wanted: frozenset[str], parameters: frozenset[str]) -> Iterator[Op]:
    """Ops of a step's backward: gradients of its inputs that need them."""
    op, kind, dims = step.op, step.op.kind, step.op.dims
    inputs = [name for name in step.reads if name in wanted and name not in parameters]
    weights = [name for name in step.reads if name in parameters]
    if kind in ("linear", "grouped_linear"):
        if inputs:
            yield Op(f"{kind}_dgrad", dims, op.dtype)
        if weights:
            yield Op(f"{kind}_wgrad", dims, op.dtype)
        if len(weights) > 1:
            yield Op("bias_grad", (dims[-3], dims[-2]), op.dtype)
    elif kind == "batched_matmul":
        batch, m, n, k = dims
        yield Op(kind, (batch, m, k, n), op.dtype)
        yield Op(kind, (batch, k, n, m), op.dtype)
    elif kind == "conv":
        yield Op("conv_backward", (*dims, int(bool(inputs))), op.dtype)
    elif f"{kind}_backward" in OP_KINDS:
        yield Op(f"{kind}_backward", dims, op.dtype)
    elif kind not in _NO_GRADIENT:
        yield Op("elementwise" if kind == "reduce" else kind, dims, op.dtype)


def matrix_product(left: Sequence[int], right: Sequence[int], dtype: str, *, transposed: bool = False) -> Op | None:
    """``left[..., m, k] @ right[..., k, n]``, or ``right[n, k]`` if it is transposed; None if a size is 0."""
    if not left or not right or 0 in (*left, *right):
        return None
    if len(right) == 1:
        right = (right[0], 1)
    rows, inner = math.prod(left[:-1]), left[-1]
    columns = right[-2] if transposed else right[-1]
    if len(right) == 2 or math.prod(right[:-2]) == 1:
        return Op("linear", (rows, columns, inner), dtype)
    batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
    return Op("batched_matmul", (batch, left[-2], columns, inner), dtype)


def attention(q: Sequence[int], k: Sequence[int], dtype: str, *, causal: bool) -> Op | None:
    """Fused attention of queries and keys, ``[batch, heads, length, head_dim]``; of three dims, one head."""
    q, k = ((each[0], 1, *each[1:]) if len(each) == 3 else tuple(each) for each in (q, k))
    if len(q) != 4 or len(k) != 4 or 0 in (*q, *k):
        return None
    return Op("attention", (q[0], q[1], k[1], q[2], k[2], q[3], int(causal)), dtype)


def norm(name: str, shape: Sequence[int], hidden: int, dtype: str) -> Op | None:
    """A norm of rows of ``hidden`` numbers."""
    rows = math.prod(shape) // max(hidden, 1)
    if rows * hidden < 2:
        return None
    return Op("rms_norm" if name == "rms_norm" else "layer_norm", (rows, hidden), dtype)


def rows_of(kind: str, shape: Sequence[int], dtype: str) -> Op | None:
    """An op on the rows of a tensor."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // max(columns, 1)
    return Op(kind, (rows, columns), dtype) if rows * columns > 1 else None


def streamed(kind: str, shape: Sequence[int], dtype: str) -> Op | None:
    """An op on all elements of a tensor; None if it is one element."""
    numel = math.prod(shape)
    return Op(kind, (numel,), dtype) if numel > 1 else None
