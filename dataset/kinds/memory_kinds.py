"""Kinds that stream through memory or a link: ops on elements and rows, lookups, the optimizer, transfers; and those of
traces alone (``in_harness`` is false), for which the harness has no callables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stepsight.dataset.kinds import call_dims
from stepsight.dataset.kinds.call_dims import CALLS, Args, Dims, DimsOf, count, first, largest, named_calls, shape_of
from stepsight.dataset.kinds.kind_table import STREAMED, OpKind


def _streamed(
    name: str, family: str, dims: str, flops: float, moved: float, code: int = -1, *, over: int = 1, **more: Any
) -> OpKind:
    """A kind with so many FLOP, and elements read and written, for each element.

    Args:
        dims: Names of the dims; the product of the first ``over`` counts the elements.
    """
    return OpKind(
        name=name,
        family=family,
        dim_names=tuple(dims.split()),
        flops=lambda *sizes: math.prod(sizes[:over], start=flops),
        elements=lambda *sizes: math.prod(sizes[:over], start=moved),
        code=code,
        **more,
    )


# --- elements ---------------------------------------------------------------------------------------------------------


def _elementwise(name: str, code: int, flops: float, moved: float, **more: Any) -> OpKind:
    return _streamed(name, "elementwise", "numel", flops, moved, code, streams=True, **more)


_ELEMENTWISE = (
    _elementwise("gelu", 16, 10.0, 2.0, calls=named_calls("gelu", first)),
    _elementwise("gelu_backward", 17, 15.0, 3.0, base="gelu", calls=named_calls("gelu_backward", first)),
    _elementwise("swiglu", 18, 6.0, 3.0),
    _elementwise("swiglu_backward", 19, 12.0, 5.0, base="swiglu"),
    _elementwise("rope", 20, 4.0, 2.0),
    _elementwise("rope_backward", 21, 4.0, 2.0, base="rope"),
    _elementwise(  # the mask takes a byte, half of an element in 16 bits
        "dropout", 22, 2.0, 2.5, calls=named_calls("native_dropout", largest, ("dropout", call_dims.dropout))
    ),
    _elementwise(
        "dropout_backward", 23, 1.0, 2.5, base="dropout", calls=named_calls("native_dropout_backward", largest)
    ),
    _elementwise("add", 24, 1.0, 3.0, base="", slept=False, calls=named_calls(CALLS["add"], largest)),
    _elementwise(
        "copy", 25, 0.0, 2.0, slept=False, calls=named_calls(CALLS["copy"], largest, (CALLS["copy_of_first"], first))
    ),
    _elementwise("fill", 26, 0.0, 1.0, slept=False, calls=named_calls("fill_ zero_ _foreach_zero_", largest)),
    _elementwise("reduce", 27, 1.0, 1.0, slept=False, calls=named_calls(CALLS["reduce"], largest)),
    _elementwise("elementwise", 28, 1.0, 2.0, slept=False, calls=named_calls(CALLS["elementwise"], largest)),
    _elementwise("relu", 42, 1.0, 2.0),
    _elementwise("relu_backward", 43, 1.0, 3.0, base="relu"),
    _elementwise("geglu", 44, 11.0, 3.0),
    _elementwise("geglu_backward", 45, 17.0, 5.0, base="geglu"),
    _elementwise("cross", -1, 2.0, 4.0, in_harness=False),  # of a cross layer: x0 * y + x, and its three gradients
    _elementwise("cross_backward", -1, 4.0, 9.0, base="cross", in_harness=False),
    _elementwise("cast", 51, 0.0, 3.0),  # from the 16 bits that the op's dtype says to fp32, or back
)


# --- rows -------------------------------------------------------------------------------------------------------------


def _on_rows(name: str, code: int, flops: float, moved: float, of: tuple[str, str], **more: Any) -> OpKind:
    """A kind on rows; ``of``: its family, and the name of its second dim."""
    family, second = of
    more = {"units": lambda r, h: r, "streams": family == "norm", **more}
    return _streamed(name, family, f"rows {second}", flops, moved, code, over=2, **more)


_NORM, _SOFTMAX, _LOSS = ("norm", "hidden"), ("softmax", "columns"), ("loss", "vocab")


def _batch_normed(index: int) -> Callable[[Args], Dims]:
    def dims(args: Args) -> Dims:
        shape = shape_of(args, index)
        channels = shape[1] if len(shape) > 1 else 0
        return (count(shape) // channels if channels else 0, channels)

    return dims


_BATCH_NORM: dict[str, Any] = {"over": 2, "base_dims": lambda p, c: (p * c,)}
_ROWS = (
    OpKind(
        name="bias_grad",
        family="reduce",
        dim_names=("rows", "hidden"),
        flops=lambda r, h: float(r * h),
        elements=lambda r, h: float(r * h + h),
        code=3,
    ),
    _on_rows("layer_norm", 12, 8.0, 2.0, _NORM, calls=named_calls("native_layer_norm", call_dims.normed(0, 2))),
    _on_rows(
        *("layer_norm_backward", 13, 14.0, 3.0, _NORM),
        base="layer_norm",
        calls=named_calls("native_layer_norm_backward", call_dims.normed(1, 5)),
    ),
    _on_rows("rms_norm", 14, 5.0, 2.0, _NORM, calls=named_calls("_fused_rms_norm rms_norm", call_dims.normed(0, 2))),
    _on_rows(
        *("rms_norm_backward", 15, 10.0, 3.0, _NORM),
        base="rms_norm",
        calls=named_calls("_fused_rms_norm_backward", call_dims.normed(1, 4)),
    ),
    _on_rows("softmax", 32, 5.0, 2.0, _SOFTMAX),
    _on_rows("softmax_backward", 33, 4.0, 3.0, _SOFTMAX, base="softmax"),
    _on_rows(
        "cross_entropy", 8, 5.0, 2.0, _LOSS, calls=named_calls(CALLS["cross_entropy"], call_dims.rows(0)), in_parts=True
    ),
    _on_rows(
        *("cross_entropy_backward", 9, 3.0, 2.0, _LOSS),
        base="cross_entropy",
        calls=named_calls("nll_loss_backward", call_dims.rows(1), ("_log_softmax_backward_data", call_dims.rows(0))),
        in_parts=True,
    ),
    _streamed(
        *("batch_norm", "batch_norm", "positions channels", 6.0, 2.0),
        calls=named_calls(CALLS["batch_norm"], _batch_normed(0)),
        **_BATCH_NORM,
    ),
    _streamed(
        *("batch_norm_backward", "batch_norm", "positions channels", 11.0, 3.0),
        calls=named_calls(
            CALLS["batch_norm_backward_0"], _batch_normed(0), (CALLS["batch_norm_backward"], _batch_normed(1))
        ),
        **_BATCH_NORM,
    ),
)

# --- lookups, permutations and pools ----------------------------------------------------------------------------------

_BAG = ("indices", "hidden", "bags", "rows")


def _pooled(index: int, out: int | None = None) -> Callable[[Args], Dims]:
    def dims(args: Args) -> Dims:
        shape, result = shape_of(args, index), shape_of(args, out) if out is not None else []
        if len(shape) < 3:
            return (0,) * 3
        return math.prod(shape[:2]), math.prod(shape[2:]), math.prod(result[2:]) if len(result) > 2 else 0

    return dims


def _bag(args: Args) -> Dims:
    table, indices = shape_of(args, 0), shape_of(args, 1)
    bags = indices[0] if len(indices) == 2 else count(shape_of(args, 2))
    return count(indices), table[-1] if table else 0, bags, table[0] if len(table) == 2 else 0


def _bag_backward(rows_at: int) -> DimsOf:
    """``rows_at``: argument that says how many rows the table has."""

    def dims(args: Args) -> Dims:
        grad, rows = shape_of(args, 0), call_dims.literal_of(args, rows_at)
        return (
            count(shape_of(args, 1)), grad[-1] if grad else 0, grad[0] if grad else 0,
            int(rows) if rows.isdigit() else 0,
        )  # fmt: skip

    return dims


def _permute(name: str, code: int, flops: Callable[..., float], elements: Callable[..., float], base: str) -> OpKind:
    return OpKind(
        name=name,
        family="permute",
        dim_names=("copies", "tokens", "hidden"),
        flops=flops,
        elements=elements,
        code=code,
        units=lambda c, t, h: c,
        base=base,
    )


def _pool(name: str, calls: dict[str, DimsOf]) -> OpKind:
    return OpKind(
        name=name,
        family="pool",
        dim_names=("batch_channels", "in_positions", "out_positions"),
        calls=calls,
        flops=lambda r, i, o: float(r * i),
        elements=lambda r, i, o: float(r * (i + o)),
        base_dims=lambda r, i, o: (r * (i + o),),
        in_harness=False,
    )


_LOOKUPS = (
    OpKind(
        name="embedding",
        family="embedding",
        dim_names=("tokens", "hidden", "vocab"),
        flops=lambda t, h, v: 0.0,
        elements=lambda t, h, v: 2.0 * t * h,
        code=6,
        units=lambda t, h, v: t,
        calls=named_calls("embedding", call_dims.embedding),
    ),
    OpKind(
        name="embedding_backward",  # it also clears the whole table's gradient, so that its base is what streams
        family="embedding",
        dim_names=("tokens", "hidden", "vocab"),
        flops=lambda t, h, v: float(t * h),
        elements=lambda t, h, v: 3.0 * t * h + v * h,
        code=7,
        units=lambda t, h, v: t,
        calls=named_calls("embedding_dense_backward", call_dims.embedding_backward),
    ),
    _permute("permute", 34, lambda c, t, h: 0.0, lambda c, t, h: float((c + t) * h), STREAMED),
    _permute("unpermute", 35, lambda c, t, h: 2.0 * c * h, lambda c, t, h: float((c + t) * h), STREAMED),
    _permute(
        "unpermute_backward", 36, lambda c, t, h: 4.0 * c * h, lambda c, t, h: float((3 * c + t) * h), "unpermute"
    ),
    _pool("pool", named_calls(CALLS["pool"], _pooled(0))),
    _pool(
        "pool_backward",
        named_calls(CALLS["pool_backward"], _pooled(1, 0), (CALLS["upsample_backward"], _pooled(0))),
    ),
    OpKind(
        name="embedding_bag",
        family="embedding_bag",
        dim_names=_BAG,
        calls=named_calls(CALLS["embedding_bag"], _bag),
        flops=lambda n, h, b, r: float(n * h),
        elements=lambda n, h, b, r: float((n + b) * h),
        base_dims=lambda n, h, b, r: ((n + b) * h,),
    ),
    OpKind(  # a gradient of the whole table
        name="embedding_bag_backward",
        family="embedding_bag",
        dim_names=_BAG,
        calls=named_calls(
            "_embedding_bag_dense_backward", _bag_backward(5), ("_embedding_bag_backward", _bag_backward(6))
        ),
        flops=lambda n, h, b, r: float(n * h),
        elements=lambda n, h, b, r: float((2 * n + b + r) * h),
        base_dims=lambda n, h, b, r: ((2 * n + b + r) * h,),
    ),
)

# --- lookups in several tables in one call, FBGEMM's table-batched embeddings -----------------------------------------

# Assumed: rows at random reach about three quarters of the bandwidth of a stream, and a row that was read before comes
# from a cache, at about half the cost.  Each index is distributed, sorted by its row and
# searched for runs, which moves as much as 200 elements of 4 bytes: inferred from MLPerf's runs of DLRM on one node.
_RANDOM, _CACHED, _SORTED = 1.33, 0.5, 200.0


def _rows_read(n: int, h: int, u: int) -> float:
    return (_RANDOM * u + _CACHED * max(n - u, 0)) * h


_BATCHED: dict[str, Any] = {"family": "table_lookup", "units": lambda n, h, b, u, *more: n}
_TABLE_LOOKUPS = (
    OpKind(
        name="table_lookup",
        dim_names=("indices", "hidden", "bags", "distinct", "tables"),
        flops=lambda n, h, b, u, t: float(n * h),
        elements=lambda n, h, b, u, t: _rows_read(n, h, u) + b * h + 2.0 * n,
        base_dims=lambda n, h, b, u, t: (int(_rows_read(n, h, u) + b * h + 2.0 * n) // 3 + 1,),
        **_BATCHED,
    ),
    OpKind(  # with the optimizer's step of each row, whose state has so many elements
        name="table_lookup_backward",
        dim_names=("indices", "hidden", "bags", "distinct", "tables", "state"),
        flops=lambda n, h, b, u, t, s: 2.0 * n * h,
        elements=lambda n, h, b, u, t, s: _rows_read(n, h, b) + 2.0 * _RANDOM * u * (h + s) + _SORTED * n,
        base_dims=lambda n, h, b, u, t, s: (
            int(_rows_read(n, h, b) + 2.0 * _RANDOM * u * (h + s) + _SORTED * n) // 3 + 1,
        ),
        **_BATCHED,
    ),
    _streamed(  # rows that the device does not have, over the link to the host
        *("missed_rows", "transfer", "rows hidden", 0.0, 1.0), over=2, bound="host_link", base="", in_harness=False
    ),
)

# --- the optimizer, the host, and what traces alone have --------------------------------------------------------------


def _over_tensors(
    name: str, family: str, code: int, flops: float, moved: float, calls: str = "", **more: Any
) -> OpKind:
    """A kind that iterates over tensors; ``calls``: their names."""
    more = {"units": lambda n, t: t, "calls": named_calls(calls, call_dims.tensors), **more}
    return _streamed(name, family, "numel tensors", flops, moved, code, **more)


def _of_host(name: str, moved: float, bound: str, **more: Any) -> OpKind:
    """A transfer between a device and its host, or calls of the host that a device waits for."""
    given = {"family": "transfer", "dims": "numel", **more}
    return _streamed(name, flops=0.0, moved=moved, bound=bound, base="", **given)


def _traced(name: str, flops: float, moved: float, calls: dict[str, DimsOf]) -> OpKind:
    return _streamed(name, name, "numel", flops, moved, calls=calls, streams=True, in_harness=False)


_OF_STEPS = (
    _over_tensors("adamw", "optimizer", 10, 12.0, 7.0, "_fused_adamw_ _fused_adam_"),
    _over_tensors("grad_norm", "optimizer", 11, 2.0, 1.0, "_foreach_norm"),
    _over_tensors("adamw_host", "host", 46, 12.0, 7.0, bound="host_memory", base=""),
    _of_host("to_host", 1.0, "host_link", code=37),
    _of_host("from_host", 1.0, "host_link", code=38),
    _of_host("host_calls", 0.0, "host", family="host_calls", dims="calls", in_harness=False, units=float),
    _traced("sort", 16.0, 6.0, named_calls(CALLS["sort"], largest)),
    _traced("random", 8.0, 1.0, named_calls("randperm randint rand randn multinomial", largest)),
    _traced("fused", 4.0, 2.0, {}),  # a compiler's kernel, as Triton's of Inductor
    _over_tensors(
        *("foreach", "optimizer", -1, 2.0, 3.0, CALLS["foreach"]),
        base_dims=lambda n, t: (n,),
        in_harness=False,
    ),
    OpKind(
        name="opaque",  # a kernel that fits no kind, by how it was launched
        family="opaque",
        dim_names=("blocks", "threads", "registers", "shared_bytes"),
        flops=lambda b, t, r, s: 0.0,
        elements=lambda b, t, r, s: float(b * t),
        base_dims=lambda b, t, r, s: (b * t,),
        in_harness=False,
    ),
    OpKind(  # loops that a compiler fused for a CPU; amounts as ``harness.regions.loop_counts`` counts them
        name="fused_loops",
        family="fused_loops",
        dim_names=(
            *("near_bytes", "middle_bytes", "far_bytes", "strided", "far_strided", "gathers", "moves"),
            *("vectors", "scalars", "function_cycles", "nests"),
        ),
        flops=lambda a, b, c, d, e, f, g, vectors, scalars, functions, h: 16.0 * (vectors + functions) + scalars,
        elements=lambda near, middle, far, *others: (near + middle + far) / 4.0,
        base_dims=lambda near, middle, far, *others: (max((near + middle + far) // 4, 1),),
        in_harness=False,
    ),
)
KINDS = (*_ELEMENTWISE, *_ROWS, *_LOOKUPS, *_TABLE_LOOKUPS, *_OF_STEPS)
