"""The rules of the pipeline's clock, each written once, and runs of a schedule by them.

A rank has ``K`` clocks, shape ``(num_ranks, K)``: clock 0 is when its computation is free, the others when its
data-parallel streams are, and ``HOST``, where there is one, when its host is.  Every entry of a rank follows one of
three rules (``advance``):

* Host: before an action or a post, the host takes its time on clock 0.
* Action: the clocks go through the action's segment, whose matrix holds the longest path from each clock to each
  (max-plus algebra).
* Message: it starts once both sides have posted it.  A rank that waits for it is held until it has passed.

The full run (``run_entries``), the runs that skip what repeats (``run_periods``) and the stand-in's run all call
``advance``.  The derivative (``trace_path``) follows the causes that a full run has logged, so it repeats no rule.

A track holds a schedule's entries in one order that can run; it is computed once for all jobs.  A run of it says when
every action and message of an iteration runs, and what the critical path is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached, compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.specs import RUNTIMES
from stepsight.simulator.clock.engine import HOST, Floats, Ints
from stepsight.simulator.schedules import KIND_NAMES, Schedule, order, order_actions, schedule_of
from stepsight.simulator.schedules.runtimes import deepspeed_entries, torch_entries

Indices = NDArray[np.uint32]  # unsigned: signed indices cost a fifth of the time
TOLERANCE = 1e-12  # relative: two periods whose steps differ by less count as equal


class Durations(NamedTuple):
    """Durations of entries; seconds."""

    segment: Indices  # of each action, shape (num_actions,)
    transition: Floats  # of each segment, to clock, from clock; -inf where none leads; shape (num_segments, K, K)
    message: Floats  # of each message once both sides are ready, shape (num_messages,)
    host: Floats  # what each rank's host takes before a COMPUTE and before a POST, shape (num_ranks, 2)
    # numbers of a rank's clocks, 0 to K - 1; a tuple, since its length is known when the loops over clocks are
    # compiled, so that they are unrolled (a quarter of the time)
    clocks: tuple[int, ...]


class State(NamedTuple):
    """The state of a run; seconds."""

    clocks: Floats  # of each rank, shape (num_ranks, K)
    posted: Floats  # when the sender and the receiver were ready, shape (num_messages, 2); filled
    after: Floats  # clock 0 after each entry of the last two periods, in turn; shape (2, period); filled
    before: Floats  # clocks before the last period, same shape; filled


def at_rest(num_ranks: int, num_messages: int, num_clocks: int, period: int) -> State:
    """The initial state of a run; ``period`` is the number of entries of a period, 0 if nothing repeats."""
    shape = (num_ranks, num_clocks)
    return State(np.zeros(shape), np.empty((num_messages, 2)), np.empty((2, period)), np.empty(shape))


class Log(NamedTuple):
    """What ``advance`` records for each action and message."""

    # start, finish: clocks of its rank before and after each action, shape (num_actions, K)
    start: Floats
    finish: Floats
    cause: NDArray[np.int8]  # the clock that decided each of finish, same shape
    # message_start, message_finish: when each message passed, shape (num_messages,)
    message_start: Floats
    message_finish: Floats
    late: NDArray[np.int8]  # the side whose post decided when each message started, shape (num_messages,)
    # whether the sender and the receiver were held by each message, shape (num_messages, 2); false at the start
    held: NDArray[np.bool_]


def new_log(num_actions: int, num_messages: int, num_clocks: int) -> Log:
    start, finish = np.empty((2, num_actions, num_clocks))
    cause = np.empty((num_actions, num_clocks), dtype=np.int8)
    message_start, message_finish = np.empty((2, num_messages))
    late, held = np.empty(num_messages, dtype=np.int8), np.zeros((num_messages, 2), dtype=np.bool_)
    return Log(start, finish, cause, message_start, message_finish, late, held)


class Steady(NamedTuple):
    """Entries that repeat: where they begin, entries of one period, how many follow each other (0: nothing repeats),
    and the largest number of periods between the post of a message and the wait for it.
    """

    first: int = 0
    length: int = 0
    periods: int = 0
    lag: int = 0


class Uses(NamedTuple):
    """How often each duration lies on a critical path, the derivative of a clock by it: of ``Durations.transition``, of
    each message, and of each op that takes the host's time, shape ``(2,)``.
    """

    transition: Floats
    message: Floats
    host: Floats


Span = tuple[int, int, int]  # see ``advance``
APART = -1  # replaces 0 or 1: the turn of a period; its entries are part of none


def advance(entries: order.Entries, durations: Durations, state: State, log: Log | None, span: Span) -> None:
    """Process a range of entries: all rules of the clock.

    Args:
        entries, durations: What happens.
        state: Where the run is; moved on.
        log: Filled, if there is one.
        span: The first entry; the one behind the last; the row of ``State.after`` that is filled, or ``APART``.
    """
    ops, ranks, items, sides = entries
    segment_of, transition, message_seconds, host, numbers = durations
    clocks, posted, after, _ = state
    begin, end, turn = span
    start = np.zeros(len(numbers))
    for entry in range(begin, end):
        op, rank, at = ops[entry], ranks[entry], items[entry]
        if op != order.WAIT:
            clocks[rank, 0] += host[rank, op]
        if op == order.COMPUTE:
            for clock in range(len(numbers)):
                start[clock] = clocks[rank, clock]
            for to in range(len(numbers)):
                latest, cause = -np.inf, 0
                for clock in range(len(numbers)):
                    path = start[clock] + transition[segment_of[at], to, clock]
                    if path > latest:
                        latest, cause = path, clock
                clocks[rank, to] = latest
                if log is not None:
                    log.start[at, to], log.finish[at, to], log.cause[at, to] = start[to], latest, cause
        elif op == order.WAIT:
            late = 1 if posted[at, 1] > posted[at, 0] else 0
            passed = posted[at, late] + message_seconds[at]
            holds = passed > clocks[rank, 0]
            if holds:
                clocks[rank, 0] = passed
            if log is not None:
                log.message_start[at], log.message_finish[at] = posted[at, late], passed
                log.late[at], log.held[at, sides[entry]] = late, holds
        else:
            posted[at, sides[entry]] = clocks[rank, 0]
        if turn != APART:
            after[turn, entry - begin] = clocks[rank, 0]


run_entries = compiled(advance)


@compiled
def run_periods(entries: order.Entries, durations: Durations, clocks: Floats, steady: Steady) -> None:
    """Process all entries of several runs that differ only in durations; skip periods that repeat the one before.

    Once all clocks and all posts move on by the same time from one period to the next, they do so until the pattern
    ends (the state of a max-plus system decides its future), and the rest of the periods is skipped.  A host that
    moves on by less is never waited for again.

    Args:
        entries: What happens.
        durations: What it takes; ``transition`` and ``message`` have a first axis of runs.
        clocks: Of each rank in each run; 0 at the start, shape ``(num_runs, num_ranks, K)``; filled.
        steady: What repeats.
    """
    segment, transition, message, host, numbers = durations
    scratch = at_rest(len(host), message.shape[1], len(numbers), steady.length)
    for run in range(len(message)):
        takes = Durations(segment, transition[run], message[run], host, numbers)
        state = State(clocks[run], scratch.posted, scratch.after, scratch.before)
        period, alike = -1, 0  # -1 before the first period
        while period <= steady.periods:
            begin, end, turn = steady.first + period * steady.length, len(entries.op), APART
            if 0 <= period < steady.periods:
                end, turn = begin + steady.length, period % 2
            elif period < 0:
                begin, end = 0, steady.first
            advance(entries, takes, state, None, (begin, end, turn))
            period += 1
            if turn == APART:
                continue
            alike = alike + 1 if period > 1 and _moves_on(state, turn) else 0
            if alike > steady.lag and period < steady.periods:
                _skip(entries, state, steady, period)
                period = steady.periods
            for rank in range(len(host)):
                for clock in range(len(numbers)):
                    state.before[rank, clock] = state.clocks[rank, clock]


def _moves_on(state: State, turn: int) -> bool:
    """Whether clock 0 advanced by the same time after every entry, and no other clock or host advanced more."""
    clocks, before, after = state.clocks, state.before, state.after
    shift = after[turn, 0] - after[1 - turn, 0]
    for place in range(after.shape[1]):
        if not abs(after[turn, place] - after[1 - turn, place] - shift) <= TOLERANCE * after[turn, place]:
            return False
    for rank in range(len(clocks)):
        for clock in range(1, clocks.shape[1]):
            if clock == HOST:
                if not clocks[rank, clock] - before[rank, clock] <= shift * (1.0 + TOLERANCE):
                    return False
            elif clocks[rank, clock] != before[rank, clock]:
                return False
    return True


def _skip(entries: order.Entries, state: State, steady: Steady, period: int) -> None:
    """Advance all clocks over the periods from ``period`` on, each of which equals the last one."""
    clocks, posted, turn = state.clocks, state.posted, (period - 1) % 2
    shift = state.after[turn, 0] - state.after[1 - turn, 0]
    left, begin = steady.periods - period, steady.first + period * steady.length
    for entry in range(begin - steady.lag * steady.length, begin):
        if entries.op[entry] == order.POST:
            ahead, side = entries.item[entry + left * steady.length], entries.side[entry]
            posted[ahead, side] = posted[entries.item[entry], side] + left * shift
    for rank in range(len(clocks)):
        clocks[rank, 0] += left * shift
        if clocks.shape[1] > HOST:
            clocks[rank, HOST] += left * (clocks[rank, HOST] - state.before[rank, HOST])


@compiled
def trace_path(entries: order.Entries, segment: Indices, log: Log, end: tuple[int, int], uses: Uses) -> None:
    """Walk back over the entries of a full run along the logged causes, from a rank and a clock, and count the
    durations on the way.
    """
    ops, ranks, items, sides = entries
    rank, clock = end
    sought, late = -1, 0  # the post whose message delayed the path: until the message arrives, nothing is on the path
    for entry in range(len(ops) - 1, -1, -1):
        op, at = ops[entry], items[entry]
        if sought >= 0:
            if op != order.POST or at != sought or sides[entry] != late:
                continue
            sought, rank = -1, ranks[entry]
        elif ranks[entry] != rank:
            continue
        elif op == order.COMPUTE:
            cause = log.cause[at, clock]
            uses.transition[segment[at], clock, cause] += 1.0
            clock = cause
        elif op == order.WAIT and clock == 0 and log.held[at, sides[entry]]:
            uses.message[at] += 1.0
            sought, late = at, log.late[at]
        if op != order.WAIT and clock == 0:
            uses.host[op] += 1.0


@dataclass(frozen=True, eq=False)
class Track:
    """Every action of a schedule, the messages between stages, and the entries of the ranks."""

    schedule: Schedule  # the order of each stage
    runtime: str  # who runs it, one of RUNTIMES
    # stage, kind, micro_batch, part: of every action, in an order that can run, shape (num_actions,)
    stage: Ints
    kind: Ints
    micro_batch: Ints
    part: Ints
    turn: Ints  # as ``order.turns`` gives it, same shape
    # source, target: actions that make and need each message between stages, shape (num_messages,)
    source: Ints
    target: Ints
    entries: order.Entries  # what ranks do, in an order that can run

    @cached_property
    def unsigned(self) -> order.Entries:
        return self.entries.unsigned()

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def num_actions(self) -> int:
        return len(self.stage)

    @property
    def num_messages(self) -> int:
        return len(self.source)


def find_track(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    virtual_stages: int = 1,
    runtime: str = "asynchronous",
    *,
    flushes: int = 1,
) -> Track:
    """The track of a schedule by its name, or of a user's table."""
    return track(schedule_of(name, num_stages, num_micro_batches, virtual_stages, flushes), runtime)


