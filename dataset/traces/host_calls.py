"""Calls of host threads: the call that encloses each, its phase, their order across threads, and the steps they form.

Steps are bounded by annotations, optimizer steps, backward passes or repetition, in this order.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from stepsight.dataset.graph.columns import PHASES, Flags, Floats, Ints, Span
from stepsight.dataset.traces.classify import parse_annotation
from stepsight.dataset.traces.event_columns import Annotation, RankEvents, Table

FORWARD, BACKWARD, OPTIMIZER = range(3)
_MARK, _OP, _CALL = range(3)
_EVALUATE = "autograd::engine::evaluate_function: "
_BACKWARDS = ("autograd::engine::", "torch::autograd::AccumulateGrad")
_NODE = re.compile(r"Backward\d*$")  # of autograd's graph
_OPTIMIZERS = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")


@dataclass
class CallTree:
    """Nesting of the calls of all host threads: ``n`` ops and ``r`` runtime calls."""

    parent: Ints  # ``(n,)``: the op that encloses each, -1: none
    phase: Ints  # ``(n,)``
    backward: Ints  # ``(n,)``: the autograd node (an op) in which each is evaluated, -1: none
    sequence: Ints  # ``(n,)``: autograd's sequence number of the op or of the nearest that encloses it, -1: none
    owner: Ints  # ``(r,)``: innermost op around each runtime call, -1: none
    call_phase: Ints  # ``(r,)``: phase of each runtime call
    crossed: int  # calls of a thread that overlap another without nesting


def call_tree(events: RankEvents) -> CallTree:
    """Nest the calls of each thread by their times."""
    ops, runtime = events.ops, events.runtime
    marks = [each for each in events.annotations if annotated_phase(each.name) is not None]
    first, last = len(marks), len(marks) + len(ops)
    what = np.repeat([_MARK, _OP, _CALL], [len(marks), len(ops), len(runtime)])
    start = np.concatenate([[mark.start for mark in marks], ops.start, runtime.start])
    end = np.concatenate([[mark.end for mark in marks], ops.end, runtime.end])
    thread = np.concatenate([[mark.thread for mark in marks], ops["thread"], runtime["thread"]])
    row, own = np.arange(len(ops)), {key: np.full(len(what), -1) for key in ("row", "phase", "backward", "sequence")}
    evaluated = np.array([is_evaluation(name) for name in events.names], dtype=np.bool_)[ops["name"]]
    backs = [name.startswith(_BACKWARDS) or _NODE.search(name) for name in events.names]
    phases = [BACKWARD if back else OPTIMIZER if name.startswith(_OPTIMIZERS) else -1
              for back, name in zip(backs, events.names, strict=True)]  # fmt: skip
    own["phase"][:first] = [annotated_phase(mark.name) or FORWARD for mark in marks]
    own["row"][first:last], own["phase"][first:last] = row, np.array(phases, dtype=np.int64)[ops["name"]]
    own["backward"][first:last], own["sequence"][first:last] = np.where(evaluated, row, -1), ops["sequence"]
    order = np.lexsort((what == _CALL, -end, start, thread))
    above, depth = _enclosing(start[order], end[order], thread[order], what[order] != _CALL)
    found = _inherited({key: values[order] for key, values in own.items()}, what[order] == _MARK, above, depth)
    ends = np.append(end[order], np.inf)
    crossed = int((ends[:-1] > ends[above])[what[order] == _OP].sum())
    place = np.argsort(order)
    around, phase = found["row"][above][place], found["phase"][place]
    backward, sequence = (found[key][place[first:last]] for key in ("backward", "sequence"))
    return CallTree(around[first:last], phase[first:last], backward, sequence, around[last:], phase[last:], crossed)


def annotated_phase(name: str) -> int | None:
    """Phase that an annotation names, None if it names none."""
    if name.startswith(("Optimizer.", "Optimizer::")):
        return OPTIMIZER
    if name.startswith("stepsight::segment"):
        return next((phase for phase, word in enumerate(PHASES) if f"label={word}" in name), None)
    bare = name.strip("#* []").lower().replace("optimizer_step", "optimizer")
    return PHASES.index(bare) if bare in PHASES else None


def annotated_phases(marks: list[Annotation], at: Floats) -> Ints:
    """Phase of the innermost annotation around each time, -1 for none; ``(n,)`` each, in microseconds."""
    order = np.argsort(at, kind="stable")
    moments, found = at[order], np.full(len(at), -1, dtype=np.int64)
    for mark in marks:  # in order of start, so inner ones come later
        phase = annotated_phase(mark.name)
        if phase is not None:
            found[slice(*np.searchsorted(moments, (mark.start, mark.end)))] = phase
    phases = np.empty(len(at), dtype=np.int64)
    phases[order] = found
    return phases


def is_evaluation(name: str) -> bool:
    """Whether a call evaluates one node of autograd's graph."""
    return name.startswith(_EVALUATE)


