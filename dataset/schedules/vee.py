"""Schedules of two chunks placed in a V, down the stages and up again: ZBV and DualPipeV.

Letters: ``F0`` is a forward of the first chunk, ``I1`` an input gradient of the second.
"""

from __future__ import annotations

import numpy as np

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.schedules.base import (
    B,
    F,
    I,
    Schedule,
    ScheduleKind,
    W,
    letters,
    number_actions,
    spell,
    v_placement,
)

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
