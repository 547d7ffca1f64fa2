"""One op by its signature, made callable: the same functions that models run, on inputs from a rotating pool."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..base.errors import HarnessError
from . import op_makers, table_lookups
from .input_pool import Call, Maker, Pool

_MAKERS: dict[str, Maker] = {**op_makers.MAKERS, **table_lookups.MAKERS}


def op_call(kind: str, dims: list[int], pool: Pool) -> Call:
    """The op of this signature, ready to be called; refused if there is none, or not in the dtype of the pool."""
    makers = op_makers.NARROW_MAKERS.get(pool.name, _MAKERS)
    if kind not in _MAKERS:
        raise HarnessError(f"op kind must be one of {', '.join(_MAKERS)}, got {kind!r}")
    if kind not in makers:
        raise HarnessError(f"in {pool.name} the harness measures {', '.join(makers)}, got {kind!r}")
    made = makers[kind](pool, *dims)
    if isinstance(made, Call):
        return made
    run, *inputs = cast(Any, made)
    return Call(run, lambda: tuple(each() if callable(each) else pool.take(*each) for each in inputs))


TYPES = {  # the profiler's names
    "float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16, "double": torch.float64,
    "long int": torch.int64, "int": torch.int32, "short": torch.int16, "bool": torch.bool, "unsigned char": torch.uint8,
    "signed char": torch.int8, "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_NUMBERS = ("float", "double", "c10::BFloat16", "c10::Half")
_LIST = "TensorList "
_READS_VALUES = ("aten::mkldnn_rnn_layer", "aten::_embedding_bag")  # arguments hold what a forward left, or offsets
_ROWS_OF = {"embedding": 0, "embedding_dense_backward": 2}  # argument that says how many rows are indexed
_ALONG = ("index_select", "index_add", "index_add_", "gather", "scatter_add", "scatter_add_")  # argument 1
_SETS, _MOST_BYTES = 8, 2**26  # of inputs that calls take in turn, so that they come from memory


def replayed_call(call: Sequence[Any], device: torch.device) -> Call:
    """The call, ready to be made; refused if it is none of PyTorch's own, or cannot be made from its signature."""
    name, dims, types, _, literals = call[:5]
    if not is_replayed(name):
        raise HarnessError(f"only calls of PyTorch ops that read no values can be measured, got {name!r:.80}")
    packet = getattr(torch.ops.aten, name[6:], None)
    overloads = [getattr(packet, overload) for overload in (packet.overloads() if packet is not None else ())]
    fitting = (each for each in overloads if len(each._schema.arguments) == len(types))
    function = next((e for e in fitting if all(map(_fits, e._schema.arguments, types, literals))), None)
    if function is None:
        raise HarnessError(f"this PyTorch has no {name} that takes {len(types)} such arguments")
    most = _most_index(name[6:], dims, types, literals)
    first = _inputs(function, call[1:5], most, device)
    num_bytes = sum(each.untyped_storage().nbytes() for each in tree_leaves(first) if isinstance(each, Tensor))
    sets = min(_SETS, _MOST_BYTES // max(num_bytes, 1))
    turns = cycle([first, *(_inputs(function, call[1:5], most, device) for _ in range(sets - 1))])

    def run() -> Any:
        args, kwargs = next(turns)
        return function(*args, **kwargs)

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


def _inputs(function: Any, told: Sequence[Sequence[Any]], most: int, device: torch.device) -> tuple[Any, Any]:
    """Arguments of one call, by place and by name; ``told``: their shapes, types, strides and literals."""
    args, kwargs = list[Any](), dict[str, Any]()
    for argument, shape, kind, stride, literal in zip(function._schema.arguments, *told, strict=True):
        if kind.startswith(_LIST):
            value: Any = [_tensor(each, (), kind.removeprefix(_LIST), most, device) for each in shape]
        elif kind != "Scalar":
            value = _tensor(shape, stride, kind, most, device)
        else:
            value = device if literal and argument.name == "device" else _literal(argument, literal)
        if not argument.kwarg_only:
            args.append(value)
        elif value is not None:
            kwargs[argument.name] = value
    return args, kwargs


def _literal(argument: Any, literal: str) -> Any:
    if not literal:
        default = argument.default_value if argument.has_default_value() else None
        return [] if default is None and str(argument.type).startswith("List[") else default
    if literal.startswith("torch."):
        return getattr(torch, literal.removeprefix("torch."))
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(literal)
    return literal


def _tensor(shape: Sequence[int], stride: Sequence[int], kind: str, most: int, device: torch.device) -> Tensor:
    dtype = TYPES.get(kind)
    if dtype is None:
        raise HarnessError(f"tensors can be of {', '.join(TYPES)}, got {kind!r:.80}")
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if stride else math.prod(shape)
    numel = 0 if 0 in shape else span
    if dtype.is_floating_point:
        flat = torch.empty(numel, device=device).uniform_(0.1, 0.9).to(dtype)
    elif dtype is torch.bool:
        flat = torch.rand(numel, device=device) < 0.5
    else:
        flat = torch.randint(most, (numel,), device=device).to(dtype)
    return flat.as_strided(tuple(shape), tuple(stride)) if stride else flat.view(tuple(shape))


def _most_index(name: str, dims: Sequence[Any], types: Sequence[str], literals: Sequence[str]) -> int:
    """A bound of all indices: what they index where it is known, else any dim of any tensor of numbers."""
    if name in _ROWS_OF:
        at = _ROWS_OF[name]
        return int(literals[at]) if literals[at].isdigit() else int(dims[at][0])
    if name in _ALONG and literals[1].lstrip("-").isdigit():
        return max(int(dims[0][int(literals[1])]), 1)
    told = zip(dims, types, strict=True)
    return min((size for shape, kind in told if kind in _NUMBERS for size in shape if size > 1), default=1)