def _enclosing(start: Floats, end: Floats, thread: Ints, opens: Flags) -> tuple[Ints, Ints]:
    """The innermost span around each span of a thread, -1 for none, and the depth; ``(n,)`` each, by thread and start.

    ``opens``: which of them may lie around others.
    """
    above, depth = list[int](), list[int]()
    ends, inside, current = [np.inf], [-1], -1  # stack of open spans
    spans = zip(start.tolist(), end.tolist(), thread.tolist(), opens.tolist(), strict=True)
    for place, (begin, until, of, is_open) in enumerate(spans):
        if of != current:
            ends, inside, current = [np.inf], [-1], of
        while ends[-1] <= begin:
            ends.pop()
            inside.pop()
        above.append(inside[-1])
        depth.append(len(inside))
        if is_open:
            ends.append(until)
            inside.append(place)
    return np.array(above, dtype=np.int64), np.array(depth, dtype=np.int64)


def _inherited(own: dict[str, Ints], marks: Flags, above: Ints, depth: Ints) -> dict[str, Ints]:
    """The value inside each span: its own, or that of the enclosing span; the last row is outside all spans."""
    found = {key: np.append(values, FORWARD if key == "phase" else -1) for key, values in own.items()}
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(1, int(depth.max(initial=0)) + 2))
    for level in range(len(bounds) - 1):
        places = order[bounds[level] : bounds[level + 1]]
        for key, values in found.items():
            mine, outer = own[key][places], values[above[places]]
            kept = mine >= 0
            if key == "phase":  # calls of an optimizer belong to the optimizer, unless an annotation says otherwise
                kept &= (outer != OPTIMIZER) | marks[places]
            values[places] = np.where(kept, mine, outer)
    return found


_LEAST_WAIT_US = 15.0  # shorter gaps are the host's own work


def in_order(start: Floats, end: Floats, thread: Any, row: Any, name: Any) -> Table:
    """Calls of host threads on which other nodes depend: ``thread``, ``row`` of the runtime table (-1: a mark) and
    number of a ``name``.  A call that begins within the previous one on its thread begins when that ends.
    """
    columns = {"thread": thread, "row": row, "name": name}
    calls = Table(start, end, {key: np.asarray(values, dtype=np.int64) for key, values in columns.items()})
    calls = calls.take(np.lexsort((end, start)))
    for each in np.unique(calls["thread"]):
        own = np.flatnonzero(calls["thread"] == each)
        latest = np.maximum.accumulate(calls.end[own])
        calls.start[own[1:]] = np.maximum(calls.start[own[1:]], latest[:-1])
        calls.end[own] = np.maximum(calls.end[own], calls.start[own])
    return calls.take(np.lexsort((calls.end, calls.start)))


def chain(calls: Table, events: RankEvents) -> tuple[Ints, Ints, Floats]:
    """Order the calls of each thread, and across threads where one waits for another: sources, targets and delays."""
    nothing = np.zeros(0, dtype=np.int64)
    found = [_chain_of(calls, int(thread), events) for thread in np.unique(calls["thread"])]
    source, target, delay = zip((nothing, nothing, np.zeros(0)), *found, strict=True)
    return np.concatenate(source), np.concatenate(target), np.concatenate(delay)


def _chain_of(calls: Table, thread: int, events: RankEvents) -> tuple[Ints, Ints, Floats]:
    """Edges to the calls of one thread, in order: from the previous call, and from calls that it waited for."""
    own = np.flatnonzero(calls["thread"] == thread)
    busy = np.sort(events.ops.start[events.ops["thread"] == thread])
    since = np.concatenate([[-np.inf], calls.end[own[:-1]]])
    gap = calls.start[own] - since
    low = np.searchsorted(calls.start, since)
    others = (own - low) > np.arange(len(own)) - np.searchsorted(own, low)  # calls of other threads in the gap
    waited = {
        place: other
        for place in np.flatnonzero((gap > _LEAST_WAIT_US) & others).tolist()
        if (other := _awaited(calls, busy, float(since[place]), int(own[place]))) >= 0
    }
    places = np.array([*waited], dtype=np.int64)
    awaited = np.array([*waited.values()], dtype=np.int64)
    gap[places] = 0.0
    source = np.concatenate([awaited, own[:-1]])
    target = np.concatenate([own[places], own[1:]])
    delay = np.concatenate([calls.start[own[places]] - calls.end[awaited], gap[1:]])
    order = np.argsort(target, kind="stable")
    return source[order], target[order], delay[order]


