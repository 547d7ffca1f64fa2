"""Captured scripts against the jobs that they run: ``python -m tests.dataset.capture.jobs_and_scripts [*fsdp*]``.

It captures a script of the harness for each strategy of ``strategies.toml`` whose name matches, and prints how
collectives, FLOP and the predicted step differ from those of the job.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.capture.captured import collective_counts, compute_flops
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Row
from stepsight.experiments.studies.torch_agreement import tracked_job
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.replay.captured_step import time_captured
from stepsight.training.prediction.prediction import asked_predictor

SCRIPT = Path(__file__).with_name("trained_job.py")
CAPTURED_ON = "h100-sxm-80gb"
Counts = Counter[tuple[str, int, int]]  # by kind, bytes and group size


def strategies() -> dict[str, Row]:
    """Sizes and degrees of every strategy, by name."""
    found = tomllib.loads(Path(__file__).with_name("strategies.toml").read_text("utf-8"))
    models: dict[str, Row] = found["models"]
    return {name: {**models[re.split("[ ,]", name)[0]], **own} for name, own in found["strategies"].items()}


def captured_job(values: Mapping[str, Any]) -> Job:
    """A job from sizes and degrees."""
    values = {"precision": "pure-bf16", **{key: value for key, value in values.items() if key != "autocast"}}
    ranks = math.prod(values.get(key, 1) for key in ("tp", "pp", "dp"))
    if values.get("pp", 1) > 1:  # as the harness runs pipelines: torch's runtime, gradients reduced after the schedule
        values |= {"runtime": "torch", "overlap_grad_reduce": False}
    cluster = {"hardware": CAPTURED_ON, "nodes": -(-ranks // 8), "devices_per_node": min(ranks, 8)}
    return tracked_job(values, cluster=cluster, execution={"engine": "eager-pytorch"})


def lowered_counts(lowered: Lowered, stage: int) -> tuple[Counts, float]:
    """Collectives and FLOP of one rank of a stage."""
    found: Counts = Counter()
    flops, track = 0.0, lowered.track
    for index in [*lowered.segment[track.stage == stage].tolist(), int(lowered.optimizer[stage])]:
        segment = lowered.segments[index]
        flops += segment.flops
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
    job = captured_job(values)
    predictor = asked_predictor(job.cluster.hardware, None)
    assert predictor is not None
    latency = predictor.latency(job)
    simulation = simulate(job, latency)
    words = (json.dumps(job.to_dict()), *(["--autocast"] if values.get("autocast") else []))
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


if __name__ == "__main__":
    wanted = (sys.argv[1:] or ["*"])[0]
    rows = [compare(name, values) for name, values in strategies().items() if fnmatch.fnmatch(name, wanted)]
    rows = [{**row, "differ": len(row["differences"])} for row in rows]
    shown = ("strategy", "ranks", "collectives", "differ", "flops_off_percent", "time_off_percent")
    print(table_of(rows, {key: key for key in shown}, 2))
