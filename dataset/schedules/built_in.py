"""Schedules of one pass or looped passes over the stages: GPipe, 1F1B, breadth-first, zero-bubble H1, interleaved.

Every one is a word per stage (forwards, backwards …), and for several chunks the order in which a stage goes through
them, which is the same on all stages.

Schedules of two chunks placed in a V, down the stages and up again: ZBV and DualPipeV.

Letters: ``F0`` is a forward of the first chunk, ``I1`` an input gradient of the second.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.schedules.base import (
    FORWARD,
    MOST_VIRTUAL_STAGES,
    B,
    F,
    I,
    Ints,
    Schedule,
    ScheduleKind,
    W,
    letters,
    loop_placement,
    number_actions,
    spell,
    v_placement,
)


def alternate(num_micro_batches: int, virtual_stages: int, name: str) -> Schedule:
    """A single stage: every micro-batch forward and backward in turn."""
    chunks = np.arange(virtual_stages, dtype=np.int32)
    kind, _, _ = spell([(F * virtual_stages + B * virtual_stages) * num_micro_batches])
    chunk = np.tile(np.concatenate([chunks, chunks[::-1]]), num_micro_batches)
    actions = number_actions(kind, chunk, [len(kind)])
    return Schedule(actions, num_micro_batches, loop_placement(1, virtual_stages), name)


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
    for stage in range(num_stages):
        ahead = num_stages - stage - 1
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


def zb_h1(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Zero-bubble H1 (Qi et al. 2023, arXiv:2401.10241, section 3).

    1F1B with the backward split: a stage's weight gradients lag behind its input gradients by as many micro-batches as
    its warm-up is shorter than the first stage's.  So all stages keep as many micro-batches as 1F1B's first does, and
    the weight gradients that are left fill the end.
    """
    return _zero_bubble(num_stages, num_micro_batches, 1, "zb-h1")


def interleaved_zb(num_stages: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Zero-bubble H1 over several chunks of a stage in rounds, as ``ScheduleInterleavedZeroBubble`` of torch."""
    return _zero_bubble(num_stages, num_micro_batches, virtual_stages, "interleaved-zb")


def _zero_bubble(num_stages: int, num_micro_batches: int, virtual_stages: int, name: str) -> Schedule:
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
        raise JobError(
            f"schedule {name} runs micro-batches in equal rounds of at least one per stage: "
            "num_micro_batches % (num_micro_batches // pp) must be 0, "
            f"got {num_micro_batches} % ({num_micro_batches} // {num_stages}) = {num_micro_batches % rounds}"
        )
    return num_micro_batches // rounds


def _looped(words: list[bytes], num_micro_batches: int, virtual_stages: int, in_round: int, name: str) -> Schedule:
    """The schedule of these words; every ``in_round`` actions of a kind the next chunk's turn comes."""
    kind, chunk, _ = spell(words)
    if virtual_stages > 1:
        turn = np.arange(num_micro_batches * virtual_stages, dtype=np.int32) // in_round % virtual_stages
        for number in range(4):
            _fill(chunk, kind == number, turn if number == FORWARD else virtual_stages - 1 - turn)
    actions = number_actions(kind, chunk, [len(word) for word in words])
    return Schedule(actions, num_micro_batches, loop_placement(len(words), virtual_stages), name)


def _fill(chunk: Ints, where: NDArray[np.bool_], turn: Ints) -> None:
    """Set the chunks of one kind: all stages have as many actions of it, or none."""
    count = int(np.count_nonzero(where))
    if count:
        chunk[where] = np.tile(turn, count // len(turn))


LOOPED_SCHEDULES = {
    "gpipe": ScheduleKind(gpipe),
    "1f1b": ScheduleKind(one_f_one_b, (1, MOST_VIRTUAL_STAGES)),  # more than one: interleaved
    "looped-bfs": ScheduleKind(looped_bfs, (1, MOST_VIRTUAL_STAGES)),
    "zb-h1": ScheduleKind(zb_h1),
    "interleaved-zb": ScheduleKind(interleaved_zb, (2, MOST_VIRTUAL_STAGES)),
}


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
        raise JobError(
            "schedule dualpipev needs num_micro_batches >= 2 * pp, "
            f"got {num_micro_batches} < 2 * {num_stages} = {2 * num_stages}"
        )
    words = []
    for stage in range(num_stages):
        below = num_stages - stage - 1
        main = (FORWARD_WITH[0] + FORWARD_WITH[1]) * (num_micro_batches - 2 * num_stages + stage + 1)
        if below == 0:  # the turn of the V starts with a pair that is not overlapped
            main = F0 + main[1:]
        ending, delayed = _ending(stage, below)
        words.append(
            F0 * (2 * below)
            + (F0 + F1) * (stage + 1)
            + (I1 + W1 + F1) * below
            + main
            + (B1 + FORWARD_WITH[1]) * below
            + ending
            + delayed[below:]
        )
    return _vee(words, num_micro_batches, "dualpipev")


def _ending(stage: int, below: int) -> tuple[bytes, bytes]:
    """Backwards after the last forward, the later half of them split, and the weight gradients that were put off."""
    half, odd = divmod(stage + 1, 2)
    # Splitting starts with the second chunk on odd stages and with the first on even ones.
    turn = (B1 + B0) * half + (B1 + I0) * odd + (I1 + I0) * (stage + 1 - half - odd)
    delayed = (turn + I0 * below).translate(AS_WEIGHT, delete=B0 + B1)
    between = b"".join(delayed[at : at + 1] + I0 for at in range(below))
    return turn + between, delayed


def _vee(words: list[bytes], num_micro_batches: int, name: str) -> Schedule:
    kind, chunk, fused = spell(words)
    lengths = [len(word) for word in words]
    actions = number_actions(kind, chunk, lengths)
    overlapped = tuple(np.split(fused, np.cumsum(lengths)[:-1])) if fused.any() else ()
    if name == "zbv":
        actions = tuple(rows[rows[:, 1] < num_micro_batches] for rows in actions)
    return Schedule(actions, num_micro_batches, v_placement(len(words)), name, overlapped)


V_SCHEDULES = {"zbv": ScheduleKind(zbv, (2, 2)), "dualpipev": ScheduleKind(dualpipev, (2, 2))}
