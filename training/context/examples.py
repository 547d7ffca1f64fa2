"""From measured runs to what context models learn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.graph.program import OPAQUE
from stepsight.dataset.hardware.hardware import find_fabric, usual_fabric
from stepsight.dataset.kinds.op import Op
from stepsight.features.graph_features import SegmentGraph
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import timer_of
from stepsight.simulator.iteration.simulate import simulate
from stepsight.training.context.fit_context import Example, Iteration, Whole
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import MeasuredRun, average
from stepsight.training.measured.planning import run_latency
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
_UNKNOWN_LINKS = "loopback"  # of hardware without usual links: they are features of collectives, and teach nothing

Taught = MeasuredRun | ImportedSegments  # a run with segments
Measured = tuple[list[Example], list[Whole]]  # segments of a run, and its iteration if that was timed


def make_examples(runs: Sequence[Taught], predictor: Predictor) -> list[Example]:
    """Distinct segments of the runs' traces, with the predictor's seconds alone.

    Nodes of imported runs that no predictor predicts are left out: opaque kernels, and ops of unknown sizes.
    """
    examples = []
    for run in runs:
        timer = timer_of(_latency(run, predictor))
        for mean, repeats in average(run.segments):
            works, inside = [node.work for node in mean.program.nodes], mean.slot_s
            if works:
                if isinstance(run, ImportedSegments):
                    known = [not isinstance(w, Op) or (w.kind != OPAQUE and min(w.dims, default=0) > 0) for w in works]
                    inside = np.where(known, inside, np.nan)
                alone = timer.work_seconds(works) * [node.share for node in mean.program.nodes]
                graph = SegmentGraph(mean.program, predictor.hardware, mean.busy)
                examples.append(Example(graph, alone, inside, mean.run, repeats))
    return examples


def _latency(run: Taught, predictor: Predictor) -> LatencyModel:
    """Seconds of a run's works; an imported one without a job ran on one device with the hardware's usual links."""
    if isinstance(run, MeasuredRun):
        return run_latency(run.manifest, predictor)
    if run.job is not None and run.job.hardware_name == predictor.hardware.name:
        return predictor.latency(run.job)
    try:
        fabric = find_fabric(usual_fabric(predictor.hardware.name))
    except JobError:
        fabric = find_fabric(_UNKNOWN_LINKS)
    return predictor.latency_on(fabric, 1, 1)


def make_wholes(runs: Sequence[Taught], predictor: Predictor) -> list[Whole]:
    """The whole runs as functions of their nodes, with their measured iteration times."""
    manifests = [run.manifest for run in runs if isinstance(run, MeasuredRun) and run.whole]
    return [
        Whole(Iteration.of(run.job, run_latency(run, predictor)), run.iteration_time_s, run.busy, run.name)
        for run in manifests
    ]


def measured_runs(runs: Sequence[Taught], predictor: Predictor) -> list[Measured]:
    """What each run teaches, with a predictor's seconds alone."""
    return [(make_examples([run], predictor), make_wholes([run], predictor)) for run in runs]


def joined(runs: Iterable[Measured]) -> Measured:
    """What some runs teach together."""
    parts = list(runs)
    return [each for examples, _ in parts for each in examples], [each for _, wholes in parts for each in wholes]


def iteration_times(runs: Sequence[MeasuredRun], predictor: Predictor) -> Array:
    """Predicted seconds of each run's job, before calibration, ``(runs,)``."""
    latencies = [(run.manifest.job, run_latency(run.manifest, predictor)) for run in runs]
    return np.array([simulate(job, latency).iteration_time_s for job, latency in latencies])
