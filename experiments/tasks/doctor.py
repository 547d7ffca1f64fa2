"""Why a traced run is slow: named causes, each with evidence and advice."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.errors import EXTRAS, StepsightError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware_facts import Fabric
from stepsight.dataset.harness.base.plan_error import HarnessError
from stepsight.dataset.harness.running.box import check_possible
from stepsight.dataset.harness.running.launch import busy_note
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import has_traces, is_imported, read_imported, run_folders, run_graphs
from stepsight.dataset.runs.run_manifest import read_manifest, read_object
from stepsight.experiments.reports.text_table import table
from stepsight.simulator.replay.causes import COMMUNICATION, HOST_BOUND, LOADER, PEERS, breakdown
from stepsight.training.prediction.prediction import predict
from stepsight.training.prediction.prediction_views import seconds_text

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

LEAST_SHARE = 0.02  # share of the steps: smaller causes are not named
SMALL_BYTES, LARGE_BYTES = 1 << 20, 16 << 20
SLOW_LINK = 0.4  # share of the stated bandwidth: a large collective below it does not use the stated links
THROTTLED = ("power_cap", "hardware_slowdown", "thermal", "hardware_thermal", "hardware_power_brake")
_ADVICE = {
    HOST_BOUND: "the host launches too slowly: CUDA graphs, torch.compile, fused optimizers, larger micro-batches",
    LOADER: "the data loader is late: more workers, prefetching, pinned memory, faster storage",
    PEERS: "ranks wait for a slower rank: look for a straggler, uneven stages or uneven data",
    COMMUNICATION: "communication is exposed: overlap it, use larger buckets, or communicate less",
}


@dataclass(frozen=True)
class Cause:
    """One cause of a slow run.

    Attributes:
        cause: Its name.
        share: Part of the steps' time, 0 to 1; None where it is not a part of the time.
        evidence: What was seen.
        advice: What to do.
    """

    cause: str
    share: float | None
    evidence: str
    advice: str


def diagnose(run: Path, job: Job | None = None, predictor: Predictor | str | None = None) -> dict[str, Any]:
    """Name the causes of a slow run.

    Args:
        run: Folder of a traced run, or a collection with one.
        job: What ran; None: as the run states it, if it does.
        predictor: As in ``predict``, for the comparison.

    Raises:
        StepsightError: If there is no traced run.
    """
    folders = [folder for folder in run_folders(run) if has_traces(folder)]
    if len(folders) != 1:
        raise StepsightError(f"doctor takes one traced run, got {len(folders)} in {run}: name one folder of its runs/")
    found = run_graphs(folders[0])
    job = job or found.job
    told = breakdown(found.graphs).to_dict()
    steps = told["steps_s"] or 1.0
    causes = [*_idle_causes(told, steps), *_message_causes(found.graphs, steps, None if job is None else job.fabric)]
    causes += _clock_causes(folders[0])
    measured = _measured(folders[0], told)
    return {
        "run": found.name,
        "measured_s": measured,
        **_compared(job, predictor, measured),
        "causes": [asdict(cause) for cause in sorted(causes, key=lambda cause: -(cause.share or 0.0))],
    }


def _measured(folder: Path, told: dict[str, Any]) -> float:
    """Median of the steps without a profiler; of the traced ones if none were timed."""
    if is_imported(folder):
        timed = [seconds for steps in read_imported(folder).rounds for seconds in steps]
    else:
        timed = list(read_manifest(folder).step_seconds)
    return statistics.median(timed) if timed else statistics.fmean(rank["step_s"] for rank in told["ranks"])


def _compared(job: Job | None, predictor: Predictor | str | None, measured: float) -> dict[str, Any]:
    """The prediction beside the measurement, and its breakdown."""
    if job is None:
        return {"predicted_s": None}
    try:
        prediction = predict(job, predictor)
    except StepsightError as error:
        return {"predicted_s": None, "why_not_predicted": str(error)}
    return {
        "predicted_s": prediction.iteration_time_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "slower_percent": 100.0 * (measured / prediction.iteration_time_s - 1.0),
        "predicted_breakdown": dict(prediction.breakdown),
    }


def _idle_causes(told: dict[str, Any], steps: float) -> list[Cause]:
    found = []
    for name, advice in _ADVICE.items():
        share = told["idle"].get(name, 0.0) / steps
        if share > LEAST_SHARE:
            evidence = f"the device idles {1e3 * told['idle'][name]:.1f} ms of {1e3 * steps:.1f} ms for it"
            found.append(Cause(name, share, evidence, advice))
    return found


def _message_causes(graphs: Sequence[Program], steps: float, fabric: Fabric | None) -> list[Cause]:
    """Many small messages, and large ones that do not reach the links' bandwidth."""
    sizes, seconds, rates = [], [], []
    for graph in graphs:
        for node in np.flatnonzero(graph.on_device & (graph.columns["step"] >= 0)).tolist():
            work = graph.works[graph.columns["work"][node]]
            if isinstance(work, Collective):
                sizes.append(work.num_bytes)
                seconds.append(float(graph.duration_s[node]))
                if work.num_bytes >= LARGE_BYTES and seconds[-1] > 0:
                    rates.append((work, work.num_bytes / seconds[-1]))
    found = []
    small = [spent for size, spent in zip(sizes, seconds, strict=True) if size < SMALL_BYTES]
    if sum(small) / steps > LEAST_SHARE and len(small) > len(sizes) / 2:
        evidence = f"{len(small)} of {len(sizes)} collectives have less than 1 MiB and take {1e3 * sum(small):.1f} ms"
        found.append(
            Cause("small_messages", sum(small) / steps, evidence, "join messages: larger buckets, fewer shards")
        )
    across = [rate for work, rate in rates if work.ranks_per_node < work.group_size]
    if fabric is not None and across:
        reached, stated = statistics.median(across), fabric.inter_node.bandwidth_bytes_per_s
        if reached < SLOW_LINK * stated:
            evidence = (
                f"collectives of 16 MiB and more between nodes reach {reached / 1e9:.2f} GB/s, the fabric states "
                f"{stated / 1e9:.2f} GB/s"
            )
            advice = "check the transport (NCCL_DEBUG=INFO: NET/Socket instead of NET/IB), GPUDirect, and the links"
            found.append(Cause("slow_transport", None, evidence, advice))
    return found


