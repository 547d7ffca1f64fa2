"""Graphs of ranks on disk: two Parquet tables of nodes and edges, and the rest as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import parsing, read_numbers, read_parquet
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import new_file, read_json, write_json
from stepsight.dataset.graph.columns import COLLECTIVE, EDGE_COLUMNS, HOST, NODE_COLUMNS, NODE_KINDS, OP, PHASES, WHY
from stepsight.dataset.kinds.op import Collective, Op, check_sizes

FORM = 1  # of the files
MOST_SECONDS = 1e12  # of any time, since 1970 too
_SECONDS = ("start_s", "duration_s", "unrecorded_s")
_PLAIN = {
    "label": str, "rank": int, "world_size": int, "device": str, "device_name": str, "origin_us": float, "whole": bool,
    "events": int, "observed": int, "op_calls": float, "dispatch_calls": float,
}  # fmt: skip
_LISTS, _SPANS, _ADDED = ("streams", "names", "warnings"), ("loading_s", "steps_s"), ("recorded", "share")


def write_graph(graph: Any, folder: Path, stem: str) -> None:
    """Write ``<stem>.nodes.parquet``, ``<stem>.edges.parquet`` and ``<stem>.json``."""
    columns = {name: getattr(graph, name) for name in _SECONDS}
    columns |= {name: graph.columns[name].astype(np.int32) for name in NODE_COLUMNS}
    columns |= {"share": graph.columns["share"]} if "share" in graph.columns else {}
    edges = {name: graph.edge_columns[name].astype(np.int32) for name in EDGE_COLUMNS} | {"delay_s": graph.delay_s}
    for name, table in (("nodes", columns), ("edges", edges)):
        write_columns(table, folder / f"{stem}.{name}.parquet")
    described = {
        "form": FORM,
        **{name: getattr(graph, name) for name in _PLAIN},
        **{name: list(getattr(graph, name)) for name in (*_LISTS, "slowed")},
        **{name: getattr(graph, name).tolist() for name in _SPANS},
        "works": [work_to_list(work) for work in graph.works],
        "groups": [[name, list(ranks)] for name, ranks in graph.groups],
        "dependencies": [why.value for why in WHY],
        "node_kinds": list(NODE_KINDS),
    }
    write_json(folder / f"{stem}.json", described, indent=None)


def write_columns(columns: Mapping[str, Any], path: Path) -> None:
    """Write columns by name as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with new_file(path) as part:
        pq.write_table(pa.table(dict(columns)), part, compression="zstd", compression_level=1)


def work_to_list(work: Op | Collective) -> list[Any]:
    """A signature as JSON."""
    if isinstance(work, Op):
        return ["op", work.kind, list(work.dims), work.dtype]
    return ["collective", work.kind, work.num_bytes, work.group_size, work.ranks_per_node]


def read_facts(folder: Path, stem: str) -> dict[str, Any]:
    """Read what ``write_graph`` wrote, as ``Program.of_columns`` takes it; raises ``TraceError`` if it is not that."""
    path = Path(folder) / f"{stem}.json"
    advice = "if another version of stepsight wrote it, import the trace again"
    with parsing(f"{path} must be an imported graph with its tables ({advice})", TraceError):
        tree = read_json(path)
        if tree.get("form") != FORM:
            raise ValueError(f"form must be {FORM}, got {tree.get('form')!r:.40}: import the trace again")
        graph = _graph(tree, *(read_parquet(Path(folder) / f"{stem}.{name}.parquet") for name in ("nodes", "edges")))
        check_sizes(graph["works"], "an imported graph")
    check_graph(graph, path)
    return graph


def read_steps(folder: Path, stem: str) -> tuple[float, ...]:
    """Seconds of each traced step of a written graph, without its tables; raises ``TraceError`` if it is none."""
    path = Path(folder) / f"{stem}.json"
    with parsing(f"{path} must describe an imported graph", TraceError):
        return tuple(float(end) - float(begin) for begin, end in read_json(path)["steps_s"])


