"""Data dependencies: from tensors of execution traces, else from autograd's sequence numbers.

PyTorch's execution trace names the storages that every call reads and writes.  Without one a profile does not tell
who reads what, but autograd gives a forward call and its backward the same number: backward reads what forward saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.base.bounded import read_unpacked
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.columns import Flags, Ints
from stepsight.dataset.graph.program import COLLECTIVE, HOST, WHY_NUMBER, Dependency, Program
from stepsight.dataset.traces.assembly import MICROSECOND
from stepsight.dataset.traces.event_blocks import parse
from stepsight.dataset.traces.event_columns import RankEvents

_LAUNCH = WHY_NUMBER[Dependency.LAUNCH]
_OURS = "stepsight::"  # annotations of ops that count as calls
_SLACK_S = 2e-6  # clock error by which an effect may precede its cause
_LEAST_WORK = 0.5  # of that of an observed step, for a step to stand for it
_LEAST_FOUND = 0.5  # share of a trace's calls that an execution trace of the same run must contain


class TensorCall(NamedTuple):
    """A call of an execution trace: its name, its number, and the storages that it reads and writes."""

    name: str
    record: int
    reads: tuple[tuple[int, str], ...]
    writes: tuple[tuple[int, str], ...]


def read_execution_trace(path: Path) -> list[TensorCall]:
    """Calls of PyTorch's execution trace (``.json`` or ``.json.gz``), in order."""
    try:
        tree = parse(read_unpacked(path))
    except OSError as error:
        raise TraceError(f"an execution trace must be a readable file, got {path} ({error.strerror})") from None
    except ValueError as error:
        raise TraceError(f"{path} must be whole JSON, got {error}") from None
    nodes = tree.get("nodes") if isinstance(tree, dict) else None
    if not isinstance(nodes, list) or not str(tree.get("schema", "")):
        raise TraceError(f"an execution trace must hold schema and a list nodes, got neither in {path}")
    try:
        calls = [_call(node) for node in sorted(nodes, key=lambda node: int(node["id"]))]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise TraceError(f"nodes of an execution trace must have id, name and inputs: {error!r} in {path}") from None
    return [call for call in calls if "::" in call.name]


def _call(node: dict[str, Any]) -> TensorCall:
    sides = [node.get(side) for side in ("inputs", "outputs")]  # older schemas list values, newer ones have a table
    inputs, outputs = ((side.get("values") if isinstance(side, dict) else side) or [] for side in sides)
    record = node.get("rf_id")
    if record is None:
        record = next((each["value"] for each in node.get("attrs") or [] if each.get("name") == "rf_id"), 0)
    name = str(node["name"])
    reads, writes = tuple(_storages(inputs)), list(_storages(outputs))
    if name.endswith("_") or name.endswith("_out") or ".out" in name:
        writes += list(_storages(inputs[:1]))
    return TensorCall(name, int(record), reads, tuple(writes))


def _storages(values: Any) -> Iterator[tuple[int, str]]:
    """Storage and device of each tensor in some values: a tensor is id, storage, offset, elements, bytes, device."""
    for value in values:
        if not isinstance(value, list):
            continue
        if len(value) == 6 and isinstance(value[5], str) and isinstance(value[0], int):
            if value[1]:
                yield int(value[1]), value[5]
        else:
            yield from _storages(value)


def with_sequence_edges(graph: Program, sequence: Ints) -> Program:
    """Add edges from autograd's sequence numbers; ``sequence`` is that of each framework call."""
    chosen = np.flatnonzero((graph.columns["call"] >= 0) & (graph.columns["kind"] != HOST))
    numbers = sequence[graph.columns["call"][chosen]]
    chosen, numbers = chosen[numbers >= 0], numbers[numbers >= 0]
    backward = graph.columns["phase"][chosen] == 1
    last = dict(zip(numbers[~backward].tolist(), chosen[~backward].tolist(), strict=True))
    first = dict(zip(numbers[backward][::-1].tolist(), chosen[backward][::-1].tolist(), strict=True))
    found = sorted((node, number) for number, node in first.items() if number in last)
    return _with_pairs(graph, [(last[number], node) for node, number in found])