def _clock_causes(folder: Path) -> list[Cause]:
    noted = read_object(folder / "manifest.json").get("clocks")
    reasons = noted.get("reasons", {}) if isinstance(noted, dict) else {}
    seen = {name: share for name, share in reasons.items() if name in THROTTLED and share > LEAST_SHARE}
    if not seen:
        return []
    evidence = ", ".join(f"{name} in {100 * share:.0f} % of the samples" for name, share in seen.items())
    return [
        Cause("throttling", None, evidence, "cool the devices, or raise the power limit; predictions assume neither")
    ]


_NVIDIA = ("name", "memory.total", "driver_version", "clocks.max.sm")
_NAMES = {"torch_geometric": "torch-geometric", "sqlalchemy": "SQLAlchemy"}


def check_machine() -> dict[str, Any]:
    """Look at this machine; takes about a second and changes nothing.

    Returns:
        ``libraries`` (version, None if absent, and the extra that brings it), ``cores``, ``memory_bytes``, ``gpus``,
        ``links``, ``quiet`` (empty, or why measurements would be bad), and ``can``: what works here, and else why not.
    """
    libraries = {name: {"version": _version(name), "extra": extra} for name, extra in EXTRAS.items()}
    gpus = _gpus()
    quiet = busy_note()
    box = _why_no_box()
    absent = "" if libraries["torch"]["version"] else 'PyTorch is not installed: pip install "stepsight[collect]"'
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lacking = [name for name, row in libraries.items() if row["version"] is None and row["extra"] == "train"]
    can = {
        "predict, explain, search, evaluate": "",
        f"collect on the CPU, up to {cores} ranks": absent,
        f"collect on GPUs ({len(gpus)} here)": absent or ("" if gpus else "no GPU was found"),
        "collect in a box": absent or box,
        "train": f'not installed: {", ".join(lacking)}: pip install "stepsight[train]"' if lacking else "",
    }
    return {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "libraries": libraries,
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "links": _links(),
        "quiet": quiet,
        "can": can,
    }


def _version(module: str) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        return version(_NAMES.get(module, module))
    except PackageNotFoundError:
        return "installed"


def _why_no_box() -> str:
    try:
        check_possible({})
    except HarnessError as error:
        return str(error)
    return ""


def _gpus() -> list[dict[str, str]]:
    """NVIDIA GPUs as listed by ``nvidia-smi``; empty without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(_NVIDIA, (word.strip() for word in line.split(",")), strict=False)) for line in lines]


def _links() -> list[dict[str, str]]:
    """InfiniBand ports and network interfaces that are up, with their rates."""
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        found.append({"link": f"{port.parts[-3]} port {port.name}", "rate": _read(port / "rate") or "unknown"})
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if interface.name != "lo" and _read(interface / "operstate") == "up":
            speed = _read(interface / "speed")
            known = speed.isdigit() and int(speed) > 0
            found.append({"link": interface.name, "rate": f"{speed} Mb/s" if known else "unknown"})
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def machine_text(told: dict[str, Any]) -> str:
    libraries = [[name, row["version"] or "not installed", row["extra"]] for name, row in told["libraries"].items()]
    lines = [
        f"system     {told['system']}, {told['cores']} cores, {told['memory_bytes'] / 1e9:.1f} GB of memory",
        *(f"GPU        {', '.join(gpu.values())}" for gpu in told["gpus"]),
        *(f"link       {link['link']}: {link['rate']}" for link in told["links"]),
        f"quiet      {'no: ' + told['quiet'] if told['quiet'] else 'yes'}",
        "",
        table(
            ["what works here", "", "why not"],
            [[what, "no" if why else "yes", why] for what, why in told["can"].items()],
        ),
        "",
        table(["library", "version", "extra"], libraries),
    ]
    return "\n".join(lines)


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
        [
            cause["cause"],
            "" if cause["share"] is None else f"{100 * cause['share']:.1f}",
            cause["evidence"],
            cause["advice"],
        ]
        for cause in told["causes"]
    ]
    if not cells:
        return "\n".join([*lines, "no cause of idle time, small messages, slow transport or throttling was found"])
    return "\n".join([*lines, "", table(["cause", "% of the steps", "evidence", "what to do"], cells)])