def _graph(tree: dict[str, Any], nodes: Any, edges: Any) -> dict[str, Any]:
    # what earlier versions did not write, as _ADDED
    tree = dict[str, Any](label="", observed=0, slowed=(), op_calls=1.0, dispatch_calls=0.0) | tree
    listed = [name for name in (*NODE_COLUMNS, "share") if name in nodes.column_names or name not in _ADDED]
    floats = (*_SECONDS, "share", "delay_s")
    read: Callable[[Any, str], Any] = lambda of, name: read_numbers(
        of, name, np.float64 if name in floats else np.int64
    )
    return {
        **{name: kind(tree[name]) for name, kind in _PLAIN.items()},
        **{name: tuple(map(str, tree[name])) for name in _LISTS},
        **{name: np.array(tree[name], dtype=np.float64).reshape(-1, 2) for name in _SPANS},
        **{name: read(nodes, name) for name in _SECONDS},
        "columns": {"recorded": np.zeros(nodes.num_rows, np.int64)} | {name: read(nodes, name) for name in listed},
        "edge_columns": {name: read(edges, name) for name in EDGE_COLUMNS},
        "delay_s": read(edges, "delay_s"),
        "slowed": tuple(map(int, tree["slowed"])),
        "works": tuple(work_from_list(work) for work in tree["works"]),
        "groups": tuple((str(name), tuple(map(int, ranks))) for name, ranks in tree["groups"]),
    }


def work_from_list(work: list[Any]) -> Op | Collective:
    """Read a signature that ``work_to_list`` wrote."""
    if work[0] == "op":
        return Op(work[1], tuple(map(int, work[2])), work[3])
    return Collective(work[1], *map(int, work[2:]))


def check_graph(graph: Mapping[str, Any], path: Path | str) -> None:
    """Raise ``TraceError`` unless indices are in range, edges lead forward and times are real."""
    count = len(graph["start_s"])
    limits = {"kind": len(NODE_KINDS), "stream": len(graph["streams"]), "name": len(graph["names"])}
    limits |= {"work": len(graph["works"]), "group": len(graph["groups"]), "phase": len(PHASES)}
    limits |= {"step": max(len(graph["steps_s"]), 1)}
    for name, limit in limits.items():
        column, least = graph["columns"][name], 0 if name in ("kind", "stream") else -1
        if len(column) != count or (count and (column.max() >= limit or column.min() < least)):
            raise TraceError(f"{name} of nodes must be from {least} to {limit - 1} for each of {count} nodes in {path}")
    source, target, why = (graph["edge_columns"][name] for name in EDGE_COLUMNS)
    if len(source) and not ((source >= 0) & (source < target) & (target < count)).all():
        raise TraceError(f"edges must lead from an earlier to a later node of {count} in {path}")
    if len(why) and not (0 <= why.min() <= why.max() < len(WHY)):
        raise TraceError(f"why of edges must be from 0 to {len(WHY) - 1} in {path}")
    kind, work = graph["columns"]["kind"], graph["columns"]["work"]
    of_works = np.array([OP if isinstance(each, Op) else COLLECTIVE for each in graph["works"]] or [HOST])
    if not np.all((kind == HOST) | ((work >= 0) & (of_works[work] == kind))):
        raise TraceError(f"an op must have an op's signature and a collective a collective's in {path}")
    durations = [graph["duration_s"], graph["unrecorded_s"], graph["columns"].get("share", np.zeros(0))]
    durations.append(np.array([graph[name] for name in ("op_calls", "dispatch_calls")]))
    times = np.concatenate([graph["start_s"], graph["delay_s"], graph["steps_s"].ravel(), *durations])
    if not (np.abs(times) <= MOST_SECONDS).all() or np.concatenate(durations).min(initial=0) < 0:
        raise TraceError(f"times must be within {MOST_SECONDS:g} s and durations >= 0 in {path}")