def with_tensor_edges(graph: Program, events: RankEvents, parent: Ints, calls: list[TensorCall], path: Path) -> Program:
    """Add edges from the tensors of an execution trace; ``parent``: the call around each framework call."""
    rows = _rows_of(events, calls)
    names = {call.name for call in calls}
    called = {events.names[number] for number in np.unique(events.ops["name"]).tolist()}
    known = {name for name in called if "::" in name and not name.startswith(_OURS)}
    shared = len(names & known) / max(len(known), 1)
    if not rows or shared < _LEAST_FOUND:
        raise TraceError(
            f"an execution trace must be of the same run as the profile: it has {100 * shared:.0f} % of the profile's "
            f"calls by name, and {len(rows)} calls in the same place: {path}"
        )
    joined = len({id(call) for _, call, _ in rows})
    if joined < _LEAST_FOUND * len(calls):
        told = (
            f"the execution trace has no record ids of the profile, and {joined} of its {len(calls)} calls are in the "
            "same place: it may be of another run, and data dependencies are few"
        )
        graph = graph.replace(warnings=(*graph.warnings, told))
    calls_of = np.maximum(graph.columns["call"], _calls_of_collectives(graph, events))
    nodes = np.flatnonzero((calls_of >= 0) & (graph.columns["kind"] != HOST))
    rows_of_nodes = calls_of[nodes].tolist()
    last = dict(zip(rows_of_nodes, nodes.tolist(), strict=True))
    first = dict(zip(reversed(rows_of_nodes), reversed(nodes.tolist()), strict=True))
    pairs: dict[tuple[int, int], None] = {}
    writer: dict[tuple[int, int, str], int] = {}
    home = _annotated_calls(events, parent)
    for turn, call, inner in rows:
        row = home[inner]
        if row not in first:
            continue
        for storage, device in call.reads:
            before = writer.get((turn, storage, device))
            if before is not None and before != last[row]:
                pairs[before, first[row]] = None
        for storage, device in call.writes:
            writer[turn, storage, device] = last[row]
    return _with_pairs(graph, list(pairs))


def _calls_of_collectives(graph: Program, events: RankEvents) -> Ints:
    """``(n,)``: the c10d call of each collective that a host runs: the first one since its issue; -1: none."""
    found = np.full(len(graph), -1, dtype=np.int64)
    named = np.array([name.startswith("c10d::") for name in events.names], dtype=np.bool_)
    rows = np.flatnonzero(named[events.ops["name"]])[::-1]  # the first one is written last
    issue, work = (graph.edge_columns[end][graph.edge_columns["why"] == _LAUNCH] for end in ("source", "target"))
    hosted = (graph.columns["kind"][work] == COLLECTIVE) & (graph.columns["call"][work] < 0)
    order = np.argsort(graph.start_s[issue[hosted]], kind="stable")
    issued, work = graph.start_s[issue[hosted]][order], work[hosted][order]
    called = (events.ops.start[rows] - graph.origin_us) * MICROSECOND
    last = np.searchsorted(issued, called + _SLACK_S, "right") - 1
    found[work[last[last >= 0]]] = rows[last >= 0]
    return found


def _annotated_calls(events: RankEvents, parent: Ints) -> list[int]:
    """The outermost of our annotations around each framework call; without one, the call itself."""
    home = list(range(len(events.ops)))
    ours = np.array([name.startswith(_OURS) for name in events.names], dtype=np.bool_)[events.ops["name"]]
    for row, up in enumerate(parent.tolist() if ours.any() else ()):
        if up >= 0 and (ours[up] or home[up] != up):
            home[row] = home[up]
    return home


