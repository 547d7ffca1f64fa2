"""A traced run beside the job that it is said to be of.

``check_job`` refuses a job that cannot have produced the trace.  ``compare`` counts what the traced step or the lowered
program has more often than the other, by kind, dims and bytes: a test of the lowering on real jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.graph.program import OP, Program
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import OP_KINDS, Collective, Op
from stepsight.experiments.questions.traced_device import latency_of
from stepsight.experiments.reports.text_table import Number, table
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
    wrong = []
    world, devices = graphs[0].world_size, job.cluster.num_devices
    if world != devices:
        wrong.append(f"the job has {devices} devices, the trace {world} rank(s)")
    hosted, hardware = graphs[0].device == "cpu", _hardware(job, graphs)
    if hosted != (hardware.kind == "cpu"):
        traced_on = "a host" if hosted else graphs[0].device_name or "a device"
        wrong.append(f"the job runs on {job.cluster.hardware}, the trace on {traced_on}")
    traced = _traced_shares(graphs)
    works = {work for segment in lower(job, hardware).segments for work in segment.works}
    lowered = {work.family for work in works if isinstance(work, Op)}
    products = {"gemm", "attention"}  # products of attention are either, as the job fuses them or not
    for family in _TELLING:
        known = family in lowered or (family in products and lowered & products)
        if traced[family] >= _LEAST_SHARE and not known:
            wrong.append(f"{100 * traced[family]:.0f} % of the trace's time is {family}, and the job has none")
    if "gemm" in lowered and not any(traced[family] for family in ("gemm", "fused", "opaque", "attention")):
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


def _traced_shares(graphs: Sequence[Program]) -> defaultdict[str, float]:
    """Share of the ops' time by family."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for graph in graphs:
        ops = graph.columns["kind"] == OP
        for work, spent in zip(graph.columns["work"][ops].tolist(), graph.duration_s[ops].tolist(), strict=True):
            kind = graph.works[work].kind
            seconds[OP_KINDS[kind].family if kind in OP_KINDS else ""] += spent
    whole = sum(seconds.values()) or 1.0
    return defaultdict(float, {family: spent / whole for family, spent in seconds.items()})


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
    """How often a rank runs each op and collective in one traced step, and for how many seconds.

    The kernels of one framework call are one op; calls of which nobody knows are ops by themselves.
    """
    inside = np.flatnonzero((graph.columns["step"] >= 0) & graph.on_device & (graph.columns["work"] >= 0))
    steps = max(len(graph.steps_s), 1)
    count: defaultdict[Work, float] = defaultdict(float)
    seconds: defaultdict[Work, float] = defaultdict(float)
    calls: set[tuple[int, int]] = set()
    for node in inside.tolist():
        number, call = int(graph.columns["work"][node]), int(graph.columns["call"][node])
        work = graph.works[number]
        seconds[work] += float(graph.duration_s[node]) / steps
        if call < 0 or (number, call) not in calls:
            count[work] += 1.0 / steps
        calls.add((number, call))
    return dict(count), dict(seconds)


def compare(job: Job, graphs: Sequence[Program]) -> dict[str, Any]:
    """Compare a traced run with its job: one rank of each pipeline stage."""
    hardware = _hardware(job, graphs)
    lowered, latency = lower(job, hardware), _latency(job, hardware.name)
    stages: dict[int, Program] = {}
    for graph in graphs:
        if graph.rank >= job.cluster.num_devices:
            raise TraceError(f"the job must have the trace's ranks, got rank {graph.rank} of {job.cluster.num_devices}")
        stages.setdefault(stage_of(job, graph.rank), graph)
    found = [_stage(stage, graph, lowered, latency) for stage, graph in sorted(stages.items())]
    seconds, alike = (sum(each[key] for each in found) for key in ("traced_s", "alike_s"))
    return {"alike_percent": 100.0 * alike / seconds if seconds else 0.0, "stages": found}


def stage_of(job: Job, rank: int) -> int:
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


