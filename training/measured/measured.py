"""The training data of a predictor: event profiles and traced runs of one or several collections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import digest_files
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.hardware.hardware import BOX, Fabric, Hardware, Link, find_hardware, hardware_from_dict
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import PEAKS, EventFile, read_collection, read_event_file
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.training.kernels.host_calls import SEVERAL, call_label
from stepsight.training.measured import imported_ops

Array = NDArray[np.float64]

HELDOUT = "heldout"  # name of an event file that judges: it never trains
MOST_TRAINING_RANKS = 4  # in a box: larger sizes judge predictions, and must stay unseen
_MOST_SLOWDOWN = 1.7  # of a call within a step to the same call alone, if it was not measured with fresh memory


@dataclass
class Profile:
    """Ops and collectives measured on their own, and the hardware's facts."""

    fabric: Fabric | None  # of collectives whose file does not say on which links
    ops: list[Op] = field(default_factory=list)  # measured ones, with an entry in each of the next three
    op_busy: list[int] = field(default_factory=list)
    op_seconds: list[float] = field(default_factory=list)
    op_host_seconds: list[float] = field(default_factory=list)  # to launch each, 0 where that was not measured
    collectives: list[Collective] = field(default_factory=list)  # measured ones, with an entry in each of the next two
    fabrics: list[Fabric] = field(default_factory=list)
    collective_seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # fields of Hardware that were measured
    digest: str = ""  # of the files
    device: str = ""  # on what was measured or imported: cpu, cuda; empty if nothing says it
    devices: dict[str, Path] = field(default_factory=dict)  # an event file of each device that measured some
    # shortest and longest seconds of framework calls that were measured alone, by label and op
    calls: dict[tuple[str, Op], tuple[float, float]] = field(default_factory=dict)

    def add_op(self, op: Op, busy: int, seconds: float, host_seconds: float = 0.0) -> None:
        self.ops.append(op)
        self.op_busy.append(busy)
        self.op_seconds.append(seconds)
        self.op_host_seconds.append(host_seconds)

    def add_collective(self, collective: Collective, fabric: Fabric, seconds: float) -> None:
        self.collectives.append(collective)
        self.fabrics.append(fabric)
        self.collective_seconds.append(seconds)

    def hardware(self, name: str, device: str) -> Hardware:
        """The measured hardware; facts that were not measured come from a preset, else a ``TraceError``."""
        for told, path in self.devices.items():
            imported_ops.check_device(told, name, path)
        preset = find_hardware(name)
        if preset is not None and name == BOX:
            return preset  # ranks sleep as long as it says: there is nothing to measure
        known = preset.to_dict() if preset else {"op_latency_s": 5e-6}
        facts = {**known, **self.facts, "name": name, "kind": "cpu" if device == "cpu" else "gpu"}
        facts["source"] = "measured by stepsight collect" if self.facts else known.get("source", "")
        missing = {"peak_flops", "memory_bandwidth_bytes_per_s", "memory_bytes"} - set(facts)
        if missing:
            rule = f"the collection must hold event profiles with hardware facts, or {name!r:.80} must be a preset"
            raise TraceError(f"{rule}; got no {', '.join(sorted(missing))}")
        return hardware_from_dict(facts)


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its trace cut into segments (none if it was only timed)."""

    manifest: RunManifest
    segments: tuple[TracedSegment, ...]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.manifest.name

    @property
    def whole(self) -> bool:
        """Whether its iteration time is that of a whole job."""
        return self.manifest.whole

    @property
    def spread_log(self) -> float:
        """Standard deviation of the logarithm of its round medians (of its steps, where there is one round)."""
        rounds = [float(np.median(steps)) for steps in self.manifest.rounds if steps]
        values = rounds if len(rounds) > 1 else list(self.manifest.step_seconds)
        return float(np.std(np.log(values))) if len(values) > 1 else 0.0


def read_profiles(
    collections: Iterable[Path], fabric: Fabric | None, imported: Sequence[imported_ops.ImportedSegments] = ()
) -> Profile:
    """Read every event file of some collections except ``HELDOUT``, and add medians of signatures of imported runs that
    no event file has.

    ``collections``: folders.  ``fabric``: of files which name none, and of imported runs.  ``imported``: runs that were
    imported.  Raises ``TraceError`` if a folder is no collection or named twice, a file is not what the harness writes,
    or is of a box with more than ``MOST_TRAINING_RANKS``; or if collectives were measured and no fabric is known.
    """
    profile = Profile(fabric)
    collections = _distinct(collections)
    paths = [path for folder in collections for path in read_collection(folder).events]
    files = [read_event_file(path) for path in paths if path.stem != HELDOUT]
    for file in files:
        if file.box is not None:
            _check_ranks(file.box.num_ranks, file.path)
    for file in files:
        _add(file, profile)
    if imported:
        profile.device = "cpu" if imported[-1].device == "cpu" else "cuda"
    alone = {*profile.ops, *profile.collectives}
    for work, each in imported_ops.imported_times(imported).items():
        if isinstance(work, Op) and work not in alone:  # it counts as measured alone
            profile.add_op(work, 1, float(np.median(each)))
        elif isinstance(work, Collective) and fabric is not None and work not in alone:
            profile.add_collective(work, fabric, float(np.median(each)))
    found: dict[tuple[Collective, Link, Link], list[tuple[float, Fabric]]] = {}
    for work, links, seconds in zip(profile.collectives, profile.fabrics, profile.collective_seconds, strict=True):
        found.setdefault((work, links.intra_node, links.inter_node), []).append((seconds, links))
    profile.collectives = [work for work, _, _ in found]  # one of several visits to equal links may have been disturbed
    profile.fabrics = [visits[0][1] for visits in found.values()]
    profile.collective_seconds = [float(np.median([seconds for seconds, _ in visits])) for visits in found.values()]
    paths = [*(file.path for file in files), *(run.folder / "manifest.json" for run in imported)]
    profile.digest = digest_files(paths) if paths else ""
    return profile


def calls_alone(file: EventFile) -> dict[tuple[str, Op], tuple[float, float]]:
    """Framework calls that a file measured alone, by label and op: seconds with reused and with fresh memory."""
    found = {}
    for call, op, seconds, fresh in zip(file.calls, file.works, file.seconds, file.fresh_seconds, strict=True):
        if isinstance(op, Op) and call:
            found[call_label(call, op), op] = (seconds, max(fresh, seconds) if fresh else _MOST_SLOWDOWN * seconds)
    return found


def _add(file: EventFile, profile: Profile) -> None:
    profile.calls |= calls_alone(file)
    if file.device:
        profile.device, profile.devices[file.device] = "cpu" if file.device == "cpu" else "cuda", file.path
    for work, seconds, host_seconds, call in zip(file.works, file.seconds, file.host_seconds, file.calls, strict=True):
        if isinstance(work, Op) and work.kind in SEVERAL and call:
            continue  # some calls of that kind take another time
        if isinstance(work, Op):
            profile.add_op(work, file.busy, seconds, host_seconds)
        else:
            links = file.box.links if file.box else profile.fabric
            if links is None:
                got = "got hardware without a usual fabric, and no single fabric in the jobs of the runs"
                rule = f"{file.path}: the fabric on which its collectives were measured must be known, {got}"
                raise TraceError(f"{rule}: state [cluster] fabric in these jobs")
            profile.add_collective(work, links, seconds)
    facts = dict(file.hardware)
    shares = [table["memory_bytes"] for table in (profile.facts, facts) if "memory_bytes" in table]
    if shares:  # ranks of a CPU share its memory: the fact is a rank's share while all of them run
        facts["memory_bytes"] = profile.facts["memory_bytes"] = min(shares)
    # Peaks are those of a device that computes alone, if both were measured; a file has those of its own dtypes.
    tables = (profile.facts, facts) if file.busy == 1 else (facts, profile.facts)
    peaks = {dtype: peak for table in tables for dtype, peak in table.get(PEAKS, {}).items()}
    profile.facts = {**tables[0], **tables[1]} | ({PEAKS: peaks} if peaks else {})


def _distinct(collections: Iterable[Path]) -> list[Path]:
    """The collections; each counts once."""
    folders = list(collections)
    where = [folder.resolve() for folder in folders]
    twice = [str(folder) for folder, at in zip(folders, where, strict=True) if where.count(at) > 1]
    if twice:
        raise TraceError(f"every collection must be named once, got {' and '.join(twice)}")
    return folders


def read_runs(collections: Iterable[Path], roles: Sequence[str] | None) -> list[MeasuredRun]:
    """Read the complete runs of some roles (None: all), with traces if there are any."""
    chosen = []
    for collection in _distinct(collections):
        for manifest in read_collection(collection).runs:
            if roles is None or manifest.role in roles:
                if manifest.box is not None or manifest.job.cluster.hardware == BOX:
                    _check_ranks(manifest.world_size, manifest.folder)
                chosen.append(manifest)
    traced = [manifest.folder for manifest in chosen if manifest.traces]
    segments = {folder: own for folder, (own, *_) in zip(traced, imported_ops.read_graphs(traced), strict=True)}
    return [MeasuredRun(manifest, segments.get(manifest.folder, ())) for manifest in chosen]


def read_imported_runs(collections: Iterable[Path], hardware: str = "") -> list[imported_ops.ImportedSegments]:
    """Read the imported runs of some collections, except those that judge."""
    folders = [folder for collection in _distinct(collections) for folder in read_collection(collection).imported]
    return imported_ops.read_imported_segments(folders, hardware)


def _check_ranks(ranks: int, where: Path) -> None:
    if ranks > MOST_TRAINING_RANKS:
        rule = f"only runs and events of at most {MOST_TRAINING_RANKS} ranks of a box may train"
        raise TraceError(f"{rule}: what is larger judges predictions; got {ranks} ranks in {where}")


def check_hardware(runs: Sequence[MeasuredRun], name: str) -> None:
    """Check that every run is on the hardware to learn, and that all or none are compiled."""
    compiled = [run.manifest.folder for run in runs if run.manifest.compiled]
    if 0 < len(compiled) < len(runs):
        rule = "composite ops of all runs must be compiled, or of none"
        raise TraceError(f"{rule}: got {len(compiled)} of {len(runs)} runs compiled, as {compiled[0]}")
    for run in runs:
        if device := str(run.manifest.fingerprint.get("device", "")):
            imported_ops.check_device(device, name, run.manifest.folder)
        if run.manifest.job.hardware_name != name:
            rule = f"every run must be on the predictor's hardware: cluster.hardware must be {name!r:.80}"
            raise TraceError(f"{rule}, got {run.manifest.job.cluster.hardware!r:.80} in {run.manifest.folder}")


def fill_from_traces(profile: Profile, runs: Iterable[MeasuredRun]) -> list[str]:
    """Add the in-context median of kinds that no event profile has, a stand-in's collectives left out; return them."""
    have = {op.kind for op in profile.ops} | {c.kind for c in profile.collectives}
    found: dict[tuple[Op | Collective, int, Fabric], list[float]] = {}
    for run in runs:
        fabric = run.manifest.job.fabric
        for segment in run.segments:
            for node, seconds in zip(segment.program.nodes, segment.slot_s.tolist(), strict=True):
                modelled = run.manifest.stand_in is not None and isinstance(node.work, Collective)
                if node.work.kind not in have and seconds > 0 and not modelled:
                    found.setdefault((node.work, segment.busy, fabric), []).append(seconds)
    for (work, busy, fabric), seconds in found.items():
        if isinstance(work, Op):
            profile.add_op(work, busy, float(np.median(seconds)))
        else:
            profile.add_collective(work, fabric, float(np.median(seconds)))
    return sorted({work.kind for work, _, _ in found})


