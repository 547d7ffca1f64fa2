"""Which call encloses which: the framework call that launched a kernel, and the phase that it belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.imported.event_columns import Annotation, RankEvents

Ints = NDArray[np.int64]

FORWARD, BACKWARD, OPTIMIZER = range(3)
_EVALUATE = "autograd::engine::evaluate_function: "
_BACKWARDS = ("autograd::engine::", "torch::autograd::AccumulateGrad")
_NODE = re.compile(r"Backward\d*$")  # of autograd's graph
_OPTIMIZERS = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "fbgemm::emb_")


@dataclass
class CallTree:
    """Nesting of the calls of all host threads.

    Shapes: ``n`` ops, ``r`` runtime calls.

    Attributes:
        parent: ``(n,)``: the op that encloses each, -1: none.
        phase: ``(n,)``.
        backward: ``(n,)``: the autograd node (an op) in which each is evaluated, -1: none.
        sequence: ``(n,)``: autograd's sequence number of the op or of the nearest that encloses it, -1: none.
        owner: ``(r,)``: innermost op around each runtime call, -1: none.
        call_phase: ``(r,)``: phase of each runtime call.
        crossed: Calls of a thread that overlap another without nesting.
    """

    parent: Ints
    phase: Ints
    backward: Ints
    sequence: Ints
    owner: Ints
    call_phase: Ints
    crossed: int


def call_tree(events: RankEvents) -> CallTree:
    """Nest the calls of each thread by their times."""
    num_ops, num_calls = len(events.ops), len(events.runtime)
    of_ops = [np.full(num_ops, -1, dtype=np.int64) for _ in range(4)]
    of_calls = [np.full(num_calls, -1, dtype=np.int64) for _ in range(2)]
    tree = CallTree(of_ops[0], of_ops[1], of_ops[2], of_ops[3], of_calls[0], of_calls[1], crossed=0)
    phases = [_named_phase(name) for name in events.names]
    marks = [each for each in events.annotations if annotated_phase(each.name) is not None]
    for thread in range(len(events.threads)):
        _nest(events, tree, thread, phases, [mark for mark in marks if mark.thread == thread])
    return tree


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
    """Phase of the innermost annotation around each moment, -1 for none; ``(n,)`` each, in microseconds."""
    order = np.argsort(at, kind="stable")
    moments, found = at[order], np.full(len(at), -1, dtype=np.int64)
    for mark in marks:  # in order of start, so the inner ones come later
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


def _nest(events: RankEvents, tree: CallTree, thread: int, phases: list[int], marks: list[Annotation]) -> None:
    """Nest what one thread did: a walk in order of start, with a stack of what is still open."""
    ops = np.flatnonzero(events.ops["thread"] == thread)
    calls = np.flatnonzero(events.runtime["thread"] == thread)
    start = np.concatenate([[mark.start for mark in marks], events.ops.start[ops], events.runtime.start[calls]])
    end = np.concatenate([[mark.end for mark in marks], events.ops.end[ops], events.runtime.end[calls]])
    what = np.concatenate([np.full(len(marks), 2), np.zeros(len(ops), int), np.ones(len(calls), int)])
    row = np.concatenate([np.arange(len(marks)), ops, calls]).astype(np.int64)
    order = np.lexsort((what == 1, -end, start))
    columns = (start[order].tolist(), end[order].tolist(), what[order].tolist(), row[order].tolist())
    names, sequences = events.ops["name"].tolist(), events.ops["sequence"].tolist()
    evaluations = [is_evaluation(name) for name in events.names]
    stack: list[tuple[float, int, int, int, int]] = [(np.inf, -1, FORWARD, -1, -1)]
    owned: list[tuple[int, int]] = []  # by call, in order; writing to arrays one by one is slow
    nested: list[tuple[int, int, int, int]] = []  # by op
    for begin, until, kind, at in zip(*columns, strict=True):
        while stack[-1][0] <= begin:
            stack.pop()
        above, parent, phase, backward, sequence = stack[-1]
        if kind == 1:
            owned.append((parent, phase))
        elif kind == 2:
            stack.append((until, parent, annotated_phase(marks[at].name) or FORWARD, backward, sequence))
        else:
            if until > above:
                tree.crossed += 1
            name = names[at]
            phase = phases[name] if phases[name] >= 0 and phase != OPTIMIZER else phase
            backward = at if evaluations[name] else backward
            sequence = sequences[at] if sequences[at] >= 0 else sequence
            nested.append((parent, phase, backward, sequence))
            stack.append((until, at, phase, backward, sequence))
    in_order, kinds = row[order], what[order]
    columns_of = (tree.parent, tree.phase, tree.backward, tree.sequence)
    for rows, found, arrays in (
        (in_order[kinds == 1], owned, (tree.owner, tree.call_phase)),
        (in_order[kinds == 0], nested, columns_of),
    ):
        values = np.array(found, dtype=np.int64).reshape(len(found), len(arrays))
        for column, array in enumerate(arrays):
            array[rows] = values[:, column]