def _awaited(calls: Table, busy: Floats, since: float, node: int) -> int:
    """The call of another thread that a thread waited for before ``node``, -1: none."""
    low, high = int(np.searchsorted(calls.start, since)), node
    while high > low and calls.end[high - 1] > calls.start[node]:
        high -= 1
    own = calls["thread"][low:high] == calls["thread"][node]
    between = np.flatnonzero(~own) + low
    if not len(between):
        return -1
    last = int(between[np.argmax(calls.end[between])])
    first = int(between[0])
    recorded = np.searchsorted(busy, calls.end[last]) - np.searchsorted(busy, calls.start[first], "right")
    return last if recorded == 0 else -1


_STEP = re.compile(r"^ProfilerStep#(\d+)")
_OWN_STEP = "stepsight::segment label=step"
_OWN_SEGMENT = "stepsight::segment "
_ENOUGH = 3  # with more ends of steps, the first step can be dropped
_ALIKE = 0.2  # allowed difference of the number of calls of a complete step from the usual number
_MOST_OVERLAP_US = 1.0
_MOST_AFTER = 2  # kernels after the last of several steps that no step has, such as copies of results
_SAME_ORDER = 0.9  # of the kernels of two steps that follow in the same order


@dataclass
class Steps:
    """Steps of one rank; microseconds."""

    bounds: list[tuple[float, float]]  # begin and end of each on the host
    thread: int = -1  # host thread that runs them, -1: unknown
    warnings: list[str] = field(default_factory=list)  # what is wrong with them
    whole: bool = True  # whether anything bounds them


def find_steps(events: RankEvents, tree: CallTree, launched: Floats) -> Steps:
    """Find the steps of a rank.

    ``launched``: when each device event was launched, in order of start on the device; NaN where that is unknown.
    """
    marks = [each for each in events.annotations if each.name.startswith(_OWN_STEP)]
    marks = marks or [each for each in events.annotations if _STEP.match(each.name)]
    if marks:
        return _annotated(marks)
    tables = [table for table in (events.ops, events.runtime, events.device) if len(table)]
    begin = min((float(table.start.min()) for table in tables), default=0.0)
    by_name: dict[str, list[Annotation]] = {}
    for mark in events.annotations:
        if mark.name.startswith("Optimizer.step"):
            by_name.setdefault(mark.name, []).append(mark)
    # with several optimizers, ends of the last one in each step
    marks = max(by_name.values(), key=lambda marks: (-len(marks), max(mark.end for mark in marks)), default=[])
    ends, thread = [mark.end for mark in marks], marks[0].thread if marks else -1
    if not ends:  # of backward passes: the last evaluation before forward calls start again
        outer = np.flatnonzero((tree.parent < 0) & (tree.phase >= 0))
        is_backward = tree.phase[outer] == 1
        ends = events.ops.end[outer[is_backward & ~np.append(is_backward[1:], False)]].tolist()
        forward = events.ops["thread"][outer[~is_backward]]
        thread = int(np.bincount(forward).argmax()) if len(forward) else -1
    if ends:
        return _between(begin, ends, thread, events)
    if bounds := _repeated(events, launched):
        return Steps(bounds)
    last = max((float(table.end.max()) for table in tables), default=begin)
    told = "no steps: neither annotations nor repetition bound one, so the whole trace counts as a step"
    return Steps([(begin, last)], -1, [told], whole=False)


def segment_spans(events: RankEvents, origin_us: float) -> tuple[Span, ...]:
    """Annotated segments of steps, from the origin on; whole steps of PyTorch's profiler where no step is ours."""
    own = [(each, parse_annotation(each.name)) for each in events.annotations if each.name.startswith(_OWN_SEGMENT)]
    found = [(each, said) for each, said in own if said["label"] != "step"]
    if len(found) == len(own):
        found += [(each, {"label": "step"}) for each in events.annotations if _STEP.match(each.name)]
    spans = []
    for each, said in sorted(found, key=lambda one: one[0].start):
        begin, end = (1e-6 * (at - origin_us) for at in (each.start, each.end))
        micro_batch, stage = (int(said.get(name, 0)) for name in ("micro_batch", "stage"))
        spans.append(Span(said["label"], begin, end, 0, micro_batch, stage))
    return tuple(spans)


