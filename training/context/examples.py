"""From measured runs to what context models learn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.graph.program import OPAQUE, Node
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


def make_examples(runs: Sequence[Taught], predictor: Predictor) -> list[Example]:
    """Distinct segments of the runs' traces, with the predictor's seconds alone."""
    examples = []
    for run in runs:
        imported = isinstance(run, ImportedSegments)
        latency = _latency(run, predictor)
        for mean in average(run.segments):
            if len(mean.program):
                if imported:
                    mean = replace(mean, slot_s=np.where(_learnable(mean.program.nodes), mean.slot_s, np.nan))
                alone = seconds_alone(mean.program.nodes, latency)
                graph = SegmentGraph(mean.program, predictor.hardware, mean.busy)
                examples.append(Example(graph, alone, mean.slot_s, mean.run, mean.repeats))
    return examples


def _latency(run: Taught, predictor: Predictor) -> LatencyModel:
    return (
        imported_latency(run, predictor) if isinstance(run, ImportedSegments) else run_latency(run.manifest, predictor)
    )


def imported_latency(run: ImportedSegments, predictor: Predictor) -> LatencyModel:
    """Seconds of an imported run's ops by a predictor; without a job, of one device with the hardware's usual links."""
    if run.job is not None and run.job.hardware_name == predictor.hardware.name:
        return predictor.latency(run.job)
    try:
        fabric = find_fabric(usual_fabric(predictor.hardware.name))
    except JobError:
        fabric = find_fabric(_UNKNOWN_LINKS)
    return predictor.latency_on(fabric, 1, 1)


def _learnable(nodes: Sequence[Node]) -> NDArray[np.bool_]:
    """``(n,)``: nodes that a predictor can predict: no opaque kernels, and no ops of unknown sizes."""
    return np.array(
        [not isinstance(n.work, Op) or (n.work.kind != OPAQUE and min(n.work.dims, default=0) > 0) for n in nodes]
    )


def seconds_alone(nodes: Sequence[Node], latency: LatencyModel) -> Array:
    """Seconds of each node of a program alone, multiplied by its share, ``(len(nodes),)``."""
    return timer_of(latency).work_seconds([node.work for node in nodes]) * [node.share for node in nodes]


def make_wholes(runs: Sequence[MeasuredRun], predictor: Predictor) -> list[Whole]:
    """The whole runs as functions of their nodes, with their measured iteration times."""
    wholes = []
    for run in (run.manifest for run in runs if run.manifest.whole):
        iteration = Iteration.of(run.job, run_latency(run, predictor))
        wholes.append(Whole(iteration, run.iteration_time_s, run.busy, run.name))
    return wholes


Measured = tuple[list[Example], list[Whole]]  # segments of a run, and its iteration if that was timed


def measured_runs(runs: Sequence[Taught], predictor: Predictor) -> list[Measured]:
    """What each run teaches, with a predictor's seconds alone."""
    wholes = [make_wholes([run], predictor) if isinstance(run, MeasuredRun) else [] for run in runs]
    return list(zip([make_examples([run], predictor) for run in runs], wholes, strict=True))


def joined(runs: Iterable[Measured]) -> Measured:
    """What some runs teach together."""
    parts = list(runs)
    return [each for examples, _ in parts for each in examples], [each for _, wholes in parts for each in wholes]


def iteration_times(runs: Sequence[MeasuredRun], predictor: Predictor) -> Array:
    """Predicted seconds of each run's job, before calibration, ``(runs,)``."""
    latencies = [(run.manifest.job, run_latency(run.manifest, predictor)) for run in runs]
    return np.array([simulate(job, latency).iteration_time_s for job, latency in latencies])
