"""Programs as arrays, for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Program

DATA_STREAM = "dp"
COMPUTE, TENSOR_PARALLEL, DATA_PARALLEL = range(3)


@dataclass(frozen=True, eq=False)
class Graph:
    """Some programs as one set of arrays; nodes of program ``i`` are ``bounds[i]:bounds[i + 1]``.

    Attributes:
        bounds: Shape ``(num_programs + 1,)``.
        work: Index of each node's signature, shape ``(num_nodes,)``.
        share: Part of the signature's time, same shape.
        on_data_stream: Whether the node is on the data-parallel stream, same shape.
        kind: ``COMPUTE``, ``TENSOR_PARALLEL`` or ``DATA_PARALLEL``: what the breakdown books a node under.
        pointer, before: Dependencies in CSR, stream order included.
        ready: Shape ``(2, num_nodes)``: 0 where a node may start with its segment's computation (all nodes), or with
            the data-parallel stream (the first node there); else ``-inf``.
    """

    bounds: NDArray[np.int64]
    work: NDArray[np.int32]
    share: NDArray[np.float64]
    on_data_stream: NDArray[np.bool_]
    kind: NDArray[np.int8]
    pointer: NDArray[np.int32]
    before: NDArray[np.int32]
    ready: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Segment:
    """A program, and its arrays once they are asked for."""

    program: Program

    @cached_property
    def works(self) -> tuple[Op | Collective, ...]:
        """Distinct signatures in order of first use; ``graph.work`` points into them."""
        return tuple(dict.fromkeys(node.work for node in self.program.nodes))

    @cached_property
    def graph(self) -> Graph:
        """The program alone."""
        nodes = self.program.nodes
        place = {work: index for index, work in enumerate(self.works)}
        incoming: list[list[int]] = [[] for _ in nodes]
        for earlier, later, _ in self.program.all_edges():
            if earlier not in incoming[later]:
                incoming[later].append(earlier)
        data = np.array([node.stream == DATA_STREAM for node in nodes], dtype=np.bool_)
        ready = np.zeros((2, len(nodes)))
        ready[1] = -np.inf
        if data.any():
            ready[1, data.argmax()] = 0.0
        return Graph(
            np.array([0, len(nodes)]),
            np.array([place[node.work] for node in nodes], dtype=np.int32),
            np.array([node.share for node in nodes]),
            data,
            np.array([_kind(node.work, node.stream) for node in nodes], dtype=np.int8),
            np.cumsum([0, *map(len, incoming)], dtype=np.int32),
            np.array([need for needs in incoming for need in needs], dtype=np.int32),
            ready,
        )


def _kind(work: Op | Collective, stream: str) -> int:
    return COMPUTE if isinstance(work, Op) else TENSOR_PARALLEL if stream == "tp" else DATA_PARALLEL


def join(segments: Sequence[Segment], place: Mapping[Op | Collective, int]) -> Graph:
    """Several segments as one graph whose ``work`` is what ``place`` says."""
    graphs = [segment.graph for segment in segments]
    bounds = np.cumsum([0, *(len(graph.work) for graph in graphs)])
    edges = np.cumsum([0, *(len(graph.before) for graph in graphs)])
    works = [np.array([place[work] for work in segment.works], dtype=np.int32) for segment in segments]
    return Graph(
        bounds,
        np.concatenate([index[graph.work] for index, graph in zip(works, graphs, strict=True)]),
        np.concatenate([graph.share for graph in graphs]),
        np.concatenate([graph.on_data_stream for graph in graphs]),
        np.concatenate([graph.kind for graph in graphs]),
        np.concatenate([[0], *(g.pointer[1:] + at for g, at in zip(graphs, edges, strict=False))]).astype(np.int32),
        np.concatenate([g.before + at for g, at in zip(graphs, bounds, strict=False)]).astype(np.int32),
        np.concatenate([graph.ready for graph in graphs], axis=1),
    )
