"""A collection of the harness as a table of measurements, of the same form as the public tables.

One row is one measurement: of a signature alone (source ``events/<name>``), or of a node within a training step (source
``runs/<name>/rank<k>/<label>``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.base.files import digest_files
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.event_file import read_event_file
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.dataset.runs.run_manifest import read_object
from stepsight.dataset.runs.trace import Trace
from stepsight.dataset.tables.measurements import Measurements, SourceFile
from stepsight.dataset.tables.rows import device_name

_LICENCE = "unknown"
_NO_SIZES = "the trace does not record the sizes of the op"


class _Row(NamedTuple):
    work: Op | Collective
    seconds: float
    device: str
    software: str
    source: str


def read_collection_table(folder: Path) -> Measurements:
    """Return every event and every traced node of a collection, one row each.

    Nodes whose sizes the trace does not record are skipped.

    Raises:
        TraceError: If the folder is not a collection, or a file in it is damaged.
    """
    collection = read_collection(Path(folder))
    rows: list[_Row] = []
    files: dict[str, SourceFile] = {}
    for path in collection.events:
        source = f"events/{path.stem}"
        files[source] = SourceFile(_LICENCE, digest_files([path]))
        rows.extend(_event_rows(path, source))
    skipped = 0
    for trace in collection.traces():
        found = list(_trace_rows(trace))
        known = [row for row in found if not isinstance(row.work, Op) or 0 not in row.work.dims[:2]]
        skipped += len(found) - len(known)
        rows.extend(known)
        digest = digest_files([trace.manifest.folder / "manifest.json", *_trace_files(trace)])
        files.update({row.source: SourceFile(_LICENCE, digest) for row in known})
    works, seconds, device, software, source_of = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    left_out = Counter({_NO_SIZES: skipped}) if skipped else Counter[str]()
    return Measurements(
        works, np.array(seconds, float), device, ("",) * len(rows), software, source_of, files, skipped=left_out
    )


def _event_rows(path: Path, source: str) -> Iterator[_Row]:
    file = read_event_file(path)
    tree = read_object(path)
    device, software = _origin(tree.get("fingerprint", {}), tree.get("versions", {}))
    for work, seconds in zip(file.works, file.seconds, strict=True):
        yield _Row(work, seconds, device, software, source)


def _trace_rows(trace: Trace) -> Iterator[_Row]:
    device, software = _origin(trace.manifest.fingerprint, trace.manifest.versions)
    for segment in trace.segments():
        source = f"runs/{trace.manifest.name}/rank{segment.rank}/{segment.label}"
        for node, seconds in zip(segment.program.nodes, segment.slot_s.tolist(), strict=True):
            yield _Row(node.work, seconds, device, software, source)


def _trace_files(trace: Trace) -> list[Path]:
    files = trace.manifest.traces.values()
    return [trace.manifest.folder / formats["kineto"] for formats in files if "kineto" in formats]


def _origin(fingerprint: Any, versions: Any) -> tuple[str, str]:
    """Return the device and the software; "" where the file does not say them."""
    device = fingerprint.get("device", "") if isinstance(fingerprint, Mapping) else ""
    torch = versions.get("torch", "") if isinstance(versions, Mapping) else ""
    return device_name(str(device)), f"torch {torch}" if torch else ""
