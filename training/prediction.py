"""``predict``: from a job to an iteration time, an interval, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from stepsight.dataset.errors import JobError
from stepsight.dataset.hardware import find_hardware, hardware_names
from stepsight.dataset.job import Job
from stepsight.simulator.latency import RooflineLatency
from stepsight.simulator.memory import Memory
from stepsight.simulator.simulate import Simulation, simulate
from stepsight.simulator.timeline import timeline_text
from stepsight.training.intervals import Intervals
from stepsight.training.latency import LearnedLatency
from stepsight.training.predictor import Predictor

ROOFLINE_SOURCE = "roofline from hardware facts alone: nothing was measured for {}"


@dataclass(frozen=True)
class Prediction:
    """What an iteration of a job takes.

    Attributes:
        job: What was asked.
        iteration_time_s: Predicted.
        low_s, high_s: Interval, meant to hold 90 % of what is measured.
        breakdown: Seconds by cause; adds up to ``iteration_time_s``.
        memory: Peak bytes per stage, capacity, and whether it fits.
        unsupported: What lies outside of what was measured, each with its reason.
        source: Where the durations come from, for people.
    """

    job: Job
    iteration_time_s: float
    low_s: float
    high_s: float
    breakdown: dict[str, float]
    memory: Memory
    unsupported: tuple[str, ...]
    source: str
    simulation: Simulation = field(repr=False)

    def timeline(self, level: str = "segment") -> dict[str, Any]:
        """Chrome trace events, at the level of ``segment`` or ``op``; opens in Perfetto."""
        events: dict[str, Any] = json.loads("".join(self.timeline_text(level)))
        return events

    def timeline_text(self, level: str = "segment") -> Iterator[str]:
        """The same as pieces of JSON, millions of events a second: for files."""
        scale = self.iteration_time_s / self.simulation.iteration_time_s  # calibrated: it ends when the prediction says
        return timeline_text(self.simulation, level, scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "iteration_time_s": self.iteration_time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "breakdown": dict(self.breakdown),
            "memory": self.memory.to_dict(),
            "num_micro_batches": self.job.num_micro_batches,
            "tokens_per_s": self.job.batch.global_batch * self.job.model.seq_len / self.iteration_time_s,
            "unsupported": list(self.unsupported),
            "source": self.source,
        }


def predict(job: Job, predictor: Predictor | None = None) -> Prediction:
    """Predict one iteration of a job.

    Args:
        job: What to ask about.
        predictor: Learned for the job's hardware; without one, a roofline from the preset's facts.

    Raises:
        PredictorError: If the predictor is for other hardware.
        JobError: If there is no predictor and no preset of the job's hardware.
    """
    if predictor is None:
        return _from_facts(job)
    latency = predictor.latency(job)
    simulation = simulate(job, latency)
    unsupported, share = _outside(simulation, latency)
    scale = predictor.calibration.scale
    seconds = simulation.iteration_time_s * scale
    low, high = predictor.intervals.interval(seconds, share)
    return Prediction(
        job,
        seconds,
        low,
        high,
        {cause: max(0.0, value * scale) for cause, value in simulation.breakdown.items()},
        simulation.memory,
        unsupported,
        predictor.source,
        simulation,
    )


def predict_many(jobs: Sequence[Job], predictor: Predictor | None = None) -> list[Prediction]:
    """Predict several jobs; what they share is worked out once."""
    return [predict(job, predictor) for job in jobs]


@lru_cache(maxsize=64)
def _roofline(hardware_name: str, fabric: Any) -> RooflineLatency:
    hardware = find_hardware(hardware_name)
    if hardware is None:
        raise JobError(
            "without a predictor, cluster.hardware must be a preset "
            f"({', '.join(hardware_names())}), got {hardware_name!r}: train a predictor for it, or name a preset"
        )
    return RooflineLatency(hardware, fabric)


def _from_facts(job: Job) -> Prediction:
    simulation = simulate(job, _roofline(job.cluster.hardware, job.fabric))
    seconds = simulation.iteration_time_s
    low, high = Intervals().interval(seconds)
    return Prediction(
        job,
        seconds,
        low,
        high,
        {cause: max(0.0, value) for cause, value in simulation.breakdown.items()},
        simulation.memory,
        (),
        ROOFLINE_SOURCE.format(job.cluster.hardware),
        simulation,
    )


def _outside(simulation: Simulation, latency: LearnedLatency) -> tuple[tuple[str, ...], float]:
    """Reasons of what was never measured, and the part of the critical path that it makes up."""
    reasons, outside = latency.outside(simulation.lowered.all_works)
    if not reasons:
        return (), 0.0
    if outside.all():
        return reasons, 1.0
    seconds = float((simulation.count_works() * simulation.work_seconds)[outside].sum())
    return reasons, min(1.0, seconds / max(simulation.iteration_time_s, 1e-12))
