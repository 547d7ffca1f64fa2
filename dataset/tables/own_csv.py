"""A user's own table: CSV with one row for each measurement, microseconds.

Columns ``op, dims, dtype, microseconds`` for ops (dims as ``4096x4096x1024``, in the order of the kind's sizes), and
``op, num_bytes, group_size, ranks_per_node, microseconds`` for collectives; both may stand in one file, what does not
apply left empty.  ``device``, ``fabric`` and ``software`` are optional; versions in ``cuda``, ``nccl`` and ``driver``
are added to the software's name.
"""

from __future__ import annotations

import re

from stepsight.dataset.op import COLLECTIVE_KINDS, Collective, Op
from stepsight.dataset.tables.rows import Line, Rows, read_csv

_VERSIONS = ("cuda", "nccl", "driver")


def read(rows: Rows) -> None:
    for line in read_csv(rows, ("op", "microseconds")):
        kind = line.text("op")
        needs = ("num_bytes", "group_size", "ranks_per_node") if kind in COLLECTIVE_KINDS else ("dims",)
        missing = [name for name in needs if name not in line.cells]
        if missing:
            raise rows.error(f"{kind} needs columns {', '.join(needs)}; {', '.join(missing)} missing", line.number)
        work = _collective(line, kind) if kind in COLLECTIVE_KINDS else _op(line, kind)
        told = {name: line.cells.get(name, "").strip() for name in ("device", "fabric", "software")}
        versions = [f"{name} {text}" for name in _VERSIONS if (text := line.cells.get(name, "").strip())]
        told["software"] = " ".join(filter(None, [told["software"], *versions]))
        rows.add(work, line.real("microseconds") * 1e-6, **told)
    if not len(rows):
        raise rows.error(f"a table must hold a row with a time, got none ({rows.skipped.total()} rows without)")


def _op(line: Line, kind: str) -> Op:
    sizes = line.text("dims").lower()
    if not re.fullmatch(r"\d+(x\d+)*", sizes):
        raise line.rows.error(f"dims must be whole numbers joined by x, got {sizes!r:.80}", line.number)
    try:
        work = Op(kind, tuple(map(int, sizes.split("x"))), line.cells.get("dtype", "").strip() or "bf16")
    except ValueError as error:
        raise line.rows.error(str(error), line.number) from None
    record = work.record
    if any(size < 1 for name, size in zip(record.dim_names, work.dims, strict=True) if name not in record.flags):
        raise line.rows.error(f"dims must be >= 1, got {sizes}", line.number)
    return work


def _collective(line: Line, kind: str) -> Collective:
    size, ranks, per_node = line.whole("num_bytes"), line.whole("group_size", 2), line.whole("ranks_per_node")
    if ranks % per_node:
        raise line.rows.error(f"ranks_per_node must divide group_size, got {ranks} % {per_node}", line.number)
    return Collective(kind, size, ranks, per_node)
