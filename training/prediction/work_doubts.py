"""Doubt about an iteration, and about its ops and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency
from stepsight.simulator.iteration.simulate import Simulation
from stepsight.training.collectives.collective_models import label_of
from stepsight.training.corrections import intervals
from stepsight.training.corrections.calibration import JobCorrection
from stepsight.training.kernels.kernel_models import label
from stepsight.training.predictor.predictor import Predictor


class WorkDoubts(NamedTuple):
    """Half widths of 90 % intervals, in log-seconds."""

    halves: Mapping[Op | Collective, float]  # of each signature on the critical path
    total: float  # of the iteration, summed over its signatures with their correlation


def work_doubts(simulation: Simulation, predictor: Predictor | None) -> WorkDoubts:
    """Doubt from errors within runs that were held back, else of signatures that the fit of their family left out.

    It is a factor of three where nothing is known, and wider outside the measured range.
    """
    lowered, halves = simulation.lowered, dict.fromkeys(simulation.op_counts, intervals.ROOFLINE_LOG)
    doubts = intervals.NodeDoubts({})
    if predictor is not None:
        doubts = predictor.doubts or doubts
        phases = {node.work: program.label for program in lowered.programs for node in program.nodes}
        for work in halves:
            family = label(work.family, work, predictor.hardware) if isinstance(work, Op) else label_of(work)
            errors = predictor.kernel.regressor.errors if isinstance(work, Op) else predictor.collective.errors
            if predictor.doubts is not None:
                halves[work] = doubts.half(work.kind, phases.get(work, ""))
            elif family in errors:
                halves[work] = intervals.MEAN_TO_HALF * errors[family]
            if predictor.unsupported(work, simulation.job.fabric):
                halves[work] = min(halves[work] + intervals.UNSUPPORTED_LOG, intervals.MOST_LOG)
    counts = simulation.work_counts * simulation.work_seconds
    seconds = dict(zip(lowered.all_works, counts.tolist(), strict=True))
    shares = np.array([seconds[work] for work in halves]) / simulation.iteration_time_s
    return WorkDoubts(halves, doubts.of_sum(shares, np.array(list(halves.values()))))


def interval_ends(
    predictor: Predictor | None,
    job: Job,
    correction: JobCorrection,
    outside: float,
    certain: float,
    latency: LatencyModel,
    *,
    without: str = "",
    judged: bool = False,
) -> tuple[float, float]:
    """How far a prediction interval reaches below and above the time, in log-seconds; see ``Prediction.interval``.

    ``correction``: of the job by the predictor's calibration.  ``outside``: share of the time outside the measured
    range.  ``certain``: hardware FLOP utilisation of the prediction, with lookups.  ``latency``: what answered.
    """
    like, devices = intervals.class_of(job, certain), job.cluster.num_devices
    if predictor is None:
        if isinstance(latency, RooflineLatency) and latency.hardware.kind == "gpu":
            return intervals.published_widths(of_facts=True).ends_of(like, without)
        return intervals.ROOFLINE_LOG, intervals.ROOFLINE_LOG
    public = predictor.kernel.derives
    ends = intervals.uncalibrated_ends(predictor.intervals, like, outside, devices, public=public, without=without)
    down, up = (predictor.calibration.half_width_log(correction, end, judged=judged) for end in ends)
    return down, up
