"""Counts and masks that depend on values, computed as if every choice were made equally often.

Numbers are finite: no loss is NaN.  A router's choices are not computed in the fake world, but what follows depends on
them: tokens of each expert, splits of an all-to-all, rows that a mask selects.  Here each of ``n`` choices is made by
the same part of the rows.  A count over rows becomes a real tensor, so that a script can read it; a mask of which
nothing is known selects all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_aten = torch.ops.aten
_SPREAD = "_captured_spread"  # attribute of a fake tensor
MOST_COUNTS = 2**16  # elements of a tensor of counts


class Spread(NamedTuple):
    """The known properties of the values of a fake tensor."""

    choices: int = 0  # they are numbers below this, each as often as the others; 0: not known
    mean: float | None = None  # their mean; of a mask the part that is set; None: not known


UNKNOWN = Spread()


def spread_of(tensor: Any) -> Spread:
    """The known properties of a tensor's values."""
    return getattr(tensor, _SPREAD, UNKNOWN)


def _known(tensor: Any, spread: Spread) -> Any:
    if isinstance(tensor, FakeTensor) and spread != UNKNOWN:
        setattr(tensor, _SPREAD, spread)
    return tensor


def even(total: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A real tensor of a shape whose elements are as equal as they can be, with a sum."""
    count = math.prod(shape)
    each, more = divmod(total, max(count, 1))
    with unset_fake_temporarily():
        values = torch.full((count,), each, dtype=dtype)
        values[:more] += 1
        return values.view(shape)


def _counts(values: Tensor, bins: int, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or bins > MOST_COUNTS:
        return _known(values.new_empty((bins,), dtype=dtype), Spread(mean=values.numel() / bins))
    return even(values.numel(), (bins,), dtype)


def _sum(values: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    mean = spread_of(values).mean
    if mean is None or values.dtype.is_floating_point or (dtype is not None and dtype.is_floating_point):
        return None
    gone = {dim % max(values.dim(), 1) for dim in dims or range(values.dim())}
    sizes = [1 if place in gone else size for place, size in enumerate(values.shape) if keepdim or place not in gone]
    if math.prod(sizes) > MOST_COUNTS:
        return None
    return even(round(mean * values.numel()), tuple(sizes), dtype or torch.int64)


def _selected(mask: Tensor) -> int:
    """Elements that a mask selects."""
    mean = spread_of(mask).mean
    return mask.numel() if mean is None else round(mean * mask.numel())


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)


def selects_unknown(func: Any, tensors: list[Tensor]) -> bool:
    """Whether an op selects by an unknown mask, which then selects everything."""
    masks = tensors if func is _aten.nonzero.default else filter(_is_mask, tensors)
    selects = func in (_aten.nonzero.default, _aten.masked_select.default, _aten.index.Tensor)
    return selects and any(spread_of(mask).mean is None for mask in masks)


def _index(values: Tensor, indices: Any) -> Any:
    if not any(map(_is_mask, indices)):
        return None
    found: list[Any] = []
    for each in indices:
        mask = _is_mask(each)
        found += [each.new_empty(_selected(each), dtype=torch.int64) for _ in range(each.dim())] if mask else [each]
    return _aten.index.Tensor(values, found)


# Ops of which the result depends on values: what they give instead, None: as the op itself.
RESULTS: dict[Any, Callable[..., Any]] = {
    _aten.histc.default: lambda values, bins=100, *limits, **more: _counts(values, bins, values.dtype),
    _aten.bincount.default: lambda values, weights=None, minlength=0: (
        _counts(values, max(minlength, spread_of(values).choices, 1), torch.int64) if weights is None else None
    ),
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.nonzero.default: lambda mask: mask.new_empty((_selected(mask), mask.dim()), dtype=torch.int64),
    _aten.masked_select.default: lambda values, mask: values.new_empty((_selected(mask),)),
    _aten.index.Tensor: _index,
}

_SAME_NAMES = (
    "view _unsafe_view permute t unsqueeze squeeze expand _to_copy clone detach alias _reshape_alias squeeze_ "
    "index_select transpose.int slice.Tensor select.int index.Tensor squeeze.dim squeeze.dims view.dtype"
)
_SAME = frozenset(
    getattr(getattr(_aten, packet), overload or "default")
    for packet, _, overload in (name.partition(".") for name in _SAME_NAMES.split())
)
_CHOOSE = {_aten.topk.default: 2, _aten.sort.default: 1, _aten.sort.stable: 2}  # where dim stands


def follow(func: Any, args: Any, out: Any) -> None:
    """Set the known properties of a result's values."""
    if func in _SAME:
        _known(out, spread_of(args[0]))
    elif func in _CHOOSE:
        dim = dict(enumerate(args)).get(_CHOOSE[func], -1)
        _known(out[0], spread_of(args[0]))
        _known(out[1], Spread(choices=args[0].shape[dim] if args[0].dim() else 1))
    elif func is _aten.argmax.default and len(args) > 1 and args[1] is not None:
        _known(out, Spread(choices=args[0].shape[args[1]]))
    elif func in _MEANS:
        _known(out, Spread(mean=_MEANS[func](*args)))


def _equal(values: Any, other: Any) -> float | None:
    """As ``one_hot`` compares choices with all numbers, or with one; what is equal to itself is a number."""
    if values is other:
        return 1.0
    if isinstance(other, Tensor) and not isinstance(other, FakeTensor) and other.dim() == 1:
        return 1.0 / max(len(other), 1)
    if isinstance(other, float) and math.isinf(other):
        return 0.0
    choices = spread_of(values).choices
    return 1.0 / choices if choices else None


def _inverse(mean: float | None) -> float | None:
    return None if mean is None else 1.0 - mean


def _any_of(mask: Any, dim: int, keepdim: bool = False) -> float | None:
    mean = spread_of(mask).mean
    return None if mean is None else 1.0 - (1.0 - mean) ** mask.shape[dim]


def _both(one: Any, other: Any) -> float | None:
    mean, more = spread_of(one).mean, spread_of(other).mean
    known = isinstance(one, Tensor) and one.dtype is torch.bool
    return mean * more if known and mean is not None and more is not None else None


# Ops that make masks: which part of theirs is set, None: not known.
_MEANS: dict[Any, Callable[..., float | None]] = {
    **dict.fromkeys((_aten.eq.Scalar, _aten.eq.Tensor), _equal),
    **dict.fromkeys((_aten.ne.Scalar, _aten.ne.Tensor), lambda values, other: _inverse(_equal(values, other))),
    **dict.fromkeys(
        (_aten.scatter.value, _aten.scatter_.value),
        lambda values, dim, index, what: min(1.0, index.numel() / max(values.numel(), 1)),
    ),
    **dict.fromkeys(
        (_aten.any.default, _aten.all.default, _aten.all.dim),
        lambda mask, *dims: mean if (mean := spread_of(mask).mean) in (0.0, 1.0) else None,
    ),
    **dict.fromkeys((_aten.mul.Tensor, _aten.logical_and.default, _aten.bitwise_and.Tensor), _both),
    **dict.fromkeys(
        (_aten.logical_not.default, _aten.bitwise_not.default), lambda mask: _inverse(spread_of(mask).mean)
    ),
    _aten.any.dim: _any_of,
}
