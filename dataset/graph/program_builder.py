"""Builds programs node by node, as lowering does."""

from __future__ import annotations

from collections.abc import Iterable

from stepsight.dataset.graph.program import Dependency, Node, Program
from stepsight.dataset.kinds.op import Collective, Op


class ProgramBuilder:
    """Builds a program node by node.  ``add`` returns the index that ``after`` takes."""

    def __init__(self, label: str = "") -> None:
        self._label = label
        self._nodes: list[Node] = []
        self._edges: list[tuple[int, int, Dependency]] = []

    def add(
        self,
        work: Op | Collective,
        stream: str = "compute",
        name: str = "",
        *,
        after: Iterable[int] = (),
        why: Dependency = Dependency.DATA,
        share: float = 1.0,
    ) -> int:
        index = len(self._nodes)
        self._nodes.append(Node(work, stream, name, share))
        self._edges.extend((before, index, why) for before in after)
        return index

    def last(self, stream: str) -> int | None:
        """Index of the newest node on a stream."""
        return next((index for index in reversed(range(len(self._nodes))) if self._nodes[index].stream == stream), None)

    def build(self) -> Program:
        return Program(tuple(self._nodes), tuple(self._edges), self._label)
