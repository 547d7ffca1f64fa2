"""``manifest.json`` of a run folder, checked.

Clusters in a box: number of nodes, ranks on each, rate of their links; and the cluster that a job sees.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.errors import JobError, TraceError
from stepsight.dataset.base.files import IF_SET, OPTIONAL, UNSAVED, Saved, check_type, read_document, read_json
from stepsight.dataset.hardware.hardware import BOX, Fabric, fabric_from_dict
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SlowLink

SCHEMA = 1
T = TypeVar("T")
MOST = 1e30  # larger numbers are typing mistakes


@dataclass(frozen=True, kw_only=True)
class RunManifest(Saved):
    """What ``manifest.json`` of a run folder says, checked."""

    folder: Path = field(metadata=UNSAVED)
    name: str  # name of the run in its collection
    role: str = field(default="", metadata=OPTIONAL)  # ``train``, ``heldout`` or what the plan called it
    job: Job
    world_size: int  # number of ranks that ran
    rounds: tuple[tuple[float, ...], ...]  # seconds of each timed step without a profiler, by round
    profiled_seconds: tuple[float, ...] = field(default=(), metadata=OPTIONAL)  # seconds of each profiled step
    fingerprint: Mapping[str, Any] = field(default_factory=dict, metadata=OPTIONAL)  # machine and software it ran on
    versions: Mapping[str, Any] = field(default_factory=dict, metadata=OPTIONAL)  # software versions
    # file names by rank and format (``kineto``, ``et``); empty for a run that was only timed
    traces: Mapping[int, Mapping[str, str]] = field(default_factory=dict, metadata=OPTIONAL)
    digests: Mapping[str, str] = field(default_factory=dict, metadata=OPTIONAL)  # SHA-256 by file name, of the traces
    peak_memory_bytes: tuple[float, ...] = field(default=(), metadata=OPTIONAL)  # per rank
    losses: tuple[float, ...] = field(default=(), metadata=OPTIONAL)  # per step
    box: Box | None = field(default=None, metadata=OPTIONAL)  # that it ran in, None outside of one
    compiled: bool = field(default=False, metadata=OPTIONAL)  # whether composite ops were compiled
    # the rank of the job for which one process stood in, its collectives only taking their modelled time; None: all
    # ranks ran
    stand_in: int | None = field(default=None, metadata=OPTIONAL)

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of all timed steps without a profiler."""
        return tuple(seconds for steps in self.rounds for seconds in steps)

    @property
    def iteration_time_s(self) -> float:
        """Median of the timed steps."""
        return statistics.median(self.step_seconds)

    @property
    def whole(self) -> bool:
        """Whether its iterations take what those of its job do: a stand-in of a pipeline stage waits for no other."""
        return self.stand_in is None or self.job.parallel.pp == 1

    @property
    def busy(self) -> int:
        """Ranks that compute at the same time on one node."""
        return min(self.world_size, self.job.cluster.devices_per_node)


def read_manifest(folder: Path) -> RunManifest:
    """Read and check ``manifest.json`` of a run folder."""
    path = folder / "manifest.json"
    tree = read_object(path)
    if tree.get("schema") != SCHEMA:
        raise TraceError(f"a run manifest must have schema = {SCHEMA}, got {tree.get('schema')!r:.80} in {path}")
    missing = [key for key in ("name", "job", "world_size", "rounds") if key not in tree]
    if missing:
        rule = "a run manifest must have name, job, world_size and rounds"
        raise TraceError(f"{rule}, got no {', '.join(missing)} in {path}")
    with parsing(f"a run manifest must have a valid job and fields of the right type, got {path}", TraceError):
        for key, value in tree.items():
            if isinstance(value, str):
                typed(value, str, key)
        if "stand_in" in tree:
            tree["stand_in"] = typed(typed(tree["stand_in"], dict, "stand_in").get("rank"), int, "stand_in.rank")
        manifest = RunManifest.from_dict({**tree, "compiled": tree.get("compile", False)}, folder=folder)
    _check_manifest(manifest, path)
    return manifest


def typed(value: Any, kind: type[T], name: str) -> T:
    """The value, if it is of that kind; a text must be printable."""
    check_type(value, kind, name)
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{name} must be printable, got {value!a:.80}")
    return value  # type: ignore[no-any-return]


