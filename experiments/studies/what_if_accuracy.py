"""Compare what-if predictions from one traced run with real runs of each change.

Ranks sleep in a cluster in a box, so that what changes is the change: half the rate of the links, micro-batches twice
as large, other gradient buckets, a straggler that is gone.  All runs of a box take turns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.dataset.runs.box_spec import HARDWARE, Box, read_box
from stepsight.dataset.runs.run_manifest import RunManifest, read_manifest
from stepsight.experiments.studies.box_cases import sleeping
from stepsight.experiments.studies.study import Row, Study, rows_text
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.experiments.tasks.settings import TraceChanges
from stepsight.experiments.tasks.what_if import what_if
from stepsight.training.measured.planning import box_plan

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
    """Run missing cases; manifests by name.

    Raises:
        CollectError: If a run failed, or kept the cores too busy.
    """
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


def run(options: argparse.Namespace) -> tuple[Any, str]:
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
    text = f"{rows_text(rows, columns)}\n\nbox {box.name}; worst error {worst:.1f} %"
    return {"box": box.name, "rows": rows, "worst_percent": worst}, text


STUDY = Study(
    "what-if",
    "What-if answers from one trace, against runs with the change. Needs root and iproute2; six minutes.",
    run,
    {
        "--out": {"type": Path, "default": Path("runs/what-if"), "help": "folder of the runs"},
        "--box": {"default": BOX, "help": f"nodes x ranks @ rate; by default {BOX}"},
    },
)
