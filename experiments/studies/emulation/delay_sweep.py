"""The step of a script on rank 0 of 256 over the time of its communication: hidden at first, then exposed.

The sweep of NeuronaBox's Figure 4, on layers that sleep: what a step must take is known in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.experiments.tasks.emulating import Emulation, emulate

SCRIPT = Path(__file__).parent / "sleeping_script.py"
WORLD, LAYERS, VALUES = 256, 8, 300_000  # a bucket holds the gradient of a layer
SHARES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)  # of the time of the backward pass


def ddp_seconds(forward_s: float, backward_s: float, bucket_s: float) -> float:
    """Step of DDP in closed form: each layer's gradient is reduced when it is ready and the link is free.

    Args:
        forward_s: Of a layer.
        backward_s: Of a layer.
        bucket_s: Of one all-reduce.
    """
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


def knee(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The share from which communication is exposed, from the sweep alone.

    Args:
        rows: ``communication_s`` and ``step_s``, in ascending order; at least the last two lie beyond the knee.

    Returns:
        ``flat_s`` (the step without communication), ``slope`` (of the last two rows) and ``knee_s``: the communication
        at which the line through the last row with that slope meets the flat one.
    """
    flat, (before, last) = rows[0]["step_s"], rows[-2:]
    slope = (last["step_s"] - before["step_s"]) / (last["communication_s"] - before["communication_s"])
    return {
        "flat_s": flat,
        "slope": slope,
        "knee_s": last["communication_s"] - (last["step_s"] - flat) / slope if slope > 0 else math.inf,
    }


def expected_knee(forward_s: float) -> dict[str, float]:
    """The knee of DDP's sweep in closed form: all buckets except the first wait for the link instead of their
    gradients.

    From there on the step is forward, the first layer's backward, and all communication.
    """
    backward_s = 2 * forward_s
    return {"flat_s": LAYERS * (forward_s + backward_s), "slope": 1.0, "knee_s": (LAYERS - 1) * backward_s}


def sweep(mode: str, *, virtual: bool, forward_s: float) -> list[dict[str, Any]]:
    """Steps by share of communication, measured and in closed form.

    Args:
        mode: Of ``sleeping_script``.
        virtual: On a virtual clock.
        forward_s: Of a layer; its backward takes twice as long.
    """
    backward_s = 2 * forward_s
    rows = []
    for share in SHARES:
        per_layer = share * backward_s / (1 if mode == "ddp" else 3)  # FSDP2: two all-gathers and a reduce-scatter
        words = [mode, str(LAYERS), str(forward_s), str(backward_s), str(VALUES)]
        asked = Emulation(
            path=SCRIPT,
            arguments=words,
            world_size=WORLD,
            virtual=virtual,
            counts={"warmup": 2, "rounds": 1, "steps": 3},
        )
        found = emulate(asked, lambda collective, seconds=per_layer: seconds, progress=False)  # type: ignore[misc]
        closed = (ddp_seconds if mode == "ddp" else fsdp2_seconds)(forward_s, backward_s, per_layer)
        communication = sum(each["seconds"] * each["calls_per_step"] for each in found["collectives"])
        rows.append(
            {
                "communication_s": communication,
                "step_s": found["iteration_s"],
                "closed_form_s": closed,
                "error_percent": 100 * (found["iteration_s"] / closed - 1),
            }
        )
    return rows
