"""Signatures of framework calls, in the words in which PyTorch's profiler writes them into traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The profiler's names of types.
_TYPES = {
    torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half", torch.float64: "double",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short", torch.bool: "bool",
    torch.uint8: "unsigned char", torch.int8: "signed char", torch.float8_e4m3fn: "c10::Float8_e4m3fn",
    torch.float8_e5m2: "c10::Float8_e5m2",
}  # fmt: skip

COMPOSITE = "stepsight::op"  # then kind, dims and type of an op
Signature = tuple[Any, ...]  # name, dims, types, strides, literals, dims and type of the first output


class Signatures:
    """Writes calls as signatures."""

    def __init__(self) -> None:
        self._arguments: dict[Any, tuple[str, ...]] = {}

    def of(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Signature:
        """Signature of a call: equal calls have equal ones."""
        names = self._arguments.get(func)
        if names is None:
            names = self._arguments[func] = tuple(argument.name for argument in func._schema.arguments)
        dims: list[Any] = []
        types: list[str] = []
        strides: list[Any] = []
        literals: list[str] = []
        for place, name in enumerate(names):
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                dims.append(tuple(value.shape))
                types.append(type_name(value.dtype))
                strides.append(value.stride())
                literals.append("")
            elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
                dims.append(tuple(tuple(each.shape) for each in value))
                types.append(f"TensorList {type_name(value[0].dtype)}")
                strides.append(())
                literals.append("")
            else:
                dims.append(())
                types.append("Scalar")
                strides.append(())
                literals.append("" if value is None else str(value))
        first = outputs[0] if outputs else None
        made = () if first is None else (tuple(first.shape), type_name(first.dtype), len(outputs))
        return (func._schema.name, tuple(dims), tuple(types), tuple(strides), tuple(literals), made)


def type_name(dtype: torch.dtype) -> str:
    """The profiler's name of a type."""
    return _TYPES.get(dtype, "float")