@cached(256)
def track(schedule: Schedule, runtime: str = "asynchronous") -> Track:
    """The track of a schedule.

    Args:
        schedule: What every stage does.
        runtime: ``asynchronous``: an action asks for its message, waits for it, and its result is sent by the way.
            ``torch``: ``torch.distributed.pipelining`` 2.13 over gloo.  ``deepspeed``: messages in turn, each waited
            for.

    Raises:
        JobError: If the schedule cannot run.
    """
    if runtime not in RUNTIMES:
        raise JobError(f"runtime must be one of {', '.join(RUNTIMES)}, got {runtime!r:.80}")
    actions = order_actions(schedule)
    messages = order.find_messages(actions)
    if runtime == "asynchronous":
        entries = order.asynchronous(actions, messages)
    else:
        entries = (deepspeed_entries if runtime == "deepspeed" else torch_entries)(schedule, actions, messages)
    entries = order.by_end(entries, schedule.num_stages, len(messages.source))
    of_order = actions.stage, actions.kind, actions.micro_batch, actions.part, order.turns(actions)
    return Track(schedule, runtime, *of_order, messages.source, messages.target, entries)


_FEWEST = 8  # periods that are worth testing


@cached(512)
def steady_state(track: Track) -> Steady:
    """Find the longest stretch of a track in which all stages repeat their entries for the next micro-batches."""
    op, stage, item, side = track.entries
    compute = op == order.COMPUTE
    action = np.where(compute, item, 0)
    if track.num_messages:
        action = np.where(compute, action, track.source[np.where(compute, 0, item)])
    pass_ = (track.part * len(KIND_NAMES) + track.kind) * 3 + np.where(track.turn == order.MIDDLE, 0, track.turn + 1)
    what = ((pass_[action] * 3 + op) * 2 + side) * track.num_stages + stage
    each = int((track.micro_batch[action] == track.schedule.num_micro_batches // 2).sum())
    for length in dict.fromkeys((each, each * track.num_stages)):
        if not 0 < length <= len(what) // _FEWEST:
            continue
        same = np.concatenate([[False], what[:-length] == what[length:], [False]]).astype(np.int8)
        stretches = np.flatnonzero(np.diff(same)).reshape(-1, 2)
        if not len(stretches):
            continue
        first, end = stretches[np.diff(stretches).argmax()].tolist()
        periods = (end - first) // length + 1
        if periods >= _FEWEST:
            posts, post = np.zeros((max(track.num_messages, 1), 2), dtype=np.int64), np.flatnonzero(op == order.POST)
            posts[item[post], side[post]] = post
            wait = first + np.flatnonzero(op[first : first + length * periods] == order.WAIT)
            lag = (wait - posts[item[wait]].min(axis=1)).max(initial=0)
            return Steady(first, length, periods, int(lag) // length + 1)
    return Steady()


@dataclass(frozen=True, eq=False)
class TrackRun:
    """One run over a track; seconds."""

    track: Track  # what ran
    # segment, transition: given to run_track
    segment: Ints
    transition: Floats
    clocks: Floats  # at the end, shape (num_stages, K)
    posted: Floats  # when the sender and the receiver of each message were ready, shape (num_messages, 2)
    log: Log  # when actions and messages ran, and why then


def run_track(
    track: Track, segment: Ints, transition: Floats, message_seconds: Floats, host: tuple[float, float] = (0.0, 0.0)
) -> TrackRun:
    """Run all entries of a track; arguments as in ``track_clocks``."""
    state = at_rest(track.num_stages, track.num_messages, transition.shape[1], 0)
    log = new_log(track.num_actions, track.num_messages, transition.shape[1])
    durations = _durations(track, segment, transition, message_seconds, host)
    run_entries(track.unsigned, durations, state, log, (0, len(track.entries.op), APART))
    return TrackRun(track, segment, transition, state.clocks, state.posted, log)


def track_clocks(
    track: Track, segment: Ints, transition: Floats, message_seconds: Floats, host: tuple[float, float] = (0.0, 0.0)
) -> Floats:
    """The clocks at the end of one run or of several, as in ``TrackRun`` up to rounding; skips what repeats.

    Args:
        track: What ranks do in every run.
        segment: Of each action, shape ``(num_actions,)``.
        transition, message_seconds: As in ``Durations``; of several runs with a leading axis.
        host: What the host takes before each action, and to post a side of a message.

    Returns:
        The clocks, shape ``(num_stages, K)``; of several runs with a leading axis.
    """
    one = transition.ndim == 3
    many = (transition[None], message_seconds[None]) if one else (transition, message_seconds)
    clocks = np.zeros((len(many[0]), track.num_stages, transition.shape[-1]))
    run_periods(track.unsigned, _durations(track, segment, *many, host), clocks, steady_state(track))
    return clocks[0] if one else clocks


def end_clocks(entries: order.Entries, durations: Durations) -> Floats:
    """The clocks of all ranks after some of the entries, shape ``(num_ranks, K)``."""
    state = at_rest(len(durations.host), len(durations.message), len(durations.clocks), 0)
    run_entries(entries.unsigned(), durations, state, None, (0, len(entries.op), APART))
    return state.clocks


def through(transition: Floats, clocks: Floats) -> Floats:
    """The clocks after a segment, from those before it, shape ``(..., K)``: the rule of an action, for many ranks at
    once; ``transition``: to clock, from clock, shape ``(..., K, K)``.
    """
    return np.asarray((transition + clocks[..., None, :]).max(axis=-1))


def path_uses(run: TrackRun, stage: int, clock: int = 0) -> tuple[Floats, Floats, float, float]:
    """The critical path that ends at a stage and clock: passages of each segment from clock to clock, shape of
    ``transition``; uses of each message; and the numbers of actions and of posts whose host time counts.

    Times the seconds of each, over the uses that are not 0, they add up to ``run.clocks[stage, clock]``.
    """
    uses = Uses(np.zeros(run.transition.shape), np.zeros(run.track.num_messages), np.zeros(2))
    trace_path(run.track.unsigned, run.segment.view(np.uint32), run.log, (stage, clock), uses)
    return uses.transition, uses.message, float(uses.host[order.COMPUTE]), float(uses.host[order.POST])


def _durations(
    track: Track, segment: Ints, transition: Floats, message_seconds: Floats, host: tuple[float, float]
) -> Durations:
    of_stages, numbers = np.full((track.num_stages, 2), host), tuple(range(transition.shape[-1]))
    return Durations(segment.view(np.uint32), transition, message_seconds, of_stages, numbers)
