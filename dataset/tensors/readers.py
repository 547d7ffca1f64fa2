"""Models in files as calls on tensors, and what the readers of both formats share.

Weights stay unread; of constants, only small ones are read, and what follows from constants and shapes is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.calls import Shapes, TensorCall, layout_of
from stepsight.dataset.tensors.ranks import TensorStep

Found = tuple[str, dict[str, Any], list[str]]  # op, settings and reads of a node
Shape = Sequence[int]
MOST_NODES = 60_000  # of a graph


class ModelReader(ABC):
    """Reads one graph.

    Attributes:
        shapes: Of all tensors, by name.
        parameters: Names of the tensors that training updates.
        constants: Values of tensors that follow from the file alone.
        same: Names of one tensor.
        unshaped: Tensors whose shapes are not known, with the node that writes each.
        notes: What the user should know.
    """

    left = 2**23  # elements of constants that may still be computed

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self.parameters: frozenset[str] = frozenset()
        self.constants: dict[str, Any] = {}
        self.same: dict[str, str] = {}
        self.unshaped: dict[str, str] = {}
        self.notes: list[str] = []
        self._calls: list[TensorCall] = []
        self._unknown: dict[str, None] = {}

    def affords(self, numel: int) -> bool:
        """Whether a constant of so many elements may still be computed; then they are spent."""
        if numel > self.left:
            return False
        self.left -= numel
        return True

    @abstractmethod
    def read(self) -> TensorStep:
        """The forward."""

    @abstractmethod
    def kernels(self, node: Any, shapes: Mapping[str, Shape]) -> tuple[Sequence[Op | None], str]:
        """Signatures of a node's kernels on tensors of these shapes, and its op if no kind is known for it."""

    def add(self, found: Found, writes: Sequence[str], name: str, node: Any) -> None:
        """Add a call, and as one of its own the bias that a product adds; ``node`` None: it only views tensors."""
        op, settings, reads = found
        writes = writes[:1] if op == "reshape" else writes  # the mask of a dropout is constant
        names = [self.same.get(each, each) for each in reads]
        self.unshaped |= {each: name for each in (*names, *writes) if each not in self.shapes}
        unknown = "" if node is None else self.kernels(node, self.shapes)[1]
        self._unknown |= {unknown: None} if unknown else {}
        place, ops = len(self._calls), partial(self._ops, node, (*reads, *writes))
        made = [TensorCall(op, (*names,), (*writes,), settings, name, origin=place, ops=ops, known=not unknown)]
        if op == "product" and len(reads) > 2:
            plain = f"{writes[0]} without bias"
            self.shapes[plain] = self.shapes[writes[0]]
            bias = TensorCall("add", (plain, names[2]), (*writes,), {"bias": True}, name, origin=place)
            made = [replace(made[0], reads=(*names[:2],), writes=(plain,)), bias]
        for each in made:
            if not self.unshaped.keys() & {*each.reads, *each.writes}:
                self._check(each)
        self._calls += made

    def _ops(self, node: Any, names: Sequence[str], reads: Shapes, writes: Shapes) -> list[Op]:
        local: dict[str, Shape] = dict(zip(names, (*reads, *writes), strict=False))
        return [] if node is None else [op for op in self.kernels(node, ChainMap(local, self.shapes))[0] if op]

    def _check(self, call: TensorCall) -> None:
        """Refuse a call on tensors that do not fit together: each label of its layout must have one size."""
        shapes = [[self.shapes[name] for name in names] for names in (call.reads, call.writes)]
        sizes: dict[Any, int] = {}
        labels: list[set[Any]] = []
        try:
            layout = layout_of(call, *shapes)
            fit = True
            for side, given in zip((layout.reads, layout.writes), shapes, strict=True):
                factors = [factor for dims in side for dim in dims for factor in dim]
                labels.append({label for label, size in factors if size > 1})
                pairs = [pair for both in zip(side, given, strict=True) for pair in zip(*both, strict=True)]
                fit &= all(sizes.setdefault(label, size) == size for label, size in factors)
                fit &= all(math.prod(size for _, size in dim) in (each, 1) for dim, each in pairs)
            fit &= call.op in ("reduce", "expand") or (labels[0] ^ labels[1]) - layout.whole <= {"k"}
        except (ValueError, LookupError, TypeError, ArithmeticError):
            fit = False
        if call.op == "reshape":
            fit = math.prod(shapes[0][0]) == math.prod(shapes[1][0])
        if not fit:
            read, made = (", ".join(map(str, side)) for side in shapes)
            raise ValueError(f"the shapes of a {call.op} must fit together, got {read:.200} -> {made:.80}")

    def step(self, inputs: Sequence[str], outputs: Sequence[str], dtypes: Sequence[str]) -> TensorStep:
        """The step; ``dtypes``: of the parameters."""
        if self._unknown:
            self.notes.append(f"ops that are not known, counted as element-wise: {', '.join(self._unknown)}")
        read = {name for call in self._calls for name in call.reads}
        written = {name for call in self._calls for name in call.writes}
        self.unshaped = {name: node for name, node in self.unshaped.items() if name in read}
        given = read - self.constants.keys() - self.parameters
        found = {name: self.same.get(name, name) for name in outputs}
        return TensorStep(
            calls=tuple(self._calls),
            shapes={name: tuple(self.shapes.get(name, ())) for name in (*read, *written)},
            inputs=tuple(name for name in dict.fromkeys([*inputs, *sorted(read - written)]) if name in given),
            parameters=tuple(name for name in self.shapes if name in self.parameters and name in read),
            outputs={name: tensor for name, tensor in found.items() if tensor in written},
            constants={name: value for name, value in self.constants.items() if name in read},
            dtype=max(dtypes, key=dtypes.count, default="fp32"),
            notes=tuple(self.notes),
        )


def named(title: str) -> AbstractContextManager[None]:
    """Raise ``CaptureError`` with a node's title for what a damaged node makes fail."""
    return parsing(f"{title:.160} must be whole and fit its inputs", CaptureError)


def check_order(nodes: Iterable[tuple[str, Sequence[str], Sequence[str]]], given: Iterable[str]) -> None:
    """Check that each node reads what is given or made before, and writes new tensors.

    Args:
        nodes: Their titles, and the names of what they read and write.
        given: Names of inputs, weights and constants.
    """
    rows, known = list(nodes), {"", *given}
    made = {name for _, _, writes in rows for name in writes}
    for title, reads, writes in rows:
        for name in reads:
            if name not in known:
                what = "nodes out of order or in a cycle" if name in made else "a name that nothing has"
                raise CaptureError(f"{title:.120} must read inputs, weights and what nodes before it write, got "
                                   f"{name!r:.80}: {what}")  # fmt: skip
        if again := {name for name in writes if name and name in known}:
            raise CaptureError(f"{title:.120} must write tensors of its own, got {min(again)!r:.80} again")
        known |= {*writes}


def check_count(path: Path, count: int) -> None:
    """Refuse a model with more nodes than any has, before memory is taken for them."""
    if count > MOST_NODES:
        raise CaptureError(f"{path} must have at most {MOST_NODES} nodes and tensors, got {count}")


def check_names(path: Path, dims: Iterable[str], names: Collection[str]) -> None:
    """Check that sizes are of dimensions that a model has."""
    for name in dims:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise CaptureError(f"{path} must have the dimension {name!r:.80}; it has {known:.200}")
