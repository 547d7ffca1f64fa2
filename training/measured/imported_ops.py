"""What traces of other people's jobs teach: ops and collectives of imported runs, by signature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepsight.dataset.errors import TraceError
from stepsight.dataset.imported.imported_run import read_imported
from stepsight.dataset.imported.meetings import meetings
from stepsight.dataset.imported.rank_graph import OP, RankGraph
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.tables.device_names import PRESETS, device_name

HELDOUT = "heldout"  # role of runs that judge: they never train


@dataclass
class ImportedTimes:
    """Seconds of each signature, over all imported runs.

    Attributes:
        ops: Of each op, once for each call.
        collectives: Of each collective, from when its last rank came to it.
        device: ``cuda`` or ``cpu``; empty if nothing was imported.
    """

    ops: dict[Op, list[float]] = field(default_factory=dict)
    collectives: dict[Collective, list[float]] = field(default_factory=dict)
    device: str = ""


def imported_times(folders: Iterable[Path], hardware: str) -> ImportedTimes:
    """Read what imported runs measured.

    A collective counts only where all of its ranks were traced: else nobody knows how long it waited for the others.

    Raises:
        TraceError: If a run was traced on another hardware.
    """
    found = ImportedTimes()
    for folder in folders:
        run = read_imported(folder)
        if run.role == HELDOUT:
            continue
        graphs = run.graphs()
        for graph in graphs:
            _check_hardware(graph, hardware, folder)
            found.device = graph.device
            _add_ops(graph, found)
        for members in meetings(graphs)[0]:
            _add_collective(graphs, members, found)
    return found


def _check_hardware(graph: RankGraph, hardware: str, folder: Path) -> None:
    traced = device_name(graph.device_name)
    known = hardware in PRESETS.values() or graph.device_name in PRESETS
    if graph.device == "cuda" and known and traced != hardware:
        raise TraceError(
            f"every run must be on the hardware that is learned: the device must be {hardware!r:.80}, got "
            f"{graph.device_name!r:.80} in {folder}"
        )


def _add_ops(graph: RankGraph, found: ImportedTimes) -> None:
    """Ops by call: the kernels that one call launched are one op."""
    nodes = graph.nodes
    sized = np.array(
        [isinstance(work, Op) and work.kind != "opaque" and min(work.dims, default=0) > 0 for work in graph.works]
        + [False]
    )
    chosen = np.flatnonzero((nodes["kind"] == OP) & sized[nodes["work"]] & (nodes["call"] >= 0))
    keys = nodes["work"][chosen] * (int(nodes["call"].max(initial=0)) + 1) + nodes["call"][chosen]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    seconds = np.bincount(inverse, graph.duration_s[chosen], minlength=len(first))
    for node, spent in zip(chosen[first].tolist(), seconds.tolist(), strict=True):
        work = graph.works[nodes["work"][node]]
        if isinstance(work, Op) and spent > 0:
            found.ops.setdefault(work, []).append(spent)


def _add_collective(graphs: list[RankGraph], members: dict[int, int], found: ImportedTimes) -> None:
    place, node = next(iter(members.items()))
    work = graphs[place].works[graphs[place].nodes["work"][node]]
    shortest = min(float(graphs[each].duration_s[at]) for each, at in members.items())
    if isinstance(work, Collective) and len(members) == work.group_size and work.num_bytes > 0 and shortest > 0:
        found.collectives.setdefault(work, []).append(shortest)
