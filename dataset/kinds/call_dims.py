"""Dims of ops from the arguments of framework calls in a profiler's trace: what ``presets/op_kinds.toml`` names.

``args`` are those of an event: ``Input Dims`` holds the shape of every input (of a list of tensors, a list of shapes),
``Concrete Inputs`` the literals.  Numbers after them are places of inputs.  Sizes that a trace does not tell are 0;
None means that a call does no work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Args = Mapping[str, Any]
Dims = tuple[int, ...]


def all_shapes(args: Args) -> list[Any]:
    """Shapes of all inputs."""
    return args.get("Input Dims") or []


def shape_of(args: Args, index: int) -> list[int]:
    """Shape of one input; empty if it is a list of tensors, or if there is none."""
    shapes = all_shapes(args)
    shape = shapes[index] if 0 <= index < len(shapes) else []
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


def rows(args: Args, index: int) -> Dims:
    """``(rows, last dimension)`` of one input."""
    return normed(args, index, -1)


def normed(args: Args, index: int, weight: int) -> Dims:
    """``(rows, hidden)`` of one input, where ``hidden`` spans the trailing dimensions that the weight has."""
    shape = shape_of(args, index)
    hidden = count(shape_of(args, weight)) or (shape[-1] if shape else 0)
    return count(shape) // hidden if hidden else 0, hidden


def batch_normed(args: Args, index: int) -> Dims:
    """``(positions, channels)`` of one input."""
    shape = shape_of(args, index)
    channels = shape[1] if len(shape) > 1 else 0
    return count(shape) // channels if channels else 0, channels


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


def bag(args: Args) -> Dims:
    """``(indices, hidden, bags, rows)`` of a table and indices."""
    table, indices = shape_of(args, 0), shape_of(args, 1)
    bags = indices[0] if len(indices) == 2 else count(shape_of(args, 2))
    return count(indices), table[-1] if table else 0, bags, table[0] if len(table) == 2 else 0


def bag_backward(args: Args, rows_at: int) -> Dims:
    """``(indices, hidden, bags, rows)`` of a gradient, indices, and the number of rows of the table."""
    grad, literal = shape_of(args, 0) or [0], literal_of(args, rows_at)
    return count(shape_of(args, 1)), grad[-1], grad[0], int(literal) if literal.isdigit() else 0


def pooled(args: Args, index: int, out: int = -1) -> Dims:
    """``(batch_channels, in_positions, out_positions)`` of an image, and of an input that is shaped as the output."""
    shape, result = shape_of(args, index), shape_of(args, out)
    if len(shape) < 3:
        return (0,) * 3
    return math.prod(shape[:2]), math.prod(shape[2:]), math.prod(result[2:]) if len(result) > 2 else 0


def attention(args: Args, q_at: int, causal_at: int, positions_first: int = 0) -> Dims:
    """``(batch, heads, kv_heads, q_len, kv_len, head_dim, causal)`` of queries and the keys that follow them."""
    q, k = shape_of(args, q_at), shape_of(args, q_at + 1)
    if len(q) != 4 or len(k) != 4:
        return (0,) * 7
    if positions_first:
        q, k = [q[0], q[2], q[1], q[3]], [k[0], k[2], k[1], k[3]]
    literal = literal_of(args, causal_at)
    return q[0], q[1], k[1], q[2], k[2], q[3], int(literal == "True") if literal else int(q[2] == k[2])


def recurrent(args: Args, weight: int) -> Dims:
    """Sizes of one recurrent layer in one direction: the input, and two weights in a row."""
    steps, into, back = shape_of(args, 0), shape_of(args, weight), shape_of(args, weight + 1)
    if len(steps) != 3 or len(into) != 2 or len(back) != 2:
        return (0,) * 5
    return steps[0], steps[1], steps[2], back[1], into[0]


def convolution(args: Args, index: int, kernel: int, out: int = -1, transposed: int = 0) -> Dims:
    """Sizes of a convolution of an image with a kernel.

    ``out``: input that is shaped as the output; without it, the stride says the output's positions.
    """
    image, weight, result = shape_of(args, index), shape_of(args, kernel), shape_of(args, out)
    if len(image) < 3 or len(weight) != len(image):
        return (0,) * 8
    turned = bool(transposed) or literal_of(args, index + 6) == "True"
    positions = math.prod(result[2:]) if result else _strided(args, index, image[2:], transposed=turned)
    if turned:
        groups = max(result[1] // weight[1], 1) if len(result) > 1 else 1
        ins, outs = weight[0] // groups, weight[1] * groups
    else:
        groups = max(image[1] // max(weight[1], 1), 1)
        ins, outs = weight[1], weight[0]
    return image[0], ins, outs, positions, math.prod(weight[2:]), groups, math.prod(image[2:]), len(image) - 2


def _strided(args: Args, index: int, size: list[int], *, transposed: bool) -> int:
    """Positions of the output: those of the input, divided by the stride (multiplied, where transposed)."""
    words = [str(text).strip("[]() ").split(",") for text in (args.get("Concrete Inputs") or [])[index + 2 :]]
    lists = [list(map(int, each)) for each in words if all(word.strip().isdigit() for word in each)]
    stride = next((found for found in lists if len(found) in (1, len(size))), [1])
    steps = [max(step, 1) for step in (stride * len(size))[: len(size)]]
    pairs = zip(size, steps, strict=True)
    return math.prod(length * step if transposed else max(-(-length // step), 1) for length, step in pairs)


def convolution_backward(args: Args, index: int, kernel: int, out: int, mask: int = -1) -> Dims:
    """Sizes of the convolution, and whether the input has a gradient; ``mask``: the argument that tells."""
    return (*convolution(args, index, kernel, out), int(mask < 0 or "[False" not in literal_of(args, mask)))


def tensors(args: Args) -> Dims:
    """``(numel, tensors)`` of a list of tensors."""
    shapes = all_shapes(args)
    parts = shapes[0] if shapes and isinstance(shapes[0], list) else []
    return sum(math.prod(shape) for shape in parts if isinstance(shape, list)), len(parts)


def dropout(args: Args) -> Dims | None:
    """``(numel,)``; None without dropout."""
    return None if literal_of(args, 1) in ("0.", "0") or literal_of(args, 2) == "False" else largest(args)
