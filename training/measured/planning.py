"""What to measure so that a predictor can be trained: runs, every distinct signature once, sleeping ranks of a box.

Also iteration times of runs with emulated ranks, where one process replaces a rank: their collectives take the time
that the plan says, so they tell of ops in their context, and of whole iterations as far as nobody waits for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import digest
from stepsight.dataset.configs.key_table import DEFAULTS
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware, alpha_beta_seconds, find_hardware
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.plan.plan_checks import SCHEMA, WRITTEN, check_plan, job_problems
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import Box, RunManifest
from stepsight.simulator.blocks.step import Block, Comm, Item
from stepsight.simulator.clock.engine import HOST, NUM_CLOCKS
from stepsight.simulator.clock.track import Durations, Track, end_clocks, through
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency, Seconds
from stepsight.simulator.durations.segment_timing import timer_of
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import lower, signatures
from stepsight.simulator.programs.sizes import boundary_bytes, part_shapes, rank_shape
from stepsight.simulator.programs.stage import part_units
from stepsight.simulator.schedules import write_schedule
from stepsight.simulator.schedules.order import POST, WAIT, Entries
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.predictor.predictor import LearnedLatency, Predictor


def run_name(job: Job) -> str:
    """A folder name from the job: ``gpt-4L-256h-s128-tp2-pp1-dp1-mb4x2``, other differences, and digits of its digest,
    which all of its settings decide.
    """
    model = job.model
    words = f"{job.name} s{model.seq_len} v{model.vocab} f{model.ffn}"
    words += f" kv{model.kv_heads}" * (model.kv_heads != model.heads)
    words += f" recompute {job.parallel.recompute}" * (job.parallel.recompute != "none")
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{words} {job_digest(job)[:8]}")


def job_digest(job: Job, compiled: bool = False) -> str:
    """Digest of all settings of a job that are not the defaults, and of whether its ops were compiled."""
    tables = replace(job, shares_batch=False).to_dict()
    framework = tables.pop("framework", "")
    rows = ((f"{name}.{key}", value) for name, table in tables.items() for key, value in table.items())
    stated = {key: value for key, value in rows if value != DEFAULTS[key]}
    return digest(framework, json.dumps(stated, sort_keys=True), "compiled" * compiled)


def trained_names(manifest: Mapping[str, Any], runs: Iterable[RunManifest]) -> set[str]:
    """Names of the runs whose jobs trained a predictor, by its manifest; by name, if that states no digests of jobs."""
    if (jobs := manifest.get("jobs")) is not None:
        return {run.name for run in runs if run.whole and job_digest(run.job, run.compiled) in jobs}
    return {run.name for run in runs} & {*manifest.get("runs", ())}


def collectable(job: Job, max_ranks: int | None = None) -> None:
    """Check that the harness can run a job unchanged.  Raises ``CollectError`` with the rule and the values."""
    problems = job_problems(replace(job, shares_batch=False).to_dict())
    if problems:
        raise CollectError("; ".join(problems))
    if max_ranks is not None and job.cluster.num_devices > max_ranks:
        rule = f"a run needs a core (or GPU) for each rank: ranks <= {max_ranks} here"
        raise CollectError(f"{rule}, got {job.cluster.num_devices}")


def as_the_harness_runs(job: Job) -> Job:
    """The job as the harness runs it on any device: pipelines by torch, their gradients reduced after the schedule."""
    if job.parallel.pp == 1:
        return job
    overlap = job.parallel.overlap_grad_reduce and job.parallel.zero_stage > 0
    return replace(job, parallel=replace(job.parallel, runtime="torch", overlap_grad_reduce=overlap))


def stand_in_of(job: Job, rank: int) -> dict[str, Any]:
    """The part of a plan about an emulated rank: its collectives take what the job's fabric implies."""
    collectable(job)
    if type(rank) is not int or rank not in range(job.cluster.num_devices):
        raise CollectError(f"rank must be one of the job's {job.cluster.num_devices}, got {rank}")
    _, collectives = signatures(as_the_harness_runs(job), _facts(job))
    rows = [{**asdict(c), "seconds": alpha_beta_seconds(c, job.fabric)} for c in sorted(collectives, key=str)]
    return {"rank": rank, "collectives": rows}