def _stage(stage: int, graph: Program, lowered: Lowered, latency: LatencyModel | None) -> dict[str, Any]:
    """One rank of a stage: totals by kind, and what differs."""
    count, spent = traced_works(graph)
    asked = lowered_works(lowered, stage)
    seconds = _seconds(latency, asked)
    rows: dict[str, dict[str, Any]] = {
        kind: {"kind": kind, "traced": 0, "lowered": 0, "traced_s": 0, "lowered_s": 0}
        for kind in sorted({work.kind for work in (*count, *asked)})
    }
    for work in count:
        rows[work.kind]["traced"] += count[work]
        rows[work.kind]["traced_s"] += spent[work]
    for work in asked:
        rows[work.kind]["lowered"] += asked[work]
        rows[work.kind]["lowered_s"] += seconds[work]
    return {
        "stage": stage,
        "rank": graph.rank,
        "traced_s": sum(spent.values()),
        "alike_s": sum(spent[work] for work in count if work in asked and _equal(count[work], asked[work])),
        "kinds": sorted(rows.values(), key=lambda row: -max(row["traced_s"], row["lowered_s"])),
        "differences": _differences(count, spent, asked, seconds),
    }


def _equal(traced: float, lowered: float) -> bool:
    """Whether two counts of a step are the same."""
    return abs(traced - lowered) < 0.5


def _seconds(latency: LatencyModel | None, works: Counter[Work]) -> dict[Work, float]:
    """Predicted seconds of all occurrences of each work; 0 without a prediction."""
    if latency is None:
        return dict.fromkeys(works, 0.0)
    each = np.nan_to_num(sized_seconds(latency, list(works))).tolist()
    return {work: seconds * works[work] for work, seconds in zip(works, each, strict=True)}


def _differences(
    count: dict[Work, float], spent: dict[Work, float], asked: Counter[Work], seconds: dict[Work, float]
) -> list[dict[str, Any]]:
    """Signatures that occur in one of the two more often; of one kind, equal numbers with other dims are paired.

    Returns:
        For each ``what``: ``missing`` (the job alone has it), ``extra`` (the trace alone), ``count``, or ``dims`` (of
        one kind and count, in other dims or bytes); and both signatures, with counts and seconds of a step.
    """

    def difference(what: str, one: Work | None, other: Work | None) -> dict[str, Any]:
        own = (count[one], spent[one]) if one else (0.0, 0.0)
        job = (float(asked[other]), seconds[other]) if other else (0.0, 0.0)
        signatures = {"what": what, "traced": str(one or ""), "lowered": str(other or "")}
        counts = {"traced_count": own[0], "lowered_count": job[0]}
        return {**signatures, **counts, "traced_s": own[1], "lowered_s": job[1]}

    found = [difference("count", w, w) for w in count if w in asked and not _equal(count[w], asked[w])]
    missing = sorted((work for work in asked if work not in count), key=lambda work: -work.num_bytes)
    for one in sorted((work for work in count if work not in asked), key=lambda work: -work.num_bytes):
        same = next((w for w in missing if w.kind == one.kind and _equal(asked[w], count[one])), None)
        if same is not None:
            missing.remove(same)
        found.append(difference("dims" if same is not None else "extra", one, same))
    found += [difference("missing", None, work) for work in missing]
    return sorted(found, key=lambda each: -max(each["traced_s"], each["lowered_s"]))


def comparison_text(told: dict[str, Any]) -> str:
    blocks = [
        f"beside its job: {told['alike_percent']:.1f} % of the traced time is in ops and collectives that the lowered "
        "program runs equally often, in the same dims"
    ]
    titles = ["kind", "traced", "lowered", "traced ms", "predicted ms"]
    header = ["difference", "traced", "lowered", "times traced", "times lowered", "ms"]
    for stage in told["stages"]:
        cells: list[list[Any]] = [
            [row["kind"], Number(row["traced"]), Number(row["lowered"]), _ms(row["traced_s"]), _ms(row["lowered_s"])]
            for row in stage["kinds"]
        ]
        blocks.append(f"stage {stage['stage']}, rank {stage['rank']}, a step:\n" + table(titles, cells))
        rows = stage["differences"]
        cells = [
            [row["what"], row["traced"] or "-", row["lowered"] or "-", Number(row["traced_count"]),
             Number(row["lowered_count"]), _ms(max(row["traced_s"], row["lowered_s"]))]
            for row in rows[:_MOST_PRINTED]
        ]  # fmt: skip
        more = f"\n… and {len(rows) - _MOST_PRINTED} more (--json)" if len(rows) > _MOST_PRINTED else ""
        blocks.append(table(header, cells) + more if cells else "no differences")
    return "\n\n".join(blocks)


def _ms(seconds: float) -> Number:
    return Number(1e3 * seconds, 3)
