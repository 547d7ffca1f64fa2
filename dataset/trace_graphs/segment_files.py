"""Traced segments on disk: Parquet tables of programs and of times, and the rest as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import read_parquet
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import new_file, read_json, write_json
from stepsight.dataset.graph.graph_files import work_from_list, work_to_list
from stepsight.dataset.graph.program import Dependency, Node, Program
from stepsight.dataset.graph.rank_graph import WHY, WHY_NUMBER
from stepsight.dataset.graph.rank_trace import TracedSegment

STEM = "segments"
FORM = 1  # of the files
_NODES = ("program", "work", "stream", "share")
_EDGES = ("program", "before", "after", "why")
_TIMES = ("slot_s", "launch_s", "launch_events", "start_s", "end_s")
_ABOUT = ("label", "rank", "busy", "run", "step", "micro_batch", "stage", "wait_s", "span_s")


def write_segments(segments: Sequence[TracedSegment], folder: Path) -> None:
    """Write ``segments.{nodes,edges,times}.parquet`` and ``segments.json``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    programs = {id(segment.program): segment.program for segment in segments}
    number = {key: place for place, key in enumerate(programs)}
    works: dict[Any, int] = {}
    streams: dict[str, int] = {}
    nodes = [
        (place, works.setdefault(node.work, len(works)), streams.setdefault(node.stream, len(streams)), node.share)
        for place, program in enumerate(programs.values())
        for node in program.nodes
    ]
    edges = [
        (place, before, after, WHY_NUMBER[why])
        for place, program in enumerate(programs.values())
        for before, after, why in program.edges
    ]
    lengths = [len(segment.program) for segment in segments]
    times = {"segment": np.repeat(np.arange(len(segments)), lengths)}
    times |= {name: np.concatenate([_whole(segment, name) for segment in segments]) for name in _TIMES}
    tables = {
        "nodes": {name: np.array([row[place] for row in nodes]) for place, name in enumerate(_NODES)},
        "edges": {name: np.array([row[place] for row in edges], np.int64) for place, name in enumerate(_EDGES)},
        "times": times,
    }
    for name, table in tables.items():
        with new_file(folder / f"{STEM}.{name}.parquet") as part:
            pq.write_table(pa.table(table), part, compression="zstd", compression_level=1)
    tree = {
        "form": FORM,
        "works": [work_to_list(work) for work in works],
        "streams": list(streams),
        "programs": [program.label for program in programs.values()],
        "dependencies": [why.value for why in WHY],
        "segments": [
            {"program": number[id(each.program)]} | {name: getattr(each, name) for name in _ABOUT} for each in segments
        ],
    }
    write_json(folder / f"{STEM}.json", tree, indent=None)


def _whole(segment: TracedSegment, name: str) -> Any:
    """A column of times, NaN without measurement."""
    values = getattr(segment, name)
    return values if len(values) else np.full(len(segment.program), np.nan)


def read_segments(folder: Path) -> list[TracedSegment]:
    """Read the files that ``write_segments`` wrote.

    Raises:
        TraceError: If it is not that.
    """
    path = Path(folder) / f"{STEM}.json"
    try:
        tree = read_json(path)
        if tree["form"] != FORM:
            raise ValueError(f"form must be {FORM}, got {tree['form']!r:.40}")
        nodes, edges, times = (
            read_parquet(Path(folder) / f"{STEM}.{name}.parquet") for name in ("nodes", "edges", "times")
        )
        programs = _programs(tree, nodes, edges)
        lengths = [len(programs[each["program"]]) for each in tree["segments"]]
        bounds = np.cumsum([0, *lengths])
        columns = {name: times.column(name).to_numpy() for name in _TIMES}
        if len(times) != bounds[-1]:
            raise ValueError(f"times must be as many as nodes, got {len(times)} and {bounds[-1]}")
        return [
            TracedSegment(
                program=programs[about["program"]],
                **{name: about[name] for name in _ABOUT},
                **{name: _known(values[begin:end]) for name, values in columns.items()},
            )
            for about, begin, end in zip(tree["segments"], bounds, bounds[1:], strict=False)
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise TraceError(f"{path} must be segments of a dataset with their tables: {error}") from None


def _known(values: Any) -> Any:
    """A column of times; empty without measurements."""
    return values.copy() if not np.isnan(values).all() or not len(values) else np.zeros(0)


def _programs(tree: dict[str, Any], nodes: Any, edges: Any) -> list[Program]:
    works = [work_from_list(work) for work in tree["works"]]
    labels, streams, kinds = tree["programs"], tree["streams"], [Dependency(why) for why in tree["dependencies"]]
    node_rows = zip(*(nodes.column(name).to_pylist() for name in _NODES), strict=True)
    edge_rows = zip(*(edges.column(name).to_pylist() for name in _EDGES), strict=True)
    own_nodes: list[list[Node]] = [[] for _ in labels]
    own_edges: list[list[tuple[int, int, Dependency]]] = [[] for _ in labels]
    for program, work, stream, share in node_rows:
        own_nodes[program].append(Node(works[work], streams[stream], share=share))
    for program, before, after, why in edge_rows:
        own_edges[program].append((before, after, kinds[why]))
    return [Program(tuple(n), tuple(e), label) for n, e, label in zip(own_nodes, own_edges, labels, strict=True)]