def event_row(
    world: int, ops: Sequence[Op], collectives: Sequence[Collective], seconds: float, name: str = ""
) -> dict[str, Any]:
    """Ops and collectives of a plan that so many ranks measure on their own."""
    rows = {"ops": [asdict(op) for op in ops], "collectives": [asdict(each) for each in collectives]}
    return {"name": name or f"world{world}", "world_size": world, **rows, "seconds": seconds}


def make_plan(
    runs: Sequence[tuple[str, Job, dict[str, Any]]],
    *,
    profile_jobs: Sequence[Job] = (),
    event_seconds: float = 30.0,
    extra_seconds: float = 0.0,
) -> dict[str, Any]:
    """A plan for the harness as plain JSON: runs by role, job and step counts (with ``stand_in``, see ``stand_in_of``,
    where one process stands in for a rank), and the distinct ops and collectives of ``profile_jobs``, measured on their
    own for ``event_seconds``. ``extra_seconds``: for more rounds of the least certain runs.
    """
    planned = []
    for role, job, counts in runs:
        name = run_name(job) + (f"-rank{counts['stand_in']['rank']}" if "stand_in" in counts else "")
        table = schedule_table(job, _facts(job))
        own = {"name": name, "role": role, "job": job.to_dict(), **counts}
        planned.append({**own, "table": table} if table else own)
    stand_ins = [job for _, job, counts in runs if "stand_in" in counts]  # of these jobs, ops alone, on one rank
    works: dict[int, tuple[set[Op], set[Collective]]] = {}  # by world size; each signature gets as much of the time
    for job in profile_jobs if event_seconds > 0 else ():
        ops, collectives = signatures(job, _facts(job))
        own_ops, own_collectives = works.setdefault(1 if job in stand_ins else job.cluster.num_devices, (set(), set()))
        own_ops |= ops
        own_collectives |= set() if job in stand_ins else collectives
    total = max(1, sum(len(ops) + len(collectives) for ops, collectives in works.values()))
    events = [
        event_row(world, sorted(ops, key=str), sorted(found, key=str), event_seconds * (len(ops) + len(found)) / total)
        for world, (ops, found) in sorted(works.items())
    ]
    return checked_plan(planned, events, extra_seconds=extra_seconds)