def observed_steps(events: RankEvents, bounds: Floats) -> Flags:
    """``(k,)``: steps in which an execution-trace observer ran too: they are several times slower.

    Our annotation says so, or recorded functions have numbers, which are 0 without the observer.  ``bounds``: begin
    and end of each step, ``(k, 2)``, microseconds.
    """
    first, last = np.searchsorted(events.ops.start, bounds).T
    numbered = np.concatenate([[0], np.cumsum(events.ops["record"] > 0)])
    marks = [each.start for each in events.annotations if each.name.startswith(_OWN_STEP) and " et=1" in each.name]
    begun, ended = np.searchsorted(np.array(marks), bounds - [1.0, 0.0]).T
    return np.asarray((numbered[last] > numbered[first]) | (ended > begun))


def _annotated(marks: list[Annotation]) -> Steps:
    thread = Counter(mark.thread for mark in marks).most_common(1)[0][0]
    marks = sorted((mark for mark in marks if mark.thread == thread), key=lambda mark: mark.start)
    bounds, warnings = [(mark.start, mark.end) for mark in marks], []
    for place, (one, other) in enumerate(pairwise(marks)):
        if one.end > other.start + _MOST_OVERLAP_US:
            ends, begins = (mark.name.split(" ")[0][:40] for mark in (one, other))
            told = f"{begins} begins {one.end - other.start:.0f} us before {ends} ends; it is cut there"
            warnings.append(f"overlapping steps: {told}")
            bounds[place] = (one.start, other.start)
    numbers = tuple(int(match[1]) for mark in marks if (match := _STEP.match(mark.name)))
    for earlier, later in pairwise(numbers):
        if later != earlier + 1:
            what = "missing" if later > earlier else "repeated"
            warnings.append(f"{what} steps: ProfilerStep#{earlier} is followed by ProfilerStep#{later}")
    return Steps([(start, end) for start, end in bounds if end > start], thread, warnings)


def _between(begin: float, ends: list[float], thread: int, events: RankEvents) -> Steps:
    """Steps from end to end; steps unlike the others are incomplete and are dropped."""
    limits = np.array([begin, *ends] if len(ends) < _ENOUGH else ends)  # anything may come before the first end
    counts = np.histogram(np.concatenate([events.runtime.start, events.ops.start]), limits)[0]
    usual = float(np.median(counts))
    whole = (np.abs(counts - usual) <= _ALIKE * usual) & (np.diff(limits) > 0)
    bounds = list(zip(limits[:-1][whole].tolist(), limits[1:][whole].tolist(), strict=True))
    left = len(counts) - len(bounds)
    told = f"steps that are not whole: {left} of {len(counts)} differ from the usual one and are left out"
    return Steps(bounds, thread, [told] if left else [])


def _repeated(events: RankEvents, launched: Floats) -> list[tuple[float, float]]:
    """Steps from a repeating sequence of kernels: from one launch of its rarest kernel to the next."""
    order = np.argsort(launched, kind="stable")
    order = order[~np.isnan(launched[order])]
    kernels, moments = events.device["kernel"][order], launched[order]
    counts = np.bincount(kernels) if len(kernels) >= 4 else np.zeros(0, dtype=np.int64)
    several = np.flatnonzero(counts >= 2)
    for kernel in several[np.argsort(counts[several], kind="stable")][:8].tolist():
        places = np.flatnonzero(kernels == kernel)
        places = places[np.concatenate([[True], np.diff(moments[places]) > 0])]  # one launch may hold many kernels
        lengths = np.diff(places)
        if not len(lengths) or lengths.min() < 2 or lengths.max() > (1 + _ALIKE) * lengths.min():
            continue
        alike = []
        for first, second, third in zip(*(places[skip:].tolist() for skip in range(3)), strict=False):
            length = min(second - first, third - second)
            alike.append((kernels[first : first + length] == kernels[second : second + length]).mean())
        # if other kernels follow the repeating part, layers repeat within one step
        after = ~np.isin(kernels[places[-1] :], kernels[places[0] : places[-1]])
        if alike and min(alike) >= _SAME_ORDER and after.sum() <= _MOST_AFTER:
            return list(pairwise(moments[places].tolist()))
    return []
