"""Emulated ranks against closed forms: the sweep of NeuronaBox's Figure 4, on layers that sleep.

The step of rank 0 of 256 over the time of its communication is flat while computation hides it, and then has slope 1.

What-if answers from one traced run against real runs of each change: half the rate of the links, micro-batches twice as
large, other gradient buckets, a straggler that is gone.  Ranks sleep in a cluster in a box, so that what changes is the
change; all runs of a box take turns.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.dataset.runs.run_manifest import HARDWARE, Box, RunManifest, read_box, read_manifest
from stepsight.experiments.questions.what_if import what_if
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.box_cases import sleeping
from stepsight.experiments.studies.study import Row, Study
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.experiments.tasks.scripts import emulate
from stepsight.experiments.tasks.settings import Emulation, TraceChanges
from stepsight.training.measured.planning import box_plan

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
    """The communication from which it is exposed, from the sweep alone.

    Returns:
        ``flat_s`` (the step without communication), ``slope`` (of the last two rows) and ``knee_s``: the communication
        at which the line through the last row with that slope meets the flat one.
    """
    flat, (before, last) = rows[0]["step_s"], rows[-2:]
    slope = (last["step_s"] - before["step_s"]) / (last["communication_s"] - before["communication_s"])
    at = last["communication_s"] - (last["step_s"] - flat) / slope if slope > 0 else math.inf
    return {"flat_s": flat, "slope": slope, "knee_s": at}


def expected_knee(forward_s: float) -> dict[str, float]:
    """The knee of DDP's sweep in closed form: all buckets except the first wait for the link instead of their
    gradients. From there on the step is forward, the first layer's backward, and all communication.
    """
    return {"flat_s": LAYERS * 3 * forward_s, "slope": 1.0, "knee_s": (LAYERS - 1) * 2 * forward_s}


def run_emulation(options: argparse.Namespace) -> tuple[Any, str]:
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
            closed = (ddp_seconds if mode == "ddp" else fsdp2_seconds)(forward_s, backward_s, per_layer)
            spent, step_s = (
                sum(of["seconds"] * of["calls_per_step"] for of in found["collectives"]),
                found["iteration_s"],
            )
            row = {"communication_s": spent, "step_s": step_s, "closed_form_s": closed}
            rows.append({**row, "error_percent": 100 * (step_s / closed - 1)})
        figures[part] = rows
        titles = {f"{key[:-2].replace('_', ' ')} ms" if key.endswith("_s") else key: key for key in rows[0]}
        texts.append(f"{part}\n{table_of(rows, titles, 2)}")
        if mode == "ddp":
            bend, closed_bend = knee(rows), expected_knee(forward_s)
            figures[f"{part}-knee"] = bend
            texts.append(
                f"flat step {1e3 * bend['flat_s']:.1f} ms (closed form {1e3 * closed_bend['flat_s']:.1f}), then slope "
                f"{bend['slope']:.3f} ({closed_bend['slope']:.0f}) from {1e3 * bend['knee_s']:.1f} ms of communication "
                f"({1e3 * closed_bend['knee_s']:.1f}: the backward pass without its first layer)"
            )
    return figures, "\n\n".join(texts)


EMULATE = Study(
    "emulate",
    "Emulate rank 0 of 256 of a script whose layers sleep, over the time of its communication, and compare with closed "
    "forms, on a virtual and on a real clock. Times mean something on a machine that does nothing else.",
    run_emulation,
    {"--only": {"choices": PARTS, "action": "append", "help": "a part alone (repeatable)"}},
)


MODEL = ModelSpec(family="bert", layers=4, seq_len=128, hidden=256, heads=16, vocab=2048)
BOX = "4x1@200mbit"
MICRO_BATCHES = 2  # of each replica
BUCKET_MB, OTHER_BUCKET_MB = 2.0, 8.0
SLOWDOWN = 1.5
COUNTS = {"rounds": 3, "steps": 2, "warmup": 1, "profile_steps": 2}
TRACED, STRAGGLER = "traced", "straggler"


def slower_links(box: Box) -> Box:
    """The box with links of half the rate."""
    return replace(box, mbits_per_s=tuple(rate / 2 for rate in box.mbits_per_s))


def jobs_of(box: Box) -> dict[str, Job]:
    """Every run on the box by name: the traced one, one with a straggler, and those with a change."""
    cluster = ClusterSpec(hardware=HARDWARE, nodes=box.nodes, devices_per_node=box.ranks_per_node, fabric=box.fabric)
    batch = BatchSpec(micro_batch=1, global_batch=MICRO_BATCHES * box.num_ranks, precision="fp32")
    parallel = ParallelSpec(dp=box.num_ranks, bucket_mbytes=BUCKET_MB)
    base = Job(model=MODEL, parallel=parallel, batch=batch, cluster=cluster)
    slow = replace(cluster, stragglers=(Straggler(rank=box.num_ranks - 1, slowdown=SLOWDOWN),))
    larger = replace(batch, micro_batch=2, global_batch=2 * batch.global_batch)
    return {
        TRACED: base,
        STRAGGLER: replace(base, cluster=slow),
        "batch": replace(base, batch=larger),
        "buckets": replace(base, parallel=replace(parallel, bucket_mbytes=OTHER_BUCKET_MB)),
    }


def measure(box: Box, out: Path) -> dict[str, RunManifest]:
    """Run missing cases; manifests by name."""
    own, other = [(name, "train", job, COUNTS) for name, job in jobs_of(box).items()], slower_links(box)
    links = [("links", "train", jobs_of(other)[TRACED], {**COUNTS, "profile_steps": 0})]
    found: dict[str, Path] = {}
    for name, where, runs in (("box", box, own), ("slower", other, links)):
        run_plan(box_plan(where, runs, sleeping(where)), out / name, progress=True)
        found |= {run[0]: out / name / "runs" / run[0] for run in runs}
    for name, folder in found.items():
        if not (folder / "manifest.json").is_file():
            raise StepsightError(
                f"run {name} must be there, got none in {folder}: it kept the cores too busy; run again"
            )
    return {name: read_manifest(folder) for name, folder in found.items()}


def run_what_if(options: argparse.Namespace) -> tuple[Any, str]:
    """Measure, ask, compare."""
    box, out = read_box(options.box), options.out
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "slower-links.json", {"fabric": {"slower-links": slower_links(box).fabric}})
    runs, rows = measure(box, out), list[Row]()
    for change, trace, name, asked in (  # in words, the run whose trace answers, the run that has the change
        ("half the rate of the links", TRACED, "links", TraceChanges(fabric=str(out / "slower-links.json"))),
        ("micro-batches twice as large", TRACED, "batch", TraceChanges(batch=2.0)),
        (f"buckets of {OTHER_BUCKET_MB:g} MB", TRACED, "buckets", TraceChanges(bucket_mb=OTHER_BUCKET_MB * 1.048576)),
        ("no straggler", STRAGGLER, TRACED, TraceChanges(remove_straggler=True)),
    ):
        before, after, told = runs[trace], runs[name], what_if(runs[trace].folder, asked)
        ratio, measured = told["changed_s"] / told["unprofiled_s"], after.iteration_time_s / before.iteration_time_s
        rounds = [[float(np.median(steps)) for steps in one.rounds if steps] for one in (before, after)]
        rows.append(
            {
                "change": change,
                "before_s": before.iteration_time_s,
                "after_s": after.iteration_time_s,
                "measured_change_percent": 100 * (measured - 1),
                "predicted_change_percent": 100 * (ratio - 1),
                "error_percent": 100 * (ratio / measured - 1),
                "spread_percent": max(50.0 * (max(medians) / min(medians) - 1.0) for medians in rounds),
                "replay_error_percent": 100 * (told["replayed_s"] / told["measured_s"] - 1),
            }
        )
    worst = max(abs(row["error_percent"]) for row in rows)
    columns = {"change": "change", "before, s": "before_s", "after, s": "after_s",
               "measured, %": "measured_change_percent", "predicted, %": "predicted_change_percent",
               "error, %": "error_percent", "spread, %": "spread_percent"}  # fmt: skip
    text = f"{table_of(rows, columns)}\n\nbox {box.name}; worst error {worst:.1f} %"
    return {"box": box.name, "rows": rows, "worst_percent": worst}, text


WHAT_IF = Study(
    "what-if",
    "What-if answers from one trace, against runs with the change. Needs root and iproute2; six minutes.",
    run_what_if,
    {
        "--out": {"type": Path, "default": Path("runs/what-if"), "help": "folder of the runs"},
        "--box": {"default": BOX, "help": f"nodes x ranks @ rate; by default {BOX}"},
    },
)
