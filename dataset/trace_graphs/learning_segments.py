"""What training reads of the dataset: segments with program and measurements, and the work of whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepsight.dataset.graph.columns import Floats, Ints
from stepsight.dataset.graph.graph_table import NUMBERS, WORK_TYPES, GraphTable, Rows, edge_types, kind_names, work_of
from stepsight.dataset.graph.program import Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.kinds.op import Collective, Op

_WHY = {why.value: number for number, why in enumerate(Dependency)}
_ABOUT = ("rank", "busy", "run", "step", "micro_batch", "stage", "wait_s", "span_s")
_ORDERED = _WHY[Dependency.STREAM_ORDER.value]  # given by the program itself


def learning_segments(table: GraphTable) -> list[TracedSegment]:
    """Every segment among some graphs, in their order; equal programs are one object."""
    table = table.select([place for place, scope in enumerate(table.about["scope"]) if scope == "segment"])
    columns, about = _Columns(table), table.about
    shared: dict[object, Program] = {}
    out = []
    for place, label in enumerate(about["segment"]):
        alone, seconds, launch = columns.times(place)
        out.append(
            TracedSegment(
                program=columns.program(place, label, about["streams"][place], shared),
                slot_s=seconds,
                label=label,
                launch_s=launch[:, 0],
                launch_events=launch[:, 1],
                alone_s=alone,
                **{name: about[name][place] for name in _ABOUT},
            )
        )
    return out


class _Columns:
    """Nodes and edges of all segments as columns, in the order of the segments and of issue."""

    def __init__(self, table: GraphTable) -> None:
        rows = [{**table.rows[name], "stream": self._streams(table, name)} for name in WORK_TYPES]
        nodes = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
        order = np.lexsort((nodes["node"], nodes["graph"]))
        nodes = {name: values[order] for name, values in nodes.items()}
        self._bounds = np.searchsorted(nodes["graph"], np.arange(len(table) + 1))
        self._seconds, self._launch = np.exp(nodes["y"].astype(np.float64)), nodes["launch"]
        self._works, self._work = distinct_works(nodes)
        self._stream, self._share = nodes["stream"], nodes["share"]
        self._edges, self._edge_bounds = self._all_edges(table)

    @staticmethod
    def _streams(table: GraphTable, name: str) -> Ints:
        """Stream of each node of a type."""
        runs = table.rows[name, "runs_on", "stream"]
        stream = np.full(len(table.rows[name]["graph"]), -1)
        stream[table.bounds[name][runs["graph"]] + runs["ends"][:, 0]] = runs["ends"][:, 1]
        return stream

    @staticmethod
    def _all_edges(table: GraphTable) -> tuple[Ints, Ints]:
        found = [np.zeros((4, 0), dtype=np.int64)]
        for key in edge_types():
            source, relation, target = key
            if relation in _WHY and _WHY[relation] != _ORDERED and {source, target} <= set(WORK_TYPES):
                graph, ends = table.rows[key]["graph"], table.rows[key]["ends"]
                pair = [
                    table.rows[name]["node"][table.bounds[name][graph] + ends[:, side]]
                    for side, name in enumerate((source, target))
                ]
                found.append(np.stack([graph, *pair, np.full(len(graph), _WHY[relation])]))
        edges = np.concatenate(found, axis=1)
        edges = edges[:, np.lexsort((edges[3], edges[1], edges[2], edges[0]))]
        return edges[1:], np.searchsorted(edges[0], np.arange(len(table) + 1))

    def times(self, row: int) -> tuple[Any, Any, Any]:
        """Seconds alone and in context, ``(n,)`` each, and launches, ``(n, 2)``, of a segment's nodes."""
        own = slice(self._bounds[row], self._bounds[row + 1])
        return self._seconds[own, 0], self._seconds[own, 1], self._launch[own]

    def program(self, row: int, label: str, streams: Sequence[str], shared: dict[object, Program]) -> Program:
        """The program of a segment; ``shared`` has those found before."""
        own = slice(self._bounds[row], self._bounds[row + 1])
        edges = self._edges[:, self._edge_bounds[row] : self._edge_bounds[row + 1]]
        columns = (self._work[own], self._stream[own], self._share[own], edges)
        key = (label, tuple(streams), *(column.tobytes() for column in columns))
        if key not in shared:
            shared[key] = Program.of_rows(self._works, streams, columns[:3], edges, label)
        return shared[key]


_LAUNCHED = ("log_blocks", "log_threads", "registers", "log_shared_bytes")


@dataclass(frozen=True)
class StepWorks:
    """Ops and collectives of traced steps, one row for each kernel.

    Shapes: ``n`` rows.
    """

    works: tuple[Op | Collective, ...]  # distinct signatures
    work: Ints  # (n,): index of works
    kernel: Ints  # (n,): number of the signature and how it was launched: equal kernels have equal numbers
    seconds: Floats  # (n,): as traced
    beside_s: Floats  # (n,): of these, beside a collective
    launch_s: Floats  # (n,): of the host, 0 where they are not known
    launch_events: Floats  # (n,): calls recorded in that time


def step_works(table: GraphTable) -> StepWorks:
    """The work in some graphs of steps, without the collectives of other ranks."""
    rows = [
        {name: values[of["node"] >= 0] for name, values in of.items()}
        for of in (table.rows[kind] for kind in WORK_TYPES)
    ]
    nodes = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    works, work = distinct_works(nodes)
    launched = nodes["x"][:, [NUMBERS.index(name) for name in _LAUNCHED]]
    _, kernel = np.unique(np.concatenate([work[:, None], launched], axis=1), axis=0, return_inverse=True)
    seconds = np.exp(nodes["y"][:, 1].astype(np.float64))
    return StepWorks(works, work, kernel.reshape(-1), seconds, nodes["beside"], *nodes["launch"].T)


def distinct_works(nodes: Rows) -> tuple[tuple[Op | Collective, ...], Ints]:
    """Distinct signatures of nodes, and the number of each node's, ``(k,)``."""
    rows = np.concatenate([nodes["kind"][:, None], nodes["signature"]], axis=1)
    distinct, work = np.unique(rows, axis=0, return_inverse=True)
    kinds = kind_names()
    return tuple(work_of(kinds[row[0]], row[1:]) for row in distinct.tolist()), work.reshape(-1)
