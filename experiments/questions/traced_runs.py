"""What replays of traced runs tell: how exact they are, why a run is slow, and what changes would gain."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import (
    FABRICS,
    HARDWARE,
    Fabric,
    canonical_hardware,
    find_fabric,
    find_hardware,
    unknown_hardware,
    usual_fabric,
)
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import has_traces, is_imported, read_imported, run_folders, run_graphs
from stepsight.dataset.runs.run_manifest import read_manifest, read_object
from stepsight.dataset.tables.measurements import device_name
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.tasks.settings import TraceChanges
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency
from stepsight.simulator.replay import changes
from stepsight.simulator.replay.causes import COMMUNICATION, HOST_BOUND, LOADER, PEERS, breakdown, critical_path
from stepsight.simulator.replay.replay import Walk, replay
from stepsight.training.prediction.prediction import predict
from stepsight.training.prediction.prediction_views import seconds_text

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

Change = Callable[[Sequence[Program], changes.Tally], list[Program]]
LEAST_SHARE = 0.02  # share of the steps: smaller causes are not named
SMALL_BYTES, LARGE_BYTES = 1 << 20, 16 << 20
SLOW_LINK = 0.4  # share of the stated bandwidth: a large collective below it does not use the stated links
THROTTLED = ("power_cap", "hardware_slowdown", "thermal", "hardware_thermal", "hardware_power_brake")
_HOST_LIMIT = 50.0  # percent of the critical path from which the host limits a step
_ADVICE = {
    HOST_BOUND: "the host launches too slowly: CUDA graphs, torch.compile, fused optimizers, larger micro-batches",
    LOADER: "the data loader is late: more workers, prefetching, pinned memory, faster storage",
    PEERS: "ranks wait for a slower rank: look for a straggler, uneven stages or uneven data",
    COMMUNICATION: "communication is exposed: overlap it, use larger buckets, or communicate less",
    "small_messages": "join messages: larger buckets, fewer shards",
    "slow_transport": "check the transport (NCCL_DEBUG=INFO: NET/Socket instead of NET/IB), GPUDirect, and the links",
    "throttling": "cool the devices, or raise the power limit; predictions assume neither",
}


def one_run(path: Path, verb: str, *, traced: bool = False) -> Path:
    """The folder of the only run (the only traced run) of a path."""
    folders = [folder for folder in run_folders(path) if not traced or has_traces(folder)]
    if len(folders) != 1:
        what = "one traced run" if traced else "one run"
        raise StepsightError(f"{verb} takes {what}, got {len(folders)} in {path}: name one folder of its runs/")
    return folders[0]


def measured_step(folder: Path, ranks: Sequence[dict[str, float]] = ()) -> float:
    """Median seconds of a run's steps without a profiler; of the traced ``ranks`` if none was timed; 0 without any."""
    if is_imported(folder):
        timed = [seconds for steps in read_imported(folder).rounds for seconds in steps]
    else:
        timed = list(read_manifest(folder).step_seconds)
    return statistics.median(timed) if timed else statistics.fmean([rank["step_s"] for rank in ranks] or [0.0])


def _warnings(graphs: Sequence[Program]) -> list[str]:
    return list(dict.fromkeys(warning for graph in graphs for warning in graph.warnings))


def replay_runs(path: Path) -> dict[str, Any]:
    """Replay a run, or every run of a collection: then the totals, and each run under ``runs``."""
    folders = run_folders(path)
    told = []
    for folder in [each for each in folders if has_traces(each)] or folders[:1]:
        run = run_graphs(folder)
        told.append({"run": run.name, **replay(run.graphs).to_dict(), "warnings": _warnings(run.graphs)})
    if len(told) == 1:
        return told[0]
    measured, replayed = (sum(each[key] for each in told) for key in ("measured_s", "replayed_s"))
    streams = [{"run": each["run"], **stream} for each in told for stream in each["streams"]]
    error = 100.0 * (replayed / measured - 1.0) if measured else 0.0
    return {"measured_s": measured, "replayed_s": replayed, "error_percent": error, "streams": streams, "runs": told}


