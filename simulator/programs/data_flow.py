"""Which nodes made the tensors that a node of a segment reads: its data edges, as execution traces tell them.

In a block each step reads what the step before it made, and hands on what it makes itself.  ``Step.flow`` says where
that is not so, with marks (``Flow``).  Backward follows them in reverse: a tensor that is kept has two gradients.

Gradients of parameters read what arrived at their step; copies and sums of them, and messages of replicas, read them.
What was gathered is read by the ops that have parameters.  Casts of parameters are not followed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Dependency, Program
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.step import Flow, Item, Step

_AGAIN = ".again"  # in names of what runs again
ENTERS = -1  # in place of a node: what enters the segment
_IN_BACKWARD = {Flow.KEEP: Flow.JOIN, Flow.JOIN: Flow.KEEP, Flow.SWAP: Flow.SWAP, Flow.DROP: Flow.DROP}
_COPIES = frozenset({Flow.COPY_FIRST, Flow.COPY_LAST, Flow.COPY_AGAIN})
_MADE = frozenset({Flow.GRADIENT, Flow.GRADIENT_CONTINUED, Flow.GRADIENTS_TOO})
_INTO_MESSAGE = frozenset({Flow.PARAMETERS_IN, Flow.GRADIENTS_IN, Flow.IN_BUCKET})
_OFF_WAY = _COPIES | _MADE - {Flow.GRADIENTS_TOO} | _INTO_MESSAGE | {Flow.ASIDE, Flow.PARAMETERS_OUT}

Marks = tuple[Flow, ...]
Items = Sequence[Item]


def _sums(items: Items) -> bool:
    """Whether the last of some items adds gradients."""
    return bool(items) and isinstance(items[-1], Op) and items[-1].kind == "add"


def forward_flow(step: Step, before: Marks) -> tuple[list[Marks], Marks]:
    """Marks of each item of a step's forward, and those for the item after it; ``before``: such of steps before."""
    first = tuple([mark for mark in step.flow if mark not in (Flow.JOIN_AT_LAST, Flow.RUN_AGAIN)])
    last = (Flow.JOIN,) * step.flow.count(Flow.JOIN_AT_LAST)
    if not step.forward:
        return [], (*before, *first, *last)
    found = _of_parameters(step, step.forward)
    found[0] = (*before, *first, *found[0])
    found[-1] += last
    return found, ()


def _of_parameters(step: Step, items: Items) -> list[Marks]:
    """Marks of items, of which products, or else the last one of a forward and the first of a backward, read the
    parameters of a step."""
    if not step.parameters and not step.frozen:
        return [()] * len(items)
    products = [isinstance(item, Op) and item.record.family.endswith("gemm") for item in items]
    if not any(products) and items:
        products[0 if items is step.backward else -1] = True
    return [(Flow.PARAMETERS,) * product for product in products]


def backward_flow(step: Step, way: Items, gradients: Items, before: Marks) -> tuple[list[Marks], Marks]:
    """The same of its backward: of the items on the way and of those that make gradients of parameters, in order."""
    if step.flow == (Flow.RUN_AGAIN,):
        return [(*before, Flow.RUN_AGAIN), *[()] * (len(way) - 1)], (Flow.RAN_AGAIN,)
    found, after = _of_parameters(step, way), [_IN_BACKWARD[m] for m in reversed(step.flow) if m in _IN_BACKWARD]
    apart = [isinstance(item, Op) and (item.record.weight_gradient or item.kind == "bias_grad") for item in gradients]
    kinds = Flow.GRADIENT_CONTINUED, Flow.GRADIENT
    others: list[Marks] = [(kinds[own or not at],) for at, own in enumerate(apart)]
    if found and step.parameters and not others:
        found[-2 if _sums(way) and len(way) > 1 else -1] += (Flow.GRADIENTS_TOO,)
    if _sums(way):
        found[-1] += (Flow.JOIN,) * after.count(Flow.JOIN)
        after = [mark for mark in after if mark is not Flow.JOIN]
    before += (Flow.KEEP,) * step.flow.count(Flow.JOIN_AT_LAST)
    if not found and not others:
        return [], (*before, *after)
    if others and not (found and step.weight_grad_first):
        others[0], after = (*after, *others[0]), []
    found = [*others, *found] if step.weight_grad_first else [*found, *others]
    found[0] = (*before, Flow.BEGIN_BACKWARD, *found[0])
    return found, tuple(after)


