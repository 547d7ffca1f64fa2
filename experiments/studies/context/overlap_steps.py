"""Task *overlap-steps*: how long a step is if a model says what kernels lose beside collectives; jobs held out.

The host hides much of what kernels lose: it is late anyway.  So steps are replayed as traced, and once more with a host
that takes no time (``no host``), as for a job that keeps its devices busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.experiments.studies.context.edgeless_models import MODELS, Fit, given, table
from stepsight.experiments.studies.context.network_models import concurrency_networks, without_edges
from stepsight.experiments.studies.context.overlap_formulas import FORMULAS
from stepsight.experiments.studies.context.overlap_table import neighbour_table
from stepsight.experiments.studies.context.overlap_task import Job, overlap_jobs, task_of
from stepsight.experiments.studies.context.step_errors import StepTable, step_table
from stepsight.simulator.replay.changes import host_scaled
from stepsight.simulator.replay.replay import replay

Array = NDArray[np.float64]

JUDGED: dict[str, Fit] = {
    "time alone": given("baseline"),
    **FORMULAS,
    "table by class of kernel": table,
    "table by class and class of neighbour": neighbour_table,
    "trees, neighbours' features": MODELS["trees, neighbours' features"],
    "sum over ops, no edges": without_edges("op"),
    **concurrency_networks(),
}
LEAST_JOBS = 3


def judge_overlap_steps(folder: Path) -> StepTable:
    """Error of a step by each model of what kernels lose beside collectives and copies.

    Raises:
        TraceError: If fewer than three jobs have such kernels and steps.
    """
    jobs = [job for job in overlap_jobs(folder) if job.graphs and all(len(rank.steps_s) for rank in job.ranks)]
    if len(jobs) < LEAST_JOBS:
        raise TraceError(f"{folder} must hold {LEAST_JOBS} jobs with overlap and steps, got {len(jobs)}")
    task = task_of(jobs)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for job in jobs:
        taught = [graph for other in jobs if other is not job for graph in other.graphs]
        device = replace(job, ranks=[host_scaled(rank, 0.0) for rank in job.ranks])
        traced, without_host = replay(job.ranks).replayed_s, replay(device.ranks).replayed_s
        for name, fit in JUDGED.items():
            nodes, _ = fit(task, taught, 0)(job.graphs)
            found[name][job.name] = 100.0 * (_step_s(job, nodes) / traced - 1.0)
            found[f"{name}; no host"][job.name] = 100.0 * (_step_s(device, nodes) / without_host - 1.0)
    found = {name: found[name] for name in sorted(found, key=lambda name: name.endswith("no host"))}
    return step_table("overlap-steps", "error of a step from kernels beside collectives and copies", found)


def _step_s(job: Job, predicted: Sequence[Array]) -> float:
    """Seconds of a step in which the kernels that are judged take what is predicted."""
    durations = [rank.duration_s.copy() for rank in job.ranks]
    for graph, seconds in zip(job.graphs, predicted, strict=True):
        known = np.isfinite(graph["op"].seconds.numpy())
        durations[graph.place][graph["op"].node.numpy()[known]] = seconds[known]
    changed = [replace(rank, duration_s=spent) for rank, spent in zip(job.ranks, durations, strict=True)]
    return replay(changed).replayed_s
