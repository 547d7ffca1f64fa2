"""What training reads of the dataset: segments with program and measurements, and the work of whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.trace_graphs.graph_schema import NUMBERS, WORK_TYPES, edge_types, work_of
from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs

Ints = NDArray[np.int64]
_WHY = {why.value: number for number, why in enumerate(Dependency)}
_ORDERED = _WHY[Dependency.STREAM_ORDER.value]  # given by the program itself


def learning_segments(graphs: TraceGraphs) -> list[TracedSegment]:
    """Every segment of a dataset, or of a part of one, in the order of its graphs; equal programs are one object."""
    places = [place for place, scope in enumerate(graphs.values("scope")) if scope == "segment"]
    columns = _Columns(graphs, places)
    about = {
        name: graphs.values(name)
        for name in ("segment", "rank", "busy", "run", "step", "micro_batch", "stage", "wait_s", "span_s", "streams")
    }
    shared: dict[object, Program] = {}
    out = []
    for row, place in enumerate(places):
        program = columns.program(row, str(about["segment"][place]), about["streams"][place], shared)
        alone, seconds, launch = columns.times(row)
        out.append(
            TracedSegment(
                program=program,
                slot_s=seconds,
                label=program.label,
                rank=int(about["rank"][place]),
                busy=int(about["busy"][place]),
                run=str(about["run"][place]),
                step=int(about["step"][place]),
                micro_batch=int(about["micro_batch"][place]),
                stage=int(about["stage"][place]),
                launch_s=launch[:, 0],
                launch_events=launch[:, 1],
                wait_s=float(about["wait_s"][place]),
                span_s=float(about["span_s"][place]),
                alone_s=alone,
            )
        )
    return out


class _Columns:
    """Nodes and edges of all segments as columns, in the order of the segments and of issue."""

    def __init__(self, graphs: TraceGraphs, places: Sequence[int]) -> None:
        parts = [self._nodes(graphs, name, places) for name in WORK_TYPES]
        owner, node, kind, exact, share, seconds, launch, stream = (
            np.concatenate(each) for each in zip(*parts, strict=True)
        )
        own = np.flatnonzero(node >= 0)  # not collectives of peers
        order = own[np.lexsort((node[own], owner[own]))]
        self._bounds = np.searchsorted(owner[order], np.arange(len(places) + 1))
        self._seconds, self._launch = seconds[order], launch[order]
        rows = np.concatenate([kind[order, None], exact[order]], axis=1)
        distinct, work = np.unique(rows, axis=0, return_inverse=True)
        kinds = graphs.kinds
        self._works: list[Op | Collective] = [work_of(kinds[row[0]], row[1:]) for row in distinct.tolist()]
        self._work, self._stream, self._share = work.reshape(-1), stream[order], share[order]
        self._edges, self._edge_bounds = self._all_edges(graphs, places)

    @staticmethod
    def _nodes(graphs: TraceGraphs, name: str, places: Sequence[int]) -> tuple[Any, ...]:
        columns = {each: graphs.column(name, each, places) for each in ("node", "kind", "signature", "share", "launch")}
        node, owner = columns["node"]
        seconds = np.exp(graphs.column(name, "y", places)[0].astype(np.float64))
        ends, runs = graphs.column((name, "runs_on", "stream"), "edge_index", places)
        stream = np.full(len(node), -1, dtype=np.int64)
        stream[np.searchsorted(owner, runs) + ends[0]] = ends[1]  # owner is in order
        return (
            owner,
            node,
            *(columns[each][0] for each in ("kind", "signature", "share")),
            seconds,
            columns["launch"][0],
            stream,
        )

    @staticmethod
    def _all_edges(graphs: TraceGraphs, places: Sequence[int]) -> tuple[Ints, Ints]:
        nodes = {name: graphs.column(name, "node", places) for name in WORK_TYPES}
        found = [np.zeros((4, 0), dtype=np.int64)]
        for source, relation, target in edge_types():
            if relation in _WHY and _WHY[relation] != _ORDERED and {source, target} <= set(WORK_TYPES):
                ends, owner = graphs.column((source, relation, target), "edge_index", places)
                pair = [
                    nodes[name][0][np.searchsorted(nodes[name][1], owner) + ends[side]]
                    for side, name in enumerate((source, target))
                ]
                found.append(np.stack([owner, *pair, np.full(len(owner), _WHY[relation])]))
        edges = np.concatenate(found, axis=1)
        edges = edges[:, (edges[1] >= 0) & (edges[2] >= 0)]
        edges = edges[:, np.lexsort((edges[3], edges[1], edges[2], edges[0]))]
        return edges[1:], np.searchsorted(edges[0], np.arange(len(places) + 1))

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


Floats = NDArray[np.float64]

_LAUNCHED = ("log_blocks", "log_threads", "registers", "log_shared_bytes")


@dataclass(frozen=True)
class StepWorks:
    """Ops and collectives of traced steps, one row for each kernel.

    Shapes: ``n`` rows.

    Attributes:
        works: Distinct signatures.
        work: ``(n,)``: index of ``works``.
        kernel: ``(n,)``: number of the signature and how it was launched: equal kernels have equal numbers.
        seconds: ``(n,)``: as traced.
        beside_s: ``(n,)``: of these, beside a collective.
        launch_s: ``(n,)``: of the host, 0 where they are not known.
        launch_events: ``(n,)``: calls recorded in that time.
    """

    works: tuple[Op | Collective, ...]
    work: Ints
    kernel: Ints
    seconds: Floats
    beside_s: Floats
    launch_s: Floats
    launch_events: Floats


def step_works(graphs: TraceGraphs, places: Sequence[int]) -> StepWorks:
    """The work in some graphs of steps, without the collectives of other ranks."""
    names = ("kind", "signature", "x", "y", "beside", "launch", "node")
    parts = [[graphs.column(kind, name, places)[0] for name in names] for kind in WORK_TYPES]
    kind, exact, x, logs, beside, launch, node = (np.concatenate(each) for each in zip(*parts, strict=True))
    own = np.flatnonzero(node >= 0)
    rows = np.concatenate([kind[own, None], exact[own]], axis=1)
    distinct, work = np.unique(rows, axis=0, return_inverse=True)
    works = tuple(work_of(graphs.kinds[row[0]], row[1:]) for row in distinct.tolist())
    work = work.reshape(-1)
    launched = x[own][:, [NUMBERS.index(name) for name in _LAUNCHED]]
    _, kernel = np.unique(np.concatenate([work[:, None], launched], axis=1), axis=0, return_inverse=True)
    seconds = np.exp(logs[own, 1].astype(np.float64))
    return StepWorks(works, work, kernel.reshape(-1), seconds, beside[own], launch[own, 0], launch[own, 1])