def number(value: Any, name: str, least: float = -MOST, most: float = MOST) -> float:
    """The value, if it is a number that can be reckoned with, and within limits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ValueError(f"{name} must be a number within +-{MOST:g}, got {value!r:.80}")
    if not least <= value <= most:
        raise ValueError(f"{name} must lie within {least:g} and {most:g}, got {value}")
    return float(value)


def _check_manifest(manifest: RunManifest, path: Path) -> None:
    devices, ranks, box = manifest.job.cluster.num_devices, sorted(manifest.traces), manifest.box
    world, rank, rounds = manifest.world_size, manifest.stand_in, manifest.rounds
    timed = bool(rounds) and all(steps and 0 < min(steps) <= max(steps) <= MOST for steps in rounds)
    nested = [name for files in manifest.traces.values() for name in files.values() if Path(name).name != name]
    rules = [
        (timed, f"every round must have timed steps of more than 0 s, got {rounds!s:.80}"),
        (not nested, f"a trace's file name must have no folder, got {''.join(nested[:1])!r:.80}"),
    ]
    if rank is not None:
        rules += [
            (world == 1 and box is None, f"a stand-in is one rank outside of a box, got world_size = {world}"),
            (rank in range(devices), f"stand_in.rank must be one of the job's {devices} ranks, got {rank}"),
            (ranks in ([], [rank]), f"a stand-in must have a trace of rank {rank}, got ranks {ranks}"),
        ]
    else:
        held = box.num_ranks if box is not None else devices
        absent = next((f", rank {rank} is missing" for rank in range(world) if rank not in manifest.traces), "")
        told = f"a run must have a trace of every rank of {world}, got ranks {ranks}{absent}"
        rules += [
            (world == devices, f"world_size must equal the job's devices, got {world} != {devices}"),
            (held == devices, f"a box must have the job's ranks, got {held} != {devices}"),
            (not ranks or (len(ranks) == world and ranks == list(range(len(ranks)))), told),
        ]
    if broken := next((rule for kept, rule in rules if not kept), ""):
        raise TraceError(f"{broken} in {path}")


def read_object(path: Path) -> dict[str, Any]:
    """The table that a JSON file of a run or collection holds."""
    with parsing(f"a run or collection must have {path.name} of whole JSON, got {path}", TraceError):
        tree = read_json(path)
    if not isinstance(tree, dict):
        raise TraceError(f"{path} must hold a JSON object, got {type(tree).__name__}")
    return tree


HARDWARE = BOX
_TEXT = re.compile(r"(\d+)x(\d+)@(\d+(?:\.\d+)?)(mbit|gbit)")
_INTER_LATENCY_US = 150.0


@dataclass(frozen=True)
class Box(Saved):
    """A cluster in a box."""

    nodes: int  # sizes
    ranks_per_node: int
    mbits_per_s: tuple[float, ...]  # rate of every node's link, both ways
    # delay of everything that leaves each node; empty: none
    latency_ms: tuple[float, ...] = field(default=(), metadata=IF_SET)

    def __post_init__(self) -> None:
        self._check(self.to_dict())

    @staticmethod
    def _check(table: Any) -> None:
        from stepsight.dataset.harness.plan.plan_checks import box_problems  # the harness's rules, if there is a box

        if problems := box_problems(table):
            raise JobError("; ".join(problems))

    @classmethod
    def from_dict(cls, value: Any, **given: Any) -> Box:
        """Read the result of ``to_dict``, the table of a plan."""
        cls._check(value)
        return super().from_dict(value, **given)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """``4x1@200mbit``; if links differ, the fastest rate and the number of slower links."""
        fastest = max(self.mbits_per_s)
        slower = sum(rate < fastest for rate in self.mbits_per_s)
        late = f"-{max(self.latency_ms):g}ms" if any(self.latency_ms) else ""
        return f"{self.nodes}x{self.ranks_per_node}@{fastest:g}mbit" + (f"-{slower}slow" if slower else "") + late

    @property
    def fabric(self) -> dict[str, Any]:
        """The ``[cluster] fabric`` of a job: the fastest link, shared by a node's ranks, and the longest latency."""
        from stepsight.dataset.harness.running.box import BURST_BYTES

        rate = max(self.mbits_per_s) / 8e3 / self.ranks_per_node
        return {
            "intra_node": {"bandwidth_gbytes_per_s": 1.0, "latency_us": 100.0},  # TCP within one namespace
            "inter_node": {
                "bandwidth_gbytes_per_s": rate,
                "latency_us": _INTER_LATENCY_US + 1e3 * max(self.latency_ms, default=0.0),
                "burst_bytes": BURST_BYTES / self.ranks_per_node,
            },
        }

    @property
    def links(self) -> Fabric:
        """The box's links as a ``Fabric``."""
        return fabric_from_dict(self.name, self.fabric)

    def holds(self, job: Job) -> Job:
        """The job on this box: the devices are the box's ranks, which sleep as long as ``HARDWARE`` would compute."""
        fastest, rates = max(self.mbits_per_s), enumerate(self.mbits_per_s)
        slow = tuple(SlowLink(node=node, slowdown=fastest / rate) for node, rate in rates if rate < fastest)
        facts: dict[str, Any] = {"nodes": self.nodes, "devices_per_node": self.ranks_per_node, "slow_links": slow}
        return replace(job, cluster=replace(job.cluster, hardware=HARDWARE, fabric=self.fabric, **facts))


def read_box(text: str) -> Box:
    """A box from ``4x1@200mbit`` (nodes x ranks per node @ rate of each link), or from a TOML file.

    The file has ``nodes``, ``ranks_per_node`` and ``mbits_per_s``, one number or one for each node, and maybe
    ``latency_ms`` likewise.
    """
    found = _TEXT.fullmatch(text)
    if found:
        nodes, ranks, rate = int(found[1]), int(found[2]), float(found[3]) * (1000 if found[4] == "gbit" else 1)
        return Box(nodes, ranks, (rate,) * min(nodes, 10_000))
    path = Path(text)
    if path.suffix != ".toml":
        rule = "a box is nodes x ranks per node @ link rate, as in 4x1@200mbit, or a .toml file"
        raise JobError(f"{rule}, got {text!r:.80}")
    table = read_document(path, f"box {path}")
    for key in ("mbits_per_s", "latency_ms"):
        number = table.get(key)
        if isinstance(number, int | float) and isinstance(table.get("nodes"), int):
            table[key] = [number] * min(table["nodes"], 10_000)
    try:
        return Box.from_dict(table)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None
