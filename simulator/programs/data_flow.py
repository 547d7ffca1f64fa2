"""Which nodes made the tensors that a node of a segment reads: its data edges, as execution traces tell them.

In a block each step reads what the step before it made, and hands on what it makes itself.  ``Step.flow`` says where
that is not so, letter by letter, with a stack of kept tensors: ``k`` keeps what comes in, ``s`` swaps it with what was
kept last, ``n`` goes on with nothing, ``j`` joins what was kept last to what the first op reads, and ``J`` to what the
last one reads (a sum); ``x`` reads nothing and hands nothing on.  Backward is the reverse of it: a tensor that is kept
has two gradients.  ``N`` is ``n`` in forward alone.

Gradients of parameters read what arrived at their step; copies and sums of them, and messages of replicas, read them.
What was gathered is read by the ops that have parameters.  Casts of parameters are not followed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Dependency, Program
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.step import Item, Step

# Letters of items, beside those of steps: ``b`` begins the backward of a step, ``e`` makes gradients of parameters too,
# ``r`` reads parameters, ``(`` and ``)`` surround what runs again.  These are not handed on: ``w``, ``v`` a gradient of
# a parameter, and the op after it; ``p``, ``P``, ``q`` a copy of the first or last of these of a step, and the op after
# it; ``c`` is that in a bucket, where others are; ``i``, ``g`` copies into a message of parameters and of gradients,
# and ``o`` one out of it.
_AGAIN = ".again"  # in names of what runs again
ENTERS = -1  # in place of a node: what enters the segment
_BACK = str.maketrans("kj", "jk", "JNx")
_OFF_WAY = frozenset("wvpPqcxigo")


def _sums(items: Sequence[Item]) -> bool:
    """Whether the last of some items adds gradients."""
    return bool(items) and isinstance(items[-1], Op) and items[-1].kind == "add"


def forward_flow(step: Step, before: str) -> tuple[list[str], str]:
    """Letters of each item of a step's forward, and those for the item after it; ``before``: such of steps before."""
    if not step.forward:
        return [], before + step.flow.lower().strip("(")
    found = _of_parameters(step, step.forward)
    found[0] = before + step.flow.replace("J", "") + found[0]
    found[-1] += "j" * step.flow.count("J")
    return found, ""


def _of_parameters(step: Step, items: Sequence[Item]) -> list[str]:
    """Letters of items, of which products, or else the last one of a forward and the first of a backward, read the
    parameters of a step."""
    if not step.parameters and not step.frozen:
        return [""] * len(items)
    products = [isinstance(item, Op) and item.record.family.endswith("gemm") for item in items]
    if not any(products) and items:
        products[0 if items is step.backward else -1] = True
    return ["r" * product for product in products]


def backward_flow(step: Step, way: Sequence[Item], gradients: Sequence[Item], before: str) -> tuple[list[str], str]:
    """The same of its backward: of the items on the way and of those that make gradients of parameters, in order."""
    if step.flow == "(":
        return [f"{before}(", *[""] * (len(way) - 1)], ")"
    found, after = _of_parameters(step, way), step.flow[::-1].translate(_BACK)
    apart = [isinstance(item, Op) and (item.record.weight_gradient or item.kind == "bias_grad") for item in gradients]
    others = ["w" if apart[at] or not at else "v" for at in range(len(apart))]
    if found and step.parameters and not others:
        found[-2 if _sums(way) and len(way) > 1 else -1] += "e"
    if _sums(way):
        found[-1] += "j" * after.count("j")
        after = after.replace("j", "")
    before += "k" * step.flow.count("J")
    if not found and not others:
        return [], before + after
    if others and not (found and step.weight_grad_first):
        others[0], after = after + others[0], ""
    found = [*others, *found] if step.weight_grad_first else [*found, *others]
    found[0] = f"{before}b{found[0]}"
    return found, after


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

    def reads(self, node: int, name: str, letters: str) -> list[int]:
        """Nodes that a node reads; ``name``: its own."""
        layer = not name.startswith(("head", "embedding", "root"))
        role, read = letters[-1:], self.follow(letters.removesuffix("c"), name)
        read = [*read, *self._message * (role == "c"), *self._parameters.get(layer, []) * ("r" in letters)]
        if role in ("v", "p", "P", "q", "c"):
            for each in read:
                self._made.pop(each, None)
        if role in ("w", "v", "e"):
            self._ends = [*self._ends[: len(self._ends) - (role == "v")], node]
        if role in ("w", "v", "e", "p", "P", "q"):
            self._made[node] = layer
        if role in ("i", "g", "c"):
            self._message = [node]
        if role == "o":
            self._parameters[layer] = [node]
        if role not in _OFF_WAY:
            self.newest = [node]
        self._last = node
        return read

    def follow(self, letters: str, name: str = "") -> list[int]:
        """Go along the letters; what an item with them reads."""
        for letter in letters:
            if letter == "k":
                self._kept.append(self.newest)
            elif letter == "j":
                self.newest = [*dict.fromkeys([*self.newest, *(self._kept.pop() if self._kept else ())])]
            elif letter == "s" and self._kept:
                self.newest, self._kept[-1] = self._kept[-1], self.newest
            elif letter in "nN":
                self.newest = []
            elif letter == "(":
                self._outside.append((self.newest, self._kept))
                self.newest, self._kept = [], []
            elif letter == ")":
                self.newest, self._kept = self._outside.pop()
            elif letter == "b":
                self._arrived, self._ends = self.newest, []
            elif letter in _OFF_WAY:
                return self._aside(letter, name)
        return self.newest

    def _aside(self, letter: str, name: str) -> list[int]:
        """What an item reads that is not handed on."""
        if letter in "go":
            return self._gradients() if letter == "g" else self._gathered.pop(name.rpartition(".")[0], [])
        sources = {"w": self._arrived, "v": [self._last], "q": [self._last], "p": self._ends[:1], "P": self._ends[-1:]}
        return {**sources, "i": self._message}.get(letter, [])

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
