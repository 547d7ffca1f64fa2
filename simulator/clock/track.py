"""A schedule as the entries of its ranks, in one order that can run; computed once for all jobs.

A run of it says when every action and message of an iteration runs, and what the critical path is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached, compiled
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.specs import RUNTIMES
from stepsight.simulator.clock.engine import Floats, Ints
from stepsight.simulator.clock.kernel import (
    APART,
    Durations,
    Log,
    Steady,
    Uses,
    at_rest,
    new_log,
    run_entries,
    run_periods,
    trace_path,
)
from stepsight.simulator.schedules import KIND_NAMES, Order, Schedule, order_actions, schedule_of
from stepsight.simulator.schedules.order import COMPUTE, POST, WAIT, Entries, asynchronous, find_messages
from stepsight.simulator.schedules.runtimes import deepspeed_entries, torch_entries

FIRST, MIDDLE, LAST = range(3)


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
    # FIRST for the first time that a part runs this pass, LAST for the last time (also if it is the first), MIDDLE
    # between; same shape.  Passes are forwards, split input gradients, and backwards that give weight gradients (B and
    # W together).
    turn: Ints
    # source, target: actions that make and need each message between stages, shape (num_messages,)
    source: Ints
    target: Ints
    entries: Entries  # what ranks do, in an order that can run

    @cached_property
    def unsigned(self) -> Entries:
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
    order = order_actions(schedule)
    messages = find_messages(order)
    if runtime == "asynchronous":
        entries = asynchronous(order, messages)
    else:
        entries = (deepspeed_entries if runtime == "deepspeed" else torch_entries)(schedule, order, messages)
    # Sorted by end times as if all actions took equally long, so that repeating parts repeat for each micro-batch.
    ends = np.empty(len(entries.op), dtype=np.int64)
    _count_ticks(entries, schedule.num_stages, len(messages.source), ends)
    by_end = np.argsort(ends * schedule.num_stages + entries.stage, kind="stable")  # sorted runs: merging is faster
    entries = Entries(*(field[by_end] for field in entries))
    of_order = order.stage, order.kind, order.micro_batch, order.part, _turns(order)
    return Track(schedule, runtime, *of_order, messages.source, messages.target, entries)


ACTION = 2**20  # ticks


@compiled
def _count_ticks(entries: Entries, num_stages: int, num_messages: int, ends: NDArray[np.int64]) -> None:
    """Give every entry a tick later than the ticks of its dependencies.

    An action ends at the next multiple of ``ACTION``, a post or a wait one tick later, so that the ticks of one round
    of actions differ from those of the round before by ``ACTION`` alone.  This is an order, not a time.
    """
    op, stage, item, side = entries
    clocks, posted = np.zeros(num_stages, dtype=np.int64), np.zeros((num_messages, 2), dtype=np.int64)
    for entry in range(len(op)):
        at, s = item[entry], stage[entry]
        if op[entry] == WAIT:
            clocks[s] = max(clocks[s], posted[at, 0], posted[at, 1])
        clocks[s] = (clocks[s] // ACTION + 1) * ACTION if op[entry] == COMPUTE else clocks[s] + 1
        if op[entry] == POST:
            posted[at, side[entry]] = clocks[s]
        ends[entry] = clocks[s]


def _turns(order: Order) -> Ints:
    group = order.part * 3 + np.array([0, 2, 1, 2], dtype=np.int32)[order.kind]
    numbers = np.arange(len(order))
    first = np.zeros(int(group.max()) + 1, dtype=np.int64)
    last = first.copy()
    first[group[::-1]] = numbers[::-1]  # the last write wins
    last[group] = numbers
    turn = np.full(len(order), MIDDLE, dtype=np.int32)
    turn[first[group]] = FIRST
    turn[last[group]] = LAST
    return turn


_FEWEST = 8  # periods that are worth testing


@cached(512)
def steady_state(track: Track) -> Steady:
    """Find the longest stretch of a track in which all stages repeat their entries for the next micro-batches."""
    compute = track.entries.op == COMPUTE
    action = np.where(compute, track.entries.item, 0)
    if track.num_messages:
        action = np.where(compute, action, track.source[np.where(compute, 0, track.entries.item)])
    pass_ = (track.part * len(KIND_NAMES) + track.kind) * 3 + np.where(track.turn == MIDDLE, 0, track.turn + 1)
    what = ((pass_[action] * 3 + track.entries.op) * 2 + track.entries.side) * track.num_stages + track.entries.stage
    micro_batch = track.micro_batch[action]
    each = int((micro_batch == track.schedule.num_micro_batches // 2).sum())
    for length in dict.fromkeys((each, each * track.num_stages)):
        if not 0 < length <= len(what) // _FEWEST:
            continue
        first, repeats = _longest(what[:-length] == what[length:])
        periods = repeats // length + 1
        if periods >= _FEWEST:
            return Steady(first, length, periods, _lag(track, first, length, periods))
    return Steady()


def _longest(same: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the start and the length of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(np.argmax(lengths))
    return int(edges[2 * at]), int(lengths[at])


def _lag(track: Track, first: int, length: int, periods: int) -> int:
    posts = np.zeros((max(track.num_messages, 1), 2), dtype=np.int64)
    numbers = np.arange(len(track.entries.op))
    post = track.entries.op == POST
    posts[track.entries.item[post], track.entries.side[post]] = numbers[post]
    wait = (track.entries.op == WAIT) & (numbers >= first) & (numbers < first + length * periods)
    if not wait.any():
        return 1
    return int((numbers[wait] - posts[track.entries.item[wait]].min(axis=1)).max()) // length + 1


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


def end_clocks(entries: Entries, durations: Durations) -> Floats:
    """The clocks of all ranks after some of the entries, shape ``(num_ranks, K)``."""
    state = at_rest(len(durations.host), len(durations.message), len(durations.clocks), 0)
    run_entries(entries.unsigned(), durations, state, None, (0, len(entries.op), APART))
    return state.clocks


def through(transition: Floats, clocks: Floats) -> Floats:
    """The clocks after a segment: the rule of an action, for many ranks at once.

    Args:
        transition: To clock, from clock, shape ``(..., K, K)``.
        clocks: Before it, shape ``(..., K)``.
    """
    after: Floats = (transition + clocks[..., None, :]).max(axis=-1)
    return after


def path_uses(run: TrackRun, stage: int, clock: int = 0) -> tuple[Floats, Floats, float, float]:
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
    of_stages, numbers = np.full((track.num_stages, 2), host), tuple(range(transition.shape[-1]))
    return Durations(segment.view(np.uint32), transition, message_seconds, of_stages, numbers)