def replay_text(told: dict[str, Any]) -> str:
    blocks = []
    for each in told.get("runs", [told]):
        lines = [
            f"{_replayed(each)} ({each['error_percent']:+.2f} %), {each['steps']} step(s)",
            f"idle time without a known cause: {each['unexplained_percent']:.2f} % of the steps",
        ]
        if each["unrecorded_percent"]:
            lines.append(f"work that the trace leaves out: {each['unrecorded_percent']:.2f} % of the steps")
        cells = [
            [s["rank"], s["stream"], Number(1e3 * s["measured_busy_s"], 3), Number(1e3 * s["replayed_busy_s"], 3),
             Number(s["error_percent"], 2), Number(1e3 * s["unexplained_idle_s"], 3)]
            for s in each["streams"]
        ]  # fmt: skip
        lines.append(table(["rank", "stream", "busy ms", "replayed ms", "error %", "unexplained idle ms"], cells))
        blocks.append("\n".join([*lines, *(f"warning: {warning}" for warning in each["warnings"])]))
    return "\n\n".join(blocks)


def _replayed(told: dict[str, Any]) -> str:
    measured, replayed = 1e3 * told["measured_s"], 1e3 * told["replayed_s"]
    return f"run {told['run']}: step measured {measured:.3f} ms, replayed {replayed:.3f} ms"


def diagnose(run: Path, job: Job | None = None, predictor: Predictor | str | None = None) -> dict[str, Any]:
    """Name the causes of a slow run.

    Args:
        run: Folder of a traced run, or a collection with one.
        job: What ran; None: as the run states it, if it does.
        predictor: As in ``predict``, for the comparison.

    Returns:
        The measured step, the prediction beside it, and ``causes``: ``share`` is the part of the steps' time, None
        where a cause is not a part of the time.
    """
    folder = one_run(run, "doctor", traced=True)
    found = run_graphs(folder)
    job = job or found.job
    told = breakdown(found.graphs).to_dict()
    steps, measured = told["steps_s"] or 1.0, measured_step(folder, told["ranks"])
    causes = [
        _cause(name, told["idle"][name] / steps, f"the device idles {1e3 * told['idle'][name]:.1f} ms of "
               f"{1e3 * steps:.1f} ms for it")
        for name in (HOST_BOUND, LOADER, PEERS, COMMUNICATION)
        if told["idle"].get(name, 0.0) / steps > LEAST_SHARE
    ]  # fmt: skip
    causes += _message_causes(found.graphs, steps, None if job is None else job.fabric) + _clock_causes(folder)
    compared: dict[str, Any] = {"predicted_s": None}
    try:
        if job is not None:
            prediction = predict(job, predictor)
            compared = {
                "predicted_s": prediction.iteration_time_s,
                "low_s": prediction.low_s,
                "high_s": prediction.high_s,
                "slower_percent": 100.0 * (measured / prediction.iteration_time_s - 1.0),
                "predicted_breakdown": dict(prediction.breakdown),
            }
    except StepsightError as error:
        compared["why_not_predicted"] = str(error)
    causes.sort(key=lambda cause: -(cause["share"] or 0.0))
    return {"run": found.name, "measured_s": measured, **compared, "causes": causes}


def _cause(name: str, share: float | None, evidence: str) -> dict[str, Any]:
    return {"cause": name, "share": share, "evidence": evidence, "advice": _ADVICE[name]}


def _message_causes(graphs: Sequence[Program], steps: float, fabric: Fabric | None) -> list[dict[str, Any]]:
    """Many small messages, and large ones that do not reach the links' bandwidth."""
    sent: list[tuple[Collective, float]] = []
    for graph in graphs:
        for node in np.flatnonzero(graph.on_device & (graph.columns["step"] >= 0)).tolist():
            work = graph.works[graph.columns["work"][node]]
            if isinstance(work, Collective):
                sent.append((work, float(graph.duration_s[node])))
    found = []
    small = [seconds for work, seconds in sent if work.num_bytes < SMALL_BYTES]
    if sum(small) / steps > LEAST_SHARE and len(small) > len(sent) / 2:
        evidence = f"{len(small)} of {len(sent)} collectives have less than 1 MiB and take {1e3 * sum(small):.1f} ms"
        found.append(_cause("small_messages", sum(small) / steps, evidence))
    across = [
        work.num_bytes / seconds
        for work, seconds in sent
        if work.num_bytes >= LARGE_BYTES and seconds > 0 and work.ranks_per_node < work.group_size
    ]
    if fabric is not None and across:
        reached, stated = statistics.median(across), fabric.inter_node.bandwidth_bytes_per_s
        if reached < SLOW_LINK * stated:
            evidence = (
                f"collectives of 16 MiB and more between nodes reach {reached / 1e9:.2f} GB/s, the fabric states "
                f"{stated / 1e9:.2f} GB/s"
            )
            found.append(_cause("slow_transport", None, evidence))
    return found


