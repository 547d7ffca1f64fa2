"""Doubt about an iteration, and about its ops and collectives."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.iteration.simulate import Simulation
from stepsight.training.collectives.collective_models import label_of
from stepsight.training.corrections import intervals
from stepsight.training.corrections.calibration import JobCorrection
from stepsight.training.kernels.kernel_models import label
from stepsight.training.predictor.predictor import Predictor


class WorkDoubts:
    """Half widths of 90 % intervals, in log-seconds.

    Args:
        simulation: The iteration.
        predictor: What answered; None: hardware facts.
    """

    def __init__(self, simulation: Simulation, predictor: Predictor | None) -> None:
        self._simulation, self._predictor = simulation, predictor

    @cached_property
    def halves(self) -> dict[Op | Collective, float]:
        """Of each signature on the critical path."""
        programs = self._simulation.lowered.programs
        phases = {node.work: program.label for program in programs for node in program.nodes}
        return {work: self._half(work, phases.get(work, "")) for work in self._simulation.op_counts}

    @cached_property
    def total(self) -> float:
        """Of the iteration, summed over its signatures with their correlation."""
        doubts = None if self._predictor is None else self._predictor.doubts
        counts = self._simulation.count_works() * self._simulation.work_seconds
        seconds = dict(zip(self._simulation.lowered.all_works, counts.tolist(), strict=True))
        shares = np.array([seconds[work] for work in self.halves]) / self._simulation.iteration_time_s
        return (doubts or intervals.NodeDoubts({})).of_sum(shares, np.array(list(self.halves.values())))

    def _half(self, work: Op | Collective, phase: str) -> float:
        """From errors within runs that were held back, else from those of signatures that its family's fit left out; a
        factor of three where nothing is known, and wider outside the measured range.
        """
        predictor = self._predictor
        if predictor is None:
            return intervals.ROOFLINE_LOG
        if predictor.doubts is not None:
            half = predictor.doubts.half(work.kind, phase)
        else:
            family = label(work.family, work, predictor.hardware) if isinstance(work, Op) else label_of(work)
            errors = predictor.kernel.regressor.errors if isinstance(work, Op) else predictor.collective.errors
            half = intervals.MEAN_TO_HALF * errors[family] if family in errors else intervals.ROOFLINE_LOG
        outside = predictor.unsupported(work, self._simulation.job.fabric)
        return min(half + intervals.UNSUPPORTED_LOG, intervals.MOST_LOG) if outside else half


def interval_ends(
    predictor: Predictor | None,
    job: Job,
    correction: JobCorrection,
    shares: tuple[float, float],
    *,
    without: str = "",
    judged: bool = False,
) -> tuple[float, float]:
    """How far a prediction interval reaches below and above the time, in log-seconds; see ``Prediction.interval``.

    ``correction``: of the job by the predictor's calibration.  ``shares``: of the time, outside the measured range and
    decided by the host.
    """
    if predictor is None:
        return intervals.Intervals().half_width_log, intervals.Intervals().half_width_log
    ends = intervals.uncalibrated_ends(
        predictor.intervals, intervals.class_of(job), shares, public=predictor.kernel.derives, without=without
    )
    down, up = (predictor.calibration.half_width_log(correction, end, judged=judged) for end in ends)
    return down, up
