"""The op table: every measured op and collective in long form, in Parquet.

One row is one measurement: of a signature alone (an event), or of a node within a training step (a trace).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.bounded import read_parquet
from stepsight.dataset.errors import TraceError
from stepsight.dataset.event_file import read_event_file
from stepsight.dataset.files import digest_files, new_file
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.run_folder import Collection, read_collection
from stepsight.dataset.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

COLUMNS = {
    "work": "string",  # op or collective
    "kind": "string",
    "family": "string",  # of an op; "collective" otherwise
    "dims": "list",  # of int64; empty for a collective
    "dtype": "string",  # of an op; "" otherwise
    "num_bytes": "int64",  # of a collective's buffer; 0 for an op
    "group_size": "int64",  # of a collective; 0 for an op
    "ranks_per_node": "int64",  # likewise
    "busy": "int64",  # ranks computing at the same time on the node
    "seconds": "double",
    "in_context": "bool",  # False: measured alone (an event); True: within a training step (a trace)
    "source": "string",  # "events/<name>" or "runs/<name>/rank<k>/<label>"
    "run": "string",  # "" for an event
    "role": "string",  # of the run; "event" for an event
}
_DIGEST = b"stepsight.digest"

Signature = tuple[str, str, str, list[int], str, int, int, int]


def op_table(collection: Path) -> pd.DataFrame:
    """All events and all traced nodes of a collection, one row each, columns ``COLUMNS``.

    Nodes whose sizes the trace does not tell are left out.  The digest of what was read is in
    ``frame.attrs["digest"]``.

    Raises:
        TraceError: If the folder is no collection, or a file in it is not whole.
    """
    import pandas as pd

    found = read_collection(Path(collection))
    rows = [row for path in found.events for row in _event_rows(path)]
    for trace in found.traces():
        rows.extend(_trace_rows(trace))
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    for name, kind in COLUMNS.items():
        if kind != "list":
            frame[name] = frame[name].astype({"double": "float64", "string": "str"}.get(kind, kind))
    frame.attrs["digest"] = collection_digest(found)
    return frame


def collection_digest(collection: Collection) -> str:
    """Version of a collection: digest of its manifests, traces and events."""
    paths = list(collection.events)
    for manifest in collection.runs:
        paths.append(manifest.folder / "manifest.json")
        paths.extend(manifest.folder / files["kineto"] for files in manifest.traces.values() if "kineto" in files)
    return digest_files(paths)


def _signature(work: Op | Collective) -> Signature:
    if isinstance(work, Op):
        return ("op", work.kind, work.family, list(work.dims), work.dtype, 0, 0, 0)
    return ("collective", work.kind, "collective", [], "", work.num_bytes, work.group_size, work.ranks_per_node)


def _event_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    file = read_event_file(path)
    for work, seconds in zip(file.works, file.seconds, strict=True):
        yield (*_signature(work), file.busy, seconds, False, f"events/{path.stem}", "", "event")


def _trace_rows(trace: Trace) -> Iterator[tuple[Any, ...]]:
    manifest = trace.manifest
    signatures: dict[Op | Collective, Signature] = {}
    for segment in trace.segments():
        source = f"runs/{manifest.name}/rank{segment.rank}/{segment.label}"
        for node, seconds in zip(segment.program.nodes, segment.slot_s.tolist(), strict=True):
            work = node.work
            if isinstance(work, Op) and 0 in work.dims[:2]:
                continue  # sizes were not recorded
            signature = signatures.get(work)
            if signature is None:
                signature = signatures[work] = _signature(work)
            yield (*signature, segment.busy, seconds, True, source, manifest.name, manifest.role)


def _schema() -> pa.Schema:
    import pyarrow as pa

    types = {"string": pa.string(), "list": pa.list_(pa.int64()), "int64": pa.int64(), "double": pa.float64()}
    return pa.schema([(name, types.get(kind, pa.bool_())) for name, kind in COLUMNS.items()])


def write_op_table(frame: pd.DataFrame, path: Path) -> None:
    """Write Parquet whole or not at all, digest included."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame[list(COLUMNS)], schema=_schema(), preserve_index=False)
    table = table.replace_schema_metadata({_DIGEST: str(frame.attrs.get("digest", "")).encode()})
    with new_file(path) as temporary:
        pq.write_table(table, temporary)


def read_op_table(path: Path) -> pd.DataFrame:
    """Read what ``write_op_table`` wrote.

    Raises:
        TraceError: If it is no op table.
    """
    import pyarrow as pa

    try:
        table = read_parquet(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceError(f"an op table must be a Parquet file, got {path} ({str(error).splitlines()[0]})") from None
    if table.schema.remove_metadata() != _schema():
        raise TraceError(
            f"an op table must have columns {', '.join(COLUMNS)}, got {', '.join(table.column_names)} in {path}"
        )
    frame = table.to_pandas()
    frame["dims"] = [dims.tolist() for dims in frame["dims"]]
    frame.attrs["digest"] = (table.schema.metadata or {}).get(_DIGEST, b"").decode()
    return frame


def works(frame: pd.DataFrame) -> list[Op | Collective]:
    """Signature of every row; equal rows share one object."""
    shared: dict[tuple[Any, ...], Op | Collective] = {}
    out: list[Op | Collective] = []
    columns = ("work", "kind", "dims", "dtype", "num_bytes", "group_size", "ranks_per_node")
    for work, kind, dims, dtype, num_bytes, group_size, per_node in zip(
        *(frame[name] for name in columns), strict=True
    ):
        is_op = work == "op"
        key = (kind, tuple(dims), dtype) if is_op else (kind, int(num_bytes), int(group_size), int(per_node))
        found = shared.get(key)
        if found is None:
            found = shared[key] = Op(*key) if is_op else Collective(*key)
        out.append(found)
    return out
