"""Emulate rank 0 of 256 of a script whose layers sleep, over the time of its communication, and compare with closed
forms, on a virtual and on a real clock. Times mean something on a machine that does nothing else.

The sweep of NeuronaBox's Figure 4: the step is flat while computation hides communication, and then has slope 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Row, Study, figures_text
from stepsight.experiments.tasks.scripts import emulate
from stepsight.experiments.tasks.settings import Emulation

SCRIPT = Path(__file__).with_name("scripts.py")
PARTS = ("virtual-ddp", "virtual-fsdp2", "real-ddp")
FORWARD_S = {"virtual": 0.2, "real": 0.04}  # of a layer: on a virtual clock, sleeping takes no time
WORLD, LAYERS, VALUES = 256, 8, 300_000  # a bucket holds the gradient of a layer
SHARES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)  # of the time of the backward pass


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


def knee(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The communication from which it is exposed, from the sweep alone: ``flat_s`` (the step without communication),
    ``slope`` (of the last two rows) and ``knee_s``, at which the line through the last row with that slope meets the
    flat one.
    """
    flat, (before, last) = rows[0]["step_s"], rows[-2:]
    slope = (last["step_s"] - before["step_s"]) / (last["communication_s"] - before["communication_s"])
    at = last["communication_s"] - (last["step_s"] - flat) / slope if slope > 0 else math.inf
    return {"flat_s": flat, "slope": slope, "knee_s": at}


def expected_knee(forward_s: float) -> dict[str, float]:
    """The knee of DDP's sweep in closed form, from which all buckets except the first wait for the link."""
    return {"flat_s": LAYERS * 3 * forward_s, "slope": 1.0, "knee_s": (LAYERS - 1) * 2 * forward_s}


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """All parts, or those that were asked for: steps by share of communication, measured and in closed form."""
    figures: Row = {}
    texts = []
    for part in options.only or PARTS:
        clock, _, mode = part.partition("-")
        forward_s, backward_s = FORWARD_S[clock], 2 * FORWARD_S[clock]
        world, rows = Emulation(world_size=WORLD, virtual=clock == "virtual", rounds=1, steps=3), list[Row]()
        words = [mode, str(LAYERS), str(forward_s), str(backward_s), str(VALUES)]
        for share in SHARES:
            per_layer = share * backward_s / (1 if mode == "ddp" else 3)  # FSDP2: two all-gathers and a reduce-scatter
            delay = lambda collective, seconds=per_layer: seconds
            found = emulate(SCRIPT, words, world, delay, progress=False)
            spent = sum(of["seconds"] * of["calls_per_step"] for of in found["collectives"])
            closed = (ddp_seconds if mode == "ddp" else fsdp2_seconds)(forward_s, backward_s, per_layer)
            row = {"communication_s": spent, "step_s": found["iteration_s"], "closed_form_s": closed}
            rows.append({**row, "error_percent": 100 * (found["iteration_s"] / closed - 1)})
        figures[part] = rows
        titles = {f"{key[:-2].replace('_', ' ')} ms" if key.endswith("_s") else key: key for key in rows[0]}
        texts.append(f"{part}\n{table_of(rows, titles, 2)}")
        if mode == "ddp":
            bend = figures[f"{part}-knee"] = knee(rows)
            texts.append(f"{figures_text(bend)}\nclosed form: {figures_text(expected_knee(forward_s))}")
    return figures, "\n\n".join(texts)


OPTIONS = {"--only": {"choices": PARTS, "action": "append", "help": "a part alone (repeatable)"}}
STUDY = Study("emulate", __doc__ or "", run, OPTIONS)
