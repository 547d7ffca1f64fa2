"""Bounds of the steps of a trace: from annotations, optimizer steps, backward passes or repetition, in this order."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_graph import Span
from stepsight.dataset.traces.call_tree import CallTree
from stepsight.dataset.traces.classify import parse_annotation
from stepsight.dataset.traces.event_columns import Annotation, RankEvents

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
    thread: int  # host thread that runs them, -1: unknown
    found_by: str  # ``annotations``, ``optimizer``, ``backward``, ``repetition`` or ``nothing``
    warnings: list[str] = field(default_factory=list)  # what is wrong with them


def find_steps(events: RankEvents, tree: CallTree, launched: NDArray[np.float64]) -> Steps:
    """Find the steps of a rank.

    ``launched``: when each device event was launched, in order of start on the device; NaN where that is unknown.
    """
    marks = [each for each in events.annotations if each.name.startswith(_OWN_STEP)]
    marks = marks or [each for each in events.annotations if _STEP.match(each.name)]
    if marks:
        return _annotated(marks)
    tables = [table for table in (events.ops, events.runtime, events.device) if len(table)]
    begin = min((float(table.start.min()) for table in tables), default=0.0)
    ends, thread = _optimizer_ends(events)
    found_by = "optimizer"
    if not ends:
        ends, thread, found_by = *_backward_ends(events, tree), "backward"
    if ends:
        return _between(begin, ends, thread, found_by, events)
    bounds = _repeated(events, launched)
    if bounds:
        return Steps(bounds, -1, "repetition")
    last = max((float(table.end.max()) for table in tables), default=begin)
    told = "no steps: neither annotations nor repetition bound one, so the whole trace counts as a step"
    return Steps([(begin, last)], -1, "nothing", [told])


def segment_spans(events: RankEvents, origin_us: float) -> tuple[Span, ...]:
    """Annotated segments of steps, from the origin on; whole steps of PyTorch's profiler where no step is ours.

    Raises:
        ValueError: If one of our own annotations is malformed.
    """
    own = [(each, parse_annotation(each.name)) for each in events.annotations if each.name.startswith(_OWN_SEGMENT)]
    found = [
        (each, said["label"], int(said.get("micro_batch", 0)), int(said.get("stage", 0)))
        for each, said in own
        if said["label"] != "step"
    ]
    if len(found) == len(own):
        found += [(each, "step", 0, 0) for each in events.annotations if _STEP.match(each.name)]
    return tuple(
        Span(label, 1e-6 * (each.start - origin_us), 1e-6 * (each.end - origin_us), 0, *numbers)
        for each, label, *numbers in sorted(found, key=lambda one: one[0].start)
    )


def observed_steps(events: RankEvents, bounds: NDArray[np.float64]) -> NDArray[np.bool_]:
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
    return Steps([(start, end) for start, end in bounds if end > start], thread, "annotations", warnings)


def _optimizer_ends(events: RankEvents) -> tuple[list[float], int]:
    """Ends of the optimizer's steps; with several optimizers, of the last one in each step."""
    marks = [each for each in events.annotations if each.name.startswith("Optimizer.step")]
    if not marks:
        return [], -1
    counts = Counter(mark.name for mark in marks)
    name = max(counts, key=lambda name: (-counts[name], max(mark.end for mark in marks if mark.name == name)))
    chosen = [mark for mark in marks if mark.name == name]
    return [mark.end for mark in chosen], chosen[0].thread


def _backward_ends(events: RankEvents, tree: CallTree) -> tuple[list[float], int]:
    """Ends of backward passes: the last evaluation before forward calls start again."""
    outer = np.flatnonzero((tree.parent < 0) & (tree.phase >= 0))
    if not len(outer):
        return [], -1
    is_backward = tree.phase[outer] == 1
    turns = np.flatnonzero(is_backward[:-1] & ~is_backward[1:])
    ends = [float(events.ops.end[outer[turn]]) for turn in turns]
    if is_backward[-1]:
        ends.append(float(events.ops.end[outer[-1]]))
    forward = events.ops["thread"][outer[~is_backward]]
    return ends, int(np.bincount(forward).argmax()) if len(forward) else -1


def _between(begin: float, ends: list[float], thread: int, found_by: str, events: RankEvents) -> Steps:
    """Steps from end to end; steps unlike the others are incomplete and are dropped."""
    limits = np.array([begin, *ends] if len(ends) < _ENOUGH else ends)  # anything may come before the first end
    moments = np.concatenate([events.runtime.start, events.ops.start])
    counts = np.histogram(moments, limits)[0] if len(limits) > 1 else np.zeros(0)
    usual = float(np.median(counts)) if len(counts) else 0.0
    whole = np.abs(counts - usual) <= _ALIKE * usual
    bounds = [(a, b) for a, b, good in zip(limits[:-1], limits[1:], whole.tolist(), strict=True) if good and b > a]
    warnings = []
    if left := len(counts) - len(bounds):
        warnings.append(f"steps that are not whole: {left} of {len(counts)} differ from the usual one and are left out")
    return Steps([(float(a), float(b)) for a, b in bounds], thread, found_by, warnings)


def _repeated(events: RankEvents, launched: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Steps from a repeating sequence of kernels: from one launch of its rarest kernel to the next."""
    order = np.argsort(launched, kind="stable")
    order = order[~np.isnan(launched[order])]
    kernels, moments = events.device["kernel"][order], launched[order]
    if len(kernels) < 4:
        return []
    counts = np.bincount(kernels)
    several = np.flatnonzero(counts >= 2)
    if not len(several):
        return []
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
