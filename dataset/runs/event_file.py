"""Event files of a collection: ``events/<name>.json``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.kinds.op import MOST_SIZE, Collective, Op
from stepsight.dataset.runs.box_spec import Box
from stepsight.dataset.runs.run_manifest import SCHEMA, number, read_object, typed

FACTS = {  # fields of ``Hardware`` that may be measured: least and most
    "memory_bandwidth_bytes_per_s": (1.0, 1e18),
    "memory_bytes": (1.0, 1e18),
    "comm_compute_share": (0.0, 1.0),
    "op_latency_s": (0.0, 1e3),
    "compute_efficiency": (1e-6, 1.0),
    "memory_efficiency": (1e-6, 1.0),
}
PEAKS = "peak_flops"  # the fact that is a table by dtype


@dataclass(frozen=True)
class EventFile:
    """Ops and collectives that were measured alone."""

    path: Path
    busy: int  # ranks that computed at the same time
    works: tuple[Op | Collective, ...]  # what was measured
    seconds: tuple[float, ...]  # of each
    host_seconds: tuple[float, ...]  # what the host took to launch each, 0 where that was not measured
    fresh_seconds: tuple[float, ...]  # of each with fresh memory for its results, 0 where that was not measured
    calls: tuple[str, ...]  # name of the framework call that was measured, "" where it was the op by its dims
    hardware: Mapping[str, Any]  # fields of ``Hardware`` that were measured
    box: Box | None = None  # that it was measured in, None outside of one


def read_event_file(path: Path) -> EventFile:
    """Read and check an event file.

    Raises:
        TraceError: If it is not what the harness writes.
    """
    tree = read_object(path)
    if tree.get("schema") != SCHEMA:
        raise TraceError(f"an event file must have schema = {SCHEMA}, got {tree.get('schema')!r:.80} in {path}")
    try:
        busy = _size(tree.get("busy"), "busy")
        if not busy:
            raise ValueError(f"busy must be >= 1, got {busy}")
        records = [typed(record, dict, "a record") for record in typed(tree.get("records"), list, "records")]
        works = tuple(_work(record) for record in records)
        seconds = tuple(_positive(record.get("seconds"), "seconds") for record in records)
        host, fresh = (
            tuple(_positive(record[name], name) if name in record else 0.0 for record in records)
            for name in ("host_seconds", "fresh_seconds")
        )
        facts = _facts(typed(tree.get("hardware", {}), dict, "hardware"))
        box = Box.from_dict(tree["box"]) if "box" in tree else None
        if box is not None and tree.get("world_size") != box.num_ranks:
            raise ValueError(
                f"world_size must equal the box's ranks, got {tree.get('world_size')!r:.80} != {box.num_ranks}"
            )
        calls = tuple(_call(record.get("op")) for record in records)
        return EventFile(path, busy, works, seconds, host, fresh, calls, facts, box)
    except (KeyError, TypeError, ValueError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path} must be an event profile: {why}") from None


def _work(record: dict[str, Any]) -> Op | Collective:
    if "op" in record:
        op = typed(record["op"], dict, "op")
        dims = typed(op["dims"], list, "dims")
        return Op(typed(op["kind"], str, "kind"), tuple(_size(dim, "dims") for dim in dims), op["dtype"])
    table = dict(typed(record["collective"], dict, "collective"))
    kind = typed(table.pop("kind"), str, "kind")
    return Collective(kind, **{name: _size(value, name) for name, value in table.items()})


def _call(op: Any) -> str:
    """Name of the call of a record of an op."""
    return typed(typed(op["call"], list, "call")[0], str, "name of a call") if op and "call" in op else ""


def _size(value: Any, name: str) -> int:
    if not 0 <= typed(value, int, name) <= MOST_SIZE:
        raise ValueError(f"{name} must lie within 0 and {MOST_SIZE}, got {value}")
    return int(value)


def _positive(value: Any, name: str) -> float:
    if not number(value, name) > 0:
        raise ValueError(f"{name} must be > 0, got {value}")
    return float(value)


def _facts(hardware: dict[str, Any]) -> dict[str, Any]:
    """The known fields; unknown fields of later versions are dropped."""
    facts: dict[str, Any] = {name: number(hardware[name], name) for name in FACTS if name in hardware}
    for name, value in facts.items():
        least, most = FACTS[name]
        if not least <= value <= most:
            raise ValueError(f"{name} must lie within {least:g} and {most:g}, got {value}")
    if PEAKS in hardware:
        peaks = typed(hardware[PEAKS], dict, PEAKS)
        facts[PEAKS] = {dtype: _positive(peak, f"{PEAKS}.{dtype}") for dtype, peak in peaks.items()}
    return facts
