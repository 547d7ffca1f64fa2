"""Boxes measured beside predicted: runs, iterations, activity of every rank, and times of every pass.

Two folders are kept apart: ``profile`` (event profiles and runs of at most four ranks, which train) and ``judge`` (runs
of eight and sixteen, which nothing is trained on).  Three baselines predict the same boxes: a roofline with latency and
bandwidth of the links, ideal arithmetic, and a closed formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import read_json
from stepsight.dataset.hardware.hardware import HARDWARE as PRESETS
from stepsight.dataset.hardware.hardware import Fabric, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.box_spec import HARDWARE, Box
from stepsight.dataset.runs.run_manifest import RunManifest, read_manifest
from stepsight.experiments.studies.box_cases import (
    MOST_TRAINING_RANKS,
    BoxCase,
    collectives_of,
    ops_profiled,
    profiled_boxes,
)
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.simulator.durations.latency_model import Seconds
from stepsight.simulator.iteration.simulate import Simulation, simulate
from stepsight.simulator.programs.lower import lower
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.training.measured.planning import SleepingLatency, box_plan
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
ROUNDS = {"judge": 3, "train": 2}
COUNTS = {"steps": 1, "warmup": 1, "profile_steps": 0}
EVENT_SECONDS = 30.0
PROFILE, JUDGE = "profile", "judge"


def sleeping(box: Box) -> SleepingLatency:
    """Sleeping times of the box's ranks, and its links from their facts."""
    return SleepingLatency(PRESETS[HARDWARE], box.links)


def file_name(case: BoxCase) -> str:
    """File name of a run in its collection."""
    return case.name.removeprefix("box/").replace("/", ".").replace("@", "-")


def measure_cases(cases: Sequence[BoxCase], out: Path, *, events: bool = True) -> list[str]:
    """Run missing cases, one collection per box; return names of runs that used too much of the cores.

    ``events``: also what ops and collectives take on their own.  Small boxes first.  All of a box's runs take turns, so
    that a drift of the machine touches them alike.
    """
    rejected = []
    for box in profiled_boxes() if events else ():
        plan = box_plan(
            box, [], sleeping(box), collectives=collectives_of(box), ops=ops_profiled(), event_seconds=EVENT_SECONDS
        )
        run_plan(plan, out / PROFILE / f"events-{_slug(box)}", progress=True)
    boxes: dict[Box, list[BoxCase]] = {}
    for case in cases:
        boxes.setdefault(case.box, []).append(case)
    for box, held in sorted(boxes.items(), key=lambda pair: (pair[0].num_ranks, pair[0].name)):
        role = "judge" if held[0].judges else "train"
        runs = [(file_name(case), role, case.job, {**COUNTS, "rounds": ROUNDS[role]}) for case in held]
        summary = run_plan(box_plan(box, runs, sleeping(box)), folder_of(held[0], out), progress=True)
        rejected += [case.name for case in held if file_name(case) in summary["rejected"]]
    return rejected


def folder_of(case: BoxCase, out: Path) -> Path:
    """The collection of a case."""
    return out / (JUDGE if case.judges else PROFILE) / _slug(case.box)


def training_folders(out: Path) -> list[Path]:
    """Collections for training: all of ``profile``.

    Raises:
        CollectError: If one is of more ranks than may train.
    """
    folders = sorted(folder for folder in (out / PROFILE).iterdir() if (folder / "plan.json").exists())
    for folder in folders:
        ranks = Box.from_dict(read_json(folder / "plan.json")["box"]).num_ranks
        if ranks > MOST_TRAINING_RANKS:
            raise CollectError(
                f"only boxes of at most {MOST_TRAINING_RANKS} ranks may train, got {ranks} ranks in {folder}"
            )
    return folders


def _slug(box: Box) -> str:
    return box.name.replace("@", "-")


LABELS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
COMMUNICATION_BOUND = 0.4  # share of the predicted iteration in which ranks wait for communication


@dataclass(frozen=True)
class Measured:
    """The real run of a case."""

    case: BoxCase
    manifest: RunManifest
    steps: tuple[dict[str, Any], ...]  # records of its steps, as ``measure.noted_steps`` of the harness returns them

    @property
    def seconds(self) -> float:
        """Median of its repeats."""
        return self.manifest.iteration_time_s

    @property
    def spread_s(self) -> float:
        """Largest less smallest of its repeats."""
        return max(self.manifest.step_seconds) - min(self.manifest.step_seconds)

    @property
    def cpu(self) -> float:
        """Share of the cores' time that its ranks computed, in the busiest repeat."""
        return max(float(step["cpu"]) for step in self.steps)


def read_case(case: BoxCase, out: Path) -> Measured | None:
    """The run of a case, None if there is none (or the box was too busy for it)."""
    folder = folder_of(case, out) / "runs" / file_name(case)
    if not (folder / "manifest.json").exists():
        return None
    manifest = read_manifest(folder)
    if manifest.job != case.job:
        raise CollectError(f"a folder holds one study: {folder} is of another job than {case.name}; choose another")
    return Measured(case, manifest, tuple(read_json(folder / "records.json")["steps"]))


