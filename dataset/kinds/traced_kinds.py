"""Ops of traced jobs that no built-in model family has: convolutions, pooling, embedding bags, fused kernels.

The harness has no callables for them: their times come from traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from stepsight.dataset.kinds.call_dims import Args, count, largest, shape_of, tensors
from stepsight.dataset.kinds.op_kind import Dims, OpKind

_CONV = ("batch", "in_channels", "out_channels", "out_positions", "window")
_POOL = ("batch_channels", "in_positions", "out_positions")
_BAG = ("indices", "hidden", "bags")
_Calls = Mapping[str, Callable[[Args], Dims | None]]


def _conv_dims(
    index: int, out: int | None = None, transposed: bool = False, kernel: int | None = None
) -> Callable[[Args], Dims]:
    """Dims of a convolution of input ``index`` with the weight ``kernel`` (the input after it, if None); ``out``: input
    that is shaped as the output.

    Without it, the output's positions are those of the input divided by the stride.
    """

    def dims(args: Args) -> Dims:
        image, weight = shape_of(args, index), shape_of(args, index + 1 if kernel is None else kernel)
        if len(image) < 3 or len(weight) < 3:
            return (0,) * 5
        result = shape_of(args, out) if out is not None else []
        positions = math.prod(result[2:]) if result else _strided(args, index, image[2:])
        ins, outs = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
        return image[0], ins, outs, positions, math.prod(weight[2:])

    return dims


def _strided(args: Args, index: int, size: list[int]) -> int:
    literals = args.get("Concrete Inputs") or []
    lists = [_numbers(text) for text in literals[index + 2 :]]
    stride = next((found for found in lists if len(found) == len(size)), [1])
    return math.prod(max(-(-length // max(step, 1)), 1) for length, step in zip(size, stride * len(size), strict=False))


def _numbers(text: Any) -> list[int]:
    words = str(text).strip("[]() ").split(",")
    return [int(word) for word in words] if all(word.strip().isdigit() for word in words) else []


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


def _bag(weight: int, indices: int, offsets: int) -> Callable[[Args], Dims]:
    def dims(args: Args) -> Dims:
        table = shape_of(args, weight)
        return count(shape_of(args, indices)), table[-1] if table else 0, count(shape_of(args, offsets))

    return dims


def _kind(name: str, family: str, dim_names: tuple[str, ...], calls: _Calls, **more: Any) -> OpKind:
    return OpKind(name=name, family=family, dim_names=dim_names, calls=calls, in_harness=False, **more)


def _conv(name: str, products: int, calls: _Calls) -> OpKind:
    """A convolution, or its backward of two ``products``."""
    return _kind(
        name,
        "conv",
        _CONV,
        calls,
        flops=lambda b, i, o, p, w: 2.0 * products * b * o * p * i * w,
        elements=lambda b, i, o, p, w: float(products * (b * p * (i + o) + i * o * w)),
        bound="compute",
        base="linear",
        base_dims=lambda b, i, o, p, w: (products * b * p, o, i * w),
    )


def _streaming(name: str, calls: _Calls, flops: float, moved: float) -> OpKind:
    return _kind(
        name, name, ("numel",), calls, flops=lambda n: flops * n, elements=lambda n: moved * n, streams=True
    )  # fmt: skip


def _calls(names: str, dims: Callable[[Args], Dims | None]) -> _Calls:
    return {name if "::" in name else f"aten::{name}": dims for name in names.split()}


def _batch_norm(name: str, flops: float, moved: float, calls: _Calls) -> OpKind:
    return _kind(
        name,
        "batch_norm",
        ("positions", "channels"),
        calls,
        flops=lambda p, c: flops * p * c,
        elements=lambda p, c: moved * p * c,
        base_dims=lambda p, c: (p * c,),
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
    _conv(
        "conv",
        1,
        {
            **_calls("convolution _convolution conv2d conv1d conv3d", _conv_dims(0)),
            **_calls("cudnn_convolution miopen_convolution mkldnn_convolution slow_conv2d_forward", _conv_dims(0)),
            **_calls("_conv_depthwise2d cudnn_convolution_add_relu cudnn_convolution_relu", _conv_dims(0)),
            **_calls("cudnn_convolution_transpose miopen_convolution_transpose", _conv_dims(0, transposed=True)),
        },
    ),
    _conv(
        "conv_backward",
        2,
        {
            **_calls("convolution_backward", _conv_dims(1, out=0)),
            **_calls("cudnn_convolution_backward miopen_convolution_backward", _conv_dims(0, out=1, kernel=2)),
            **_calls("mkldnn_convolution_backward", _conv_dims(0, out=1, kernel=2)),
        },
    ),
    _batch_norm(
        "batch_norm",
        6.0,
        2.0,
        _calls(
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
            **_calls("cudnn_batch_norm_backward miopen_batch_norm_backward", _batch_normed(0)),
            **_calls("native_batch_norm_backward batch_norm_backward native_group_norm_backward", _batch_normed(1)),
        },
    ),
    _pool(
        "pool",
        _calls(
            "max_pool2d_with_indices max_pool2d avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d "
            "adaptive_max_pool2d max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d "
            "upsample_nearest2d upsample_bilinear2d upsample_nearest1d upsample_bicubic2d",
            _pooled(0),
        ),
    ),
    _pool(
        "pool_backward",
        {
            **_calls("max_pool2d_with_indices_backward avg_pool2d_backward", _pooled(1, 0)),
            **_calls("_adaptive_avg_pool2d_backward adaptive_avg_pool2d_backward", _pooled(1, 0)),
            **_calls("upsample_nearest2d_backward upsample_bilinear2d_backward", _pooled(0)),
        },
    ),
    _kind(
        "embedding_bag",
        "embedding_bag",
        _BAG,
        {
            **_calls("embedding_bag _embedding_bag _embedding_bag_forward_only", _bag(0, 1, 2)),
            **_calls("fbgemm::split_embedding_codegen_lookup_function", _bag(0, 1, 2)),
        },
        flops=lambda n, h, b: float(n * h),
        elements=lambda n, h, b: float((n + b) * h),
        base_dims=lambda n, h, b: ((n + b) * h,),
    ),
    _kind(
        "embedding_bag_backward",
        "embedding_bag",
        _BAG,
        _calls("_embedding_bag_dense_backward _embedding_bag_backward _embedding_bag_sparse_backward", _bag(0, 1, 2)),
        flops=lambda n, h, b: float(n * h),
        elements=lambda n, h, b: float(2 * (n + b) * h),
        base_dims=lambda n, h, b: (2 * (n + b) * h,),
    ),
    _streaming(
        "sort",
        _calls("sort topk argsort msort searchsorted bucketize nonzero unique _unique2 kthvalue", largest),
        16.0,
        6.0,
    ),
    _streaming("random", _calls("randperm randint rand randn multinomial", largest), 8.0, 1.0),
    _streaming("fused", {}, 4.0, 2.0),  # a compiler's kernel, as Triton's of Inductor
    _kind(
        "foreach",
        "optimizer",
        ("numel", "tensors"),
        _calls(
            "_fused_sgd_ _fused_adagrad_ _foreach_norm _foreach_pow _foreach_addcdiv _foreach_lerp _foreach_maximum_ "
            "_foreach_sub _foreach_sub_ _foreach_div _foreach_neg _foreach_reciprocal _foreach_sigmoid _foreach_abs "
            "_foreach_clamp_max_ _foreach_max _foreach_addcmul _foreach_sqrt_",
            tensors,
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
)