def _clock_causes(folder: Path) -> list[dict[str, Any]]:
    noted = read_object(folder / "manifest.json").get("clocks")
    reasons = noted.get("reasons", {}) if isinstance(noted, dict) else {}
    seen = {name: share for name, share in reasons.items() if name in THROTTLED and share > LEAST_SHARE}
    evidence = ", ".join(f"{name} in {100 * share:.0f} % of the samples" for name, share in seen.items())
    return [_cause("throttling", None, evidence)] if seen else []


def diagnosis_text(told: dict[str, Any]) -> str:
    lines = [f"run {told['run']}: measured {seconds_text(told['measured_s'])}"]
    if told["predicted_s"] is not None:
        lines[0] += (
            f", predicted {seconds_text(told['predicted_s'])} "
            f"({seconds_text(told['low_s'])} to {seconds_text(told['high_s'])}): {told['slower_percent']:+.1f} %"
        )
    elif "why_not_predicted" in told:
        lines.append(f"not predicted: {told['why_not_predicted']}")
    cells = [
        [row["cause"], "" if row["share"] is None else f"{100 * row['share']:.1f}", row["evidence"], row["advice"]]
        for row in told["causes"]
    ]
    if not cells:
        return "\n".join([*lines, "no cause of idle time, small messages, slow transport or throttling was found"])
    return "\n".join([*lines, "", table(["cause", "% of the steps", "evidence", "what to do"], cells)])


def what_if(path: Path, wanted: TraceChanges) -> dict[str, Any]:
    """Compute one run: the unchanged replayed step, the step after each change, and with all changes.

    Where a step was timed without a profiler too, changes are to that step (``unprofiled_s``).
    """
    run = run_graphs(one_run(path, "what-if"))
    graphs: Sequence[Program] = run.graphs
    traced = _traced_on(wanted, graphs, run.job) if wanted.by_predictor else None
    asked = _changes(wanted, traced)
    if not asked:
        raise StepsightError("what-if needs at least one change, as --faster gemm=1.5 or --no-host")
    profiled = before = replay(graphs)
    if run.iteration_s:
        graphs = changes.as_timed(graphs, run.iteration_s)
        before = replay(graphs)
    each = []
    for title, change in asked:
        alone = replay(change(graphs, changes.Tally())).replayed_s
        each.append({"change": title, "step_s": alone, "speedup": before.replayed_s / alone})
    tally, changed = changes.Tally(), list(graphs)
    for _, change in asked:
        changed = change(changed, tally)
    after = replay(changed)
    device = sum(graph.device_time_s for graph in graphs) or 1.0
    source = None if traced is None else getattr(_predictor_of(traced[0]), "source", "roofline")
    return {
        "run": run.name,
        "measured_s": profiled.measured_s,
        "replayed_s": profiled.replayed_s,
        "unprofiled_s": before.replayed_s,
        "changed_s": after.replayed_s,
        "speedup": before.replayed_s / after.replayed_s if after.replayed_s else 0.0,
        "changes": each,
        "host_percent": _host_percent(before.walked),
        "changed_host_percent": _host_percent(after.walked),
        "traced_on": traced and {"hardware": traced[0], "fabric": traced[1].name, "predictor": source},
        "predicted_percent": min(100.0 * tally.predicted_s / device, 100.0),
        "scaled_percent": min(100.0 * tally.scaled_s / device, 100.0),
        "warnings": _warnings(graphs),
    }


def _host_percent(walked: Walk) -> float:
    """Share of the critical path that is work of the host, percent; 0 for ranks that compute on their host."""
    path = critical_path(walked)
    whole = sum(path.values())
    return 100.0 * path.get("host", 0.0) / whole if whole and walked.joined.graphs[0].device != "cpu" else 0.0


def _changes(asked: TraceChanges, traced: tuple[str, Fabric] | None) -> list[tuple[str, Change]]:
    """Titles and functions of the changes that are asked for."""
    found: list[tuple[str, Change]] = [
        (f"{what} {factor:g} times as fast", partial(changes.faster, what=what, factor=factor))
        for what, factor in asked.faster.items()
    ]
    if asked.no_host:
        found.append(("no host", changes.without_host))
    if asked.cuda_graph:
        found.append(("launches cost nothing", changes.as_device_graph))
    if asked.remove_straggler:
        found.append(("no straggler", changes.without_straggler))
    if traced is None:
        return found
    name, fabric = traced
    now = latency_of(name, fabric)
    if asked.times != 1.0:
        found.append((f"batch {asked.times:g} x", partial(changes.with_batch, factor=asked.times, latency=now)))
    if asked.replicas != 1:
        found.append((f"{asked.replicas} x ranks", partial(changes.with_replicas, factor=asked.replicas, latency=now)))
    if asked.bucket_mb:
        merged = partial(changes.with_buckets, num_bytes=asked.bucket_mb * 1e6, latency=now)
        found.append((f"buckets of {asked.bucket_mb:g} MB", merged))
    if asked.fabric or asked.hardware:
        device = _preset_name(asked.hardware) if asked.hardware else name
        other = find_fabric(asked.fabric or usual_fabric(device))
        title = " and ".join(filter(None, (asked.hardware, asked.fabric)))
        found.append((f"on {title}", partial(changes.on_latencies, before=now, after=latency_of(device, other))))
    return found


