"""Dims of ops from the arguments of framework calls in a profiler's trace.

``args`` are those of an event: ``Input Dims`` holds the shape of every input (of a list of tensors, a list of shapes),
``Concrete Inputs`` the literals.  Sizes that a trace does not tell are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepsight.dataset.base.files import preset

Args = Mapping[str, Any]
Dims = tuple[int, ...]
DimsOf = Callable[[Args], Dims | None]
CALLS: Mapping[str, str] = preset("trace_names.toml")["calls"]  # names of calls by what they are


def named_calls(names: str, dims: DimsOf, *others: tuple[str, DimsOf]) -> dict[str, DimsOf]:
    """Functions that find the dims of calls, by their names; names without a namespace are PyTorch's."""
    pairs = [(name, of) for text, of in ((names, dims), *others) for name in text.split()]
    return {name if "::" in name else f"aten::{name}": of for name, of in pairs}


def all_shapes(args: Args) -> list[Any]:
    """Shapes of all inputs."""
    return args.get("Input Dims") or []


def shape_of(args: Args, index: int) -> list[int]:
    """Shape of one input; empty if it is a list of tensors."""
    shapes = all_shapes(args)
    shape = shapes[index] if index < len(shapes) else []
    return shape if not shape or not isinstance(shape[0], list) else []


def literal_of(args: Args, index: int) -> str:
    """One input as a literal; empty if it is none."""
    values = args.get("Concrete Inputs") or []
    return str(values[index]) if index < len(values) else ""


def count(shape: Sequence[Any]) -> int:
    """Elements of a shape; of a list of shapes, their sum; 0 if it is not known."""
    if shape and isinstance(shape[0], list):
        return sum(math.prod(part) for part in shape)
    return math.prod(shape) if shape else 0


def largest(args: Args) -> Dims:
    """``(numel,)`` of the largest input."""
    return (max((count(shape) for shape in all_shapes(args) if shape), default=0),)


def first(args: Args) -> Dims:
    """``(numel,)`` of the first input."""
    shapes = all_shapes(args)
    return (count(shapes[0]) if shapes else 0,)


def rows(index: int) -> Callable[[Args], Dims]:
    """``(rows, last dimension)`` of one input."""

    def dims(args: Args) -> Dims:
        shape = shape_of(args, index)
        last = shape[-1] if shape else 0
        return count(shape) // last if last else 0, last

    return dims


def normed(index: int, weight: int) -> Callable[[Args], Dims]:
    """``(rows, hidden)`` of one input, where ``hidden`` spans the trailing dimensions that the weight has."""

    def dims(args: Args) -> Dims:
        shape, hidden = shape_of(args, index), count(shape_of(args, weight))
        hidden = hidden or (shape[-1] if shape else 0)
        return count(shape) // hidden if hidden else 0, hidden

    return dims


def embedding(args: Args) -> Dims:
    """``(tokens, hidden, vocab)`` of a weight and indices."""
    weight, indices = shape_of(args, 0), shape_of(args, 1)
    vocab, hidden = weight if len(weight) == 2 else (0, 0)
    return count(indices), hidden, vocab


def embedding_backward(args: Args) -> Dims:
    """``(tokens, hidden, vocab)`` of a gradient and the number of rows of the weight."""
    grad, literal = shape_of(args, 0), literal_of(args, 2)
    hidden = grad[-1] if grad else 0
    return count(grad) // max(hidden, 1), hidden, int(literal) if literal.isdigit() else 0


def attention(q_at: int, causal_at: int, heads_first: bool = True) -> Callable[[Args], Dims]:
    """``(batch, heads, kv_heads, q_len, kv_len, head_dim, causal)`` of queries and the keys that follow them."""

    def dims(args: Args) -> Dims:
        q, k = shape_of(args, q_at), shape_of(args, q_at + 1)
        if len(q) != 4 or len(k) != 4:
            return (0,) * 7
        if not heads_first:
            q, k = [q[0], q[2], q[1], q[3]], [k[0], k[2], k[1], k[3]]
        literal = literal_of(args, causal_at)
        causal = int(literal == "True") if literal else int(q[2] == k[2])
        return q[0], q[1], k[1], q[2], k[2], q[3], causal

    return dims


def tensors(args: Args) -> Dims:
    """``(numel, tensors)`` of a list of tensors."""
    shapes = all_shapes(args)
    parts = shapes[0] if shapes and isinstance(shapes[0], list) else []
    return sum(math.prod(shape) for shape in parts if isinstance(shape, list)), len(parts)


def dropout(args: Args) -> Dims | None:
    """``(numel,)``; None without dropout."""
    return None if literal_of(args, 1) in ("0.", "0") or literal_of(args, 2) == "False" else largest(args)