def without_observed_steps(graph: Program, observed: Flags) -> Program:
    """Leave steps out that an execution-trace observer slowed; steps of the same work keep their data dependencies.

    The observer makes an op of many small calls half as long again and a tiny copy ten times as long, so its steps'
    times would teach what no other step shows.  They stay where no other step has half as much work.
    """
    if not observed.any():
        return graph
    step, edges = graph.columns["step"], graph.edge_columns
    works = np.bincount(step[graph.on_device & (step >= 0)], minlength=len(observed))
    if works[~observed].max(initial=0) < _LEAST_WORK * works[observed].max() or observed.all():
        told = f"steps slowed by an execution-trace observer: {observed.sum()} of {len(observed)}; they stay, alone"
        return graph.replace(slowed=tuple(np.flatnonzero(observed).tolist()), warnings=(*graph.warnings, told))
    data = edges["why"] == WHY_NUMBER[Dependency.DATA]
    pairs = []
    place = np.full(len(graph), -1, dtype=np.int64)
    for one in np.flatnonzero(observed).tolist():
        nodes = _works_in_order(graph, one)
        inside = np.flatnonzero(data & (step[edges["source"]] == one) & (step[edges["target"]] == one))
        place[nodes] = np.arange(len(nodes))
        ends = [place[edges[end][inside]] for end in ("source", "target")]
        for other in np.flatnonzero(~observed).tolist():
            own = _works_in_order(graph, other)
            if all(np.array_equal(graph.columns[name][own], graph.columns[name][nodes]) for name in ("stream", "work")):
                pairs.append(np.stack([own[end] for end in ends]))
    found = np.unique(np.concatenate(pairs, axis=1), axis=1) if pairs else np.zeros((2, 0), dtype=np.int64)
    graph = _with_pairs(graph, [(int(source), int(target)) for source, target in found.T])
    number = np.append(np.where(observed, -1, np.cumsum(~observed) - 1), -1)
    count = int(observed.sum())
    told = f"steps slowed by an execution-trace observer: {count} of {len(observed)}; their times are left out"
    return graph.replace(
        columns={**graph.columns, "step": number[step]},
        steps_s=graph.steps_s[~observed],
        observed=count,
        warnings=(*graph.warnings, told),
    )


def _works_in_order(graph: Program, step: int) -> Ints:
    """Ops and collectives of a step, by stream and time."""
    nodes = np.flatnonzero(graph.on_device & (graph.columns["step"] == step))
    return nodes[np.argsort(graph.columns["stream"][nodes], kind="stable")]


def _rows_of(events: RankEvents, calls: list[TensorCall]) -> list[tuple[int, TensorCall, int]]:
    """Row of the profile for each call of an execution trace, with its repetition: by number, or name and order."""
    names = [events.names[number] for number in events.ops["name"].tolist()]
    record = {number: row for row, number in enumerate(events.ops["record"].tolist()) if number > 0}
    matched = [(0, call, record[call.record]) for call in calls if call.record in record]
    matched = [(turn, call, row) for turn, call, row in matched if names[row] == call.name]
    if len(matched) > _LEAST_FOUND * len(calls):
        return matched
    places: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        places.setdefault(name, []).append(row)
    given = Counter(call.name for call in calls)
    repeats = {name: len(places[name]) / count for name, count in given.items() if name in places}
    usual = Counter(times for times in repeats.values() if times == int(times)).most_common(1)
    turns = int(usual[0][0]) if usual else 0
    found = []
    for turn in range(turns):
        rows = {name: iter(places[name][turn * given[name] :]) for name, times in repeats.items() if times == turns}
        found += [(turn, call, next(rows[call.name])) for call in calls if call.name in rows]
    return found


def _with_pairs(graph: Program, pairs: list[tuple[int, int]]) -> Program:
    if not pairs:
        return graph
    source, target = np.array(pairs, dtype=np.int64).T
    apart = graph.start_s[target] - graph.end_s[source]
    possible = (apart >= -_SLACK_S) & (source < target)
    return graph.with_edges(source[possible], target[possible], Dependency.DATA, np.minimum(apart[possible], 0.0))
