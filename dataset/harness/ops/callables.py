"""One op by its signature, made callable: the same functions that models run, on inputs from a rotating pool."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from itertools import cycle
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..base.errors import HarnessError
from . import op_products, op_rows, table_lookups
from .input_pool import Call, Maker, Pool

_THEMES = (op_products, op_rows, table_lookups)
_MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {kind: make for theme in _THEMES for kind, make in theme.MAKERS.items()}
)


def op_call(kind: str, dims: list[int], pool: Pool) -> Call:
    """The op of this signature, ready to be called; refused if there is none, or not in the dtype of the pool."""
    make = _MAKERS.get(kind)
    narrow = op_products.NARROW_MAKERS.get(pool.name)
    if narrow is not None and make is not None:
        make = narrow.get(kind)
        if make is None:
            raise HarnessError(f"in {pool.name} the harness measures {', '.join(narrow)}, got {kind!r}")
    if make is None:
        raise HarnessError(f"op kind must be one of {', '.join(_MAKERS)}, got {kind!r}")
    return make(pool, *dims)


TYPES = {  # the profiler's names
    "float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16, "double": torch.float64,
    "long int": torch.int64, "int": torch.int32, "short": torch.int16, "bool": torch.bool, "unsigned char": torch.uint8,
    "signed char": torch.int8, "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_LIST = "TensorList "
_READS_VALUES = ("aten::mkldnn_rnn_layer", "aten::_embedding_bag")  # arguments hold what a forward left, or offsets
_ROWS_OF = {"embedding": 0, "embedding_dense_backward": 2}  # argument that says how many rows are indexed
_ALONG = ("index_select", "index_add", "index_add_", "gather", "scatter_add", "scatter_add_")  # argument 1
_SETS, _MOST_BYTES = 8, 2**26  # of inputs that calls take in turn, so that they come from memory


def replayed_call(call: Sequence[Any], device: torch.device) -> Call:
    """The call, ready to be made; refused if it is none of PyTorch's own, or cannot be made from its signature."""
    name, dims, types, strides, literals = call[:5]
    if not is_replayed(name):
        raise HarnessError(f"only calls of PyTorch ops that read no values can be measured, got {name!r:.80}")
    packet = getattr(torch.ops.aten, name[6:], None)
    overloads = [getattr(packet, overload) for overload in (packet.overloads() if packet is not None else ())]
    fitting = (each for each in overloads if len(each._schema.arguments) == len(types))
    function = next((e for e in fitting if all(map(_fits, e._schema.arguments, types, literals))), None)
    if function is None:
        raise HarnessError(f"this PyTorch has no {name} that takes {len(types)} such arguments")
    most = _most_index(name[6:], dims, types, literals)
    told = dims, types, strides, literals
    first = _Inputs(function, told, most, device)
    sets = min(_SETS, _MOST_BYTES // max(first.num_bytes, 1))
    turns = cycle([first, *(_Inputs(function, told, most, device) for _ in range(sets - 1))])

    def run() -> Any:
        inputs = next(turns)
        return function(*inputs.args, **inputs.kwargs)

    return Call(run, fresh=True)


def is_replayed(name: str) -> bool:
    """Whether a call can be made from its signature."""
    return name.startswith("aten::") and name[6:].isidentifier() and not name.startswith(_READS_VALUES)


def _fits(argument: Any, kind: str, literal: str) -> bool:
    told = str(argument.type)
    if kind.startswith(_LIST):
        return "List[" in told and "Tensor" in told
    if kind != "Scalar":
        return "Tensor" in told and "List[" not in told
    if not literal:  # nothing was given
        return told.startswith("Optional") or "[]" in told or argument.has_default_value()
    if "Tensor" in told or argument.is_out:
        return False
    return ("List[" in told) == (literal[:1] in "[(") or "Device" in told


class _Inputs:
    """Arguments of one call."""

    def __init__(self, function: Any, told: Sequence[Sequence[Any]], most: int, device: torch.device) -> None:
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.num_bytes = 0
        self._most, self._device = most, device
        for argument, *one in zip(function._schema.arguments, *told, strict=True):
            value = self._value(argument, *one)
            if argument.kwarg_only:
                if value is not None:
                    self.kwargs[argument.name] = value
            else:
                self.args.append(value)

    def _value(self, argument: Any, shape: Any, kind: str, stride: Any, literal: str) -> Any:
        if kind.startswith(_LIST):
            return [self._tensor(each, (), kind.removeprefix(_LIST)) for each in shape]
        if kind != "Scalar":
            return self._tensor(shape, stride, kind)
        if not literal:
            if argument.has_default_value():
                return argument.default_value
            return [] if str(argument.type).startswith("List[") else None
        if argument.name == "device":
            return self._device
        if literal.startswith("torch."):
            return getattr(torch, literal.removeprefix("torch."))
        try:
            return ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            return literal

    def _tensor(self, shape: Sequence[int], stride: Sequence[int], kind: str) -> Tensor:
        dtype = TYPES.get(kind)
        if dtype is None:
            raise HarnessError(f"tensors can be of {', '.join(TYPES)}, got {kind!r:.80}")
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if stride else 0
        numel = 0 if 0 in shape else max(span, math.prod(shape) if not stride else 1)
        self.num_bytes += numel * dtype.itemsize
        if dtype.is_floating_point:
            flat = torch.empty(numel, device=self._device).uniform_(0.1, 0.9).to(dtype)
        elif dtype is torch.bool:
            flat = torch.rand(numel, device=self._device) < 0.5
        else:
            flat = torch.randint(self._most, (numel,), device=self._device).to(dtype)
        return flat.as_strided(tuple(shape), tuple(stride)) if stride else flat.view(tuple(shape))


def _most_index(name: str, dims: Sequence[Any], types: Sequence[str], literals: Sequence[str]) -> int:
    """A bound of all indices: what they index where it is known, else any dim of any tensor of numbers."""
    if name in _ROWS_OF:
        at = _ROWS_OF[name]
        return int(literals[at]) if literals[at].isdigit() else int(dims[at][0])
    if name in _ALONG and literals[1].lstrip("-").isdigit():
        return max(int(dims[0][int(literals[1])]), 1)
    sizes = [size for shape, kind in zip(dims, types, strict=True) if kind in ("float", "double", "c10::BFloat16",
             "c10::Half") for size in shape if size > 1]  # fmt: skip
    return max(min(sizes, default=1), 1)
