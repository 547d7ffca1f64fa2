"""The rules of the pipeline's clock, each written once.

A rank has ``K`` clocks, shape ``(num_ranks, K)``: clock 0 is when its computation is free, the others when its
data-parallel streams are, and ``HOST``, where there is one, when its host is.  Every entry of a rank follows one of
three rules (``advance``):

* Host: before an action or a post, the host takes its time on clock 0.
* Action: the clocks go through the action's segment, whose matrix holds the longest path from each clock to each
  (max-plus algebra).
* Message: it starts once both sides have posted it.  A rank that waits for it is held until it has passed.

The full run (``run_entries``), the run that skips what repeats (``run_periods``) and the stand-in's run all call
``advance``.  The derivative (``trace_path``) follows the causes that a full run has logged, so it repeats no rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.simulator.clock.codes import HOST
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.compiling import compiled
from stepsight.simulator.runtimes.entries import COMPUTE, POST, WAIT, Entries

Indices = NDArray[np.uint32]  # unsigned: indices that may be negative cost a fifth of the time
TOLERANCE = 1e-12  # relative: two periods that differ by less move on by the same time


class Durations(NamedTuple):
    """What entries take; seconds.

    Attributes:
        segment: Of each action, shape ``(num_actions,)``.
        transition: Of each segment, to clock, from clock; ``-inf`` where none leads; shape ``(num_segments, K, K)``.
        message: Of each message once both sides are ready, shape ``(num_messages,)``.
        host: What each rank's host takes before a ``COMPUTE`` and before a ``POST``, shape ``(num_ranks, 2)``.
        clocks: Numbers of a rank's clocks, 0 to K - 1; a tuple, since its length is known when the loops over clocks
            are compiled, so that they are unrolled (a quarter of the time).
    """

    segment: Indices
    transition: Floats
    message: Floats
    host: Floats
    clocks: tuple[int, ...]


class State(NamedTuple):
    """Where a run is; seconds.

    Attributes:
        clocks: Of each rank, shape ``(num_ranks, K)``; 0 at the start.
        posted: When the sender and the receiver were ready, shape ``(num_messages, 2)``; filled.
        after: Clock 0 after each entry of one period, shape ``(period,)``; empty if nothing repeats.
    """

    clocks: Floats
    posted: Floats
    after: Floats


class Log(NamedTuple):
    """What ``advance`` notes of each action and message.

    Attributes:
        start, finish: Clocks of its rank before and after each action, shape ``(num_actions, K)``.
        cause: The clock that decided each of ``finish``, same shape.
        message_start, message_finish: When each message passed, shape ``(num_messages,)``.
        late: The side whose post decided when each message started, shape ``(num_messages,)``.
        held: Whether the sender and the receiver were held by each message, shape ``(num_messages, 2)``; false at
            the start.
    """

    start: Floats
    finish: Floats
    cause: NDArray[np.int8]
    message_start: Floats
    message_finish: Floats
    late: NDArray[np.int8]
    held: NDArray[np.bool_]


def new_log(num_actions: int, num_messages: int, num_clocks: int) -> Log:
    """A log to be filled."""
    start, finish = np.empty((2, num_actions, num_clocks))
    cause = np.empty((num_actions, num_clocks), dtype=np.int8)
    message_start, message_finish = np.empty((2, num_messages))
    late, held = np.empty(num_messages, dtype=np.int8), np.zeros((num_messages, 2), dtype=np.bool_)
    return Log(start, finish, cause, message_start, message_finish, late, held)


class Steady(NamedTuple):
    """Entries that repeat.

    Attributes:
        first: Where they begin.
        length: Entries of one period.
        periods: How many follow each other, 0: nothing repeats.
        lag: A message is waited for at most so many periods after it was posted.
    """

    first: int = 0
    length: int = 0
    periods: int = 0
    lag: int = 0


class Uses(NamedTuple):
    """How often each duration lies on a critical path; the derivative of a clock by that duration.

    Attributes:
        transition: Shape of ``Durations.transition``.
        message: Of each message, shape ``(num_messages,)``.
        host: Of each op that takes the host's time, shape ``(2,)``.
    """

    transition: Floats
    message: Floats
    host: Floats


def advance(entries: Entries, durations: Durations, state: State, log: Log | None, begin: int, end: int) -> None:
    """Let the entries from ``begin`` to ``end`` (exclusive) happen: all rules of the clock.

    Args:
        entries, durations: What happens.
        state: Where the run is; moved on.
        log: Filled, if there is one.
        begin, end: Which entries.
    """
    ops, ranks, items, sides = entries
    segment_of, transition, message_seconds, host, numbers = durations
    clocks, posted, after = state
    num_clocks = len(numbers)
    start = np.zeros(num_clocks)
    follows = len(after) > 0
    for entry in range(begin, end):
        op, rank, at = ops[entry], ranks[entry], items[entry]
        if op != WAIT:
            clocks[rank, 0] += host[rank, op]
        if op == COMPUTE:
            segment = segment_of[at]
            for clock in range(num_clocks):
                start[clock] = clocks[rank, clock]
            for to in range(num_clocks):
                latest, cause = -np.inf, 0
                for clock in range(num_clocks):
                    path = start[clock] + transition[segment, to, clock]
                    if path > latest:
                        latest, cause = path, clock
                clocks[rank, to] = latest
                if log is not None:
                    log.start[at, to], log.finish[at, to], log.cause[at, to] = start[to], latest, cause
        elif op == WAIT:
            begins = max(posted[at, 0], posted[at, 1])
            passed = begins + message_seconds[at]
            holds = passed > clocks[rank, 0]
            if holds:
                clocks[rank, 0] = passed
            if log is not None:
                log.message_start[at], log.message_finish[at] = begins, passed
                log.late[at], log.held[at, sides[entry]] = posted[at, 1] > posted[at, 0], holds
        else:
            posted[at, sides[entry]] = clocks[rank, 0]
        if follows:
            after[entry - begin] = clocks[rank, 0]


run_entries = compiled(advance)


@compiled
def run_periods(entries: Entries, durations: Durations, state: State, steady: Steady) -> None:
    """Let all entries happen, except for periods that only repeat the one before.

    Once all clocks and all posts move on by the same time from one period to the next, they do so until the pattern
    ends (the state of a max-plus system decides its future), and the rest of the periods is skipped.  A host that
    moves on by less is never waited for again.

    Args:
        entries, durations: What happens.
        state: Where the run begins and, filled, where it ends; ``after`` is not used.
        steady: What repeats.
    """
    clocks, posted, _ = state
    after = np.zeros((2, steady.length))  # of this period and of the one before, in turn
    ends = clocks.copy()  # all clocks at the end of the period before
    period, alike = -1, 0  # what comes before the first period is -1
    while period <= steady.periods:
        repeats = 0 <= period < steady.periods
        begin, end = steady.first + period * steady.length, len(entries.op)
        if repeats:
            end = begin + steady.length
        elif period < 0:
            begin, end = 0, steady.first
        now, before = after[period % 2], after[1 - period % 2]
        advance(entries, durations, State(clocks, posted, now if repeats else now[:0]), None, begin, end)
        period += 1
        if repeats:
            alike = alike + 1 if period > 1 and _moves_on(now, before, clocks, ends) else 0
            if alike > steady.lag and period < steady.periods:
                _skip(entries, state, ends, steady, period, now[0] - before[0])
                period = steady.periods
            for rank in range(len(clocks)):
                for clock in range(clocks.shape[1]):
                    ends[rank, clock] = clocks[rank, clock]


def _moves_on(now: Floats, before: Floats, clocks: Floats, ends: Floats) -> bool:
    """Whether clock 0 moved on by the same time after every entry, no other clock did, and no host by more."""
    shift = now[0] - before[0]
    for place in range(len(now)):
        if not abs(now[place] - before[place] - shift) <= TOLERANCE * now[place]:
            return False
    for rank in range(len(clocks)):
        for clock in range(1, clocks.shape[1]):
            if clock == HOST:
                if not clocks[rank, clock] - ends[rank, clock] <= shift * (1.0 + TOLERANCE):
                    return False
            elif clocks[rank, clock] != ends[rank, clock]:
                return False
    return True


def _skip(entries: Entries, state: State, ends: Floats, steady: Steady, period: int, shift: float) -> None:
    """Let all periods from ``period`` on pass as the last one did.

    Args:
        entries, state, steady: As in ``run_periods``.
        ends: All clocks before the last period.
        period: The first that is skipped.
        shift: What clock 0 moved on by in the last period.
    """
    clocks, posted = state.clocks, state.posted
    left, begin = steady.periods - period, steady.first + period * steady.length
    for entry in range(begin - steady.lag * steady.length, begin):
        if entries.op[entry] == POST:
            ahead, side = entries.item[entry + left * steady.length], entries.side[entry]
            posted[ahead, side] = posted[entries.item[entry], side] + left * shift
    for rank in range(len(clocks)):
        clocks[rank, 0] += left * shift
        if clocks.shape[1] > HOST:
            clocks[rank, HOST] += left * (clocks[rank, HOST] - ends[rank, HOST])


@compiled
def trace_path(entries: Entries, segment: Indices, log: Log, end: tuple[int, int], uses: Uses) -> None:
    """Walk back over the entries along the causes in a log, and count the durations on the way.

    Args:
        entries, segment: As in a full run.
        log: Of that run.
        end: Rank and clock at which the path ends.
        uses: Added to.
    """
    ops, ranks, items, sides = entries
    rank, clock = end
    sought, late = -1, 0  # the post whose message held the path up: until it comes, nothing lies on the path
    for entry in range(len(ops) - 1, -1, -1):
        op, at = ops[entry], items[entry]
        if sought >= 0:
            if op != POST or at != sought or sides[entry] != late:
                continue
            sought, rank = -1, ranks[entry]
        elif ranks[entry] != rank:
            continue
        elif op == COMPUTE:
            cause = log.cause[at, clock]
            uses.transition[segment[at], clock, cause] += 1.0
            clock = cause
        elif op == WAIT and clock == 0 and log.held[at, sides[entry]]:
            uses.message[at] += 1.0
            sought, late = at, log.late[at]
        if op != WAIT and clock == 0:
            uses.host[op] += 1.0
