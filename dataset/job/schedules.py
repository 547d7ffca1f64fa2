"""Pipeline schedules as data: for every stage the order in which it runs its actions.

One format for all: an array of rows ``(kind, micro_batch, chunk)`` per stage.  A chunk is one of the stage's virtual
stages; ``placement`` says which stage and chunk hold the model's n-th part.  Built-in schedules are made as words of
letters, which are numbered afterwards.

A schedule is declared once, as a ``ScheduleKind``: a built-in one in the table below, a user's with
``SCHEDULES.register(name, ScheduleKind(make))`` or with an entry point of the group ``stepsight.schedules``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import Registry, check_takes, instance_of

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
KIND_NAMES = ("F", "B", "I", "W")

Actions = NDArray[np.int32]
Ints = NDArray[np.int32]

# Letters of the words that builders write: a kind, for V-shaped schedules with its chunk.
F, B, I, W = (bytes([kind]) for kind in range(4))  # noqa: E741
CHUNK_SHIFT = 2
FUSED = 0x80  # this action and the next one are one of torch's OVERLAP_F_B


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every stage does, in order."""

    actions: tuple[Actions, ...]  # per stage an int32 array of shape (num_actions, 3): kind, micro-batch, chunk
    num_micro_batches: int  # of one iteration
    placement: Ints  # shape (num_parts, 2): stage and chunk of every part of the model, in model order
    name: str = ""  # for people, and for runtimes that run some schedules in their own way
    # Per stage, shape (num_actions,): whether an action and the next one run as one (DualPipe's overlapped forward and
    # backward); empty if nowhere.
    fused: tuple[NDArray[np.bool_], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.actions)

    @property
    def num_parts(self) -> int:
        return len(self.placement)

    @property
    def virtual_stages(self) -> int:
        """Chunks of the stage that has the most."""
        return int(self.placement[:, 1].max()) + 1

    @property
    def part_of(self) -> Ints:
        """Part of the model that a stage's chunk holds, shape ``(num_stages, num_chunks)``; -1 where there is none."""
        part = np.full((self.num_stages, self.virtual_stages), -1, dtype=np.int32)
        part[self.placement[:, 0], self.placement[:, 1]] = np.arange(self.num_parts)
        return part


MOST_VIRTUAL_STAGES = 1024
_SIZES = ("num_stages", "num_micro_batches", "virtual_stages")


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A kind of schedule that jobs name: everything that the rest of the package knows about it.

    ``make`` takes the number of stages (two or more), of micro-batches and of virtual stages, and returns the schedule.
    It raises ``JobError`` for numbers that it does not allow.
    """

    make: Callable[[int, int, int], Schedule]
    virtual_stages: tuple[int, int] = (1, 1)  # the fewest and the most that it allows
    doc: str = ""  # one line for people; empty: the first line of the docstring of make

    def __post_init__(self) -> None:
        check_takes("a schedule's make", self.make, _SIZES, JobError)
        pair = self.virtual_stages
        two = isinstance(pair, tuple) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not two or not 1 <= pair[0] <= pair[1] <= MOST_VIRTUAL_STAGES:
            rule = f"(fewest, most) with 1 <= fewest <= most <= {MOST_VIRTUAL_STAGES}"
            raise JobError(f"a schedule's virtual_stages must be {rule}, got {pair}")
        if not self.doc:
            object.__setattr__(self, "doc", (self.make.__doc__ or "").strip().partition("\n")[0])

    def allows(self, virtual_stages: int) -> bool:
        """Whether that many virtual stages are allowed."""
        return self.virtual_stages[0] <= virtual_stages <= self.virtual_stages[1]

    @property
    def allowed(self) -> str:
        """The rule for virtual stages, for messages."""
        fewest, most = self.virtual_stages
        return f"= {fewest}" if fewest == most else f"from {fewest} to {most}"

    def build(self, name: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
        """Make a schedule, under the name by which a job asked for it."""
        if not self.allows(virtual_stages):
            raise JobError(f"schedule {name} has virtual_stages {self.allowed}, got {virtual_stages}")
        try:
            made = self.make(num_stages, num_micro_batches, virtual_stages)
        except Exception as error:  # a user's own function may raise anything
            if isinstance(error, JobError):
                raise
            raise JobError(f"schedule {name} cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(made, Schedule):
            raise JobError(f"schedule {name} must be made as a Schedule, got {made!r:.80}")
        _check_arrays(name, made)
        asked, got = (num_stages, num_micro_batches, virtual_stages), tuple(getattr(made, size) for size in _SIZES)
        if got != asked:
            told = "the stages, micro-batches and virtual stages that were asked for"
            raise JobError(f"schedule {name} must have {told}, {asked}, got {got}")
        return made if made.name == name else replace(made, name=name)


def _check_arrays(name: str, made: Schedule) -> None:
    """Check the types and shapes of a schedule's arrays, and that each part has a place of its own."""
    for what, rows, columns in (
        *((f"actions of stage {stage}", rows, 3) for stage, rows in enumerate(made.actions)),
        ("placement", made.placement, 2),
    ):
        right = isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == columns and len(rows) > 0
        if not right or rows.dtype.kind not in "iu":
            told = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else f"{rows!r:.80}"
            raise JobError(f"schedule {name}: {what} must be whole numbers of shape (n, {columns}), got {told}")
    places = made.placement
    if places.min() < 0 or places[:, 0].max() >= made.num_stages or len(set(map(tuple, places.tolist()))) < len(places):
        rule = f"placement must give every part a stage < {made.num_stages} and a chunk >= 0 of its own"
        raise JobError(f"schedule {name}: {rule}, got {places.tolist()!s:.80}")
    if not isinstance(made.fused, tuple) or len(made.fused) not in (0, made.num_stages):
        raise JobError(f"schedule {name}: fused must be empty or hold an array for each stage, got {made.fused!r:.80}")


