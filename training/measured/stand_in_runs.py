"""Runs in which one process stands in for a rank of a job (``dataset.harness.emulation.stand_in``): what steps take.

Their collectives only take the time that the plan says, which is what latency and bandwidth of the job's fabric imply.
So they tell of ops in their context, and of whole iterations as far as nobody waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Fabric
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.physics import alpha_beta_seconds
from stepsight.dataset.program import Program
from stepsight.dataset.run_manifest import RunManifest
from stepsight.simulator.clock.entries import COMPUTE, POST
from stepsight.simulator.latency_model import LatencyModel
from stepsight.simulator.lowering.lower import lower
from stepsight.simulator.lowering.segment import HOST, NUM_CLOCKS
from stepsight.simulator.segment_timing import timer_of
from stepsight.simulator.simulate import simulate
from stepsight.training.measured.planning import as_the_harness_runs
from stepsight.training.predictor.learned_latency import LearnedLatency
from stepsight.training.predictor.prediction import Prediction, predict
from stepsight.training.predictor.predictor import Predictor

Seconds = NDArray[np.float64]


class StandInLatency:
    """A latency model as it is for a stand-in: collectives take what its table says, and nothing from the computation.

    Args:
        latency: Knows the ops.
        fabric: Of the job.
    """

    def __init__(self, latency: LatencyModel, fabric: Fabric) -> None:
        self.hardware = replace(latency.hardware, comm_compute_share=0.0)
        self.knows_context = latency.knows_context
        self.op_seconds = latency.op_seconds
        self._latency, self._fabric = latency, fabric

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.array([alpha_beta_seconds(c, self._fabric) for c in collectives], dtype=np.float64)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        """The same of ops; collectives take what they take alone."""
        inside = self._latency.in_context(programs, seconds)
        is_op = [
            np.array([isinstance(node.work, Op) for node in program.nodes], dtype=np.bool_) for program in programs
        ]
        return [np.where(op, own, alone) for op, own, alone in zip(is_op, inside, seconds, strict=True)]


def run_latency(run: RunManifest, predictor: Predictor) -> LearnedLatency | StandInLatency:
    """What a predictor knows of the ops and collectives of a run."""
    if run.stand_in is None:
        return predictor.latency(run.job)
    return StandInLatency(predictor.latency(run.job, alone=True), run.job.fabric)


def predict_run(run: RunManifest, predictor: Predictor) -> Prediction:
    """The iteration of a run's job, with a stand-in's collectives if it is one."""
    if run.stand_in is None:
        return predict(run.job, predictor)
    simulation = simulate(run.job, run_latency(run, predictor))
    seconds = simulation.iteration_time_s * predictor.calibration.factor(run.job, run.job.framework)
    return Prediction(run.job, seconds, predictor.source, simulation, predictor, run.job.framework)


def stand_in_seconds(job: Job, rank: int, latency: LatencyModel) -> float:
    """What a step of a stand-in should take.

    Without a pipeline it is the job's iteration with the collectives of ``StandInLatency``.  With one it is what the
    rank's stage does by itself: its own passes in the order of torch's schedule, and its optimizer.  A message is under
    way as soon as this stage has posted its side, those of a direction and peer one after the other: the stage waits
    for its delay where the schedule waits for it, and never for another stage, so there is no bubble.  The host runs
    ahead, since nothing but the device waits.
    """
    own = StandInLatency(latency, job.fabric)
    if job.parallel.pp == 1:
        return simulate(job, own).iteration_time_s
    lowered, timer = lower(as_the_harness_runs(job), own.hardware), timer_of(own)
    stage = rank // (job.parallel.tp * job.parallel.dp)
    track, seconds = lowered.track, timer.work_seconds(lowered.messages)[lowered.message]
    clocks, over = np.zeros(HOST + 1), np.zeros(track.num_messages)
    free: dict[tuple[int, int], float] = {}
    for entry in np.flatnonzero(track.entry_stage == stage).tolist():
        what, at, side = (int(v[entry]) for v in (track.entry_op, track.entry_index, track.entry_side))
        if what == COMPUTE:
            clocks[0] += own.hardware.host_action_s
            clocks = (timer.segment(lowered.segments[lowered.segment[at]]).carried + clocks).max(axis=1)
        elif what == POST:
            clocks[0] += own.hardware.host_message_s
            peer = int(track.stage[(track.target, track.source)[side][at]])
            over[at] = free[side, peer] = max(clocks[0], free.get((side, peer), 0.0)) + seconds[at]
        else:
            clocks[0] = max(clocks[0], over[at])
    clocks[0] = clocks[:NUM_CLOCKS].max()
    optimizer = timer.segment(lowered.segments[int(lowered.optimizer[stage])])
    return float((optimizer.carried + clocks)[:NUM_CLOCKS].max())
