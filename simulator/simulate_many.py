"""How long one iteration of many jobs takes: the same times as ``simulate``, all at once and without explanations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job import Job
from stepsight.simulator.clock.codes import HOST, NUM_CLOCKS
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.clock.lanes import LANES, LaneDurations, LaneState, at_rest, run_lanes, unsigned
from stepsight.simulator.clock.track import steady_state
from stepsight.simulator.latency_model import LatencyModel
from stepsight.simulator.lowering.lower import Lowered, lower
from stepsight.simulator.segment_store import SegmentStore, Unmeasured
from stepsight.simulator.segment_timing import timer_of


class Times(NamedTuple):
    """Times of ``n`` jobs, shape ``(n,)`` each.

    Attributes:
        seconds: Of one iteration.
        outside: The part of it, in seconds, from work outside of what was measured.
    """

    seconds: Floats
    outside: Floats


def can_simulate_many(job: Job, latency: LatencyModel) -> bool:
    """Whether ``simulate_many`` answers for a job: all of its ranks are alike, and no op's time depends on others."""
    cluster = job.cluster
    return not (cluster.stragglers or cluster.slow_links or cluster.mixed or latency.knows_context)


def simulate_many(jobs: Sequence[Job], latency: LatencyModel, unmeasured: Unmeasured | None = None) -> Times:
    """Simulate one iteration of each job.

    Args:
        jobs: For each ``can_simulate_many`` must hold.
        latency: How long ops and collectives take.
        unmeasured: Whether each of some works lies outside of what was measured; None: ``outside`` is not wanted.
    """
    times = Times(np.empty(len(jobs)), np.zeros(len(jobs)))
    lowered = [lower(job, latency.hardware) for job in jobs]
    for carried in (False, True):
        own = [index for index, low in enumerate(lowered) if (low.num_stages == 1) == carried]
        if own:
            _simulate([lowered[index] for index in own], own, latency, unmeasured, times)
    return times


def _simulate(
    lowered: list[Lowered], places: list[int], latency: LatencyModel, unmeasured: Unmeasured | None, times: Times
) -> None:
    """Fill in the times of jobs that all have a pipeline, or all have none; ``places``: theirs in ``times``."""
    timer, hardware = timer_of(latency), latency.hardware
    carried = lowered[0].num_stages == 1
    store = SegmentStore(
        timer,
        unmeasured or (lambda works: [False] * len(works)),
        has_host=hardware.has_host,
        num_clocks=NUM_CLOCKS + carried,
    )
    families: dict[tuple[int, ...], tuple[list[int], list[list[int]], list[Lowered]]] = {}
    for place, low in zip(places, lowered, strict=True):
        key = id(low.table), id(low.message), id(low.meets)
        where, rows, members = families.setdefault(key, ([], [], []))
        where.append(place)
        rows.append(store.rows(low.segments))
        members.append(low)
    store.time(0)
    timer.work_seconds(list(dict.fromkeys(message for low in lowered for message in low.messages)))
    host = np.zeros(2) if carried else np.array([hardware.host_action_s, hardware.host_message_s])
    for where, rows, members in families.values():
        messages = np.array([timer.work_seconds(low.messages) for low in members]).T
        far = np.zeros_like(messages)
        if unmeasured is not None and len(messages):
            far = messages * np.array([unmeasured(low.messages) for low in members], dtype=np.bool_).T
        family = _Family(members[0], np.array(rows), messages, far, host, unmeasured is not None)
        times.seconds[where], times.outside[where] = family.times(store)


class _Family(NamedTuple):
    """Jobs that differ in durations alone; ``n`` of them.

    Attributes:
        lowered: One of them.
        rows: Of their segments in the store, shape ``(n, num_segments)``.
        messages, far: Seconds of their distinct messages, and the part outside of what was measured, shape
            ``(num_kinds, n)``.
        host: As in ``LaneDurations``.
        wants: Whether the outside is wanted.
    """

    lowered: Lowered
    rows: NDArray[np.int64]
    messages: Floats
    far: Floats
    host: Floats
    wants: bool

    def times(self, store: SegmentStore) -> tuple[Floats, Floats]:
        """Seconds of one iteration of each job, and the part outside of what was measured, shape ``(n,)`` each."""
        parts = [self._some(store, slice(at, at + LANES)) for at in range(0, len(self.rows), LANES)]
        return np.concatenate([seconds for seconds, _ in parts]), np.concatenate([far for _, far in parts])

    def _some(self, store: SegmentStore, lanes: slice) -> tuple[Floats, Floats]:
        low, rows = self.lowered, self.rows[lanes]
        track, num_clocks = low.track, store.paths.shape[1]
        paths = np.ascontiguousarray(store.paths[rows].transpose(1, 2, 3, 0))  # rows, to, from, lanes
        outside = np.zeros((0, *paths.shape[1:]))
        if self.wants:
            outside = np.ascontiguousarray(store.outside[rows].transpose(1, 2, 3, 0))
        durations = LaneDurations(
            unsigned(low.segment),
            paths,
            outside,
            unsigned(low.message),
            np.ascontiguousarray(self.messages[:, lanes]),
            np.ascontiguousarray(self.far[:, lanes]),
            self.host,
        )
        state = at_rest(track.num_stages, track.num_messages, num_clocks, len(rows), outside=self.wants)
        run_lanes(track.unsigned, durations, state, steady_state(track))
        return _after_optimizers(low, paths[low.optimizer], outside[low.optimizer] if self.wants else None, state)


def _after_optimizers(low: Lowered, paths: Floats, far: Floats | None, state: LaneState) -> tuple[Floats, Floats]:
    """When the last stage is done, and the part of it outside of what was measured.

    Args:
        low: One of the jobs.
        paths, far: Of every stage's optimizer, shape ``(num_stages, K, K, lanes)``.
        state: After the last action.
    """
    clocks, of_clocks = state.clocks, state.outside if far is not None else np.zeros_like(state.clocks)
    own = clocks[:, :NUM_CLOCKS]
    begin, of_begin = _latest(own, of_clocks[:, :NUM_CLOCKS], axis=1)
    for group in np.flatnonzero(np.bincount(low.meets) > 1).tolist():
        together = low.meets == group
        begin[together], of_begin[together] = _latest(begin[together], of_begin[together], axis=0)
    entry, of_entry = clocks.copy(), of_clocks.copy()
    entry[:, 0], of_entry[:, 0] = begin, of_begin
    if clocks.shape[1] > HOST and low.semantics.overlap.reads_norm:  # then the host is no longer ahead
        waits = begin > entry[:, HOST]
        entry[:, HOST] = np.where(waits, begin, entry[:, HOST])
        of_entry[:, HOST] = np.where(waits, of_begin, of_entry[:, HOST])
    finish, of_finish = _latest(
        paths[:, :NUM_CLOCKS] + entry[:, None],
        (0.0 if far is None else far[:, :NUM_CLOCKS]) + of_entry[:, None],
        axis=2,
    )
    flat = finish.shape[0] * finish.shape[1], finish.shape[2]
    return _latest(finish.reshape(flat), of_finish.reshape(flat), axis=0)


def _latest(times: Floats, outside: Floats, axis: int) -> tuple[Floats, Floats]:
    """The latest of some times along an axis, and its outside."""
    at = np.expand_dims(times.argmax(axis=axis), axis)
    pick = np.broadcast_to(outside, times.shape)
    found = np.take_along_axis(times, at, axis), np.take_along_axis(pick, at, axis)
    return found[0].squeeze(axis), found[1].squeeze(axis)