def loop_placement(num_stages: int, virtual_stages: int = 1) -> Ints:
    """Part ``p`` on stage ``p % num_stages``: after the last stage the model goes on with the first."""
    chunk, stage = np.divmod(np.arange(num_stages * virtual_stages, dtype=np.int32), num_stages)
    return np.stack([stage, chunk], axis=1)


def v_placement(num_stages: int) -> Ints:
    """Down the stages and up again: the first stage holds the first part and the last."""
    stages = np.arange(num_stages, dtype=np.int32)
    chunks = np.repeat(np.arange(2, dtype=np.int32), num_stages)
    return np.stack([np.concatenate([stages, stages[::-1]]), chunks], axis=1)


def letters(kind: bytes, chunk: int, fused: bool = False) -> bytes:
    """The letter of an action of a chunk."""
    return bytes([kind[0] | chunk << CHUNK_SHIFT | (FUSED if fused else 0)])


def number_actions(kind: Ints, chunk: Ints, lengths: Sequence[int]) -> tuple[Ints, ...]:
    """Number the actions of all stages with micro-batches.

    On every stage and chunk forwards run the micro-batches in their order, and so do backwards, whole or split; the
    n-th weight gradient belongs to the n-th split input gradient.

    Kind and chunk are those of all actions, stage after stage, shape ``(n,)``; ``lengths`` are actions of each stage.
    Returns per stage the rows ``(kind, micro_batch, chunk)``.
    """
    stage = np.repeat(np.arange(len(lengths)), lengths)
    group = (stage * (int(chunk.max()) + 1) + chunk) * 3 + np.array([0, 1, 1, 2])[kind]
    rows = np.empty((len(kind), 3), dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = kind, _count(group), chunk
    if (kind == BACKWARD).any() and (kind == BACKWARD_INPUT).any():
        split, weight = kind == BACKWARD_INPUT, kind == BACKWARD_WEIGHT
        inputs = np.flatnonzero(split)[np.argsort(group[split], kind="stable")]
        weights = np.flatnonzero(weight)[np.argsort(group[weight], kind="stable")]
        rows[weights, 1] = rows[inputs, 1]
    return tuple(np.split(rows, np.cumsum(lengths)[:-1]))


def _count(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of its group come before each element."""
    small = group.astype(np.uint16) if group.max() < 1 << 16 else group  # 16 bits sort by radix
    order = np.argsort(small, kind="stable")
    first = np.flatnonzero(np.diff(small[order], prepend=-1))
    count = np.arange(len(group))
    count -= np.repeat(first, np.diff(first, append=len(group)))
    out = np.empty_like(count)
    out[order] = count
    return out


def spell(words: Sequence[bytes]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Kind, chunk and fused-with-the-next of every letter, word after word."""
    code = np.frombuffer(b"".join(words), dtype=np.uint8)
    kind = (code & 3).astype(np.int32)
    return kind, ((code & ~np.uint8(FUSED)) >> CHUNK_SHIFT).astype(np.int32), code >= FUSED


def gpipe(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Every forward, then every backward (Huang et al. 2019, arXiv:1811.06965), in the order of micro-batches."""
    return _looped([F * num_micro_batches + B * num_micro_batches] * num_stages, num_micro_batches, 1, 1, "gpipe")


def one_f_one_b(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn (Narayanan et al. 2021, arXiv:2104.04473).

    With several virtual stages interleaved: rounds of as many micro-batches as stages go through the chunks.
    """
    total = num_micro_batches * virtual_stages
    in_round = _round(num_stages, num_micro_batches, virtual_stages, "1f1b")
    words = []
    for ahead in reversed(range(num_stages)):
        warm_up = min(ahead if virtual_stages == 1 else 2 * ahead + (virtual_stages - 1) * in_round, total)
        words.append(F * warm_up + (F + B) * (total - warm_up) + B * warm_up)
    return _looped(words, num_micro_batches, virtual_stages, in_round, "1f1b")


def looped_bfs(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Breadth-first (Lamy-Poirier 2022, arXiv:2211.05953): a chunk runs all its micro-batches before the next does.

    Backwards take the last micro-batch first, as torch does.
    """
    total = num_micro_batches * virtual_stages
    words = [F * total + B * total] * num_stages
    schedule = _looped(words, num_micro_batches, virtual_stages, num_micro_batches, "looped-bfs")
    for rows in schedule.actions:
        rows[total:, 1] = num_micro_batches - 1 - rows[total:, 1]
    return schedule


def zero_bubble(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Zero-bubble H1 (Qi et al. 2023, arXiv:2401.10241, section 3).

    1F1B with the backward split: a stage's weight gradients lag behind its input gradients by as many micro-batches as
    its warm-up is shorter than the first stage's.  So all stages keep as many micro-batches as 1F1B's first does, and
    the weight gradients that are left fill the end.
    """
    name = "zb-h1" if virtual_stages == 1 else "interleaved-zb"
    total = num_micro_batches * virtual_stages
    in_round = _round(num_stages, num_micro_batches, virtual_stages, name)
    words = []
    for stage in range(num_stages):
        warm_up = min((virtual_stages - 1) * in_round + num_stages - stage - 1, total)
        steady, lag = total - warm_up, min(stage, total)
        early = min(lag, steady)  # pairs of forward and input gradient before the first weight gradient
        late = lag - early  # input gradients alone before it, where the forwards run out first
        words.append(
            F * warm_up + (F + I) * early + (F + I + W) * (steady - early)
            + I * late + (I + W) * (warm_up - late) + W * lag
        )  # fmt: skip
    return _looped(words, num_micro_batches, virtual_stages, in_round, name)


def _round(num_stages: int, num_micro_batches: int, virtual_stages: int, name: str) -> int:
    """Micro-batches that go through a chunk before the next one's turn."""
    if virtual_stages == 1:
        return num_micro_batches
    rounds = max(1, num_micro_batches // num_stages)
    if num_micro_batches % rounds:
        rule = f"schedule {name} runs micro-batches in equal rounds of at least one per stage"
        found = f"{num_micro_batches} % ({num_micro_batches} // {num_stages}) = {num_micro_batches % rounds}"
        raise JobError(f"{rule}: num_micro_batches % (num_micro_batches // pp) must be 0, got {found}")
    return num_micro_batches // rounds


def _looped(words: list[bytes], num_micro_batches: int, virtual_stages: int, in_round: int, name: str) -> Schedule:
    """The schedule of these words; every ``in_round`` actions of a kind the next chunk's turn comes."""
    kind, chunk, _ = spell(words)
    if virtual_stages > 1:
        turn = np.arange(num_micro_batches * virtual_stages, dtype=np.int32) // in_round % virtual_stages
        for number in np.unique(kind).tolist():  # all stages have as many actions of a kind, or none
            where = kind == number
            turns = turn if number == FORWARD else virtual_stages - 1 - turn
            chunk[where] = np.tile(turns, np.count_nonzero(where) // len(turn))
    actions = number_actions(kind, chunk, [len(word) for word in words])
    return Schedule(actions, num_micro_batches, loop_placement(len(words), virtual_stages), name)


F0, F1, B0, B1, I0, I1, W0, W1 = (letters(kind, chunk) for kind in (F, B, I, W) for chunk in range(2))
FORWARD_WITH = letters(F, 0, fused=True) + B1, letters(F, 1, fused=True) + B0  # one action: F0 with B1, F1 with B0
AS_WEIGHT = bytes.maketrans(I0 + I1, W0 + W1)


def zbv(num_stages: int, num_micro_batches: int, virtual_stages: int = 2) -> Schedule:
    """Zero-bubble V (Qi et al. 2023, arXiv:2401.10241, section 6), in the order of torch's ``ScheduleZBVZeroBubble``.

    It is laid out for at least ``2 * num_stages - 1`` micro-batches; those there are not are left out.
    """
    filled = max(2 * num_stages - 1, num_micro_batches)
    words = []
    for stage in range(num_stages):
        below = num_stages - stage  # stages from here to the turn
        warm_up = F0 * (2 * below - 1) + (F1 + F0) * stage + (F1 + I1 + W1) * below
        both = filled - (2 * below - 1) - stage
        steady = (F0 + I0 + W0 + F1 + I1 + W1) * both + (I0 + W0 + F1 + I1 + W1) * (below - 1)
        words.append(warm_up + steady + (I0 + I1) * stage + (I0 + W0) * below + W1 * stage + W0 * stage)
    return _vee(words, num_micro_batches, "zbv")


def dualpipev(num_stages: int, num_micro_batches: int, virtual_stages: int = 2) -> Schedule:
    """DualPipeV (DeepSeek 2025, github.com/deepseek-ai/DualPipe), in the order of torch's ``ScheduleDualPipeV``.

    Its overlapped pairs are a forward and then a backward here, marked as ``fused``.
    """
    if num_micro_batches < 2 * num_stages:
        found = f"{num_micro_batches} < 2 * {num_stages} = {2 * num_stages}"
        raise JobError(f"schedule dualpipev needs num_micro_batches >= 2 * pp, got {found}")
    words = []
    for stage in range(num_stages):
        below = num_stages - stage - 1
        main = (FORWARD_WITH[0] + FORWARD_WITH[1]) * (num_micro_batches - 2 * num_stages + stage + 1)
        if below == 0:  # the turn of the V starts with a pair that is not overlapped
            main = F0 + main[1:]
        # Backwards after the last forward, the later half of them split, and the weight gradients that were put off.
        # Splitting starts with the second chunk on odd stages and with the first on even ones.
        half, odd = divmod(stage + 1, 2)
        turn = (B1 + B0) * half + (B1 + I0) * odd + (I1 + I0) * (stage + 1 - half - odd)
        delayed = (turn + I0 * below).translate(AS_WEIGHT, delete=B0 + B1)
        ending = turn + b"".join(delayed[at : at + 1] + I0 for at in range(below))
        words.append(
            F0 * (2 * below) + (F0 + F1) * (stage + 1) + (I1 + W1 + F1) * below
            + main + (B1 + FORWARD_WITH[1]) * below + ending + delayed[below:]
        )  # fmt: skip
    return _vee(words, num_micro_batches, "dualpipev")


def _vee(words: list[bytes], num_micro_batches: int, name: str) -> Schedule:
    kind, chunk, fused = spell(words)
    lengths = [len(word) for word in words]
    actions = number_actions(kind, chunk, lengths)
    overlapped = tuple(np.split(fused, np.cumsum(lengths)[:-1])) if fused.any() else ()
    if name == "zbv":
        actions = tuple(rows[rows[:, 1] < num_micro_batches] for rows in actions)
    return Schedule(actions, num_micro_batches, v_placement(len(words)), name, overlapped)


_INTERLEAVED = "Zero-bubble H1 over several chunks of a stage in rounds, as ``ScheduleInterleavedZeroBubble`` of torch."
SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedule",
    {
        "gpipe": ScheduleKind(gpipe),
        "1f1b": ScheduleKind(one_f_one_b, (1, MOST_VIRTUAL_STAGES)),  # more than one: interleaved
        "looped-bfs": ScheduleKind(looped_bfs, (1, MOST_VIRTUAL_STAGES)),
        "zb-h1": ScheduleKind(zero_bubble),
        "interleaved-zb": ScheduleKind(zero_bubble, (2, MOST_VIRTUAL_STAGES), _INTERLEAVED),
        "zbv": ScheduleKind(zbv, (2, 2)),
        "dualpipev": ScheduleKind(dualpipev, (2, 2)),
    },
    group="stepsight.schedules",
    check=instance_of(ScheduleKind),
    error=JobError,
    more="a .csv file of actions",
)


@cached(256)
def find_schedule(name: str, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Find the schedule of that name; with a single stage, forward and backward of every micro-batch alternate.

    Raises:
        JobError: If there is none of that name, or it does not allow these numbers.
    """
    kind, chunks = SCHEDULES[name], np.arange(virtual_stages, dtype=np.int32)
    if num_stages > 1:
        return kind.build(name, num_stages, num_micro_batches, virtual_stages)
    kinds, _, _ = spell([(F * virtual_stages + B * virtual_stages) * num_micro_batches])
    actions = number_actions(kinds, np.tile(np.concatenate([chunks, chunks[::-1]]), num_micro_batches), [len(kinds)])
    return Schedule(actions, num_micro_batches, loop_placement(1, virtual_stages), name)
