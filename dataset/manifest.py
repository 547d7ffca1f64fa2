"""What ``manifest.json`` of a run folder says, checked."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.errors import JobError, TraceError
from stepsight.dataset.job import Job

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """What ``manifest.json`` of a run folder says, checked.

    Attributes:
        folder: The run folder.
        name: Name of the run in its collection.
        role: ``train``, ``heldout`` or what the plan called it.
        job: What ran.
        world_size: Number of ranks.
        rounds: Seconds of each timed step without a profiler, by round.
        profiled_seconds: Seconds of each profiled step.
        fingerprint: Machine and software it ran on.
        versions: Software versions.
        traces: File names by rank and format (``kineto``, ``et``); empty for a run that was only timed.
        peak_memory_bytes: Per rank.
        losses: Per step.
    """

    folder: Path
    name: str
    role: str
    job: Job
    world_size: int
    rounds: tuple[tuple[float, ...], ...]
    profiled_seconds: tuple[float, ...] = ()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    traces: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    peak_memory_bytes: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """All timed steps without a profiler: the truth and its spread."""
        return tuple(seconds for steps in self.rounds for seconds in steps)

    @property
    def iteration_time_s(self) -> float:
        """Median of the timed steps."""
        return statistics.median(self.step_seconds)

    @property
    def busy(self) -> int:
        """Ranks that compute at the same time on one node."""
        return min(self.world_size, self.job.cluster.devices_per_node)


def read_manifest(folder: Path) -> RunManifest:
    """Read and check ``manifest.json`` of a run folder.

    Raises:
        TraceError: If there is none, or it is not what the harness writes.
    """
    path = folder / "manifest.json"
    tree = read_object(path)
    if tree.get("schema") != SCHEMA:
        raise TraceError(f"a run manifest must have schema = {SCHEMA}, got {tree.get('schema')!r} in {path}")
    missing = [key for key in ("name", "job", "world_size", "rounds") if key not in tree]
    if missing:
        rule = "a run manifest must have name, job, world_size and rounds"
        raise TraceError(f"{rule}, got no {', '.join(missing)} in {path}")
    try:
        job = Job.from_dict(tree["job"])
        manifest = RunManifest(
            folder=folder,
            name=str(tree["name"]),
            role=str(tree.get("role", "")),
            job=job,
            world_size=int(tree["world_size"]),
            rounds=tuple(tuple(float(seconds) for seconds in steps) for steps in tree["rounds"]),
            profiled_seconds=tuple(float(seconds) for seconds in tree.get("profiled_seconds", ())),
            fingerprint=dict(tree.get("fingerprint", {})),
            versions=dict(tree.get("versions", {})),
            traces={int(rank): dict(files) for rank, files in tree.get("traces", {}).items()},
            peak_memory_bytes=tuple(float(size) for size in tree.get("peak_memory_bytes", ())),
            losses=tuple(float(loss) for loss in tree.get("losses", ())),
        )
    except JobError as error:
        raise TraceError(f"a run manifest must hold a valid job, got {error} in {path}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"a run manifest must have fields of the right type, got {error} in {path}") from None
    _check(manifest, path)
    return manifest


def _check(manifest: RunManifest, path: Path) -> None:
    seconds = manifest.step_seconds
    if not seconds or not all(math.isfinite(value) and value > 0 for value in seconds):
        raise TraceError(f"a run must have timed steps of more than 0 s, got {seconds} in {path}")
    devices = manifest.job.cluster.num_devices
    if manifest.world_size != devices:
        raise TraceError(f"world_size must equal the job's devices, got {manifest.world_size} != {devices} in {path}")
    ranks = sorted(manifest.traces)
    if ranks and ranks != list(range(manifest.world_size)):
        absent = sorted(set(range(manifest.world_size)) - set(ranks))
        raise TraceError(
            f"a run must have a trace of every rank of {manifest.world_size}, got ranks {ranks}"
            f"{f', rank {absent[0]} is missing' if absent else ''} in {path}"
        )


def read_object(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TraceError(f"a run or collection must have {path.name}, got {path} ({error.strerror})") from None
    except ValueError as error:
        raise TraceError(f"{path} must be whole JSON, got {error}") from None
    if not isinstance(tree, dict):
        raise TraceError(f"{path} must hold a JSON object, got {type(tree).__name__}")
    return tree