def checked_plan(runs: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A plan of the harness from its parts; raises ``CollectError`` if it is none."""
    try:
        return check_plan(json.loads(json.dumps({"schema": SCHEMA, "runs": runs, "events": events, **more})))
    except HarnessError as error:
        raise CollectError(str(error)) from None


def _facts(job: Job) -> Hardware:
    name = job.cluster.hardware
    hardware = find_hardware(name)
    if hardware is None:
        # Signatures do not depend on speeds, only on whether communication overlaps: any GPU or CPU can be used.
        hardware = find_hardware("local-cpu" if "cpu" in name else "a100-sxm-80gb")
    assert hardware is not None
    return hardware


FP32_BYTES = 4
SHORTEST_BLOCK_S = 0.08  # forward and backward of a layer of one micro-batch; below, the cores disturb each other


class SleepingLatency(RooflineLatency):
    """Durations that ranks of a box sleep; links from their facts."""

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        seconds = super().op_seconds(ops)
        idle = self.hardware.op_latency_s
        return seconds - np.array([idle * (not op.record.slept) for op in ops], dtype=np.float64)


def sleeps_of(job: Job, latency: LatencyModel) -> dict[str, Any]:
    """What the harness needs to run a sleeping job of a box; a layer that would sleep for less than
    ``SHORTEST_BLOCK_S`` is a ``CollectError``.
    """
    problems = job_problems(replace(job, shares_batch=False).to_dict(), boxed=True)
    if problems:
        raise CollectError("; ".join(problems))
    shape, shapes = rank_shape(job), part_shapes(job)
    blocks: dict[int, tuple[int, Block]] = {}  # by identity: equal blocks are one object
    root: set[int] = set()
    parts = []
    for part in shapes:
        own = []
        for unit in part_units(shape, part):
            number, _ = blocks.setdefault(id(unit.block), (len(blocks), unit.block))
            own += [number] * unit.times
            if unit.root:
                root.add(number)
        parts.append(own)
    ops = {
        item
        for _, block in blocks.values()
        for step in block
        for items in (step.forward, step.backward, step.weight_grad)
        for item in items
        if isinstance(item, Op)
    }
    lowered = lower(job, latency.hardware)
    steps = [[node.work for node in lowered.segments[at].program.nodes if isinstance(node.work, Op)
              and node.work.kind == "adamw"] for at in lowered.optimizer.tolist()]  # fmt: skip
    wanted = sorted({*ops, *(op for own in steps for op in own)}, key=str)
    seconds = dict(zip(wanted, latency.op_seconds(wanted).tolist(), strict=True))

    def items(some: Sequence[Item]) -> list[list[Any]]:
        return [_item(item, seconds) for item in some if not (isinstance(item, Op) and not item.record.slept)]

    made: list[list[dict[str, Any]]] = [
        [{"forward": items(step.forward), "backward": items(step.backward), "weight": items(step.weight_grad),
          "parameters": list(step.parameters), "weight_first": step.weight_grad_first,
          **({"expert": True} if step.expert and shape.ep.size > 1 else {})} for step in block]
        for _, block in blocks.values()
    ]  # fmt: skip
    for number, block in enumerate(made):
        total = sum(item[4] for step in block for key in ("forward", "backward", "weight") for item in step[key]
                    if item[0] == "op")  # fmt: skip
        if number not in root and total < SHORTEST_BLOCK_S:
            rule = f"in a box a layer must sleep at least {1e3 * SHORTEST_BLOCK_S:.0f} ms forward and backward"
            got = f"got {1e3 * total:.1f} ms for {job.name}"
            raise CollectError(f"{rule}, {got}: a larger model or micro-batch takes longer")
    return {
        "parts": parts,
        "blocks": made,
        "root": sorted(root),
        "boundary_numel": [-(-size // FP32_BYTES) for size in boundary_bytes(shape, shapes)],
        "optimizer": [_item(own[0], seconds) for own in steps],
        "paces": paces(job),
        "table": schedule_table(job, latency.hardware),
    }


def schedule_table(job: Job, hardware: Hardware) -> str:
    """A job's schedule in torch's form, if torch has no class for it."""
    if job.parallel.pp == 1 or not (job.parallel.schedule in WRITTEN or job.parallel.schedule.endswith(".csv")):
        return ""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write_schedule(lower(job, hardware).track.schedule, path)
        return path.read_text("utf-8")


def paces(job: Job) -> list[float]:
    """The slowdown of each rank relative to the others."""
    slow = {straggler.rank: straggler.slowdown for straggler in job.cluster.stragglers}
    return [slow.get(rank, 1.0) for rank in range(job.cluster.num_devices)]


def _item(item: Item, seconds: dict[Op, float]) -> list[Any]:
    if isinstance(item, Op):
        return ["op", item.kind, list(item.dims), item.dtype, seconds[item]]
    if isinstance(item, Comm) and not item.beside:
        return [item.stream, item.work.kind, item.work.num_bytes]
    raise CollectError(f"a box runs ops, and collectives that are waited for, got {item}")


def box_plan(
    box: Box,
    runs: Sequence[tuple[str, str, Job, dict[str, int]]],
    latency: LatencyModel,
    *,
    collectives: Sequence[Collective] = (),
    ops: Sequence[Op] = (),
    event_seconds: float = 0.0,
) -> dict[str, Any]:
    """A plan for the harness of sleeping jobs in one box (name, role, job and step counts of each), and of collectives
    and ops that are measured for real within a time budget.
    """
    planned = []
    for name, role, job, counts in runs:
        held = box.holds(job)
        own = {"name": name or run_name(held), "role": role, "job": held.to_dict(), "sleeps": sleeps_of(held, latency)}
        planned.append({**own, **counts})
    wanted = event_seconds > 0 and (collectives or ops)
    events = [event_row(box.num_ranks, ops, collectives, event_seconds)] if wanted else []
    return checked_plan(planned, events, device="cpu", box=box.to_dict())


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
        inside = zip(programs, self._latency.in_context(programs, seconds), seconds, strict=True)
        return [np.where([isinstance(node.work, Op) for node in p.nodes], own, alone) for p, own, alone in inside]


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
    stage = rank // (job.parallel.tp * job.parallel.cp * job.parallel.dp)
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
