"""Data dependencies: from tensors of execution traces, else from autograd's sequence numbers.

PyTorch's execution trace names the storages that every call reads and writes.  Without one a profile does not tell
who reads what, but autograd gives a forward call and its backward the same number: backward reads what forward saved.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.base.bounded import parsing, read_unpacked
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.columns import Flags, Ints
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.traces.assembly import MICROSECOND
from stepsight.dataset.traces.event_blocks import parse
from stepsight.dataset.traces.event_columns import RankEvents

_OURS = "stepsight::"  # annotations of ops that count as calls
_SLACK_S = 2e-6  # clock error by which an effect may precede its cause
_LEAST_WORK = 0.5  # of that of an observed step, for a step to stand for it
_LEAST_FOUND = 0.5  # share of a trace's calls that an execution trace of the same run must contain


class TensorCall(NamedTuple):
    """A call of an execution trace: its name, its number, the storages that it reads and writes, and those of its
    outputs that are views of what it reads.
    """

    name: str
    record: int
    reads: tuple[tuple[int, str], ...]
    writes: tuple[tuple[int, str], ...]
    views: frozenset[tuple[int, str]]


def read_execution_trace(path: Path) -> list[TensorCall]:
    """Calls of PyTorch's execution trace (``.json`` or ``.json.gz``), in order."""
    with parsing(f"an execution trace must be a readable file of whole JSON, got {path}", TraceError):
        tree = parse(read_unpacked(path))
    nodes = tree.get("nodes") if isinstance(tree, dict) else None
    if not isinstance(nodes, list) or not str(tree.get("schema", "")):
        raise TraceError(f"an execution trace must hold schema and a list nodes, got neither in {path}")
    with parsing(f"nodes of an execution trace must have id, name and inputs, got {path}", TraceError):
        calls = [_call(node) for node in sorted(nodes, key=lambda node: int(node["id"]))]
    return [call for call in calls if "::" in call.name]


def _call(node: dict[str, Any]) -> TensorCall:
    sides = [node.get(side) for side in ("inputs", "outputs")]  # older schemas list values, newer ones have a table
    inputs, outputs = ((side.get("values") if isinstance(side, dict) else side) or [] for side in sides)
    attributes = {str(each.get("name")): each.get("value") for each in node.get("attrs") or []}
    name, record = str(node["name"]), node["rf_id"] if node.get("rf_id") is not None else attributes.get("rf_id", 0)
    words = str(attributes.get("op_schema", "")).partition("(")[2].rpartition(" -> ")[0].split(", ")
    only = words.index("*") if "*" in words else len(words)  # arguments behind it that change are written alone
    words = [word for word in words if word != "*"]
    changed = [at for at, word in enumerate(words) if "!" in word]
    if not changed and (name.endswith(("_", "_out")) or ".out" in name):
        changed = [0]
    alone = [at for at in changed if at >= only or words[at].endswith(" output_tensor")]
    reads = _storages([value for at, value in enumerate(inputs) if at not in alone])
    in_place = _storages([inputs[at] for at in changed if at < len(inputs)])
    writes = _storages(outputs) + in_place
    return TensorCall(name, int(record), reads, writes, frozenset(writes) & frozenset(reads) - frozenset(in_place))


def _storages(values: Any) -> tuple[tuple[int, str], ...]:
    """Storage and device of each tensor in some values: a tensor is id, storage, offset, elements, bytes, device."""
    found: list[tuple[int, str]] = []
    for value in values:
        if isinstance(value, list) and len(value) == 6 and isinstance(value[5], str) and isinstance(value[0], int):
            found += [(int(value[1]), value[5])] if value[1] else []
        elif isinstance(value, list):
            found += _storages(value)
    return tuple(found)


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


