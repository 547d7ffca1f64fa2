"""A track run by several jobs at once, each in a lane of its own: the rules of ``kernel`` in loops over lanes.

Jobs with the same schedule differ in durations alone.  What an entry means is read once for all lanes, and the
arithmetic of neighbouring lanes is vectorised.

Beside every time runs its *outside*: the part of it, in seconds, that comes from work outside of what was measured.
It follows the longest path, so it is the derivative of the time by the durations of that work, times these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.codes import HOST
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.clock.kernel import TOLERANCE, Indices, Steady
from stepsight.simulator.compiling import compiled
from stepsight.simulator.runtimes.entries import COMPUTE, POST, WAIT, Entries

LANES = 16  # jobs that run together: their clocks stay in the nearest cache


class LaneDurations(NamedTuple):
    """What entries take in every lane; seconds.

    Attributes:
        segment: Row of each action in ``transition``, shape ``(num_actions,)``.
        transition: To clock, from clock, shape ``(num_rows, K, K, lanes)``; ``-inf`` where none leads.
        outside: The part of it outside of what was measured, same shape; shape ``(0, K, K, lanes)`` if not wanted.
        message: Row of each message in ``message_seconds``, shape ``(num_messages,)``.
        message_seconds, message_outside: Of each distinct message, shape ``(rows, lanes)``.
        host: What the host takes before a ``COMPUTE`` and before a ``POST``, shape ``(2,)``.
    """

    segment: Indices
    transition: Floats
    outside: Floats
    message: Indices
    message_seconds: Floats
    message_outside: Floats
    host: Floats


class LaneState(NamedTuple):
    """Where the runs are; seconds.

    Attributes:
        clocks: Of each rank, shape ``(num_ranks, K, lanes)``; 0 at the start.
        outside: Of these, same shape; empty if not wanted.
        posted: When the sender and the receiver were ready, shape ``(num_messages, 2, lanes)``; filled.
        posted_outside: Of these, same shape; empty if not wanted.
    """

    clocks: Floats
    outside: Floats
    posted: Floats
    posted_outside: Floats


class _Period(NamedTuple):
    """Clock 0, and its outside, after each entry of a period, shape ``(period, lanes)``; empty if nothing repeats."""

    after: Floats
    outside: Floats


def at_rest(num_ranks: int, num_messages: int, num_clocks: int, lanes: int, *, outside: bool) -> LaneState:
    """The state in which every run begins."""
    shape, posts = (num_ranks, num_clocks, lanes), (num_messages, 2, lanes)
    if outside:
        return LaneState(np.zeros(shape), np.zeros(shape), np.empty(posts), np.zeros(posts))
    return LaneState(np.zeros(shape), np.zeros((0, 0, lanes)), np.empty(posts), np.zeros((0, 0, lanes)))


def _advance(
    entries: Entries, durations: LaneDurations, state: LaneState, period: _Period, begin: int, end: int
) -> None:
    """Let the entries from ``begin`` to ``end`` (exclusive) happen in every lane; rules as in ``kernel.advance``."""
    ops, ranks, items, sides = entries
    clocks, posted, transition = state.clocks, state.posted, durations.transition
    num_clocks, lanes = clocks.shape[1], clocks.shape[2]
    start, begins, late = np.zeros((num_clocks, lanes)), np.zeros(lanes), np.zeros(lanes)
    start_outside = np.zeros((num_clocks, lanes))
    follows, wants = len(period.after) > 0, len(state.outside) > 0
    for entry in range(begin, end):
        op, rank, at = ops[entry], ranks[entry], items[entry]
        if op != WAIT:
            more = durations.host[op]
            for lane in range(lanes):
                clocks[rank, 0, lane] += more
        if op == COMPUTE:
            row = durations.segment[at]
            for clock in range(num_clocks):
                for lane in range(lanes):
                    start[clock, lane] = clocks[rank, clock, lane]
            for to in range(num_clocks):
                for lane in range(lanes):
                    clocks[rank, to, lane] = start[0, lane] + transition[row, to, 0, lane]
                for clock in range(1, num_clocks):
                    for lane in range(lanes):
                        path = start[clock, lane] + transition[row, to, clock, lane]
                        clocks[rank, to, lane] = max(clocks[rank, to, lane], path)
            if wants:
                _follow(durations, state, (rank, row), start, start_outside)
        elif op == WAIT:
            kind = durations.message[at]
            for lane in range(lanes):
                begins[lane] = max(posted[at, 0, lane], posted[at, 1, lane])
                late[lane] = begins[lane] + durations.message_seconds[kind, lane]
            if wants:
                for lane in range(lanes):
                    if late[lane] > clocks[rank, 0, lane]:
                        side = 1 if posted[at, 1, lane] > posted[at, 0, lane] else 0
                        came = state.posted_outside[at, side, lane]
                        state.outside[rank, 0, lane] = came + durations.message_outside[kind, lane]
            for lane in range(lanes):
                clocks[rank, 0, lane] = max(clocks[rank, 0, lane], late[lane])
        else:
            side = sides[entry]
            for lane in range(lanes):
                posted[at, side, lane] = clocks[rank, 0, lane]
            if wants:
                for lane in range(lanes):
                    state.posted_outside[at, side, lane] = state.outside[rank, 0, lane]
        if follows:
            for lane in range(lanes):
                period.after[entry - begin, lane] = clocks[rank, 0, lane]
            if wants:
                for lane in range(lanes):
                    period.outside[entry - begin, lane] = state.outside[rank, 0, lane]


def _follow(
    durations: LaneDurations, state: LaneState, place: tuple[int, int], start: Floats, start_outside: Floats
) -> None:
    """Let the outside of a rank's clocks follow the longest paths through a segment.

    Args:
        durations, state: As elsewhere; the clocks are those after the segment.
        place: The rank, and the row of the segment.
        start: The clocks before it, shape ``(K, lanes)``.
        start_outside: Filled, same shape.
    """
    rank, row = place
    num_clocks, lanes = start.shape
    for clock in range(num_clocks):
        for lane in range(lanes):
            start_outside[clock, lane] = state.outside[rank, clock, lane]
    for to in range(num_clocks):
        for lane in range(lanes):
            for clock in range(num_clocks):
                path = start[clock, lane] + durations.transition[row, to, clock, lane]
                if path == state.clocks[rank, to, lane]:
                    more = durations.outside[row, to, clock, lane]
                    state.outside[rank, to, lane] = start_outside[clock, lane] + more
                    break


@compiled
def run_lanes(entries: Entries, durations: LaneDurations, state: LaneState, steady: Steady) -> None:
    """Let all entries happen in every lane, except for periods that only repeat the one before in all of them.

    As ``kernel.run_periods``, which says why periods may be skipped.

    Args:
        entries, durations: What happens.
        state: Where the runs begin and, filled, where they end.
        steady: What repeats.
    """
    clocks, lanes = state.clocks, state.clocks.shape[2]
    wanted = steady.length if len(state.outside) > 0 else 0
    after, outside = np.zeros((2, steady.length, lanes)), np.zeros((2, wanted, lanes))
    ends, nothing = clocks.copy(), np.zeros((0, lanes))
    shift, shift_outside = np.zeros(lanes), np.zeros(lanes)
    period, alike = -1, 0  # what comes before the first period is -1
    while period <= steady.periods:
        repeats = 0 <= period < steady.periods
        begin, end = steady.first + period * steady.length, len(entries.op)
        if repeats:
            end = begin + steady.length
        elif period < 0:
            begin, end = 0, steady.first
        now = period % 2
        log = _Period(after[now], outside[now]) if repeats else _Period(nothing, nothing)
        _advance(entries, durations, state, log, begin, end)
        period += 1
        if repeats:
            before = _Period(after[1 - now], outside[1 - now])
            alike = alike + 1 if period > 1 and _all_move_on(log, before, clocks, ends) else 0
            if alike > steady.lag and period < steady.periods:
                for lane in range(lanes):
                    shift[lane] = log.after[0, lane] - before.after[0, lane]
                    if wanted > 0:
                        shift_outside[lane] = log.outside[0, lane] - before.outside[0, lane]
                _skip_lanes(entries, state, ends, steady, period, _Period(shift, shift_outside))
                period = steady.periods
            for rank in range(len(clocks)):
                for clock in range(clocks.shape[1]):
                    for lane in range(lanes):
                        ends[rank, clock, lane] = clocks[rank, clock, lane]


def _all_move_on(now: _Period, before: _Period, clocks: Floats, ends: Floats) -> bool:
    """Whether in every lane all that repeats moved on by the same time; see ``kernel._moves_on``."""
    lanes = clocks.shape[2]
    if not (_all_alike(now.after, before.after, now.after) and _all_alike(now.outside, before.outside, now.after)):
        return False
    for rank in range(len(clocks)):
        for clock in range(1, clocks.shape[1]):
            for lane in range(lanes):
                moved = clocks[rank, clock, lane] - ends[rank, clock, lane]
                if clock == HOST:
                    if not moved <= (now.after[0, lane] - before.after[0, lane]) * (1.0 + TOLERANCE):
                        return False
                elif moved != 0.0:
                    return False
    return True


def _all_alike(now: Floats, before: Floats, times: Floats) -> bool:
    """Whether in every lane all places moved on as the first did, within the tolerance of the times there."""
    for place in range(len(now)):
        for lane in range(now.shape[1]):
            shift = now[0, lane] - before[0, lane]
            if not abs(now[place, lane] - before[place, lane] - shift) <= TOLERANCE * times[place, lane]:
                return False
    return True


def _skip_lanes(entries: Entries, state: LaneState, ends: Floats, steady: Steady, period: int, shift: _Period) -> None:
    """Let all periods from ``period`` on pass as the last one did; see ``kernel._skip``.

    Args:
        entries, state, steady: As in ``run_lanes``.
        ends: All clocks before the last period.
        period: The first that is skipped.
        shift: What clock 0, and its outside, moved on by in the last period, shape ``(lanes,)`` each.
    """
    clocks, posted, lanes = state.clocks, state.posted, state.clocks.shape[2]
    left, begin, wants = steady.periods - period, steady.first + period * steady.length, len(state.outside) > 0
    for entry in range(begin - steady.lag * steady.length, begin):
        if entries.op[entry] == POST:
            ahead, side, at = entries.item[entry + left * steady.length], entries.side[entry], entries.item[entry]
            for lane in range(lanes):
                posted[ahead, side, lane] = posted[at, side, lane] + left * shift.after[lane]
                if wants:
                    more = left * shift.outside[lane]
                    state.posted_outside[ahead, side, lane] = state.posted_outside[at, side, lane] + more
    for rank in range(len(clocks)):
        for lane in range(lanes):
            clocks[rank, 0, lane] += left * shift.after[lane]
            if wants:
                state.outside[rank, 0, lane] += left * shift.outside[lane]
            if clocks.shape[1] > HOST:
                clocks[rank, HOST, lane] += left * (clocks[rank, HOST, lane] - ends[rank, HOST, lane])


def unsigned(indices: NDArray[np.int32]) -> Indices:
    """Indices for the loops; those that may be negative cost more."""
    return np.ascontiguousarray(indices).view(np.uint32)