def _traced_on(asked: TraceChanges, graphs: Sequence[Program], job: Job | None) -> tuple[str, Fabric]:
    """Hardware and fabric of the trace: from the user, from the job, or from the device's name in the trace."""
    said = graphs[0].device_name
    name = _preset_name(asked.on) if asked.on else (job.cluster.hardware if job is not None else "")
    if not name:
        name = "local-cpu" if graphs[0].device == "cpu" else device_name(said)
    if find_hardware(name) is None and not asked.on:  # of another memory size, which changes no duration
        name = _preset_name(re.sub(r"-\d+gb$", "", name))
    if find_hardware(name) is None:
        if asked.on:
            raise StepsightError(f"--on must be the traced device, a name or a file: {unknown_hardware(asked.on)}")
        told = f"the trace names {said!r:.80}, which is no known device" if said else "the trace names no device"
        raise StepsightError(
            f"{told}: name the device or a similar one with --on (as in --on mi300x); --on takes "
            f"{', '.join(HARDWARE.names())}, or a file of a device"
        )
    if asked.on_fabric:
        return name, find_fabric(asked.on_fabric)
    try:
        return name, job.fabric if job is not None else find_fabric(usual_fabric(name))
    except JobError:
        raise StepsightError(
            f"no usual fabric of {name} is known: name the traced one with --on-fabric, one of "
            f"{', '.join(FABRICS.names())}, or a file"
        ) from None


def _preset_name(name: str) -> str:
    """A known hardware by name, usual name or prefix (``h100-sxm``): the first one that matches."""
    name = canonical_hardware(name)
    if find_hardware(name) is not None:
        return name
    return next((known for known in HARDWARE.names() if known.startswith(f"{name}-")), name)


def latency_of(hardware: str, fabric: Fabric) -> LatencyModel:
    """The latency model of a hardware: the shipped predictor, else a roofline."""
    facts = find_hardware(hardware)
    if facts is None:
        raise StepsightError(f"hardware must be one of {', '.join(HARDWARE.names())} or a file, got {hardware!r:.80}")
    predictor = _predictor_of(hardware)
    if predictor is None:
        return RooflineLatency(facts, fabric)
    return predictor.latency_on(fabric, 1, 1)


def _predictor_of(hardware: str) -> Predictor | None:
    from stepsight.training.prediction.prediction import asked_predictor

    facts = find_hardware(hardware)
    return asked_predictor(facts.name, None) if facts is not None else None


def what_if_text(told: dict[str, Any]) -> str:
    cells = [[each["change"], Number(1e3 * each["step_s"], 3), Number(each["speedup"], 3)] for each in told["changes"]]
    if len(cells) > 1:
        cells.append(["all of them", Number(1e3 * told["changed_s"], 3), Number(told["speedup"], 3)])
    unprofiled = f", without a profiler {1e3 * told['unprofiled_s']:.3f} ms" if told["unprofiled_s"] else ""
    lines = [
        _replayed(told) + unprofiled,
        table(["change", "step ms", "speed-up"], cells),
        f"durations changed by a predictor for {told['predicted_percent']:.1f} %, by a plain factor for "
        f"{told['scaled_percent']:.1f} % of device time",
    ]
    if max(told["host_percent"], told["changed_host_percent"]) >= 1.0:
        lines.append(
            f"the host's share of the critical path: {told['host_percent']:.0f} % before the changes, "
            f"{told['changed_host_percent']:.0f} % after them"
        )
    if told["changed_host_percent"] >= _HOST_LIMIT:
        lines.append("the host is the limit: faster kernels and links gain little; see --cuda-graph and --no-host")
    if told["traced_on"]:
        lines.append("traced on {hardware} ({fabric}); predicted by {predictor}".format(**told["traced_on"]))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in told["warnings"])])