def with_tensor_edges(graph: Program, events: RankEvents, parent: Ints, path: Path) -> Program:
    """Add edges from the tensors of an execution trace; ``parent``: the call around each framework call."""
    calls = read_execution_trace(path)
    rows, names = _rows_of(events, calls), {call.name for call in calls}
    called = {events.names[number] for number in np.unique(events.ops["name"]).tolist()}
    known = {name for name in called if "::" in name and not name.startswith(_OURS)}
    shared = len(names & known) / max(len(known), 1)
    if not rows or shared < _LEAST_FOUND:
        told = f"it has {100 * shared:.0f} % of the profile's calls by name, and {len(rows)} calls in the same place"
        raise TraceError(f"an execution trace must be of the same run as the profile: {told}: {path}")
    joined = len({id(call) for _, call, _ in rows})
    if joined < _LEAST_FOUND * len(calls):
        some = f"{joined} of its {len(calls)} calls are in the same place"
        told = f"the execution trace has no record ids of the profile, and {some}: it may be of another run"
        told += ", and data dependencies are few"
        graph = graph.replace(warnings=(*graph.warnings, told))
    calls_of = np.maximum(graph.columns["call"], _calls_of_collectives(graph, events))
    home = _calls_around(graph, events, parent, calls_of)
    nodes = np.flatnonzero((calls_of >= 0) & (graph.columns["kind"] != HOST))
    of_nodes = list(zip(calls_of[nodes].tolist(), nodes.tolist(), strict=True))
    last, first = dict(of_nodes), dict(reversed(of_nodes))
    pairs: dict[tuple[int, int], None] = {}
    writer: dict[tuple[int, int, str], int] = {}
    for turn, call, inner in rows:
        row = home[inner]
        if row in first:
            before = (writer.get((turn, *storage)) for storage in call.reads)
            pairs |= {(each, first[row]): None for each in before if each is not None and each != last[row]}
            views = call.views if row != inner else ()  # what an op only views within itself
            writer |= {(turn, *storage): last[row] for storage in call.writes if storage not in views}
    return _with_pairs(graph, list(pairs))


def _calls_around(graph: Program, events: RankEvents, parent: Ints, calls_of: Ints) -> list[int]:
    """The call that stands for each framework call: the outermost of our annotations around it, of a host the first
    call within an annotated op, which ``calls_of`` then names; without one, itself.
    """
    home = np.arange(len(events.ops))
    if graph.device == "cpu":
        ops = np.flatnonzero(graph.columns["kind"] == OP)
        called, thread = (events.ops.start - graph.origin_us) * MICROSECOND, events.ops["thread"]
        main = thread[calls_of[ops][calls_of[ops] >= 0][:1]]
        place = np.searchsorted(graph.start_s[ops], called, "right") - 1
        inside = np.flatnonzero((place >= 0) & np.isin(thread, main))
        inside = inside[called[inside] < graph.end_s[ops[place[inside]]]]
        _, begin, which = np.unique(place[inside], return_index=True, return_inverse=True)
        around = ops[place[inside]]
        calls_of[around] = home[inside] = np.where(calls_of[around] < 0, inside[begin[which]], calls_of[around])
        return home.tolist()
    ours = np.array([name.startswith(_OURS) for name in events.names], dtype=np.bool_)[events.ops["name"]]
    for row, up in enumerate(parent.tolist() if ours.any() else ()):
        if up >= 0 and (ours[up] or home[up] != up):
            home[row] = home[up]
    return home.tolist()


def _calls_of_collectives(graph: Program, events: RankEvents) -> Ints:
    """``(n,)``: the c10d call of each collective that a host runs: the first one since its issue; -1: none."""
    found = np.full(len(graph), -1, dtype=np.int64)
    named = np.array([name.startswith("c10d::") for name in events.names], dtype=np.bool_)
    rows = np.flatnonzero(named[events.ops["name"]])[::-1]  # the first one is written last
    launched = graph.edge_columns["why"] == WHY_NUMBER[Dependency.LAUNCH]
    issue, work = (graph.edge_columns[end][launched] for end in ("source", "target"))
    hosted = (graph.columns["kind"][work] == COLLECTIVE) & (graph.columns["call"][work] < 0)
    order = np.argsort(graph.start_s[issue[hosted]], kind="stable")
    issued, work = graph.start_s[issue[hosted]][order], work[hosted][order]
    called = (events.ops.start[rows] - graph.origin_us) * MICROSECOND
    last = np.searchsorted(issued, called + _SLACK_S, "right") - 1
    found[work[last[last >= 0]]] = rows[last >= 0]
    return found


