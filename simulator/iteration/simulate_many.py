"""Iteration times of many jobs: the same times as ``simulate``, computed together and without explanations.

``Timer`` answers for one segment at a time, with all that explains it.  ``many_paths`` answers for thousands, with what
an iteration time needs alone: longest paths, and the part of each outside of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job
from stepsight.simulator.clock.engine import NUM_CLOCKS, Floats, Ints, add_path, longest_paths
from stepsight.simulator.clock.event_run import NO_STREAMS, OutsideEvents, SegmentList, run_events, to_from
from stepsight.simulator.clock.kernel import RunDurations
from stepsight.simulator.clock.track import many_clocks, through
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import BlockPassTime, Timer, block_pass_table, timer_of
from stepsight.simulator.iteration.simulated_iteration import begin_optimizers, enter_optimizers, last_steps
from stepsight.simulator.programs.block_pass import BlockPass, Work
from stepsight.simulator.programs.lower import Lowered, lower
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
    run_events(listed, block_pass_table(times), NO_STREAMS, outside, ends)
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


def _outside(
    passage: BlockPass, time: BlockPassTime, far: dict[Work, bool]
) -> tuple[tuple[float, float, float], Floats]:
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


TOGETHER = 16  # jobs that are laid out at once: they fit in a near cache


class Times(NamedTuple):
    """Times of ``n`` jobs, shape ``(n,)`` each.

    Attributes:
        seconds: Of one iteration.
        outside: The part of it, in seconds, from work outside of what was measured.
    """

    seconds: Floats
    outside: Floats


def can_simulate_many(job: Job, latency: LatencyModel) -> bool:
    """Whether ``simulate_many`` can simulate a job: all ranks are equal, and ops do not depend on context."""
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
    _ask_works(lowered, latency)
    for carried in (False, True):
        own = [index for index, low in enumerate(lowered) if (low.num_stages == 1) == carried]
        if own:
            _simulate([lowered[index] for index in own], own, latency, unmeasured, times)
    return times


def _ask_works(lowered: list[Lowered], latency: LatencyModel) -> None:
    """Request every op and collective in one list: latency models answer long lists faster than several short ones."""
    works = {id(low.segments): low for low in lowered}.values()
    segments = {id(segment): segment for low in works for segment in low.segments}.values()
    passages = {id(passage): passage for segment in segments for passage in segment.passages}.values()
    asked = dict.fromkeys([work for passage in passages for work in passage.works])
    asked.update(dict.fromkeys({id(work): work for segment in segments for work in segment.sent}.values()))
    asked.update(dict.fromkeys([message for low in works for message in low.messages]))
    timer_of(latency).work_seconds(list(asked))


def _simulate(
    lowered: list[Lowered], places: list[int], latency: LatencyModel, unmeasured: Unmeasured | None, times: Times
) -> None:
    """Fill in the times of jobs that all have a pipeline, or all have none; ``places``: their indices in ``times``."""
    timer, hardware, carried = timer_of(latency), latency.hardware, lowered[0].num_stages == 1
    works = {id(low.segments): low for low in lowered}  # strategies that differ in the schedule share the rest
    segments = list({id(segment): segment for low in works.values() for segment in low.segments}.values())
    row = {id(segment): at for at, segment in enumerate(segments)}
    rows_of = {key: [row[id(segment)] for segment in low.segments] for key, low in works.items()}
    paths, outside = many_paths(timer, segments, unmeasured, carried=carried)
    messages = list(dict.fromkeys([message for low in works.values() for message in low.messages]))
    seconds = dict(zip(messages, timer.work_seconds(messages).tolist(), strict=True))
    far_of = {} if unmeasured is None else dict(zip(messages, unmeasured(messages), strict=True))
    host = (0.0, 0.0) if carried else (hardware.host_action_s, hardware.host_message_s)
    families: dict[tuple[int, ...], list[int]] = {}  # jobs that differ only in durations
    for at, low in enumerate(lowered):
        families.setdefault((id(low.track), id(low.table), id(low.message), id(low.meets)), []).append(at)
    for family in families.values():
        for own in (family[at : at + TOGETHER] for at in range(0, len(family), TOGETHER)):
            some, where = [lowered[at] for at in own], [places[at] for at in own]
            rows = np.array([rows_of[id(low.segments)] for low in some])
            kinds = np.array([[seconds[message] for message in low.messages] for low in some])
            takes, far = RunDurations(paths[rows], kinds.take(some[0].message, axis=1)), None
            if outside is not None:
                kinds *= np.array([[far_of[message] for message in low.messages] for low in some], dtype=np.bool_)
                far = RunDurations(outside[rows], kinds.take(some[0].message, axis=1))
            times.seconds[where], times.outside[where] = _iterations(some[0], takes, far, host)


def _iterations(
    low: Lowered, takes: RunDurations, far: RunDurations | None, host: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Seconds of one iteration of several jobs, and the share of each outside the measured range."""
    clocks, of_clocks = many_clocks(low.track, low.segment, takes, far, host)
    paths = takes.transition[:, low.optimizer]
    of_stages = np.moveaxis(clocks, 0, 1)
    entry = enter_optimizers(low, of_stages, begin_optimizers(low, of_stages))
    entry = np.moveaxis(entry, 1, 0)
    finish = through(paths, entry)[:, :, :NUM_CLOCKS]
    parts = np.zeros(len(finish))
    if far is not None and of_clocks is not None:
        for job in range(len(parts)):
            path = last_steps(low, clocks[job : job + 1], entry[job], finish[job], paths[job])
            through_optimizer = far.transition[job, low.optimizer[path.stage], path.to, path.since]
            parts[job] = of_clocks[job, path.before, path.clock] + through_optimizer
    return finish.max(axis=(1, 2)), parts
