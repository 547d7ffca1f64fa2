"""Segments of many jobs, timed together for one latency model, and kept as rows of arrays.

``Timer`` answers for one segment at a time, with all that explains it.  A store answers for thousands, with what an
iteration time needs alone: longest paths, and the part of each outside of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stepsight.dataset.op import Collective
from stepsight.simulator.clock.engine import Floats, add_path, longest_paths
from stepsight.simulator.clock.many_events import PassageStore, SegmentList, run_many_events
from stepsight.simulator.lowering.issue_order import Work
from stepsight.simulator.lowering.passages import Passage
from stepsight.simulator.lowering.segment import Segment
from stepsight.simulator.segment_timing import PassageTime, Timer

Unmeasured = Callable[[Sequence[Work]], Sequence[bool]]


class SegmentStore:
    """Longest paths of segments for one latency model.

    Args:
        timer: Of the latency model.
        unmeasured: Whether each of some works lies outside of what was measured.
        has_host: Whether the hardware's host launches anything.
        num_clocks: Of a rank: 3, or 4 with the host's own.
    """

    def __init__(self, timer: Timer, unmeasured: Unmeasured, *, has_host: bool, num_clocks: int) -> None:
        self._timer, self._unmeasured, self._has_host = timer, unmeasured, has_host
        self._rows: dict[int, int] = {}  # by identity of the segment
        self._segments: list[Segment] = []  # kept, so that identities stay theirs
        self.paths = np.empty((1024, num_clocks, num_clocks))
        self.outside = np.empty((1024, num_clocks, num_clocks))
        self._passages = _Passages(timer, unmeasured)

    def __len__(self) -> int:
        return len(self._segments)

    def rows(self, segments: Sequence[Segment]) -> list[int]:
        """Row of each segment in ``paths`` and ``outside``; ``time`` fills the rows of new ones."""
        known, out = self._rows, []
        for segment in segments:
            row = known.get(id(segment))
            if row is None:
                known[id(segment)] = row = len(self._segments)
                self._segments.append(segment)
            out.append(row)
        return out

    def time(self, since: int) -> None:
        """Time the segments from row ``since`` on."""
        new = self._segments[since:]
        if not new:
            return
        while len(self.paths) < len(self._segments):
            self.paths, self.outside = (np.concatenate([a, np.empty_like(a)]) for a in (self.paths, self.outside))
        passages = [self._passages.row(passage) for segment in new for passage in segment.passages]
        sent = list(dict.fromkeys([work for segment in new for work in segment.sent]))
        works = dict.fromkeys([*self._passages.new_works(), *sent])
        self._timer.work_seconds(list(works))  # all at once
        end = len(self._segments)
        run_many_events(
            self._listed(new, passages, sent),
            self._passages.stored(),
            self._has_host,
            self.paths[since:end],
            self.outside[since:end],
        )

    def _listed(self, new: Sequence[Segment], passages: list[int], sent: list[Collective]) -> SegmentList:
        """The segments as arrays.

        Args:
            new: The segments.
            passages: Row of each of their passages in the store, one segment after the other.
            sent: Distinct collectives that they send.
        """
        plans: dict[int, tuple[int, int]] = {}  # begin and end by identity of the events
        tables, length = [], 0
        for segment in new:
            if id(segment.events) not in plans:
                plans[id(segment.events)] = length, length + len(segment.events)
                length += len(segment.events)
                tables.append(segment.events)
        bounds = np.array([plans[id(segment.events)] for segment in new], dtype=np.int64)
        place = {work: index for index, work in enumerate(sent)}
        works = np.array([place[work] for segment in new for work in segment.sent], dtype=np.int64)
        seconds, launches = self._timer.work_seconds(sent), self._timer.launch_seconds(sent)
        far = seconds * np.array(self._unmeasured(sent), dtype=np.bool_)
        return SegmentList(
            np.concatenate(tables),
            np.ascontiguousarray(bounds[:, 0]),
            np.ascontiguousarray(bounds[:, 1]),
            np.array(passages, dtype=np.int64),
            np.cumsum([0, *(len(segment.passages) for segment in new)])[:-1],
            seconds[works],
            launches[works],
            far[works],
            np.cumsum([0, *(len(segment.sent) for segment in new)])[:-1],
            np.array([segment.compute_share for segment in new], dtype=np.float64),
            np.array([segment.joined for segment in new], dtype=np.bool_),
        )


class _Passages:
    """Passages of segments, timed, as arrays."""

    def __init__(self, timer: Timer, unmeasured: Unmeasured) -> None:
        self._timer, self._unmeasured = timer, unmeasured
        self._rows: dict[int, int] = {}
        self._new: list[Passage] = []
        self._kept: list[Passage] = []
        self._store = PassageStore(
            np.zeros((0, 3)), np.zeros(0), np.zeros(0), np.zeros(1, dtype=np.int64), np.zeros((0, 3)), np.zeros(0)
        )

    def row(self, passage: Passage) -> int:
        """Row of a passage in the store."""
        row = self._rows.get(id(passage))
        if row is None:
            self._rows[id(passage)] = row = len(self._kept)
            self._kept.append(passage)
            self._new.append(passage)
        return row

    def new_works(self) -> list[Work]:
        """Signatures of the passages that are not timed yet."""
        return list(dict.fromkeys([work for passage in self._new for work in passage.works]))

    def stored(self) -> PassageStore:
        """All passages that have a row."""
        if self._new:
            times = [self._timer.passage(passage) for passage in self._new]
            works = self.new_works()
            far = dict(zip(works, self._unmeasured(works), strict=True))
            parts = [_outside(*pair, far) for pair in zip(self._new, times, strict=True)]
            old, self._new = self._store, []
            lengths = np.array([len(time.seconds) for time in times])
            self._store = PassageStore(
                np.concatenate([old.paths, np.array([time.paths for time in times])]),
                np.concatenate([old.nodes, *(time.seconds for time in times)]),
                np.concatenate([old.launches, *(time.launches for time in times)]),
                np.concatenate([old.bounds, old.bounds[-1] + lengths.cumsum()]),
                np.concatenate([old.outside, np.array([paths for paths, _ in parts])]),
                np.concatenate([old.nodes_outside, *(nodes for _, nodes in parts)]),
            )
        return self._store


def _outside(passage: Passage, time: PassageTime, far: dict[Work, bool]) -> tuple[tuple[float, float, float], Floats]:
    """The part of a passage's paths, and of its nodes, outside of what was measured."""
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
