"""Runs of a track: when every action and message of an iteration runs, and the critical path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.engine import Floats, Ints
from stepsight.simulator.clock.kernel import (
    APART,
    Durations,
    Log,
    OutsideRuns,
    Uses,
    at_rest,
    new_log,
    run_entries,
    run_periods,
    trace_path,
)
from stepsight.simulator.clock.track import Track, steady_state
from stepsight.simulator.schedules.entries import COMPUTE, POST, Entries


@dataclass(frozen=True, eq=False)
class TrackRun:
    """One run over a track; seconds.

    Attributes:
        track: What ran.
        segment, transition: Given to ``run_track``.
        clocks: At the end, shape ``(num_stages, K)``.
        posted: When the sender and the receiver of each message were ready, shape ``(num_messages, 2)``.
        log: When actions and messages ran, and why then.
    """

    track: Track
    segment: Ints
    transition: Floats
    clocks: Floats
    posted: Floats
    log: Log

    @property
    def start(self) -> Floats:
        """Clocks of its stage before each action, shape ``(num_actions, K)``."""
        return self.log.start

    @property
    def finish(self) -> Floats:
        """Clocks of its stage after each action, shape ``(num_actions, K)``."""
        return self.log.finish

    @property
    def message_start(self) -> Floats:
        """When each message began to be transferred, shape ``(num_messages,)``."""
        return self.log.message_start

    @property
    def message_finish(self) -> Floats:
        """When each message had been transferred, shape ``(num_messages,)``."""
        return self.log.message_finish

    @property
    def held(self) -> NDArray[np.bool_]:
        """Whether each message delayed its sender and its receiver, shape ``(num_messages, 2)``."""
        return self.log.held


def run_track(
    track: Track,
    segment: Ints,
    transition: Floats,
    message_seconds: Floats,
    host_action_s: float = 0.0,
    host_message_s: float = 0.0,
) -> TrackRun:
    """Run all entries of a track.

    Args:
        track: What ranks do.
        segment: Of each action, shape ``(num_actions,)``.
        transition: Of each segment, shape ``(num_segments, K, K)``: to clock, from clock; ``-inf`` where none leads.
        message_seconds: Of each message once both sides are ready, shape ``(num_messages,)``.
        host_action_s: What the host takes before each action.
        host_message_s: What it takes to post a side of a message.
    """
    state = at_rest(track.num_stages, track.num_messages, transition.shape[1], 0)
    log = new_log(track.num_actions, track.num_messages, transition.shape[1])
    durations = _durations(track, segment, transition, message_seconds, (host_action_s, host_message_s))
    run_entries(track.unsigned, durations, state, log, None, (0, len(track.entries.op), APART))
    return TrackRun(track, segment, transition, state.clocks, state.posted, log)


def track_clocks(
    track: Track,
    segment: Ints,
    transition: Floats,
    message_seconds: Floats,
    host_action_s: float = 0.0,
    host_message_s: float = 0.0,
) -> Floats:
    """The clocks at the end, shape ``(num_stages, K)``: ``run_track(...).clocks`` up to rounding.

    Most of a long schedule does the same again and again, and is skipped.
    """
    takes = Taken(transition[None], message_seconds[None])
    clocks: Floats = many_clocks(track, segment, takes, None, (host_action_s, host_message_s))[0][0]
    return clocks


class Taken(NamedTuple):
    """Durations of a track's entries in many runs, or their share outside the measured range; seconds.

    Attributes:
        transition: Of each segment of each run, shape ``(num_runs, num_segments, K, K)``: to clock, from clock.
        message: Of each message of each run, shape ``(num_runs, num_messages)``.
    """

    transition: Floats
    message: Floats


def many_clocks(
    track: Track, segment: Ints, takes: Taken, far: Taken | None, host: tuple[float, float]
) -> tuple[Floats, Floats | None]:
    """The clocks at the end of many runs, each equal to ``track_clocks``.

    Args:
        track: What ranks do in every run.
        segment: Of each action, shape ``(num_actions,)``.
        takes: What the entries take.
        far: The parts of that outside of what was measured, if these are wanted.
        host: What the host takes before each action, and to post a side of a message.

    Returns:
        The clocks, shape ``(num_runs, num_stages, K)``; and the parts of them outside of what was measured.
    """
    durations = _durations(track, segment, takes.transition, takes.message, host)
    clocks = np.zeros((len(takes.message), track.num_stages, takes.transition.shape[-1]))
    outside = None if far is None else OutsideRuns(far.transition, far.message, np.zeros(clocks.shape))
    run_periods(track.unsigned, durations, clocks, outside, steady_state(track))
    return clocks, None if outside is None else outside.clocks


def end_clocks(entries: Entries, durations: Durations) -> Floats:
    """The clocks of all ranks after some of the entries, shape ``(num_ranks, K)``."""
    state = at_rest(len(durations.host), len(durations.message), len(durations.clocks), 0)
    run_entries(entries.unsigned(), durations, state, None, None, (0, len(entries.op), APART))
    return state.clocks


def through(transition: Floats, clocks: Floats) -> Floats:
    """The clocks after a segment: the rule of an action, for many ranks at once.

    Args:
        transition: To clock, from clock, shape ``(..., K, K)``.
        clocks: Before it, shape ``(..., K)``.
    """
    after: Floats = (transition + clocks[..., None, :]).max(axis=-1)
    return after


def walk(run: TrackRun, stage: int, clock: int = 0) -> tuple[Floats, Floats, float, float]:
    """The critical path that ends at a stage and clock.

    ``run.clocks[stage, clock] == sum(uses * transition) + sum(message_uses * message_seconds)
    + host_actions * host_action_s + host_messages * host_message_s``, over the uses that are not 0.

    Returns:
        ``uses``: passages of each segment from clock to clock, shape of ``transition``.
        ``message_uses``: of each message, shape ``(num_messages,)``.
        ``host_actions``, ``host_messages``: actions and posts whose host time counts.
    """
    uses = Uses(np.zeros(run.transition.shape), np.zeros(run.track.num_messages), np.zeros(2))
    trace_path(run.track.unsigned, run.segment.view(np.uint32), run.log, (stage, clock), uses)
    return uses.transition, uses.message, float(uses.host[COMPUTE]), float(uses.host[POST])


def _durations(
    track: Track, segment: Ints, transition: Floats, message_seconds: Floats, host: tuple[float, float]
) -> Durations:
    """Durations of a track's entries if every stage's host takes the same time before an action, and before a post."""
    of_stages = np.empty((track.num_stages, 2))
    of_stages[:] = host
    numbers = tuple(range(transition.shape[-1]))
    return Durations(segment.view(np.uint32), transition, message_seconds, of_stages, numbers)
