"""Segments of many jobs, timed together with one latency model.

``Timer`` answers for one segment at a time, with all that explains it.  ``many_paths`` answers for thousands, with what
an iteration time needs alone: longest paths, and the part of each outside of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.engine import Floats, Ints, add_path, longest_paths
from stepsight.simulator.clock.event_run import NO_STREAMS, OutsideEvents, SegmentList, run_events, to_from
from stepsight.simulator.durations.segment_timing import PassageTime, Timer, passage_table
from stepsight.simulator.programs.issue_order import Work
from stepsight.simulator.programs.passages import Passage
from stepsight.simulator.programs.segment import Segment

Unmeasured = Callable[[Sequence[Work]], Sequence[bool]]


def many_paths(
    timer: Timer, segments: Sequence[Segment], unmeasured: Unmeasured | None, *, carried: bool
) -> tuple[Floats, Floats | None]:
    """Longest paths through segments for one latency model.

    Args:
        timer: Of the latency model.
        segments: Distinct ones.
        unmeasured: Whether each of some works lies outside of what was measured; None: that is not wanted.
        carried: Whether the host is a clock of its own.

    Returns:
        Seconds to each clock, from each, ``-inf`` where no path leads, shape ``(num_segments, K, K)``; and the part of
        each outside of what was measured, same shape.
    """
    passages = {id(passage): passage for segment in segments for passage in segment.passages}
    uses = [work for segment in segments for work in segment.sent]
    by_identity = {id(work): work for work in uses}  # there are few of them, and identities are faster to hash
    sent = dict.fromkeys(by_identity.values())
    row = {key: at for at, key in enumerate(passages)}
    number = {work: at for at, work in enumerate(sent)}
    place = {key: number[work] for key, work in by_identity.items()}
    times = [timer.passage(passage) for passage in passages.values()]
    of_segments = np.array([place[id(work)] for work in uses], dtype=np.int64)
    seconds, launches = timer.work_seconds(list(sent)), timer.launch_seconds(list(sent))
    ends, outside = timer.new_ends(len(segments), carried=carried), None
    if unmeasured is not None:
        works = list(dict.fromkeys([work for passage in passages.values() for work in passage.works]))
        far = dict(zip(works, unmeasured(works), strict=True))
        parts = [_outside(*pair, far) for pair in zip(passages.values(), times, strict=True)]
        sent_outside = seconds * np.array(unmeasured(list(sent)), dtype=np.bool_)
        outside = OutsideEvents(
            np.array([paths for paths, _ in parts]).reshape(-1, 3),
            np.concatenate([np.zeros(0), *(nodes for _, nodes in parts)]),
            sent_outside[of_segments],
            np.empty_like(ends),
        )
    listed = SegmentList(
        *_events(segments),
        np.array([row[id(passage)] for segment in segments for passage in segment.passages], dtype=np.int64),
        seconds[of_segments],
        launches[of_segments],
        np.array([segment.compute_share for segment in segments], dtype=np.float64),
    )
    run_events(listed, passage_table(times), NO_STREAMS, outside, ends)
    paths = np.ascontiguousarray(to_from(ends, carried=carried))
    if outside is None:
        return paths, None
    return paths, np.ascontiguousarray(to_from(outside.ends, carried=carried, nothing=0.0))


def _events(segments: Sequence[Segment]) -> tuple[Ints, NDArray[np.int64]]:
    """``SegmentList.events`` and ``places``; plans shared by segments are listed once."""
    plans: dict[int, tuple[int, int]] = {}  # begin and end by identity of the events
    tables, length, passages, sent, places = [], 0, 0, 0, []
    for segment in segments:
        if id(segment.events) not in plans:
            plans[id(segment.events)] = length, length + len(segment.events)
            length += len(segment.events)
            tables.append(segment.events)
        places.append((*plans[id(segment.events)], passages, sent, segment.joined))
        passages, sent = passages + len(segment.passages), sent + len(segment.sent)
    return np.concatenate(tables), np.array(places, dtype=np.int64)


def _outside(passage: Passage, time: PassageTime, far: dict[Work, bool]) -> tuple[tuple[float, float, float], Floats]:
    """The share of a passage's paths and nodes outside the measured range."""
    there = np.array([far[work] for work in passage.works], dtype=np.bool_)
    count = len(time.seconds)
    if not there.any():
        return (0.0, 0.0, 0.0), np.zeros(count)
    nodes: Floats = np.where(there[passage.work], time.seconds, 0.0)
    launched = np.where(time.launches > 0.0, time.launches.cumsum(), -np.inf)
    ends = [float(nodes.sum()), 0.0]
    if passage.serial:
        remaining = time.seconds[::-1].cumsum()[::-1]
        if np.isfinite(launched).any():
            ends[1] = float(nodes[int((launched + remaining).argmax()) :].sum())
        return (ends[0], ends[1], 0.0), nodes
    finish, critical, of_path = np.empty(count), np.empty(count, dtype=np.int32), np.zeros(1)
    for at, ready in enumerate((np.zeros(count), launched)):
        longest_paths(time.seconds, *passage.edges, ready, finish, critical)
        of_path[0] = 0.0
        add_path(critical, int(finish.argmax()), np.zeros(count, dtype=np.int32), nodes, 1.0, of_path)
        ends[at] = float(of_path[0])
    return (ends[0], ends[1], 0.0), nodes
