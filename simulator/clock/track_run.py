"""The clock over a track: when every action and message of an iteration runs, and what its length is made of.

A stage has ``K`` clocks: 0 when its computation is free, the others when its data-parallel streams are, and ``HOST``,
where there is one, when the host is.  An action maps them to new ones by its segment's longest paths from clock to
clock (a ``K x K`` matrix in max-plus algebra).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.engine import Floats, Ints, compiled
from stepsight.simulator.clock.entries import COMPUTE, POST
from stepsight.simulator.clock.track import Track, steady_state
from stepsight.simulator.lowering.segment import HOST

Indices = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TrackRun:
    """One run over a track; seconds.

    Attributes:
        track: What ran.
        segment, transition: Given to ``run_track``.
        start, finish: Clocks of its stage before and after each action, shape ``(num_actions, K)``.
        clocks: At the end, shape ``(num_stages, K)``.
        posted: When the sender and the receiver were ready, shape ``(num_messages, 2)``.
        message_start, message_finish: When each message passed, shape ``(num_messages,)``.
        held: Whether the sender and the receiver were held up by it, shape ``(num_messages, 2)``.
    """

    track: Track
    segment: Ints
    transition: Floats
    start: Floats
    finish: Floats
    clocks: Floats
    posted: Floats
    message_start: Floats
    message_finish: Floats
    held: NDArray[np.bool_]


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
    num_actions, num_messages, num_clocks = track.num_actions, track.num_messages, transition.shape[1]
    start, finish = np.empty((2, num_actions, num_clocks))
    clocks = np.zeros((track.num_stages, num_clocks))
    posted = np.empty((num_messages, 2))
    message_start, message_finish = np.empty((2, num_messages))
    held = np.zeros((num_messages, 2), dtype=np.bool_)
    _run(
        *_entries(track), segment.view(np.uint32), transition, message_seconds,
        host_action_s, host_message_s, start, finish, clocks, posted, message_start, message_finish, held,
    )  # fmt: skip
    return TrackRun(track, segment, transition, start, finish, clocks, posted, message_start, message_finish, held)


def track_clocks(
    track: Track,
    segment: Ints,
    transition: Floats,
    message_seconds: Floats,
    host_action_s: float = 0.0,
    host_message_s: float = 0.0,
) -> Floats:
    """The clocks at the end alone, shape ``(num_stages, K)``: ``run_track(...).clocks`` but for rounding.

    Most of a long schedule does the same again and again.  Once all clocks, and all posts, move on by the same time
    from one period to the next, they do so until the pattern ends (the state of a max-plus system decides its future),
    and the rest of the periods is skipped.  A host that moves on by less is never waited for again.
    """
    clocks = np.zeros((track.num_stages, transition.shape[1]))
    posted = np.empty((track.num_messages, 2))
    steady = steady_state(track)
    _final(
        *_entries(track), segment.view(np.uint32), transition, message_seconds, host_action_s, host_message_s,
        steady.first, steady.length, steady.periods, steady.lag, clocks, posted,
    )  # fmt: skip
    return clocks


def walk(run: TrackRun, stage: int, clock: int = 0) -> tuple[Floats, Floats, float, float]:
    """What lies on the critical path that ends at a stage and clock.

    ``run.clocks[stage, clock] == sum(uses * transition) + sum(message_uses * message_seconds)
    + host_actions * host_action_s + host_messages * host_message_s``, over the uses that are not 0.

    Returns:
        ``uses``: passages of each segment from clock to clock, shape of ``transition``.
        ``message_uses``: of each message, shape ``(num_messages,)``.
        ``host_actions``, ``host_messages``: actions and posts whose host time counts.
    """
    track = run.track
    uses, message_uses, host = np.zeros(run.transition.shape), np.zeros(track.num_messages), np.zeros(2)
    _walk(
        *_entries(track), run.segment.view(np.uint32), run.transition, run.start, run.posted, run.held, stage, clock,
        uses, message_uses, host,
    )  # fmt: skip
    return uses, message_uses, float(host[0]), float(host[1])


def _entries(track: Track) -> tuple[Indices, Indices, Indices, Indices]:
    """The entries for the loops: unsigned, since indices that may be negative cost a fifth of the time."""
    return (
        track.entry_op.view(np.uint32),
        track.entry_stage.view(np.uint32),
        track.entry_index.view(np.uint32),
        track.entry_side.view(np.uint32),
    )


@compiled
def _run(
    op: Indices,
    stage: Indices,
    index: Indices,
    side: Indices,
    segment: Indices,
    transition: Floats,
    message_seconds: Floats,
    host_action_s: float,
    host_message_s: float,
    start: Floats,
    finish: Floats,
    clocks: Floats,
    posted: Floats,
    message_start: Floats,
    message_finish: Floats,
    held: NDArray[np.bool_],
) -> None:
    """The loop of ``run_track``; the last seven are filled (``clocks`` and ``held`` must be zero)."""
    num_clocks = transition.shape[1]
    for entry in range(len(op)):
        at, s = index[entry], stage[entry]
        if op[entry] == COMPUTE:
            clocks[s, 0] += host_action_s
            for clock in range(num_clocks):
                start[at, clock] = clocks[s, clock]
            for to in range(num_clocks):
                latest = -np.inf
                for clock in range(num_clocks):
                    latest = max(latest, start[at, clock] + transition[segment[at], to, clock])
                finish[at, to] = latest
                clocks[s, to] = latest
        elif op[entry] == POST:
            clocks[s, 0] += host_message_s
            posted[at, side[entry]] = clocks[s, 0]
        else:
            begin = max(posted[at, 0], posted[at, 1])
            end = begin + message_seconds[at]
            message_start[at] = begin
            message_finish[at] = end
            if end > clocks[s, 0]:
                clocks[s, 0] = end
                held[at, side[entry]] = True


@compiled
def _final(
    op: Indices,
    stage: Indices,
    index: Indices,
    side: Indices,
    segment: Indices,
    transition: Floats,
    message_seconds: Floats,
    host_action_s: float,
    host_message_s: float,
    first: int,
    length: int,
    periods: int,
    lag: int,
    clocks: Floats,
    posted: Floats,
) -> None:
    """The loop of ``track_clocks``; the last two are filled (``clocks`` must be zero)."""
    num_clocks = transition.shape[1]
    start = np.zeros(num_clocks)
    before, now = np.zeros(length), np.zeros(length)  # clock 0 after each entry of a period
    others = clocks.copy()  # all clocks at the end of the period before
    host_shift = np.zeros(len(clocks))  # what the host moved on by in the last period
    begin, steady, period = 0, 0, -1  # what comes before the first period is -1
    while begin < len(op):
        repeats = 0 <= period < periods
        end = first if period < 0 and periods > 0 else begin + length if repeats else len(op)
        for entry in range(begin, end):
            at, s = index[entry], stage[entry]
            if op[entry] == COMPUTE:
                clocks[s, 0] += host_action_s
                for clock in range(num_clocks):
                    start[clock] = clocks[s, clock]
                for to in range(num_clocks):
                    latest = -np.inf
                    for clock in range(num_clocks):
                        latest = max(latest, start[clock] + transition[segment[at], to, clock])
                    clocks[s, to] = latest
            elif op[entry] == POST:
                clocks[s, 0] += host_message_s
                posted[at, side[entry]] = clocks[s, 0]
            else:
                passed = max(posted[at, 0], posted[at, 1]) + message_seconds[at]
                if passed > clocks[s, 0]:
                    clocks[s, 0] = passed
            if repeats:
                now[entry - begin] = clocks[s, 0]
        begin = end
        period += 1
        if not repeats:
            continue
        shift = now[0] - before[0]
        same = period > 1
        for place in range(length):
            same &= abs(now[place] - before[place] - shift) <= 1e-12 * now[place]
        for who in range(len(clocks)):
            for clock in range(1, num_clocks):
                if clock == HOST:
                    host_shift[who] = clocks[who, clock] - others[who, clock]
                    same &= host_shift[who] <= shift * (1.0 + 1e-12)
                else:
                    same &= clocks[who, clock] == others[who, clock]
                others[who, clock] = clocks[who, clock]
        steady = steady + 1 if same else 0
        before, now = now, before
        skipped = periods - period
        if steady > lag and skipped > 0:
            for back in range(begin - lag * length, begin):
                if op[back] == POST:
                    ahead = index[back + skipped * length]
                    posted[ahead, side[back]] = posted[index[back], side[back]] + skipped * shift
            for who in range(len(clocks)):
                clocks[who, 0] += skipped * shift
                if num_clocks > HOST:
                    clocks[who, HOST] += skipped * host_shift[who]
            begin += skipped * length
            period = periods


@compiled
def _walk(
    op: Indices,
    stage: Indices,
    index: Indices,
    side: Indices,
    segment: Indices,
    transition: Floats,
    start: Floats,
    posted: Floats,
    held: NDArray[np.bool_],
    end_stage: int,
    end_clock: int,
    uses: Floats,
    message_uses: Floats,
    host: Floats,
) -> None:
    """The loop of ``walk``: once backwards over the entries; the last three are added to."""
    at_stage, at_clock = end_stage, end_clock
    sought, sought_side = -1, 0  # the post whose message held the path up; until there nothing lies on it
    for entry in range(len(op) - 1, -1, -1):
        at, what = index[entry], op[entry]
        if sought >= 0:
            if what == POST and at == sought and side[entry] == sought_side:
                sought, at_stage = -1, stage[entry]
                host[1] += 1.0
        elif stage[entry] != at_stage:
            continue
        elif what == COMPUTE:
            cause = 0
            latest = -np.inf
            for clock in range(transition.shape[1]):
                value = start[at, clock] + transition[segment[at], at_clock, clock]
                if value > latest:
                    latest = value
                    cause = clock
            uses[segment[at], at_clock, cause] += 1.0
            at_clock = cause
            if cause == 0:
                host[0] += 1.0
        elif at_clock == 0 and what == POST:
            host[1] += 1.0
        elif at_clock == 0 and held[at, side[entry]]:
            message_uses[at] += 1.0
            sought = at
            sought_side = 1 if posted[at, 1] > posted[at, 0] else 0
