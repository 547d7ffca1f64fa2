"""Emulated scripts whose layers sleep, against closed forms: the sweep of NeuronaBox's Figure 4.

The step is flat while computation hides communication, and then has slope 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepsight.experiments.tasks.scripts import emulate
from stepsight.experiments.tasks.settings import Emulation

SCRIPT = Path(__file__).with_name("sleeping_layers.py")
LAYERS, VALUES = 8, 300_000  # a bucket holds the gradient of a layer
FORWARD_S, BACKWARD_S = 0.5, 1.0


def ddp_seconds(forward_s: float, backward_s: float, bucket_s: float) -> float:
    """Step of DDP in closed form: each layer's gradient is reduced when it is ready and the link is free."""
    now, free = LAYERS * forward_s, 0.0
    for _ in range(LAYERS):
        now += backward_s
        free = max(free, now) + bucket_s
    return max(now, free)


def fsdp2_seconds(forward_s: float, backward_s: float, collective_s: float) -> float:
    """Step of FSDP2 in closed form, if each all-gather and reduce-scatter takes the same time.

    One link carries both, in the order in which the host issues them.  Forward, the all-gather of a layer runs beside
    the layer before it; that of the last layer's backward runs beside its forward.  Backward, the all-gather of the
    next layer is issued when a layer begins, and the reduce-scatter when it ends; a layer ends when the reduce-scatter
    before it has.
    """
    link, now, begins = 0.0, 0.0, [0.0, 0.0]
    for _ in range(LAYERS):
        link = max(link, begins[-2]) + collective_s
        begins.append(max(now, link))
        now = begins[-1] + forward_s
    link += collective_s
    gathered, scattered = link, 0.0
    for layer in reversed(range(LAYERS)):
        begin = max(now, gathered)
        if layer:
            gathered = link = max(link, begin) + collective_s
        now = max(begin + backward_s, scattered)
        scattered = link = max(link, now) + collective_s
    return max(now, link)


@pytest.mark.parametrize(
    ("mode", "closed", "seconds", "ranks"),
    [
        ("ddp", ddp_seconds, 0.5, (3, 8)),
        ("ddp", ddp_seconds, 1.5, (3, 8)),
        ("fsdp2", fsdp2_seconds, 0.2, (3,)),
        ("fsdp2", fsdp2_seconds, 0.7, (3,)),
    ],
)
def test_virtual_steps_take_what_the_closed_form_says(
    mode: str, closed: Callable[[float, float, float], float], seconds: float, ranks: tuple[int, ...]
) -> None:
    """Ranks of 64, two with DDP; what the host computes itself comes on top."""
    words = [mode, str(LAYERS), str(FORWARD_S), str(BACKWARD_S), str(VALUES)]
    world = Emulation(world_size=64, ranks=ranks, virtual=True, rounds=1, steps=2)
    found = emulate(SCRIPT, words, world, lambda collective: seconds, progress=False)
    assert found["iteration_s"] == pytest.approx(closed(FORWARD_S, BACKWARD_S, seconds), rel=0.03)
    kinds = {each["kind"]: each["calls_per_step"] for each in found["collectives"]}
    assert kinds == ({"all_reduce": 8} if mode == "ddp" else {"all_gather": 16, "reduce_scatter": 8})


def test_ddp_hides_communication_until_it_outlasts_the_backward_pass() -> None:
    """Flat, but for the last bucket, and then with slope 1; the knee is where the backward pass ends."""
    backward = LAYERS * BACKWARD_S
    steps = [ddp_seconds(FORWARD_S, BACKWARD_S, total / LAYERS) for total in (0, backward, 2 * backward)]
    assert steps == pytest.approx([12, 13, 21])
