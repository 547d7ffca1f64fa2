"""Ops that stream through memory or a link: elementwise ops, permutations of experts, the optimizer, transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from stepsight.dataset.kinds.call_dims import dropout, first, largest, named_calls, tensors
from stepsight.dataset.kinds.kind_table import STREAMED, Bound, OpKind


def _elementwise(name: str, code: int, flops: float, moved: float, **more: Any) -> OpKind:
    """An element-wise kind; ``flops`` and ``moved``: FLOP, and elements read and written, per element."""
    return OpKind(
        name=name,
        family="elementwise",
        dim_names=("numel",),
        flops=lambda n: flops * n,
        elements=lambda n: moved * n,
        code=code,
        streams=True,
        **more,
    )


_OTHERS = (
    "mul mul_ div div_ exp log log2 neg abs sqrt rsqrt reciprocal pow where sigmoid sigmoid_ "
    "sigmoid_backward silu silu_ silu_backward tanh tanh_backward relu relu_ threshold_backward softplus masked_fill "
    "masked_fill_ eq ne lt gt le ge logical_not logical_and logical_or bitwise_and bitwise_or bitwise_not "
    "clamp clamp_ clamp_min maximum minimum sin cos erf isnan isfinite isinf addcmul addcmul_ addcdiv "
    "addcdiv_ lerp lerp_ square sign floor ceil round remainder _softmax _softmax_backward_data tril triu "
    "tril_ triu_ scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_put_ _index_put_impl_ "
    "arange random_ normal_ uniform_ bernoulli_ exponential_ _foreach_mul_ _foreach_mul _foreach_div_ "
    "_foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_ _foreach_sqrt "
    "_amp_foreach_non_finite_check_and_unscale_"
)
_COPIES = (
    "copy_ clone _to_copy cat stack split_with_sizes_copy index_select gather index repeat "
    "repeat_interleave flip roll _foreach_copy_ fsdp::split_with_sizes_copy "
    "slice_backward select_backward constant_pad_nd torch::distributed::reducer::mul_out"
)
_SUMS = (
    "mean max amax min amin any all argmax argmin logsumexp norm linalg_vector_norm prod var std var_mean "
    "cumsum count_nonzero"
)

_ELEMENTWISE = (
    _elementwise("gelu", 16, 10.0, 2.0, calls=named_calls("gelu", first)),
    _elementwise("gelu_backward", 17, 15.0, 3.0, base="gelu", calls=named_calls("gelu_backward", first)),
    _elementwise("swiglu", 18, 6.0, 3.0),
    _elementwise("swiglu_backward", 19, 12.0, 5.0, base="swiglu"),
    _elementwise("rope", 20, 4.0, 2.0),
    _elementwise("rope_backward", 21, 4.0, 2.0, base="rope"),
    _elementwise(  # the mask takes a byte, half of an element in 16 bits
        "dropout", 22, 2.0, 2.5, calls={**named_calls("native_dropout", largest), **named_calls("dropout", dropout)}
    ),
    _elementwise(
        "dropout_backward", 23, 1.0, 2.5, base="dropout", calls=named_calls("native_dropout_backward", largest)
    ),
    _elementwise(
        "add",
        24,
        1.0,
        3.0,
        base="",
        slept=False,
        calls=named_calls("add add_ sub sub_ rsub _foreach_add_ _foreach_add", largest),
    ),
    _elementwise(
        "copy",
        25,
        0.0,
        2.0,
        slept=False,
        calls={
            **named_calls(_COPIES, largest),
            **named_calls("fsdp::all_gather_copy_in fsdp::chunk_cat _chunk_cat", first),
        },
    ),
    _elementwise("fill", 26, 0.0, 1.0, slept=False, calls=named_calls("fill_ zero_ _foreach_zero_", largest)),
    _elementwise("reduce", 27, 1.0, 1.0, slept=False, calls=named_calls(_SUMS, largest)),
    _elementwise("elementwise", 28, 1.0, 2.0, slept=False, calls=named_calls(_OTHERS, largest)),
    _elementwise("relu", 42, 1.0, 2.0),
    _elementwise("relu_backward", 43, 1.0, 3.0, base="relu"),
    _elementwise("geglu", 44, 11.0, 3.0),
    _elementwise("geglu_backward", 45, 17.0, 5.0, base="geglu"),
    _elementwise("cast", 51, 0.0, 3.0),  # from the 16 bits that the op's dtype says to fp32, or back
)


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


_EXPERTS = (
    _permute("permute", 34, lambda c, t, h: 0.0, lambda c, t, h: float((c + t) * h), STREAMED),
    _permute("unpermute", 35, lambda c, t, h: 2.0 * c * h, lambda c, t, h: float((c + t) * h), STREAMED),
    _permute(
        "unpermute_backward", 36, lambda c, t, h: 4.0 * c * h, lambda c, t, h: float((3 * c + t) * h), "unpermute"
    ),
)


def _over_tensors(name: str, family: str, code: int, flops: float, moved: float, **more: Any) -> OpKind:
    """A kind that iterates over tensors; ``flops`` and ``moved``: FLOP and elements moved per element."""
    return OpKind(
        name=name,
        family=family,
        dim_names=("numel", "tensors"),
        flops=lambda n, t: flops * n,
        elements=lambda n, t: moved * n,
        code=code,
        units=lambda n, t: t,
        **more,
    )


_OPTIMIZER = (
    _over_tensors("adamw", "optimizer", 10, 12.0, 7.0, calls=named_calls("_fused_adamw_ _fused_adam_", tensors)),
    _over_tensors("grad_norm", "optimizer", 11, 2.0, 1.0, calls=named_calls("_foreach_norm", tensors)),
    _over_tensors("adamw_host", "host", 46, 12.0, 7.0, bound="host_memory", base=""),
)


def _of_host(name: str, dim: str, bound: str, moved: float, **more: Any) -> OpKind:
    """A transfer between a device and its host, or calls of the host that a device waits for."""
    return OpKind(
        name=name,
        dim_names=(dim,),
        flops=lambda n: 0.0,
        elements=lambda n: moved * n,
        bound=cast(Bound, bound),
        base="",
        **more,
    )


_HOST = (
    _of_host("to_host", "numel", "host_link", 1.0, family="transfer", code=37),
    _of_host("from_host", "numel", "host_link", 1.0, family="transfer", code=38),
    _of_host("host_calls", "calls", "host", 0.0, family="host_calls", in_harness=False, units=float),
)
KINDS = (*_ELEMENTWISE, *_EXPERTS, *_OPTIMIZER, *_HOST)