@dataclass(frozen=True)
class Passes:
    """Passes of micro-batches on every rank, arrays of shape ``(num_passes,)``.

    Attributes:
        rank, kind, part, micro_batch: Which (``kind`` indexes ``KIND_NAMES``).
        start, end: Seconds from the begin of the iteration.
        optimizer: Begin and end of each rank's optimizer (sums of gradients included), shape ``(ranks, 2)``.
    """

    rank: NDArray[np.int64]
    kind: NDArray[np.int64]
    part: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    start: Array
    end: Array
    optimizer: Array


def measured_passes(steps: Sequence[dict[str, Any]]) -> Passes:
    """Activity of the ranks: medians over the repeats; ``steps`` as in ``Measured``."""
    found = [_of_step(step) for step in steps]
    start, end, optimizer = (
        np.median([getattr(passes, name) for passes in found], axis=0) for name in ("start", "end", "optimizer")
    )
    return replace(found[0], start=start, end=end, optimizer=optimizer)


def _of_step(step: dict[str, Any]) -> Passes:
    kinds = {label: KIND_NAMES.index(name) for name, label in LABELS.items()}
    rows, optimizer = [], np.zeros((len(step["spans"]), 2))
    for rank, spans in enumerate(step["spans"]):
        for label, part, micro_batch, start, end in spans:
            if label in kinds:
                rows.append((rank, kinds[label], part, micro_batch, start - step["begin"], end - step["begin"]))
            elif label == "optimizer":
                optimizer[rank] = start - step["begin"], end - step["begin"]
    return _passes(np.array(rows, dtype=np.float64), optimizer)