def kept_activations(forward: Program, backward: Program) -> NDArray[np.int64]:
    """What a pass keeps for its backward: nodes of the one and those of the other that read them, ``(e, 2)``.

    The first op of a step's backward reads what its forward made, and the first product for weights, or else the first
    op, what its forward read.  What a backward runs again is kept for itself: both programs are then the same.
    """
    names = [node.name.replace(_AGAIN, "") for node in forward.nodes]
    redone = {node.name.replace(_AGAIN, "") for node in backward.nodes if _AGAIN in node.name}
    own = [_AGAIN in node.name if forward is backward else node.name not in redone for node in forward.nodes]
    made = {name: at for at, (name, kept) in enumerate(zip(names, own, strict=True)) if kept and "copy_" not in name}
    read: dict[str, list[int]] = {}
    for before, after, why in forward.edges:
        if why is Dependency.DATA and own[after] and names[before] != names[after] and "copy_out" not in names[before]:
            read.setdefault(names[after], []).append(before)
    begins: dict[str, int] = {}
    weighs: dict[str, int] = {}
    for at, node in enumerate(backward.nodes):
        if node.name in made and isinstance(node.work, Op):
            begins.setdefault(node.name, at)
            if node.work.record.weight_gradient:
                weighs.setdefault(node.name, at)
    pairs = [(made[name], at) for name, at in begins.items()]
    for name, at in begins.items():
        if backward.nodes[at].work.kind != "reduce":  # of a sum, whose gradient needs none of its terms
            pairs += [(source, weighs.get(name, at)) for source in read.get(name, ())]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


class DataFlow:
    """What was made so far in a segment, by nodes."""

    def __init__(self) -> None:
        self.newest: list[int] = [ENTERS]  # what is handed on
        self._kept: list[list[int]] = []
        self._outside: list[tuple[list[int], list[list[int]]]] = []  # both of these, around what runs again
        self._arrived: list[int] = []  # at the step that runs
        self._ends: list[int] = []  # gradients of parameters of this step
        self._made: dict[int, bool] = {}  # gradients that no message took yet, and whether their unit is a layer
        self._message: list[int] = []  # what was copied for a message
        self._sums: list[int] = []  # messages of gradients
        self._gathered: dict[str, list[int]] = {}  # messages of parameters, by unit
        self._parameters: dict[bool, list[int]] = {}  # newest copies out of them, of layers and of others
        self._last = -1

    def reads(self, node: int, name: str, marks: Marks) -> list[int]:
        """Nodes that a node reads; ``name``: its own."""
        layer = not name.startswith(("head", "embedding", "root"))
        role, in_bucket = marks[-1] if marks else None, marks[-1:] == (Flow.IN_BUCKET,)
        read = self.follow(marks[:-1] if in_bucket else marks, name)
        parameters = self._parameters.get(layer, []) if Flow.PARAMETERS in marks else []
        read = [*read, *self._message * in_bucket, *parameters]
        if in_bucket or role in _COPIES or role is Flow.GRADIENT_CONTINUED:
            for each in read:
                self._made.pop(each, None)
        if role in _MADE:
            self._ends = [*self._ends[: len(self._ends) - (role is Flow.GRADIENT_CONTINUED)], node]
        if role in _MADE or role in _COPIES:
            self._made[node] = layer
        if role in _INTO_MESSAGE:
            self._message = [node]
        if role is Flow.PARAMETERS_OUT:
            self._parameters[layer] = [node]
        if role not in _OFF_WAY:
            self.newest = [node]
        self._last = node
        return read

    def follow(self, marks: Marks, name: str = "") -> list[int]:
        """Go along the marks; what an item with them reads."""
        for mark in marks:
            if mark is Flow.KEEP:
                self._kept.append(self.newest)
            elif mark is Flow.JOIN:
                self.newest = [*dict.fromkeys([*self.newest, *(self._kept.pop() if self._kept else ())])]
            elif mark is Flow.SWAP and self._kept:
                self.newest, self._kept[-1] = self._kept[-1], self.newest
            elif mark in (Flow.DROP, Flow.DROP_IN_FORWARD):
                self.newest = []
            elif mark is Flow.RUN_AGAIN:
                self._outside.append((self.newest, self._kept))
                self.newest, self._kept = [], []
            elif mark is Flow.RAN_AGAIN:
                self.newest, self._kept = self._outside.pop()
            elif mark is Flow.BEGIN_BACKWARD:
                self._arrived, self._ends = self.newest, []
            elif mark in _OFF_WAY:
                return self._aside(mark, name)
        return self.newest

    def _aside(self, mark: Flow, name: str) -> list[int]:
        """What an item reads that hands nothing on."""
        if mark is Flow.GRADIENTS_IN:
            return self._gradients()
        if mark is Flow.PARAMETERS_OUT:
            return self._gathered.pop(name.rpartition(".")[0], [])
        if mark in (Flow.GRADIENT_CONTINUED, Flow.COPY_AGAIN):
            return [self._last]
        copied = {Flow.COPY_FIRST: self._ends[:1], Flow.COPY_LAST: self._ends[-1:], Flow.PARAMETERS_IN: self._message}
        return {**copied, Flow.GRADIENT: self._arrived}.get(mark, [])

    def message(self, node: int, name: str) -> list[int]:
        """What a message between replicas carries: parameters that were copied for it, or gradients."""
        taken, self._message = self._message, []
        if name.endswith(".parameters"):
            self._gathered.setdefault(name.removesuffix(".parameters"), []).append(node)
            return taken
        self._sums.append(node)
        return taken or self._gradients()

    @property
    def gradients(self) -> list[int]:
        """Nodes that have gradients of parameters when the segment ends."""
        return [*self._made, *self._sums]

    def _gradients(self) -> list[int]:
        """Take the gradients made so far: those of layers, or else those of the first and last unit."""
        taken = [node for node, layer in self._made.items() if layer] or [*self._made]
        for node in taken:
            del self._made[node]
        return taken