STALL = 2.5  # times the median of the same signature in the same run


def average(segments: Sequence[TracedSegment]) -> list[tuple[TracedSegment, int]]:
    """Each distinct segment of each run with the mean seconds of its nodes, and over how many executions it is.

    A node that takes more than ``STALL`` times the median of its signature (and share) in the run was interrupted by
    something that is no part of the job; it is cut to that.
    """
    known: dict[tuple[str, Op | Collective, float], list[float]] = {}
    groups: dict[tuple[object, ...], list[TracedSegment]] = {}
    for segment in segments:
        groups.setdefault((segment.run, segment.busy, segment.program.digest_key), []).append(segment)
        for node, seconds in zip(segment.program.nodes, segment.slot_s.tolist(), strict=True):
            if not np.isnan(seconds):
                known.setdefault((segment.run, node.work, node.share), []).append(seconds)
    medians = {key: float(np.median(values)) for key, values in known.items()}
    means = []
    for group in groups.values():
        run, nodes = group[0].run, group[0].program.nodes
        middle = np.array([medians.get((run, node.work, node.share), np.nan) for node in nodes])
        slots = np.stack([segment.slot_s for segment in group])
        mean = np.clip(slots, middle / STALL, middle * STALL).mean(axis=0)  # NaN if it is unknown
        means.append((replace(group[0], slot_s=mean), len(group)))
    return means
