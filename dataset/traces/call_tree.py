"""Calls of host threads: the call that encloses each, its phase, and chains of launches and waits across threads."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.traces.event_columns import Annotation, RankEvents

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORWARD, BACKWARD, OPTIMIZER = range(3)
_MARK, _OP, _CALL = range(3)
_EVALUATE = "autograd::engine::evaluate_function: "
_BACKWARDS = ("autograd::engine::", "torch::autograd::AccumulateGrad")
_NODE = re.compile(r"Backward\d*$")  # of autograd's graph
_OPTIMIZERS = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "fbgemm::emb_")


@dataclass
class CallTree:
    """Nesting of the calls of all host threads.

    Shapes: ``n`` ops, ``r`` runtime calls.
    """

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
    phases = np.array([_named_phase(name) for name in events.names], dtype=np.int64)[ops["name"]]
    own["phase"][:first] = [annotated_phase(mark.name) or FORWARD for mark in marks]
    own["row"][first:last], own["phase"][first:last] = row, phases
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
    if name.startswith("Optimizer.") or name.startswith("Optimizer::"):
        return OPTIMIZER
    if name.startswith("stepsight::segment"):
        words = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
        return next((phase for word, phase in words.items() if f"label={word}" in name), None)
    bare = name.strip("#* []").lower()
    return {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER, "optimizer_step": OPTIMIZER}.get(bare)


def annotated_phases(marks: list[Annotation], at: NDArray[np.float64]) -> NDArray[np.int64]:
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


def _named_phase(name: str) -> int:
    if name.startswith(_BACKWARDS) or _NODE.search(name):
        return BACKWARD
    if name.startswith(_OPTIMIZERS[:3]):
        return OPTIMIZER
    return -1


def _enclosing(start: Floats, end: Floats, thread: Ints, opens: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The innermost span around each span of a thread, -1 for none, and the depth; ``(n,)`` each, by thread and start.

    ``opens``: which of them may lie around others.
    """
    above: list[int] = []
    depth: list[int] = []
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


def _inherited(own: dict[str, Ints], marks: NDArray[np.bool_], above: Ints, depth: Ints) -> dict[str, Ints]:
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


@dataclass
class HostCalls:
    """Calls of host threads on which other nodes depend, in order of start; microseconds.

    Shapes: ``n`` calls.
    """

    start: Floats  # ``(n,)``
    end: Floats  # ``(n,)``
    thread: Ints  # ``(n,)``
    row: Ints  # ``(n,)``: row of the runtime table, -1 for marks
    name: Ints  # ``(n,)``: number of a name

    def __len__(self) -> int:
        return len(self.start)

    def sorted(self) -> HostCalls:
        """The calls in order; a call that begins within the previous one on its thread begins when that ends."""
        order = np.lexsort((self.end, self.start))
        start, end, thread = self.start[order].copy(), self.end[order].copy(), self.thread[order]
        for each in np.unique(thread):
            own = np.flatnonzero(thread == each)
            latest = np.maximum.accumulate(end[own])
            start[own[1:]] = np.maximum(start[own[1:]], latest[:-1])
            end[own] = np.maximum(end[own], start[own])
        again = np.lexsort((end, start))
        order = order[again]
        return HostCalls(start[again], end[again], self.thread[order], self.row[order], self.name[order])


def chain(calls: HostCalls, events: RankEvents) -> tuple[Ints, Ints, Floats]:
    """Order the calls of each thread, and across threads where one waits for another: sources, targets and delays."""
    nothing = np.zeros(0, dtype=np.int64)
    found = [_chain_of(calls, int(thread), events) for thread in np.unique(calls.thread)]
    source, target, delay = zip((nothing, nothing, np.zeros(0)), *found, strict=True)
    return np.concatenate(source), np.concatenate(target), np.concatenate(delay)


def _chain_of(calls: HostCalls, thread: int, events: RankEvents) -> tuple[Ints, Ints, Floats]:
    """Edges to the calls of one thread, in order: from the previous call, and from calls that it waited for."""
    own = np.flatnonzero(calls.thread == thread)
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


def _awaited(calls: HostCalls, busy: Floats, since: float, node: int) -> int:
    """The call of another thread that a thread waited for before ``node``, -1: none."""
    low, high = int(np.searchsorted(calls.start, since)), node
    while high > low and calls.end[high - 1] > calls.start[node]:
        high -= 1
    own = calls.thread[low:high] == calls.thread[node]
    between = np.flatnonzero(~own) + low
    if not len(between):
        return -1
    last = int(between[np.argmax(calls.end[between])])
    first = int(between[0])
    recorded = np.searchsorted(busy, calls.end[last]) - np.searchsorted(busy, calls.start[first], "right")
    return last if recorded == 0 else -1
