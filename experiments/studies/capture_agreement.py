"""Compare lowered jobs with the same models and strategies captured from scripts.

The script trains the harness' own model of the job. Both are timed with the same durations. The table shows, for each
strategy, whether all collectives agree in kind, bytes, group size and count, by how much FLOP differ, and by how much
the predicted times differ.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.capture.captured import collective_counts, compute_flops
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.experiments.studies.study import Row, Study, cases, rows_text
from stepsight.simulator.iteration.simulate import segment_flops, simulate
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.replay.captured_step import time_captured
from stepsight.training.prediction.prediction import asked_predictor

SCRIPT = Path(__file__).with_name("scripts.py")
HARDWARE = "h100-sxm-80gb"
Counts = Counter[tuple[str, int, int]]  # by kind, bytes and group size


def strategies() -> dict[str, Row]:
    """Sizes and degrees of every strategy, by name."""
    found = cases("capture")
    models: dict[str, Row] = found["models"]
    return {name: {**models[re.split("[ ,]", name)[0]], **own} for name, own in found["strategies"].items()}


def job_of(values: Mapping[str, Any]) -> Job:
    """A job from sizes and degrees."""
    merged = {"tp": 1, "pp": 1, "dp": 1, "micro_batches": 1, **values}
    many = merged.pop("micro_batches")
    model = {key: merged.pop(key) for key in cases("capture")["models"]["llama"] if key in merged}
    precision = merged.pop("precision", "pure-bf16")
    merged.pop("autocast", None)  # concerns the script alone
    ranks = merged["tp"] * merged["pp"] * merged["dp"]
    if merged["pp"] > 1:  # as the harness runs pipelines: torch's runtime, and gradient reduction after the schedule
        merged |= {"runtime": "torch", "overlap_grad_reduce": False}
    return Job.from_dict(
        {
            "model": model,
            "parallel": merged,
            "batch": {"micro_batch": 1, "global_batch": many * merged["dp"], "precision": precision},
            "execution": {"engine": "eager-pytorch"},
            "cluster": {"hardware": HARDWARE, "nodes": -(-ranks // 8), "devices_per_node": min(ranks, 8)},
        }
    )


def lowered_counts(lowered: Lowered, stage: int) -> tuple[Counts, float]:
    """Collectives and FLOP of one rank of a stage."""
    found: Counts = Counter()
    flops, track = 0.0, lowered.track
    for index in [*lowered.segment[track.stage == stage].tolist(), int(lowered.optimizer[stage])]:
        segment = lowered.segments[index]
        flops += segment_flops(segment)
        for node, lost in zip(segment.program.nodes, segment.graph.taken, strict=True):
            if isinstance(node.work, Collective) and not lost:
                both = 2 if node.work.kind == "send_recv" else 1  # a rank of a ring sends one and receives one
                found[node.work.kind, node.work.num_bytes, node.work.group_size] += both
    for message, source, target in zip(lowered.message, track.source, track.target, strict=True):
        if stage in (track.stage[source], track.stage[target]):
            work = lowered.messages[message]
            found[work.kind, work.num_bytes, work.group_size] += 1
    return found, flops


def compare(name: str, values: Mapping[str, Any]) -> Row:
    """One strategy, lowered and captured."""
    job = job_of(values)
    predictor = asked_predictor(job.cluster.hardware, None)
    assert predictor is not None
    latency = predictor.latency(job)
    simulation = simulate(job, latency)
    words = ("job", json.dumps(job.to_dict()), *(["--autocast"] if values.get("autocast") else []))
    asked = CaptureRequest(SCRIPT, words, job.cluster.num_devices, job.cluster.devices_per_node)
    captured = capture(asked)
    step = time_captured(captured.graphs, latency)
    differences, flops, collectives = [], [], 0
    for graph in captured.graphs:
        stage = graph.rank // (job.cluster.num_devices // job.parallel.pp)
        mine, lowered_flops = lowered_counts(simulation.lowered, stage)
        theirs: Counts = Counter()
        for row in collective_counts(graph):
            theirs[row["kind"], row["num_bytes"], row["group_size"]] += row["count"]
        flops.append(abs(lowered_flops / compute_flops(graph) - 1.0))
        collectives += int(theirs.total())
        differences += [
            {"stage": stage, "kind": key[0], "num_bytes": key[1], "group_size": key[2], "lowered": mine[key],
             "captured": theirs[key]}
            for key in sorted(mine.keys() | theirs.keys())
            if mine[key] != theirs[key]
        ]  # fmt: skip
    return {
        "strategy": name,
        "ranks": job.cluster.num_devices,
        "captured_ranks": len(captured.graphs),
        "collectives": collectives,
        "differences": differences,
        "flops_off_percent": 100.0 * max(flops),
        "lowered_s": simulation.iteration_time_s,
        "captured_s": step.iteration_time_s,
        "time_off_percent": 100.0 * (simulation.iteration_time_s / step.iteration_time_s - 1.0),
        "breakdowns": [simulation.breakdown, step.breakdown],
    }


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """All strategies whose names match."""
    rows = []
    for name, values in strategies().items():
        if fnmatch.fnmatch(name, options.only):
            print(f"capturing {name}", file=sys.stderr)
            rows.append(compare(name, values))
    if not rows:
        raise StepsightError(f"--only must match one of {', '.join(strategies())}, got {options.only!r:.80}")
    told = [{**row, "agree": f"{len(row['differences'])} differ" if row["differences"] else "all"} for row in rows]
    columns = {"strategy": "strategy", "ranks": "ranks", "collectives": "collectives", "agree": "agree",
               "FLOP off, %": "flops_off_percent", "job ms": "lowered_s", "script ms": "captured_s",
               "time off, %": "time_off_percent"}  # fmt: skip
    off = [abs(row["time_off_percent"]) for row in rows]
    told_off = f"time off by {np.mean(off):.2f} % on average, {max(off):.2f} % at most, over {len(rows)} strategies"
    return {"rows": rows}, f"{rows_text(told, columns, 2)}\n\n{told_off}"


STUDY = Study(
    "capture",
    __doc__ or "",
    run,
    {"--only": {"default": "*", "help": "strategies whose names match, as '*fsdp*'"}},
)
