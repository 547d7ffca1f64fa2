"""aiconfigurator (NVIDIA): kernels of inference engines and NCCL within a node, milliseconds.

Forward only.  ``message_size`` of a collective is in *elements* of its dtype.  Attention with a window narrower than
the sequence, onto a longer prefix, or with keys in another dtype than queries is none of our ops.  ``moe`` times the
experts' whole MLP; it is told as one grouped product with the same FLOP and weights (``n = 3 * inter_size``: gate, up
and down), which leaves the activation between them out of the account; experts of other ranks (``moe_ep_size > 1``) are
left out, since how many rows reached those here is not said, and so are uneven loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stepsight.dataset.base.bounded import parquet_rows, read_parquet, reason
from stepsight.dataset.kinds import benchmark_names
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables.rows import Rows, device_name

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_block": "fp8"}
_NCCL_BYTES = {"half": 2, "int8": 1}
_FABRICS = {
    "a100-sxm-80gb": "dgx-a100",
    "h100-sxm-80gb": "dgx-h100",
    "h200-sxm-141gb": "dgx-h100",  # the same NVLink 4
    "b200-sxm-180gb": "dgx-b200",
    "gb200-sxm-186gb": "gb200-nvl72",
    "l40s-pcie-48gb": "pcie-gen4",
}
_SKIPPED_MOE = "experts of a model whose MLP has no gate"

Cells = tuple[Any, ...]
Found = Op | Collective | str  # a reason where it is no work of ours


def read(rows: Rows) -> None:
    table = rows.path.name.removesuffix(".parquet").removesuffix("_perf")
    reader = _TABLES.get(table)
    if reader is None:
        rows.skip(f"{table}: no op of a training step", _num_rows(rows))
        return
    columns, convert = reader
    for index, (framework, version, told, kernel, latency_ms, cells) in enumerate(_cells(rows, columns), 1):
        try:
            found = convert(*cells)
        except ValueError as error:
            raise rows.error(str(error), index) from None
        if isinstance(found, str):
            rows.skip(found)
            continue
        device = device_name(told)
        if isinstance(found, Op):
            variant = f" {cells[0]}" if cells[0] == "fp8_block" else ""
            rows.add(found, latency_ms * 1e-3, device=device, software=f"{framework} {version} {kernel}{variant}")
        else:
            fabric, software = _FABRICS.get(device, ""), f"nccl {version} {cells[1]}"
            rows.add(found, latency_ms * 1e-3, device=device, fabric=fabric, software=software)


def _gemm(dtype: str, m: int, n: int, k: int) -> Found:
    if dtype not in _DTYPES:
        return f"weights in {dtype}"
    return Op("linear", _sizes(m, n, k), _DTYPES[dtype])


def _context_attention(dtype: str, kv_dtype: str, *numbers: int) -> Found:
    batch, length, heads, kv_heads, size, step, window = numbers
    if dtype not in _DTYPES:
        return f"attention in {dtype}"
    if kv_dtype != dtype:
        return "keys and values in another dtype"
    if step:
        return "attention onto a prefix"
    if 0 < window < length:
        return "a window narrower than the sequence"
    return Op("attention", (*_sizes(batch, heads, kv_heads or heads, length, length, size), 1), _DTYPES[dtype])


def _encoder_attention(dtype: str, batch: int, length: int, heads: int, size: int) -> Found:
    if dtype not in _DTYPES:
        return f"attention in {dtype}"
    return Op("attention", (*_sizes(batch, heads, heads, length, length, size), 0), _DTYPES[dtype])


def _moe(dtype: str, *cells: Any) -> Found:
    *numbers, distribution = cells
    tokens, hidden, inter, top_k, experts, tp, ep = numbers
    if dtype not in _DTYPES:
        return f"weights in {dtype}"
    if ep > 1:
        return "experts of which some are on other ranks"
    if distribution != "balanced":
        return "experts loaded unevenly"
    if top_k == 22 or inter == 1856:  # Nemotron 3 (squared ReLU)
        return _SKIPPED_MOE
    tokens, hidden, inter, top_k, experts, tp = _sizes(tokens, hidden, inter, top_k, experts, tp)
    copies = tokens * top_k
    return Op("grouped_linear", (min(experts, copies), copies, 3 * inter // tp, hidden), _DTYPES[dtype])


def _nccl(kind: str, dtype: str, num_gpus: int, elements: int) -> Found:
    if kind not in benchmark_names():
        return f"no collective kind for {kind}"
    if dtype not in _NCCL_BYTES:
        return f"collectives in {dtype}"
    return Collective(benchmark_names()[kind], elements * _NCCL_BYTES[dtype], num_gpus, num_gpus)


def _sizes(*sizes: int) -> tuple[int, ...]:
    if min(sizes) < 1:
        raise ValueError(f"sizes must be >= 1, got {sizes}")
    return sizes


_OPTIONAL = {"window_size": 0, "step": 0}
# Columns of a table (the dtype first), and what makes work of them.
_TABLES: dict[str, tuple[tuple[str, ...], Callable[..., Found]]] = {
    "gemm": (("gemm_dtype", "m", "n", "k"), _gemm),
    "context_attention": (
        (
            *("attn_dtype", "kv_cache_dtype", "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
            *("step", "window_size"),
        ),
        _context_attention,
    ),
    "encoder_attention": (("attn_dtype", "batch_size", "isl", "num_heads", "head_dim"), _encoder_attention),
    "moe": (
        (
            *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"),
            *("moe_ep_size", "distribution"),
        ),
        _moe,
    ),
    "nccl": (("op_name", "nccl_dtype", "num_gpus", "message_size"), _nccl),
}
_TEXTS = ("op_name", "distribution")


def _num_rows(rows: Rows) -> int:
    try:
        return parquet_rows(rows.path)
    except OSError as error:
        raise rows.error(f"must be a Parquet file ({reason(error)})") from None


def _cells(rows: Rows, columns: tuple[str, ...]) -> Iterator[tuple[str, str, str, str, float, Cells]]:
    """Framework, version, device, kernel, milliseconds and the columns asked for, row by row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        table = read_parquet(rows.path)
    except OSError as error:
        raise rows.error(f"must be a Parquet file ({reason(error)})") from None
    every = ("framework", "version", "device", "kernel_source", "latency", *columns)
    missing = [name for name in every if name not in table.column_names and name not in _OPTIONAL]
    if missing:
        raise rows.error(f"the table must have columns {', '.join(every)}; {', '.join(missing)} missing")
    values: list[list[Any]] = []
    for name in every:
        if name not in table.column_names:
            values.append([_OPTIONAL[name]] * len(table))
            continue
        column = table[name]
        text = name in every[:4] or name in _TEXTS or name.endswith("dtype")
        wanted = pa.string() if text else pa.float64() if name == "latency" else pa.int64()
        try:
            values.append(pc.cast(column, wanted).to_pylist())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise rows.error(f"{name} must be {wanted} throughout, got {column.type}") from None
        if column.null_count and name != "latency":
            raise rows.error(f"{name} must be filled throughout", values[-1].index(None) + 1)
    for framework, version, device, kernel, latency, *cells in zip(*values, strict=True):
        yield framework, version, device, kernel, float("nan") if latency is None else latency, tuple(cells)
