"""Counts and masks that depend on values, computed as if every choice were made equally often.

Numbers are finite: no loss is NaN.  A router's choices are not computed in the fake world, but what follows depends on
them: tokens of each expert, splits of an all-to-all, rows that a mask selects.  Here each of ``n`` choices is made by
the same part of the rows.  A count over rows becomes a real tensor, so that a script can read it; a mask of which
nothing is known selects all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_aten = torch.ops.aten
_SPREAD = "_captured_spread"  # attribute of a fake tensor
MOST_COUNTS = 2**16  # elements of a tensor of counts


class Spread(NamedTuple):
    """The known properties of the values of a fake tensor.

    Attributes:
        choices: They are numbers below this, each as often as the others; 0: not known.
        mean: Their mean; of a mask the part that is set; None: not known.
    """

    choices: int = 0
    mean: float | None = None


UNKNOWN = Spread()


def spread_of(tensor: Any) -> Spread:
    """The known properties of a tensor's values."""
    found: Spread = getattr(tensor, _SPREAD, UNKNOWN)
    return found


def _known(tensor: Any, spread: Spread) -> None:
    if isinstance(tensor, FakeTensor) and spread != UNKNOWN:
        setattr(tensor, _SPREAD, spread)


def even(total: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A real tensor of a shape whose elements are as equal as they can be, with a sum."""
    count = math.prod(shape)
    each, more = divmod(total, max(count, 1))
    with unset_fake_temporarily():
        values = torch.full((count,), each, dtype=dtype)
        values[:more] += 1
        return values.view(shape)


def _histogram(values: Tensor, bins: int = 100, *limits: Any, **more: Any) -> Any:
    return _counts(values, bins, values.dtype)


def _bin_counts(values: Tensor, weights: Any = None, minlength: int = 0) -> Any:
    return None if weights is not None else _counts(values, max(minlength, spread_of(values).choices, 1), torch.int64)


def _counts(values: Tensor, bins: int, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or bins > MOST_COUNTS:
        out = values.new_empty((bins,), dtype=dtype)
        _known(out, Spread(mean=values.numel() / bins))
        return out
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


def selects_unknown(func: Any, tensors: list[Tensor]) -> bool:
    """Whether an op selects by an unknown mask, which then selects everything."""
    masks = tensors if func is _aten.nonzero.default else [each for each in tensors if _is_mask(each)]
    return func in _SELECTING and any(spread_of(mask).mean is None for mask in masks)


def _nonzero(mask: Tensor) -> Any:
    return mask.new_empty((_selected(mask), mask.dim()), dtype=torch.int64)


def _masked_select(values: Tensor, mask: Tensor) -> Any:
    return values.new_empty((_selected(mask),))


def _index(values: Tensor, indices: Any) -> Any:
    if not any(_is_mask(each) for each in indices):
        return None
    found: list[Any] = []
    for each in indices:
        if _is_mask(each):
            found += [each.new_empty((_selected(each),), dtype=torch.int64) for _ in range(each.dim())]
        else:
            found.append(each)
    return _aten.index.Tensor(values, found)


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)


_SELECTING = frozenset((_aten.nonzero.default, _aten.masked_select.default, _aten.index.Tensor))
# Ops of which the result depends on values: what they give instead, None: as the op itself.
RESULTS: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.histc.default: _histogram,
        _aten.bincount.default: _bin_counts,
        _aten.sum.default: _sum,
        _aten.sum.dim_IntList: _sum,
        _aten.nonzero.default: _nonzero,
        _aten.masked_select.default: _masked_select,
        _aten.index.Tensor: _index,
    }
)

_SAME_NAMES = (
    "view _unsafe_view permute t unsqueeze squeeze expand _to_copy clone detach alias _reshape_alias squeeze_ "
    "index_select transpose.int slice.Tensor select.int index.Tensor squeeze.dim squeeze.dims view.dtype"
)
_SAME = frozenset(
    getattr(getattr(_aten, packet), overload or "default")
    for packet, _, overload in (name.partition(".") for name in _SAME_NAMES.split())
)
_CHOOSE = MappingProxyType({_aten.topk.default: 2, _aten.sort.default: 1, _aten.sort.stable: 2})  # where dim stands


def follow(func: Any, args: Any, out: Any) -> None:
    """Set the known properties of a result's values."""
    if func in _SAME:
        _known(out, spread_of(args[0]))
    elif func in _CHOOSE:
        place = _CHOOSE[func]
        dim = args[place] if len(args) > place else -1
        _known(out[0], spread_of(args[0]))
        _known(out[1], Spread(choices=args[0].shape[dim] if args[0].dim() else 1))
    elif func is _aten.argmax.default and len(args) > 1 and args[1] is not None:
        _known(out, Spread(choices=args[0].shape[args[1]]))
    elif func in _MASKS:
        _known(out, _MASKS[func](*args))


def _equal_to_one(values: Any, other: Any) -> Spread:
    if isinstance(other, float) and math.isinf(other):
        return Spread(mean=0.0)
    choices = spread_of(values).choices
    return Spread(mean=1.0 / choices) if choices else UNKNOWN


def _equal_to_each(values: Any, others: Any) -> Spread:
    """As ``one_hot`` compares choices with all numbers; what is equal to itself is a number."""
    if values is others:
        return Spread(mean=1.0)
    if isinstance(others, Tensor) and not isinstance(others, FakeTensor) and others.dim() == 1:
        return Spread(mean=1.0 / max(len(others), 1))
    return _equal_to_one(values, others)


def _different(values: Any, others: Any) -> Spread:
    return _inverse((_equal_to_each if isinstance(others, Tensor) else _equal_to_one)(values, others).mean)


def _inverse(mean: float | None) -> Spread:
    return UNKNOWN if mean is None else Spread(mean=1.0 - mean)


def _scattered(values: Any, dim: int, index: Any, what: Any) -> Spread:
    return Spread(mean=min(1.0, index.numel() / max(values.numel(), 1)))


def _any(mask: Any, dim: int, keepdim: bool = False) -> Spread:
    mean = spread_of(mask).mean
    return UNKNOWN if mean is None else Spread(mean=1.0 - (1.0 - mean) ** mask.shape[dim])


def _all(mask: Any, *dims: Any) -> Spread:
    mean = spread_of(mask).mean
    return Spread(mean=mean) if mean in (0.0, 1.0) else UNKNOWN


def _both(one: Any, other: Any) -> Spread:
    means = spread_of(one).mean, spread_of(other).mean
    if not isinstance(one, Tensor) or one.dtype is not torch.bool or means[0] is None or means[1] is None:
        return UNKNOWN
    return Spread(mean=means[0] * means[1])


def _negated(mask: Any) -> Spread:
    return _inverse(spread_of(mask).mean)


_MASKS: MappingProxyType[Any, Callable[..., Spread]] = MappingProxyType(
    {
        _aten.eq.Scalar: _equal_to_one,
        _aten.eq.Tensor: _equal_to_each,
        _aten.scatter.value: _scattered,
        _aten.scatter_.value: _scattered,
        _aten.any.dim: _any,
        _aten.any.default: _all,
        _aten.all.default: _all,
        _aten.all.dim: _all,
        _aten.ne.Scalar: _different,
        _aten.ne.Tensor: _different,
        _aten.mul.Tensor: _both,
        _aten.logical_and.default: _both,
        _aten.bitwise_and.Tensor: _both,
        _aten.logical_not.default: _negated,
        _aten.bitwise_not.default: _negated,
    }
)
