"""Ops of jobs that no built-in model family has: batch norms, pooling, embedding bags, recurrence, fused kernels.

The harness has no callables for some of them: their times come from traces alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from stepsight.dataset.kinds import call_dims
from stepsight.dataset.kinds.call_dims import Args, Dims, DimsOf, count, literal_of, named_calls, shape_of
from stepsight.dataset.kinds.kind_table import OpKind

_POOL = ("batch_channels", "in_positions", "out_positions")
_BAG = ("indices", "hidden", "bags", "rows")
_RECURRENT = ("steps", "batch", "input", "hidden", "gates")  # gates: outputs of the product of one step
_Calls = Mapping[str, DimsOf]


def _batch_normed(index: int) -> Callable[[Args], Dims]:
    def dims(args: Args) -> Dims:
        shape = shape_of(args, index)
        channels = shape[1] if len(shape) > 1 else 0
        return (count(shape) // channels if channels else 0, channels)

    return dims


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
        grad, rows = shape_of(args, 0), literal_of(args, rows_at)
        return (
            count(shape_of(args, 1)), grad[-1] if grad else 0, grad[0] if grad else 0,
            int(rows) if rows.isdigit() else 0,
        )  # fmt: skip

    return dims


def _recurrent(weight: int, args: Args) -> Dims:
    """Sizes of one recurrent layer in one direction: the input, and two weights in a row."""
    steps, into, back = shape_of(args, 0), shape_of(args, weight), shape_of(args, weight + 1)
    if len(steps) != 3 or len(into) != 2 or len(back) != 2:
        return (0,) * len(_RECURRENT)
    return steps[0], steps[1], steps[2], back[1], into[0]


def _kind(name: str, family: str, dim_names: tuple[str, ...], calls: _Calls, **more: Any) -> OpKind:
    return OpKind(name=name, family=family, dim_names=dim_names, calls=calls, **{"in_harness": False, **more})


def _layer_of_steps(name: str, passes: int, **more: Any) -> OpKind:
    """A recurrent layer; ``passes``: of the products, one forward and two backward."""
    return _kind(
        name,
        "recurrent",
        _RECURRENT,
        named_calls(name.replace("recurrent", "mkldnn_rnn_layer"), partial(_recurrent, 1)),
        flops=lambda t, n, i, h, g: 2.0 * passes * t * n * g * (i + h),
        elements=lambda t, n, i, h, g: float(passes * (t * (g * h + n * (i + g + 2 * h)) + g * i)),
        units=lambda t, n, i, h, g: float(t),
        bound="compute",
        in_harness=True,
        **more,
    )


def _streaming(name: str, calls: _Calls, flops: float, moved: float) -> OpKind:
    return _kind(
        name, name, ("numel",), calls, flops=lambda n: flops * n, elements=lambda n: moved * n, streams=True
    )  # fmt: skip


def _batch_norm(name: str, flops: float, moved: float, calls: _Calls) -> OpKind:
    return _kind(
        name,
        "batch_norm",
        ("positions", "channels"),
        calls,
        flops=lambda p, c: flops * p * c,
        elements=lambda p, c: moved * p * c,
        base_dims=lambda p, c: (p * c,),
        in_harness=True,
    )


def _pool(name: str, calls: _Calls) -> OpKind:
    return _kind(
        name,
        "pool",
        _POOL,
        calls,
        flops=lambda r, i, o: float(r * i),
        elements=lambda r, i, o: float(r * (i + o)),
        base_dims=lambda r, i, o: (r * (i + o),),
    )


KINDS = (
    _batch_norm(
        "batch_norm",
        6.0,
        2.0,
        named_calls(
            "native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index batch_norm "
            "_native_batch_norm_legit _batch_norm_with_update native_group_norm instance_norm",
            _batch_normed(0),
        ),
    ),
    _batch_norm(
        "batch_norm_backward",
        11.0,
        3.0,
        {
            **named_calls("cudnn_batch_norm_backward miopen_batch_norm_backward", _batch_normed(0)),
            **named_calls(
                "native_batch_norm_backward batch_norm_backward native_group_norm_backward", _batch_normed(1)
            ),
        },
    ),
    _pool(
        "pool",
        named_calls(
            "max_pool2d_with_indices max_pool2d avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d "
            "adaptive_max_pool2d max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d "
            "upsample_nearest2d upsample_bilinear2d upsample_nearest1d upsample_bicubic2d",
            _pooled(0),
        ),
    ),
    _pool(
        "pool_backward",
        {
            **named_calls("max_pool2d_with_indices_backward avg_pool2d_backward", _pooled(1, 0)),
            **named_calls("_adaptive_avg_pool2d_backward adaptive_avg_pool2d_backward", _pooled(1, 0)),
            **named_calls("upsample_nearest2d_backward upsample_bilinear2d_backward", _pooled(0)),
        },
    ),
    _kind(
        "embedding_bag",
        "embedding_bag",
        _BAG,
        named_calls(
            "embedding_bag _embedding_bag _embedding_bag_forward_only fbgemm::split_embedding_codegen_lookup_function",
            _bag,
        ),
        flops=lambda n, h, b, r: float(n * h),
        elements=lambda n, h, b, r: float((n + b) * h),
        base_dims=lambda n, h, b, r: ((n + b) * h,),
        in_harness=True,
    ),
    _kind(  # a gradient of the whole table
        "embedding_bag_backward",
        "embedding_bag",
        _BAG,
        {
            **named_calls("_embedding_bag_dense_backward", _bag_backward(5)),
            **named_calls("_embedding_bag_backward", _bag_backward(6)),
        },
        flops=lambda n, h, b, r: float(n * h),
        elements=lambda n, h, b, r: float((2 * n + b + r) * h),
        base_dims=lambda n, h, b, r: ((2 * n + b + r) * h,),
        in_harness=True,
    ),
    _layer_of_steps("recurrent", 1, base="linear", base_dims=lambda t, n, i, h, g: (t * n, g, i + h)),
    _layer_of_steps("recurrent_backward", 2, base="recurrent"),
    _streaming(
        "sort",
        named_calls(
            "sort topk argsort msort searchsorted bucketize nonzero unique _unique2 kthvalue", call_dims.largest
        ),
        16.0,
        6.0,
    ),
    _streaming("random", named_calls("randperm randint rand randn multinomial", call_dims.largest), 8.0, 1.0),
    _streaming("fused", {}, 4.0, 2.0),  # a compiler's kernel, as Triton's of Inductor
    _kind(
        "foreach",
        "optimizer",
        ("numel", "tensors"),
        named_calls(
            "_fused_sgd_ _fused_adagrad_ _foreach_norm _foreach_pow _foreach_addcdiv _foreach_lerp _foreach_maximum_ "
            "_foreach_sub _foreach_sub_ _foreach_div _foreach_neg _foreach_reciprocal _foreach_sigmoid _foreach_abs "
            "_foreach_clamp_max_ _foreach_max _foreach_addcmul _foreach_sqrt_",
            call_dims.tensors,
        ),
        flops=lambda n, t: 2.0 * n,
        elements=lambda n, t: 3.0 * n,
        units=lambda n, t: t,
        base_dims=lambda n, t: (n,),
    ),
    _kind(
        "opaque",  # a kernel that fits no kind, by how it was launched
        "opaque",
        ("blocks", "threads", "registers", "shared_bytes"),
        {},
        flops=lambda b, t, r, s: 0.0,
        elements=lambda b, t, r, s: float(b * t),
        base_dims=lambda b, t, r, s: (b * t,),
    ),
    _kind(  # loops that a compiler fused for a CPU; amounts as ``harness.regions.loop_code`` counts them
        "fused_loops",
        "fused_loops",
        (
            *("near_bytes", "middle_bytes", "far_bytes", "strided", "far_strided", "gathers", "moves"),
            *("vectors", "scalars", "function_cycles", "nests"),
        ),
        {},
        flops=lambda a, b, c, d, e, f, g, vectors, scalars, functions, h: 16.0 * (vectors + functions) + scalars,
        elements=lambda near, middle, far, *others: (near + middle + far) / 4.0,
        base_dims=lambda near, middle, far, *others: (max((near + middle + far) // 4, 1),),
    ),
)
