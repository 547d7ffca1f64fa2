"""Iteration times of runs with emulated ranks: one process replaces a rank (``dataset.harness.emulation.stand_in``).

Their collectives only take the time that the plan says, which is what latency and bandwidth of the job's fabric imply.
So they tell of ops in their context, and of whole iterations as far as nobody waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, alpha_beta_seconds
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.simulator.clock.engine import HOST, NUM_CLOCKS
from stepsight.simulator.clock.kernel import Durations
from stepsight.simulator.clock.track import Track, end_clocks, through
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import timer_of
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import lower
from stepsight.simulator.schedules.order import POST, WAIT, Entries
from stepsight.training.measured.planning import as_the_harness_runs
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.predictor.predictor import LearnedLatency, Predictor

Seconds = NDArray[np.float64]


class StandInLatency:
    """A latency model for an emulated rank: collectives take its table's times and slow no computation."""

    def __init__(self, latency: LatencyModel, fabric: Fabric) -> None:
        self.hardware = replace(latency.hardware, comm_compute_share=0.0)
        self.knows_context = latency.knows_context
        self.op_seconds = latency.op_seconds
        self._latency, self._fabric = latency, fabric

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.array([alpha_beta_seconds(c, self._fabric) for c in collectives], dtype=np.float64)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        """Seconds of ops in context; collectives keep their seconds alone."""
        inside = self._latency.in_context(programs, seconds)
        is_op = [
            np.array([isinstance(node.work, Op) for node in program.nodes], dtype=np.bool_) for program in programs
        ]
        return [np.where(op, own, alone) for op, own, alone in zip(is_op, inside, seconds, strict=True)]


def run_latency(run: RunManifest, predictor: Predictor) -> LearnedLatency | StandInLatency:
    """Predicted seconds of the ops and collectives of a run."""
    if run.stand_in is None:
        return predictor.latency(run.job)
    return StandInLatency(predictor.latency(run.job, alone=True), run.job.fabric)


def predict_run(run: RunManifest, predictor: Predictor) -> Prediction:
    """The iteration of a run's job; for an emulated rank, with its collectives."""
    if run.stand_in is None:
        return predict(run.job, predictor)
    simulation = simulate(run.job, run_latency(run, predictor))
    seconds = simulation.iteration_time_s * predictor.calibration.factor(run.job, run.job.framework)
    return Prediction(run.job, seconds, predictor.source, simulation, predictor, run.job.framework)


def stand_in_seconds(job: Job, rank: int, latency: LatencyModel) -> float:
    """Predicted step time of an emulated rank.

    Without a pipeline it is the job's iteration with the collectives of ``StandInLatency``.  With one it is what the
    rank's stage does by itself (``stage_alone``), and its optimizer.
    """
    own = StandInLatency(latency, job.fabric)
    if job.parallel.pp == 1:
        return simulate(job, own).iteration_time_s
    lowered, timer = lower(as_the_harness_runs(job), own.hardware), timer_of(own)
    stage = rank // (job.parallel.tp * job.parallel.dp)
    entries, num_peers = stage_alone(lowered.track, stage)
    host = np.zeros((1 + num_peers, 2))  # the peers have arrived already
    host[0] = own.hardware.host_action_s, own.hardware.host_message_s
    optimizer = int(lowered.optimizer[stage])
    transition = np.zeros((len(lowered.segments), HOST + 1, HOST + 1))
    for at in {optimizer, *lowered.segment[lowered.track.stage == stage].tolist()}:
        transition[at] = timer.segment(lowered.segments[at]).carried
    seconds = timer.work_seconds(lowered.messages)[lowered.message]
    durations = Durations(lowered.segment.view(np.uint32), transition, seconds, host, tuple(range(HOST + 1)))
    clocks = end_clocks(entries, durations)[0]
    clocks[0] = clocks[:NUM_CLOCKS].max()
    return float(through(transition[optimizer], clocks)[:NUM_CLOCKS].max())


def stage_alone(track: Track, stage: int) -> tuple[Entries, int]:
    """The work of a stage by itself, and the number of its peers.

    The stage does its own passes in the order of the schedule.  It is rank 0; each other rank is a peer in one
    direction, which takes this stage's messages one after the other and does nothing else.  So a message is under way
    as soon as this stage has posted its side and the peer's last message has passed, and there is no bubble.
    """
    rows: list[tuple[int, int, int, int]] = []
    peers: dict[tuple[int, int], int] = {}
    for entry in np.flatnonzero(track.entries.stage == stage).tolist():
        op, _, at, side = (int(field[entry]) for field in track.entries)
        rows.append((op, 0, at, side))
        if op == POST:
            other = int(track.stage[(track.target, track.source)[side][at]])
            peer = peers.setdefault((side, other), len(peers) + 1)
            rows += [(POST, peer, at, 1 - side), (WAIT, peer, at, 1 - side)]
    return Entries(*np.array(rows, dtype=np.int32).reshape(-1, 4).T.copy()), len(peers)
