"""A traced run beside the job that it is said to be of.

``check_job`` refuses a job that cannot have produced the trace.  ``compare`` counts what the traced step or the lowered
program has more often than the other, by kind, dims and bytes: a test of the lowering on real jobs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.graph.program import OP, Program
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import OP_KINDS, Collective, Op
from stepsight.experiments.questions.traced_device import latency_of
from stepsight.experiments.reports.text_table import Columns, Number, table_of
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.replay.changes import sized_seconds
from stepsight.simulator.schedules.order import POST

# Families of ops that a trace and its job must both have or both lack.
_TELLING = ("gemm", "attention", "conv", "batch_norm", "embedding_bag", "pool")
_HOST, _DEVICE = "local-cpu", "a100-sxm-80gb"  # stand for hardware that a job names and that is unknown
_MOST_PRINTED = 12  # differences printed as text; --json has all
_LEAST_SHARE = 0.05  # share of the device's time from which a family distinguishes jobs


Work = Op | Collective


def check_job(job: Job, graphs: Sequence[Program]) -> None:
    """Check that a job can have produced a trace."""
    wrong, world, devices = [], graphs[0].world_size, job.cluster.num_devices
    if world != devices:
        wrong.append(f"the job has {devices} devices, the trace {world} rank(s)")
    hosted, hardware = graphs[0].device == "cpu", _hardware(job, graphs)
    if hosted != (hardware.kind == "cpu"):
        traced_on = "a host" if hosted else graphs[0].device_name or "a device"
        wrong.append(f"the job runs on {job.cluster.hardware}, the trace on {traced_on}")
    seconds = Counter[str]()  # of ops by family
    for graph in graphs:
        ops = graph.columns["kind"] == OP
        for number, spent in zip(graph.columns["work"][ops].tolist(), graph.duration_s[ops].tolist(), strict=True):
            seconds[getattr(OP_KINDS.get(graph.works[number].kind), "family", "")] += spent
    works = {work for segment in lower(job, hardware).segments for work in segment.works}
    lowered = {work.family for work in works if isinstance(work, Op)}
    products = {"gemm", "attention"}  # products of attention are either, as the job fuses them or not
    for family in _TELLING:
        share = seconds[family] / (seconds.total() or 1.0)
        if share >= _LEAST_SHARE and family not in lowered and not (family in products and lowered & products):
            wrong.append(f"{100 * share:.0f} % of the trace's time is {family}, and the job has none")
    if "gemm" in lowered and not any(seconds[family] for family in ("gemm", "fused", "opaque", "attention")):
        wrong.append("the job has matrix products, and the trace none")
    ours = sorted({work.kind for work in works if isinstance(work, Collective)})
    theirs = sorted({work.kind for graph in graphs for work in graph.works if isinstance(work, Collective)})
    if devices > 1 and ours and not theirs:
        wrong.append(f"the job has collectives ({', '.join(ours)}), and the trace none")
    if theirs and devices == 1:
        wrong.append(f"the trace has collectives ({', '.join(theirs)}), and the job runs on one device")
    if wrong:
        raise TraceError(f"a job must be the one that was traced, got {'; '.join(wrong)}")


def _hardware(job: Job, graphs: Sequence[Program]) -> Hardware:
    return find_hardware(job.hardware_name) or HARDWARE[_HOST if graphs[0].device == "cpu" else _DEVICE]


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


def traced_works(graph: Program) -> tuple[dict[Work, float], dict[Work, float]]:
    """How often a rank runs each op and collective in one traced step, and for how many seconds; the kernels of one
    framework call are one op.
    """
    inside = np.flatnonzero((graph.columns["step"] >= 0) & graph.on_device & (graph.columns["work"] >= 0))
    steps, count, seconds = max(len(graph.steps_s), 1), defaultdict[Work, float](float), defaultdict[Work, float](float)
    calls = set[tuple[int, int]]()
    for node in inside.tolist():
        number, call = int(graph.columns["work"][node]), int(graph.columns["call"][node])
        seconds[graph.works[number]] += float(graph.duration_s[node])
        count[graph.works[number]] += call < 0 or (number, call) not in calls
        calls.add((number, call))
    return {work: each / steps for work, each in count.items()}, {w: each / steps for w, each in seconds.items()}


def compare(job: Job, graphs: Sequence[Program]) -> dict[str, Any]:
    """Compare a traced run with its job: one rank of each pipeline stage."""
    hardware = _hardware(job, graphs)
    lowered, latency = lower(job, hardware), None
    with suppress(StepsightError):  # a user's own device: the job has no predicted seconds
        latency = latency_of(hardware.name, job.fabric)
    stages: dict[int, Program] = {}
    for graph in graphs:
        if graph.rank >= job.cluster.num_devices:
            raise TraceError(f"the job must have the trace's ranks, got rank {graph.rank} of {job.cluster.num_devices}")
        stages.setdefault(stage_of(job, graph.rank), graph)
    found = [_stage(stage, graph, lowered, latency) for stage, graph in sorted(stages.items())]
    seconds, alike = (sum(each[key] for each in found) for key in ("traced_s", "alike_s"))
    return {"alike_percent": 100.0 * alike / seconds if seconds else 0.0, "stages": found}


def stage_of(job: Job, rank: int) -> int:
    inner, _, _ = job.parallel.order.partition("pp")
    stride = math.prod(getattr(job.parallel, axis) for axis in inner.split("-") if axis)
    return int(rank // stride % job.parallel.pp)


def _stage(stage: int, graph: Program, lowered: Lowered, latency: LatencyModel | None) -> dict[str, Any]:
    """One rank of a stage: totals by kind, and what differs."""
    (count, spent), asked = traced_works(graph), lowered_works(lowered, stage)
    each = np.zeros(len(asked)) if latency is None else np.nan_to_num(sized_seconds(latency, list(asked)))
    seconds = {work: one * asked[work] for work, one in zip(asked, each.tolist(), strict=True)}
    totals: dict[str, Mapping[Work, float]] = dict(traced=count, lowered=asked, traced_s=spent, lowered_s=seconds)
    kinds: list[dict[str, Any]] = [{"kind": kind} for kind in sorted({work.kind for work in (*count, *asked)})]
    for row in kinds:
        for name, found in totals.items():
            row[name] = sum(value for work, value in found.items() if work.kind == row["kind"])
    return {
        "stage": stage,
        "rank": graph.rank,
        "traced_s": sum(spent.values()),
        "alike_s": sum(spent[work] for work in count if work in asked and _equal(count[work], asked[work])),
        "kinds": sorted(kinds, key=_longest),
        "differences": _differences(count, spent, asked, seconds),
    }


def _longest(row: dict[str, Any]) -> float:
    return -float(max(row["traced_s"], row["lowered_s"]))


def _equal(traced: float, lowered: float) -> bool:
    """Whether two counts of a step are the same."""
    return abs(traced - lowered) < 0.5


def _differences(
    count: dict[Work, float], spent: dict[Work, float], asked: Counter[Work], seconds: dict[Work, float]
) -> list[dict[str, Any]]:
    """Signatures that occur in one of the two more often, with counts and seconds of a step.

    ``what`` is ``missing`` (the job alone has it), ``extra`` (the trace alone), ``count``, or ``dims``: equal numbers
    of one kind, in other dims or bytes, are paired.
    """
    pairs: list[tuple[str, Work | None, Work | None]] = [
        ("count", work, work) for work in count if work in asked and not _equal(count[work], asked[work])
    ]
    missing, extra = (
        sorted(one.keys() - other.keys(), key=lambda work: (-work.num_bytes, str(work)))
        for one, other in ((asked, count), (count, asked))
    )
    for one in extra:
        same = next((w for w in missing if w.kind == one.kind and _equal(asked[w], count[one])), None)
        if same is not None:
            missing.remove(same)
        pairs.append(("dims" if same is not None else "extra", one, same))
    found: list[dict[str, Any]] = [
        {"what": what, "traced": str(one or ""), "lowered": str(other or ""),
         "traced_count": count[one] if one else 0.0, "lowered_count": float(asked[other]) if other else 0.0,
         "traced_s": spent[one] if one else 0.0, "lowered_s": seconds[other] if other else 0.0}
        for what, one, other in (*pairs, *(("missing", None, work) for work in missing))
    ]  # fmt: skip
    return sorted(found, key=_longest)


def comparison_text(told: dict[str, Any]) -> str:
    blocks = [
        f"beside its job: {told['alike_percent']:.1f} % of the traced time is in ops and collectives that the lowered "
        "program runs equally often, in the same dims"
    ]
    totals: Columns = {"kind": "kind", "traced": lambda row: Number(row["traced"]),
                       "lowered": lambda row: Number(row["lowered"]), "traced ms": "traced_s",
                       "predicted ms": "lowered_s"}  # fmt: skip
    columns: Columns = {
        "difference": "what",
        "traced": lambda row: row["traced"] or "-",
        "lowered": lambda row: row["lowered"] or "-",
        "times traced": lambda row: Number(row["traced_count"]),
        "times lowered": lambda row: Number(row["lowered_count"]),
        "ms": lambda row: Number(1e3 * max(row["traced_s"], row["lowered_s"]), 3),
    }
    for stage in told["stages"]:
        blocks.append(f"stage {stage['stage']}, rank {stage['rank']}, a step:\n{table_of(stage['kinds'], totals, 3)}")
        rows = stage["differences"]
        more = f"\n… and {len(rows) - _MOST_PRINTED} more (--json)" if len(rows) > _MOST_PRINTED else ""
        blocks.append(table_of(rows[:_MOST_PRINTED], columns) + more if rows else "no differences")
    return "\n\n".join(blocks)
