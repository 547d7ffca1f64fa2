"""One op by its signature, made callable: the same functions that models run, on inputs from a rotating pool."""

from __future__ import annotations

from types import MappingProxyType

from ..base.plan_error import HarnessError
from . import op_convolutions, op_products, op_rows
from .input_pool import Call, Maker, Pool

_THEMES = (op_products, op_convolutions, op_rows)
_MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {kind: make for theme in _THEMES for kind, make in theme.MAKERS.items()}
)


def op_call(kind: str, dims: list[int], pool: Pool) -> Call:
    """The op of this signature, ready to be called.

    Raises:
        HarnessError: If the harness has no such op, or not in the pool's dtype.
    """
    make = _MAKERS.get(kind)
    narrow = op_products.NARROW_MAKERS.get(pool.name)
    if narrow is not None and make is not None:
        make = narrow.get(kind)
        if make is None:
            raise HarnessError(f"in {pool.name} the harness measures {', '.join(narrow)}, got {kind!r}")
    if make is None:
        raise HarnessError(f"op kind must be one of {', '.join(_MAKERS)}, got {kind!r}")
    return make(pool, *dims)
