"""Expert ops: sorting rows by expert, and the weighted sum of a row's copies."""

from __future__ import annotations

from collections.abc import Callable

from stepsight.dataset.kinds.op_kind import STREAMED, OpKind


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


KINDS = (
    _permute("permute", 34, lambda c, t, h: 0.0, lambda c, t, h: float((c + t) * h), STREAMED),
    _permute("unpermute", 35, lambda c, t, h: 2.0 * c * h, lambda c, t, h: float((c + t) * h), STREAMED),
    _permute(
        "unpermute_backward", 36, lambda c, t, h: 4.0 * c * h, lambda c, t, h: float((3 * c + t) * h), "unpermute"
    ),
)
