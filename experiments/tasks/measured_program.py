"""``stepsight replay RUN --job JOB``: compare the traced step with the program that the job lowers to.

What the job lacks, what it has besides, and what differs in dims or bytes, by kind of op and collective: a test of the
lowering on real jobs, and of a job file against the run that it is said to describe.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.hardware.hardware import HARDWARE, find_hardware
from stepsight.dataset.imported.rank_graph import RankGraph
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.tasks.what_if import latency_of
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.schedules.entries import POST

Work = Op | Collective
_MOST_TOLD = 12  # differences printed as text; --json has all


@dataclass(frozen=True)
class Difference:
    """A signature that occurs in one of the two more often than in the other.

    Attributes:
        what: ``missing`` (the job alone has it), ``extra`` (the trace alone), ``count``, or ``dims`` (of one kind and
            count, in other dims or bytes).
        traced, lowered: Signatures; empty where there is none.
        traced_count, lowered_count: In a step.
        traced_s, lowered_s: Seconds of a step.
    """

    what: str
    traced: str
    lowered: str
    traced_count: float
    lowered_count: float
    traced_s: float
    lowered_s: float


def lowered_works(lowered: Lowered, stage: int) -> Counter[Work]:
    """How often a rank of a stage runs each op and collective in one step."""
    track, found = lowered.track, Counter[Work]()
    segments = Counter(lowered.segment[track.stage == stage].tolist())
    segments[int(lowered.optimizer[stage])] += 1
    for number, times in segments.items():
        if number >= 0:
            segment = lowered.segments[number]
            kept = np.flatnonzero(~segment.graph.taken)
            for work, count in Counter(segment.graph.work[kept].tolist()).items():
                found[segment.works[work]] += times * count
    entry, rank, index, _ = track.entries
    for message in index[(entry == POST) & (rank == stage)].tolist():
        found[lowered.messages[int(lowered.message[message])]] += 1
    return found


def traced_works(graph: RankGraph) -> tuple[dict[Work, float], dict[Work, float]]:
    """How often a rank runs each op and collective in one traced step, and for how many seconds.

    The kernels of one framework call are one op; calls of which nobody knows are ops by themselves.
    """
    inside = np.flatnonzero((graph.nodes["step"] >= 0) & graph.on_device & (graph.nodes["work"] >= 0))
    steps = max(len(graph.steps_s), 1)
    count: defaultdict[Work, float] = defaultdict(float)
    seconds: defaultdict[Work, float] = defaultdict(float)
    calls: set[tuple[int, int]] = set()
    for node in inside.tolist():
        number, call = int(graph.nodes["work"][node]), int(graph.nodes["call"][node])
        work = graph.works[number]
        seconds[work] += float(graph.duration_s[node]) / steps
        if call < 0 or (number, call) not in calls:
            count[work] += 1.0 / steps
        calls.add((number, call))
    return dict(count), dict(seconds)


def compare(job: Job, graphs: Sequence[RankGraph]) -> dict[str, Any]:
    """Compare a traced run with its job: one rank of each pipeline stage.

    Raises:
        TraceError: If a rank is beyond the job's devices.
    """
    hardware = (
        find_hardware(job.hardware_name) or HARDWARE["local-cpu" if graphs[0].device == "cpu" else "a100-sxm-80gb"]
    )
    lowered, latency = lower(job, hardware), _latency(job, hardware.name)
    stages: dict[int, RankGraph] = {}
    for graph in graphs:
        if graph.rank >= job.cluster.num_devices:
            raise TraceError(f"the job must have the trace's ranks, got rank {graph.rank} of {job.cluster.num_devices}")
        stages.setdefault(stage_of(job, graph.rank), graph)
    found = [_stage(stage, graph, lowered, latency) for stage, graph in sorted(stages.items())]
    seconds, alike = (sum(each[key] for each in found) for key in ("traced_s", "alike_s"))
    return {"alike_percent": 100.0 * alike / seconds if seconds else 0.0, "stages": found}


def stage_of(job: Job, rank: int) -> int:
    """Pipeline stage of a rank."""
    parallel = job.parallel
    stride = 1
    for axis in parallel.order.split("-"):
        size = getattr(parallel, axis)
        if axis == "pp":
            return int(rank // stride % size)
        stride *= size
    return 0


def _latency(job: Job, hardware: str) -> LatencyModel | None:
    try:
        return latency_of(hardware, job.fabric)
    except StepsightError:  # a user's own device: the job has no predicted seconds
        return None


def _stage(stage: int, graph: RankGraph, lowered: Lowered, latency: LatencyModel | None) -> dict[str, Any]:
    count, spent = traced_works(graph)
    asked = lowered_works(lowered, stage)
    seconds = _seconds(latency, asked)
    differences = _differences(count, spent, asked, seconds)
    kinds = sorted({work.kind for work in (*count, *asked)})
    rows = []
    for kind in kinds:
        own, job = [w for w in count if w.kind == kind], [w for w in asked if w.kind == kind]
        rows.append(
            {
                "kind": kind,
                "traced": sum(count[w] for w in own),
                "lowered": sum(asked[w] for w in job),
                "traced_s": sum(spent[w] for w in own),
                "lowered_s": sum(seconds[w] for w in job),
            }
        )
    alike = sum(spent[work] for work in count if work in asked and abs(count[work] - asked[work]) < 0.5)
    told = [vars(each) for each in differences]
    return {
        "stage": stage,
        "rank": graph.rank,
        "traced_s": sum(spent.values()),
        "alike_s": alike,
        "kinds": sorted(rows, key=lambda row: -max(row["traced_s"], row["lowered_s"])),
        "differences": told,
    }


def _seconds(latency: LatencyModel | None, works: Counter[Work]) -> dict[Work, float]:
    """Predicted seconds of all occurrences of each work; 0 without a prediction."""
    out = dict.fromkeys(works, 0.0)
    if latency is not None:
        ops, collectives = [w for w in works if isinstance(w, Op)], [w for w in works if isinstance(w, Collective)]
        for work, seconds in zip(ops, latency.op_seconds(ops).tolist() if ops else [], strict=True):
            out[work] = seconds * works[work]
        told = latency.collective_seconds(collectives).tolist() if collectives else []
        for each, seconds in zip(collectives, told, strict=True):
            out[each] = seconds * works[each]
    return out


def _differences(
    count: dict[Work, float], spent: dict[Work, float], asked: Counter[Work], seconds: dict[Work, float]
) -> list[Difference]:
    """Signatures that differ; of one kind, equal numbers with other dims are paired."""
    found = [
        Difference("count", str(work), str(work), count[work], asked[work], spent[work], seconds[work])
        for work in count
        if work in asked and abs(count[work] - asked[work]) >= 0.5
    ]
    extra, missing = [work for work in count if work not in asked], [work for work in asked if work not in count]
    for kind in {work.kind for work in (*extra, *missing)}:
        own, job = _by_size(w for w in extra if w.kind == kind), _by_size(w for w in missing if w.kind == kind)
        for one in list(own):
            same = next((other for other in job if abs(asked[other] - count[one]) < 0.5), None)
            if same is not None:
                own.remove(one)
                job.remove(same)
                numbers = (count[one], float(asked[same]), spent[one], seconds[same])
                found.append(Difference("dims", str(one), str(same), *numbers))
        found += [Difference("extra", str(w), "", count[w], 0.0, spent[w], 0.0) for w in own]
        found += [Difference("missing", "", str(w), 0.0, float(asked[w]), 0.0, seconds[w]) for w in job]
    return sorted(found, key=lambda each: -max(each.traced_s, each.lowered_s))


def _by_size(works: Iterable[Work]) -> list[Work]:
    return sorted(works, key=lambda work: -work.num_bytes)


def comparison_text(told: dict[str, Any]) -> str:
    """The comparison as text."""
    blocks = [f"beside its job: {told['alike_percent']:.1f} % of the traced time is in ops and collectives that the "
              "lowered program runs equally often, in the same dims"]  # fmt: skip
    for stage in told["stages"]:
        cells = [
            [row["kind"], Number(row["traced"]), Number(row["lowered"]), Number(1e3 * row["traced_s"], 3),
             Number(1e3 * row["lowered_s"], 3)]
            for row in stage["kinds"]
        ]  # fmt: skip
        blocks.append(
            f"stage {stage['stage']}, rank {stage['rank']}, a step:\n"
            + table(["kind", "traced", "lowered", "traced ms", "predicted ms"], cells)
        )
        rows = stage["differences"]
        cells = [
            [row["what"], row["traced"] or "-", row["lowered"] or "-", Number(row["traced_count"]),
             Number(row["lowered_count"]), Number(1e3 * max(row["traced_s"], row["lowered_s"]), 3)]
            for row in rows[:_MOST_TOLD]
        ]  # fmt: skip
        if cells:
            header = ["difference", "traced", "lowered", "times traced", "times lowered", "ms"]
            more = f"\n… and {len(rows) - _MOST_TOLD} more (--json)" if len(rows) > _MOST_TOLD else ""
            blocks.append(table(header, cells) + more)
        else:
            blocks.append("no differences")
    return "\n\n".join(blocks)
