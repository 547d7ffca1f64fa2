"""Traced segments as parts of the dataset, and their files: programs, measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_parquet
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import new_file, read_json, write_json
from stepsight.dataset.graph.graph_files import work_from_list, work_to_list
from stepsight.dataset.graph.intervals import covered
from stepsight.dataset.graph.program import OPAQUE, PHASES, WHY, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.graph.relations import CONCURRENT, relation_pairs
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.trace_graphs.graph_parts import positions
from stepsight.dataset.trace_graphs.graph_schema import (
    EDGE_NUMBERS,
    NUMBERS,
    WORK_TYPES,
    GraphPart,
    edge_types,
    kind_names,
    node_numbers,
    signature_width,
    signatures,
    work_numbers,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass
class _Drawn:
    """Common properties of all executions of one program; shapes as in ``GraphPart``."""

    chosen: dict[str, Ints]
    part: GraphPart
    pairs: dict[tuple[str, str, str], Ints]  # edges by places in the program
    beside: Ints  # pairs that may run concurrently
    work: Ints  # (n,): number of each op's signature and share, -1 for collectives


class SegmentParts:
    """Makes the parts of one run's segments.

    An op's seconds alone are the median of its signature on its rank where nothing ran beside it, without the time of
    the host before it.  Collectives have none.
    """

    def __init__(self, segments: Sequence[TracedSegment]) -> None:
        self._segments = segments
        self._drawn: dict[int, _Drawn] = {}
        self._works: dict[tuple[Op, float], int] = {}  # numbers of signatures, and the share that a node takes
        self._alone = self._seconds_alone()

    def parts(self) -> list[GraphPart]:
        """One part for each segment."""
        return [self._part(segment) for segment in self._segments]

    def _draw(self, program: Program) -> _Drawn:
        known = self._drawn.get(id(program))
        if known is None:
            self._drawn[id(program)] = known = _draw(program)
            known.work[:] = [
                self._works.setdefault((node.work, node.share), len(self._works)) if isinstance(node.work, Op) else -1
                for node in program.nodes
            ]
        return known

    def _seconds_alone(self) -> dict[tuple[int, int], float]:
        """Seconds by rank and number of a signature."""
        keys, values = [np.zeros((2, 0), dtype=np.int64)], [np.zeros(0)]
        for segment in self._segments:
            drawn = self._draw(segment.program)
            own = np.minimum(segment.slot_s, segment.end_s - segment.start_s) if len(segment.end_s) else segment.slot_s
            alone = (own > 0) & (drawn.work >= 0)
            alone[drawn.beside[0][_overlap(segment, drawn.beside) > 0]] = False
            keys.append(np.stack([np.full(int(alone.sum()), segment.rank), drawn.work[alone]]))
            values.append(own[alone])
        return _medians(np.concatenate(keys, axis=1), np.concatenate(values))

    def _part(self, segment: TracedSegment) -> GraphPart:
        drawn, nodes = self._draw(segment.program), segment.program.nodes
        same = drawn.part
        part = GraphPart(
            "segment", segment.label, segment.step, same.x, {}, same.kind, same.node, same.signature, same.share
        )
        alone = np.array([self._alone.get((segment.rank, work), np.nan) for work in drawn.work.tolist()])
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = np.log(np.stack([alone, segment.slot_s], axis=1).reshape(-1, 2)).astype(np.float32)
        seconds[~np.isfinite(seconds)] = np.nan
        launch = np.zeros((len(nodes), 2))
        for column, values in enumerate((segment.launch_s, segment.launch_events)):
            launch[: len(values), column] = values
        beside = _beside(segment, drawn.chosen)
        for name, chosen in drawn.chosen.items():
            part.y[name], part.launch[name], part.beside[name] = seconds[chosen], launch[chosen], beside[chosen]
            part.call[name], part.recorded[name] = np.full(len(chosen), -1), np.zeros(len(chosen), dtype=np.int64)
        for edge_type, (ends, numbers) in same.edges.items():
            pairs = drawn.pairs.get(edge_type)
            if pairs is not None and pairs.shape[1] and len(segment.start_s):
                numbers = numbers.copy()
                numbers[:, 0] = _overlap(segment, pairs)
            part.edges[edge_type] = ends, numbers
        part.streams = same.streams
        part.busy, part.micro_batch, part.stage = segment.busy, segment.micro_batch, segment.stage
        part.wait_s, part.span_s = segment.wait_s, segment.span_s
        return part


def program_part(program: Program, alone: Floats, busy: int) -> GraphPart:
    """A segment without a trace: ``y`` has the logarithm of the seconds of each node alone, ``(n,)``."""
    none = np.full(len(program), np.nan)
    part = SegmentParts([TracedSegment(program, none, program.label, 0, busy, "")]).parts()[0]
    with np.errstate(divide="ignore"):
        logs = np.where(alone > 0, np.log(alone), np.nan)
    for name, nodes in part.node.items():
        part.y[name][:, 0] = logs[nodes]
    return part


def _overlap(segment: TracedSegment, pairs: Ints) -> Floats:
    """Seconds for which the nodes of each pair overlapped; 0 if their times are unknown."""
    if not len(segment.start_s):
        return np.zeros(pairs.shape[1])
    starts, ends = segment.start_s[pairs], segment.end_s[pairs]
    return np.asarray(np.maximum(ends.min(axis=0) - starts.max(axis=0), 0.0))


def _medians(keys: Ints, values: Floats) -> dict[tuple[int, int], float]:
    """Median of the values of each key; keys are ``(2, n)``, values ``(n,)``."""
    order = np.lexsort((values, *keys))
    keys, values = keys[:, order], values[order]
    first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))[: len(values)]
    last = np.append(first[1:], len(values)) - 1
    medians = (values[(first + last) // 2] + values[(first + last + 1) // 2]) / 2
    return dict(zip(map(tuple, keys[:, first].T.tolist()), medians.tolist(), strict=True))


def _beside(segment: TracedSegment, chosen: dict[str, Ints]) -> Floats:
    """``(n,)``: seconds of each op that overlapped with a collective; 0 if unknown."""
    out = np.zeros(len(segment.program))
    if len(segment.start_s):
        ops, others = chosen["op"], chosen["collective"]
        start, end = segment.start_s, segment.end_s
        out[ops] = covered(start[others], end[others], start[ops], end[ops])
    return out


def _draw(program: Program) -> _Drawn:
    nodes = program.nodes
    works = list(dict.fromkeys(node.work for node in nodes))
    number = {work: place for place, work in enumerate(works)}
    work = np.array([number[node.work] for node in nodes], dtype=np.int64)
    part = GraphPart("segment", program.label, 0, streams=program.streams)
    is_op = np.array([isinstance(node.work, Op) for node in nodes], dtype=np.bool_)
    none = np.zeros(0, dtype=np.int64)
    chosen = {"op": np.flatnonzero(is_op), "collective": np.flatnonzero(~is_op), "host": none}
    numbers = work_numbers(works)
    known = np.array([node.work.kind != OPAQUE for node in nodes], dtype=np.float64)
    phase = np.full(len(nodes), PHASES.index(program.label) if program.label in PHASES else -1)
    x = node_numbers(numbers[work], np.zeros((len(nodes), 4)), known, phase)
    kinds = {name: place for place, name in enumerate(kind_names())}
    kind = np.array([kinds[node.work.kind] for node in nodes], dtype=np.int64)
    exact, share = signatures(works)[work], np.array([node.share for node in nodes], dtype=np.float64)
    for name, own in chosen.items():
        part.x[name], part.kind[name], part.node[name] = x[own].reshape(-1, len(NUMBERS)), kind[own], own
        part.signature[name], part.share[name] = exact[own].reshape(-1, signature_width()), share[own]
    pairs = _pairs(program, is_op)
    place = np.zeros(len(nodes), dtype=np.int64)
    for own in chosen.values():
        place[own] = np.arange(len(own))
    column = {stream: index for index, stream in enumerate(program.streams)}
    stream = np.array([column[node.stream] for node in nodes], dtype=np.int64)
    position = positions(stream)
    for edge_type in edge_types():
        if edge_type in pairs:
            source, target = pairs[edge_type]
            distance = np.where(stream[source] == stream[target], position[target] - position[source], 0)
            nothing = np.zeros(len(source))
            columns = np.stack([nothing, numbers[work[source], 1], distance, nothing], axis=1)
            part.edges[edge_type] = np.stack([place[source], place[target]]), columns.astype(np.float32)
        elif "stream" in edge_type:
            own = chosen[edge_type[0] if edge_type[2] == "stream" else edge_type[2]]
            ends = np.stack([np.arange(len(own)), stream[own]])
            ends = ends if edge_type[2] == "stream" else ends[::-1].copy()
            part.edges[edge_type] = ends, np.zeros((len(own), len(EDGE_NUMBERS)), dtype=np.float32)
        else:
            part.edges[edge_type] = np.zeros((2, 0), np.int64), np.zeros((0, len(EDGE_NUMBERS)), np.float32)
    part.x["stream"] = np.ones((len(program.streams), 1), dtype=np.float32)
    beside = np.concatenate([pairs[a, CONCURRENT, b] for a in WORK_TYPES for b in WORK_TYPES], axis=1)
    return _Drawn(chosen, part, pairs, beside, np.full(len(nodes), -1, dtype=np.int64))


def _pairs(program: Program, is_op: NDArray[np.bool_]) -> dict[tuple[str, str, str], Ints]:
    """Edges between works by edge type; a relation that does not exist between two types counts as synchronisation."""
    known, found = set(edge_types()), {}
    relations = relation_pairs(program)
    for a in WORK_TYPES:
        for b in WORK_TYPES:
            rest = []
            for relation, pairs in relations.items():
                own = pairs[:, (is_op[pairs[0]] == (a == "op")) & (is_op[pairs[1]] == (b == "op"))]
                if (a, relation, b) in known:
                    found[a, relation, b] = own
                else:
                    rest.append(own)
            synchronised = (a, Dependency.SYNCHRONISATION.value, b)
            found[synchronised] = np.concatenate([found[synchronised], *rest], axis=1)
    return found


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
    works, kinds = [work_from_list(work) for work in tree["works"]], tree["dependencies"]
    number = np.array([WHY_NUMBER[Dependency(why)] for why in kinds], dtype=np.int64)
    found = []
    columns = [[table.column(name).to_numpy() for name in names] for table, names in ((nodes, _NODES), (edges, _EDGES))]
    bounds = [np.searchsorted(each[0], np.arange(len(tree["programs"]) + 1)) for each in columns]
    parts = list(zip(columns, bounds, strict=True))
    for place, label in enumerate(tree["programs"]):
        own, ends = ([column[low[place] : low[place + 1]] for column in each[1:]] for each, low in parts)
        ends[2] = number[ends[2]]
        found.append(Program.of_rows(works, tree["streams"], own, ends, label))
    return found
