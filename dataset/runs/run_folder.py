"""Run folders and collection folders, as the harness writes them: read whole, or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.runs.imported_run import is_imported
from stepsight.dataset.runs.run_manifest import RunManifest, read_manifest, read_object, typed
from stepsight.dataset.runs.trace import Trace
from stepsight.dataset.traces.placement import Placement
from stepsight.dataset.traces.trace_formats import read_rank_trace, trace_format


@dataclass(frozen=True)
class Collection:
    """What of a collection folder is there.

    Attributes:
        folder: The folder.
        runs: Manifests of the complete runs, by name.
        absent: Names of planned runs that are not there.
        events: Event files that are there.
        absent_events: Names of planned event files that are not there.
        imported: Folders of runs that were imported from other people's traces.
    """

    folder: Path
    runs: tuple[RunManifest, ...]
    absent: tuple[str, ...] = ()
    events: tuple[Path, ...] = ()
    absent_events: tuple[str, ...] = ()
    imported: tuple[Path, ...] = ()

    def __iter__(self) -> Iterator[RunManifest]:
        return iter(self.runs)

    @property
    def missing(self) -> list[str]:
        """What was planned and is not there."""
        return [*(f"runs/{name}" for name in self.absent), *(f"events/{name}.json" for name in self.absent_events)]

    def traces(self, role: str | None = None) -> Iterator[Trace]:
        """Read the complete runs (of a role) that have traces, one after the other."""
        for manifest in self.runs:
            if manifest.traces and role in (None, manifest.role):
                yield read_run(manifest.folder)


def read_run(folder: Path) -> Trace:
    """Read a run folder whole.

    Raises:
        TraceError: If the manifest, a rank or a trace is missing, truncated or inconsistent.
    """
    manifest = read_manifest(Path(folder))
    if not manifest.traces:
        raise TraceError(f"a run must have traces to be read, got none in {manifest.folder}")
    parallel, devices = manifest.job.parallel, manifest.job.cluster.devices_per_node
    ranks = []
    for rank, files in sorted(manifest.traces.items()):
        form = trace_format(files, rank, manifest.folder)
        _check_digest(manifest, files[form])
        place = Placement(rank=rank, devices_per_node=devices, tp=parallel.tp, dp=parallel.dp)
        ranks.append(read_rank_trace(form, manifest.folder / files[form], place))
    return Trace(manifest, tuple(ranks))


def _check_digest(manifest: RunManifest, name: str) -> None:
    """A trace must be the one that was written with the manifest, where the manifest says which."""
    path, wanted = manifest.folder / name, manifest.digests.get(name)
    if wanted is not None and path.is_file():
        found = hashlib.sha256(read_file(path)).hexdigest()
        if found != wanted:
            raise TraceError(f"a trace must be as it was written: SHA-256 {wanted:.16}…, got {found:.16}… of {path}")


def read_collection(folder: Path) -> Collection:
    """List what of a collection is complete and what is absent.

    Raises:
        TraceError: If the folder is no collection or a manifest is wrong.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TraceError(f"a collection must be a folder, got {folder}")
    plan = read_object(folder / "plan.json") if (folder / "plan.json").exists() else {}
    if not plan and not (folder / "runs").is_dir():
        raise TraceError(f"a collection must hold plan.json or runs/, got neither in {folder}")
    folders = [path for path in _entries(folder / "runs") if path.is_dir()]
    imported = tuple(path for path in folders if is_imported(path))
    runs = tuple(read_manifest(path) for path in folders if path not in imported)
    events = tuple(path for path in _entries(folder / "events") if path.suffix == ".json")
    planned, planned_events = (_planned(plan, key, folder / "plan.json") for key in ("runs", "events"))
    there, there_events = {manifest.name for manifest in runs}, {path.stem for path in events}
    return Collection(
        folder,
        runs,
        tuple(name for name in planned if name not in there),
        events,
        tuple(name for name in planned_events if name not in there_events),
        imported,
    )


def _planned(plan: dict[str, Any], key: str, path: Path) -> list[str]:
    """Names of a plan's runs or events."""
    try:
        return [typed(typed(entry, dict, f"one of {key}").get("name"), str, "name") for entry in plan.get(key, ())]
    except (TypeError, ValueError) as error:
        raise TraceError(f"a plan must hold lists of runs and events with names: {error} in {path}") from None


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, by name; what is being written has a leading dot and is not there yet."""
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))
