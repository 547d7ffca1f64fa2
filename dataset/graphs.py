"""Graphs for learning: a program as a PyTorch Geometric ``HeteroData``, topology only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepsight.dataset.program import Program

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

NODE_TYPES = ("op", "collective", "stream")
# (source, relation, target); relations between work exist for all four pairs of op and collective
WORK_RELATIONS = (
    "data",
    "stream_order",
    "launch",
    "synchronisation",
    "rendezvous",
    "host_order",
    "may_run_concurrently",
)


def edge_types() -> list[tuple[str, str, str]]:
    """Every edge type a graph may have, in a fixed order; each graph carries all of them, empty or not."""
    work = ("op", "collective")
    between = [(source, relation, target) for relation in WORK_RELATIONS for source in work for target in work]
    return [
        *between,
        *((source, "runs_on", "stream") for source in work),
        *(("stream", "runs", source) for source in work),
    ]


def to_hetero(program: Program, max_concurrent: int = 16) -> HeteroData:
    """Topology of a program.

    Args:
        program: ``n`` nodes.
        max_concurrent: At most so many nearest (in issue order) *may run concurrently* partners per node and stream.

    Returns:
        Node types ``op``, ``collective``, ``stream`` with ``num_nodes`` and, for the first two, ``node`` ``(k,)``: index
        into ``program.nodes``.  All of ``edge_types()``, ``edge_index`` ``(2, e)`` int64, before → after;
        *may run concurrently* in both directions.  ``data["stream"].names`` lists the streams.
    """
    raise NotImplementedError
