"""Emulated scripts against closed forms."""

from __future__ import annotations

import pytest

from stepsight.experiments.studies.emulation import (
    LAYERS,
    SCRIPT,
    VALUES,
    ddp_seconds,
    expected_knee,
    fsdp2_seconds,
    knee,
)
from stepsight.experiments.tasks.scripts import emulate
from stepsight.experiments.tasks.settings import Emulation

FORWARD_S, BACKWARD_S = 0.5, 1.0


@pytest.mark.parametrize(
    ("mode", "closed", "seconds", "ranks"), [("ddp", ddp_seconds, 1.5, (3, 8)), ("fsdp2", fsdp2_seconds, 0.7, (3,))]
)
def test_virtual_steps_take_what_the_closed_form_says(
    mode: str, closed: object, seconds: float, ranks: tuple[int, ...]
) -> None:
    """Ranks of 64, two with DDP; what the host computes itself comes on top."""
    words = [mode, str(LAYERS), str(FORWARD_S), str(BACKWARD_S), str(VALUES)]
    world = Emulation(world_size=64, ranks=ranks, virtual=True, rounds=1, steps=2)
    found = emulate(SCRIPT, words, world, lambda collective: seconds, progress=False)
    assert callable(closed)
    assert found["iteration_s"] == pytest.approx(closed(FORWARD_S, BACKWARD_S, seconds), rel=0.03)
    kinds = {each["kind"]: each["calls_per_step"] for each in found["collectives"]}
    assert kinds == ({"all_reduce": 8} if mode == "ddp" else {"all_gather": 16, "reduce_scatter": 8})


def test_ddp_hides_communication_until_it_outlasts_the_backward_pass() -> None:
    """Flat, but for the last bucket, and then with slope 1; the knee is where the backward pass ends."""
    backward = LAYERS * BACKWARD_S
    steps = [ddp_seconds(FORWARD_S, BACKWARD_S, total / LAYERS) for total in (0, backward, 2 * backward)]
    assert steps == pytest.approx([12, 13, 21])


def test_the_knee_is_found_where_the_closed_form_has_it() -> None:
    rows = [
        {"communication_s": total, "step_s": ddp_seconds(FORWARD_S, BACKWARD_S, total / LAYERS)}
        for total in (0, 4, 8, 12, 16)
    ]
    assert knee(rows) == pytest.approx(expected_knee(FORWARD_S))