def without_observed_steps(graph: Program, observed: Flags) -> Program:
    """Leave steps out that an execution-trace observer slowed; steps of the same work keep their data dependencies.

    The observer makes an op of many small calls half as long again and a tiny copy ten times as long, so its steps'
    times would teach what no other step shows.  They stay where no other step has half as much work.
    """
    count = int(observed.sum())
    if not count:
        return graph
    step, edges, told = graph.columns["step"], graph.edge_columns, "steps slowed by an execution-trace observer"
    told = f"{told}: {count} of {len(observed)}"
    works = np.bincount(step[graph.on_device & (step >= 0)], minlength=len(observed))
    if works[~observed].max(initial=0) < _LEAST_WORK * works[observed].max() or observed.all():
        slowed = tuple(np.flatnonzero(observed).tolist())
        return graph.replace(slowed=slowed, warnings=(*graph.warnings, f"{told}; they stay, alone"))
    in_order = []  # ops and collectives of each step, by stream and time
    for each in range(len(observed)):
        nodes = np.flatnonzero(graph.on_device & (step == each))
        in_order.append(nodes[np.argsort(graph.columns["stream"][nodes], kind="stable")])
    data, place = edges["why"] == WHY_NUMBER[Dependency.DATA], np.full(len(graph), -1, dtype=np.int64)
    found = [np.zeros((2, 0), dtype=np.int64)]
    for one in np.flatnonzero(observed).tolist():
        nodes = in_order[one]
        inside = data & (step[edges["source"]] == one) & (step[edges["target"]] == one)
        place[nodes] = np.arange(len(nodes))
        ends = place[np.stack([edges["source"][inside], edges["target"][inside]])]
        for other in np.flatnonzero(~observed).tolist():
            own = in_order[other]
            if all(np.array_equal(graph.columns[name][own], graph.columns[name][nodes]) for name in ("stream", "work")):
                found.append(own[ends])
    graph = _with_pairs(graph, np.unique(np.concatenate(found, axis=1), axis=1).T)
    number = np.append(np.where(observed, -1, np.cumsum(~observed) - 1), -1)
    return graph.replace(
        columns={**graph.columns, "step": number[step]},
        steps_s=graph.steps_s[~observed],
        observed=count,
        warnings=(*graph.warnings, f"{told}; their times are left out"),
    )


def _rows_of(events: RankEvents, calls: list[TensorCall]) -> list[tuple[int, TensorCall, int]]:
    """Row of the profile for each call of an execution trace, with its repetition: by number, or name and order."""
    names = [events.names[number] for number in events.ops["name"].tolist()]
    record = {number: row for row, number in enumerate(events.ops["record"].tolist()) if number > 0}
    matched = [(0, each, record[each.record]) for each in calls if each.record in record]
    matched = [(turn, call, row) for turn, call, row in matched if names[row] == call.name]
    if len(matched) > _LEAST_FOUND * len(calls):
        return matched
    places: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        places.setdefault(name, []).append(row)
    given = Counter(call.name for call in calls)
    repeats = {name: len(places[name]) / count for name, count in given.items() if name in places}
    usual = Counter(times for times in repeats.values() if times == int(times)).most_common(1)
    turns, found = int(usual[0][0]) if usual else 0, []
    for turn in range(turns):
        rows = {name: iter(places[name][turn * given[name] :]) for name, times in repeats.items() if times == turns}
        found += [(turn, call, next(rows[call.name])) for call in calls if call.name in rows]
    return found


def _with_pairs(graph: Program, pairs: Any) -> Program:
    """The graph with data dependencies between ``(e, 2)`` nodes, as far as their times allow it."""
    source, target = np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T
    apart = graph.start_s[target] - graph.end_s[source]
    possible = (apart >= -_SLACK_S) & (source < target)
    return graph.with_edges(source[possible], target[possible], Dependency.DATA, np.minimum(apart[possible], 0.0))