def predicted_passes(simulation: Simulation) -> Passes:
    """Simulated passes of every rank, in the same order."""
    parallel = simulation.job.parallel
    inner = parallel.tp * parallel.dp  # ranks of a stage are adjacent
    tables: list[Array] = []
    passing_of = {replica: passing for passing in simulation.pipeline_runs for replica in passing.pipeline.replicas}
    optimizer = np.zeros((simulation.job.cluster.num_devices, 2))
    for rank in range(len(optimizer)):
        stage, within = divmod(rank, inner)
        passing = passing_of[within // parallel.tp]
        run, track = passing.run, simulation.lowered.track
        own = np.flatnonzero(track.stage == stage)
        done = passing.clocks[stage].max()  # and all overlapping messages
        if parallel.pp == 1:  # the group of every replica
            done = max(other.clocks[stage].max() for other in simulation.pipeline_runs)
        ends = run.finish[own, 0].copy()
        if parallel.pp == 1:  # DDP and FSDP2 wait for it within the last backward
            ends[np.argmax(ends)] = done
        what = (np.full(len(own), rank), track.kind[own], track.part[own], track.micro_batch[own])
        tables.append(np.stack([*what, run.start[own, 0], ends], axis=1))
        optimizer[rank] = done, simulation.finish[stage].max()
    return _passes(np.concatenate(tables), optimizer)


def _passes(table: Array, optimizer: Array) -> Passes:
    """Passes from rows of rank, kind, part, micro-batch, start and end, in the order of the first four."""
    table = table[np.lexsort((table[:, 3], table[:, 2], table[:, 1], table[:, 0]))]
    rank, kind, part, micro_batch = table[:, :4].astype(np.int64).T
    return Passes(rank, kind, part, micro_batch, table[:, 4], table[:, 5], optimizer)


@dataclass(frozen=True)
class Compared:
    """One case, measured and predicted."""

    measured: Measured
    prediction: Prediction
    activity: Array  # ``(ranks,)``: seconds by which lengths of passes and optimizer are off, over their sum
    timestamps: Array  # ``(2 * num_passes,)``: starts and ends of passes, off in parts of the iteration

    @property
    def error(self) -> float:
        """Signed error of the iteration time, in percent."""
        return 100 * (self.prediction.iteration_time_s / self.measured.seconds - 1)

    @property
    def waits(self) -> float:
        """Share of the predicted iteration that is communication."""
        parts = self.prediction.breakdown
        communication = sum(value for key, value in parts.items() if key.endswith("_communication"))
        return communication / self.prediction.iteration_time_s

    @property
    def communication_bound(self) -> bool:
        return self.waits > COMMUNICATION_BOUND

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        return {
            "name": self.measured.case.name,
            "ranks": self.measured.case.job.cluster.num_devices,
            "measured_s": self.measured.seconds,
            "spread_s": self.measured.spread_s,
            "predicted_s": self.prediction.iteration_time_s,
            "low_s": self.prediction.low_s,
            "high_s": self.prediction.high_s,
            "error": self.error,
            "activity_error": 100 * float(self.activity.mean()),
            "timestamp_error": 100 * float(np.median(self.timestamps)),
            "cpu": 100 * self.measured.cpu,
            "communication_bound": self.communication_bound,
        }


def compare_case(measured: Measured, predictor: Predictor) -> Compared:
    """Predict a case and compare it with its run."""
    prediction = predict(measured.case.job, predictor)
    real, said = measured_passes(measured.steps), predicted_passes(prediction.simulation)
    scale = prediction.iteration_time_s / prediction.simulation.iteration_time_s
    if not all(
        np.array_equal(getattr(real, name), getattr(said, name)) for name in ("rank", "kind", "part", "micro_batch")
    ):
        raise CollectError(f"ranks must run the schedule's passes, got others in {measured.case.name}")
    off = np.concatenate([said.start * scale - real.start, said.end * scale - real.end])
    return Compared(measured, prediction, _activity(real, said, scale), np.abs(off) / measured.seconds)


def _activity(real: Passes, said: Passes, scale: float) -> Array:
    lengths = real.end - real.start
    off = np.abs((said.end - said.start) * scale - lengths)
    closing = real.optimizer[:, 1] - real.optimizer[:, 0]
    closing_off = np.abs((said.optimizer[:, 1] - said.optimizer[:, 0]) * scale - closing)
    ranks = len(closing)
    total = np.bincount(real.rank, lengths, minlength=ranks) + closing
    return (np.bincount(real.rank, off, minlength=ranks) + closing_off) / total


def compare_all(cases: Sequence[BoxCase], out: Path, predictor: Predictor) -> list[Compared]:
    """Every case with a run."""
    found = (read_case(case, out) for case in cases)
    return [compare_case(measured, predictor) for measured in found if measured is not None]


_NOTHING_S = 1e-9


class Silent(SleepingLatency):
    """Communication takes no time."""

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.full(len(collectives), _NOTHING_S)


def roofline(job: Job) -> float:
    """Seconds of the iteration from the same simulator with hardware facts, without training."""
    return simulate(job, _facts(job, SleepingLatency)).iteration_time_s


def ideal(job: Job) -> float:
    """Predict with known computation and free communication."""
    return simulate(job, _facts(job, Silent)).iteration_time_s


def formula(job: Job) -> float:
    """Seconds by the closed formula of automatic planners: computation + communication - overlap + bubble.

    Of the slowest stage: ``m (f + b)`` of computation; tensor-parallel collectives of ``m`` micro-batches, messages of
    each there and back, gradients once; the last backward hides gradients where there is no pipeline; and the pipeline
    stands still for ``(p - 1) / v`` micro-batches.
    """
    latency = _facts(job, SleepingLatency)
    lowered, parallel, batches = lower(job, latency.hardware), job.parallel, job.num_micro_batches
    passes: dict[int, dict[str, tuple[float, float]]] = {}
    for action, at in enumerate(lowered.segment.tolist()):
        segment = lowered.segments[at]
        own = passes.setdefault(int(lowered.track.part[action]), {})
        if segment.label not in own:
            own[segment.label] = _sums(segment, latency)
    stages: dict[int, list[dict[str, tuple[float, float]]]] = {}
    for part, found in passes.items():
        stages.setdefault(int(lowered.track.schedule.placement[part, 0]), []).append(found)
    compute, talk, backward = 0.0, 0.0, 0.0
    for parts in stages.values():
        ops = sum(of[0] for found in parts for of in found.values())
        if ops >= compute:
            compute = ops
            talk = sum(of[1] for found in parts for of in found.values())
            backward = sum(of[0] for found in parts for label, of in found.items() if label != "forward")
    message = float(latency.collective_seconds(lowered.messages).max()) if lowered.messages else 0.0
    gradients = _gradients(lowered.segments, latency)
    hidden = min(gradients, backward) if parallel.pp == 1 and not parallel.zero_stage else 0.0
    bubble = (parallel.pp - 1) / parallel.virtual_stages * (compute + talk + 2 * message)
    return batches * (compute + talk + 2 * message) + gradients - hidden + bubble


def _sums(segment: Segment, latency: SleepingLatency) -> tuple[float, float]:
    """Seconds of a segment's ops, and of collectives between ranks of one replica."""
    ops = [node.work for node in segment.program.nodes if isinstance(node.work, Op)]
    talk = [n.work for n in segment.program.nodes if isinstance(n.work, Collective) and not n.stream.startswith("dp")]
    return float(latency.op_seconds(ops).sum()), float(latency.collective_seconds(talk).sum())


def _gradients(segments: Sequence[Segment], latency: SleepingLatency) -> float:
    """Seconds of the replicas' traffic, of the stage with the most."""
    found = []
    for segment in segments:
        talk = [n.work for n in segment.program.nodes if isinstance(n.work, Collective) and n.stream.startswith("dp")]
        found.append(float(latency.collective_seconds(talk).sum()))
    return max(found, default=0.0)


def _facts(job: Job, kind: type[SleepingLatency]) -> SleepingLatency:
    hardware, fabric = find_hardware(HARDWARE), job.fabric
    assert hardware is not None and isinstance(fabric, Fabric)
    return kind(hardware, fabric)
