"""What training reads of the dataset: segments with program and measurements, and the work of whole steps."""

from __future__ import annotations

from dataclasses import dataclass

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
    rows = []
    for name in WORK_TYPES:
        runs, stream = table.rows[name, "runs_on", "stream"], np.full(len(table.rows[name]["graph"]), -1)
        stream[table.bounds[name][runs["graph"]] + runs["ends"][:, 0]] = runs["ends"][:, 1]
        rows.append({**table.rows[name], "stream": stream})
    nodes = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    order = np.lexsort((nodes["node"], nodes["graph"]))
    nodes = {name: values[order] for name, values in nodes.items()}
    found = [np.zeros((4, 0), dtype=np.int64)]  # edges between works: graph, places of source and target, and kind
    for key in edge_types():
        source, relation, target = key
        if relation in _WHY and _WHY[relation] != _ORDERED and {source, target} <= set(WORK_TYPES):
            graph, ends = table.rows[key]["graph"], table.rows[key]["ends"].T
            pair = [
                table.rows[of]["node"][table.bounds[of][graph] + at]
                for of, at in zip((source, target), ends, strict=True)
            ]
            found.append(np.stack([graph, *pair, np.full(len(graph), _WHY[relation])]))
    listed = np.concatenate(found, axis=1)
    listed = listed[:, np.lexsort((listed[3], listed[1], listed[2], listed[0]))]
    seconds, (works, work) = np.exp(nodes["y"].astype(np.float64)), distinct_works(nodes)
    bounds, edge_bounds = (np.searchsorted(of, np.arange(len(table) + 1)) for of in (nodes["graph"], listed[0]))
    shared: dict[object, Program] = {}
    out = []
    for place, (label, streams) in enumerate(zip(table.about["segment"], table.about["streams"], strict=True)):
        own, inside = slice(*bounds[place : place + 2]), listed[1:, slice(*edge_bounds[place : place + 2])]
        columns = (work[own], nodes["stream"][own], nodes["share"][own])
        key = (label, tuple(streams), *(column.tobytes() for column in (*columns, inside)))
        if key not in shared:
            shared[key] = Program.of_rows(works, streams, columns, inside, label)
        out.append(
            TracedSegment(
                program=shared[key],
                slot_s=seconds[own, 1],
                label=label,
                launch_s=nodes["launch"][own, 0],
                launch_events=nodes["launch"][own, 1],
                alone_s=seconds[own, 0],
                **{name: table.about[name][place] for name in _ABOUT},
            )
        )
    return out


_LAUNCHED = ("log_blocks", "log_threads", "registers", "log_shared_bytes")


@dataclass(frozen=True)
class StepWorks:
    """Ops and collectives of traced steps: ``n`` rows, one for each kernel."""

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
