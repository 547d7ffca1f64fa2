"""A user's own table: CSV with one row for each measurement.

Columns ``op, dims, dtype, microseconds`` for ops (dims as ``4096x4096x1024``, in the order of the kind's sizes), and
``op, num_bytes, group_size, ranks_per_node, microseconds`` for collectives; both may stand in one file, what does not
apply left empty.  ``device``, ``fabric`` and ``software`` are optional; versions in ``cuda``, ``nccl`` and ``driver``
are added to the software's name.  A time may have another unit (``milliseconds``, ``time_ns``), a matrix product its
sizes in columns ``m, n, k`` (rows, columns of the result, what is summed over), and words are those of PyTorch and of
benchmarks too: ``gemm``, ``bfloat16``, ``alltoall``.
"""

from __future__ import annotations

import re

from stepsight.dataset.kinds import benchmark_names
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective, Op
from stepsight.dataset.tables.rows import Line, Rows, read_csv

_VERSIONS = ("cuda", "nccl", "driver")
_UNITS = {"microseconds": 1e-6, "us": 1e-6, "milliseconds": 1e-3, "ms": 1e-3, "seconds": 1.0, "s": 1.0}
_UNITS |= {"nanoseconds": 1e-9, "ns": 1e-9}
_QUANTITIES = ("time", "latency", "duration")
# Columns that may hold the time, and the seconds of their unit.
TIMES = {**_UNITS, **{f"{what}_{unit}": seconds for what in _QUANTITIES for unit, seconds in _UNITS.items()}}
_NAMES = ("op", "kind", "operation", "kernel")
_PRODUCTS = ("gemm", "matmul", "mm", "addmm")
_SIZES = ("m", "n", "k")
_DTYPES = {
    **{"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "tfloat32": "tf32"},
    **{"float8": "fp8", "e4m3": "fp8", "float8_e4m3fn": "fp8", "fp4": "nvfp4"},
}


def read(rows: Rows) -> None:
    for line in read_csv(rows, ()):
        named = next((name for name in _NAMES if name in line.cells), "")
        if not named:
            add = ": add a column op (gemm for products of m, n, k)" if set(_SIZES) <= line.cells.keys() else ""
            raise rows.error(f"the header must have a column op, which names the op or collective{add}")
        times = [name for name in TIMES if name in line.cells]
        if len(times) != 1:
            raise rows.error(
                f"the header must have one column with the time ({', '.join(_UNITS)} or time_us, latency_ms ...), "
                f"got {' and '.join(times) or 'none'}{': rename or remove the others' if times else ''}"
            )
        time = times[0]
        kind = _kind(line.text(named))
        needs = ("num_bytes", "group_size", "ranks_per_node") if kind in COLLECTIVE_KINDS else ("dims",)
        if kind == "linear" and "dims" not in line.cells:
            needs = _SIZES
        missing = [name for name in needs if name not in line.cells]
        if missing:
            raise rows.error(f"{kind} needs columns {', '.join(needs)}; {', '.join(missing)} missing", line.number)
        work = _collective(line, kind) if kind in COLLECTIVE_KINDS else _op(line, kind)
        told = {name: line.cells.get(name, "").strip() for name in ("device", "fabric", "software")}
        versions = [f"{name} {text}" for name in _VERSIONS if (text := line.cells.get(name, "").strip())]
        told["software"] = " ".join(filter(None, [told["software"], *versions]))
        rows.add(work, line.real(time) * TIMES[time], **told)
    if not len(rows):
        raise rows.error(f"a table must hold a row with a time, got none ({rows.skipped.total()} rows without)")


def _kind(word: str) -> str:
    """The kind of an op or a collective, by its own name or by what benchmarks call it."""
    plain = word.lower().replace("-", "_").removeprefix("aten::")
    names = {**benchmark_names(), **{kind.replace("_", ""): kind for kind in COLLECTIVE_KINDS}}
    return "linear" if plain in _PRODUCTS else names.get(plain.replace("_", ""), names.get(plain, word))


def _op(line: Line, kind: str) -> Op:
    sizes = line.text("dims") if "dims" in line.cells else "x".join(line.text(name) for name in _SIZES)
    numbers = re.split(r"[x*,;\s\u00d7]+", sizes.lower().strip("()[] "))
    if not all(re.fullmatch(r"\d+", number) for number in numbers):
        raise line.rows.error(f"dims must be whole numbers joined by x, got {sizes!r:.80}", line.number)
    told = line.cells.get("dtype", "").strip().lower().removeprefix("torch.") or "bf16"
    try:
        work = Op(kind, tuple(map(int, numbers)), _DTYPES.get(told, told))
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
