"""The package's kinds of ops: ``presets/op_kinds.toml``, costs that are no sums of products of dims, and dims of calls.

Functions that find dims take the arguments of a framework's call in a profiler's trace, ``args`` of an event: ``Input
Dims`` has the shape of every input (of a list of tensors, a list of shapes), ``Concrete Inputs`` the literals.  Numbers
after them are places of inputs.  Sizes that a trace does not tell are 0; None means that a call does no work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds.kind_table import Args, Dims, OpKind, sum_of_products, sums_of_products, with_tuples

Function = Callable[..., Any]

# Assumed: rows at random reach about three quarters of the bandwidth of a stream, and a row that was read before comes
# from a cache, at about half the cost.  Each index is distributed, sorted by its row and
# searched for runs, which moves as much as 200 elements of 4 bytes: inferred from MLPerf's runs of DLRM on one node.
_RANDOM, _CACHED, _SORTED = 1.33, 0.5, 200.0


def _lookup(n: int, h: int, b: int, u: int, t: int) -> float:
    """Elements of lookups in several tables, which read some of the rows again."""
    return (_RANDOM * u + _CACHED * max(n - u, 0)) * h + b * h + 2.0 * n


def _lookup_backward(n: int, h: int, b: int, u: int, t: int, s: int) -> float:
    return (_RANDOM * b + _CACHED * max(n - b, 0)) * h + 2.0 * _RANDOM * u * (h + s) + _SORTED * n


def _streamed(elements: Function) -> dict[str, Function]:
    return {"elements": elements, "base_dims": lambda *dims: (int(elements(*dims)) // 3 + 1,)}


def _convolution(*dims: int) -> float:
    """FLOP of one product, or of the gradients of the weight and, if the last dim says so, of the input."""
    b, i, o, p, w, _, q, _, *input_gradient = dims
    return (1.0 + any(input_gradient)) * (2.0 * b * i * o * w * min(p, q))


_OWN: Mapping[str, Mapping[str, Function]] = {
    "conv": {"flops": _convolution, "base_dims": lambda b, i, o, p, w, g, q, s: (b * min(p, q), o, i * w)},
    "conv_backward": {"flops": _convolution},
    "grouped_linear": {
        "grid": lambda g, m, n, k: (g, -(-m // max(g, 1)), n),
        "base_dims": lambda g, m, n, k: (max(m // max(g, 1), 1), n, k),  # one product after another
    },
    "grouped_linear_dgrad": {"grid": lambda g, m, n, k: (g, -(-m // max(g, 1)), k)},
    "mla_attention": {"base_dims": lambda b, h, q, k, d, v, c: (b, h, h, q, k, (d + v) // 2, c)},
    "table_lookup": {**_streamed(_lookup), "chain": lambda n, h, b, u, t: n / max(b, 1)},  # the rows of a sum
    "table_lookup_backward": _streamed(_lookup_backward),
    "fused_loops": {"base_dims": lambda near, middle, far, *others: (max((near + middle + far) // 4, 1),)},
}


def _kind(name: str, told: Mapping[str, Any]) -> OpKind:
    names = tuple(told["dims"].split())
    fields = with_tuples({key: value for key, value in told.items() if key not in ("like", "dims")})
    flags = told.get("flags", ())
    for key in {"flops", "elements", "units"} & set(told):
        fields[key] = sum_of_products(told[key], names, flags=flags)
    for key in {"operands", "grid", "base_dims"} & set(told):
        terms = [told["elements"] if part == "elements" else part for part in told[key]]
        fields[key] = sums_of_products(terms, names, float if key == "operands" else int, flags)
    calls: dict[str, Function] = {}
    for words, text in told["calls"].items():
        function, *places = words.split()
        dims_of = _dims_of(globals()[function], *map(int, places))
        calls |= {call if "::" in call else f"aten::{call}": dims_of for call in text.split()}
    return OpKind(**{**fields, **_OWN.get(name, {}), "name": name, "dim_names": names, "calls": calls})


def _dims_of(function: Function, *places: int) -> Function:
    return lambda args: function(args, *places)


def _kinds() -> Iterator[OpKind]:
    """The kinds; ``like``: the fields of another one, but for its calls and its code."""
    found: dict[str, dict[str, Any]] = {}
    for name, told in preset("op_kinds.toml").items():
        found[name] = {**found.get(told.get("like", ""), {}), "calls": {}, "code": -1, **told}
        yield _kind(name, found[name])


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
        return sum(prod(part) for part in shape)
    return prod(shape) if shape else 0


def largest(args: Args) -> Dims:
    """``(numel,)`` of the largest input."""
    return (max((count(shape) for shape in all_shapes(args) if shape), default=0),)


def first(args: Args) -> Dims:
    """``(numel,)`` of the first input."""
    shapes = all_shapes(args)
    return (count(shapes[0]) if shapes else 0,)


def normed(args: Args, index: int, weight: int) -> Dims:
    """``(rows, hidden)`` of one input, where ``hidden`` spans the trailing dimensions of the weight (-1: the last)."""
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
    return prod(shape[:2]), prod(shape[2:]), prod(result[2:]) if len(result) > 2 else 0


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
    positions = prod(result[2:]) if result else _strided(args, index, image[2:], transposed=turned)
    if turned:
        groups = max(result[1] // weight[1], 1) if len(result) > 1 else 1
        ins, outs = weight[0] // groups, weight[1] * groups
    else:
        groups = max(image[1] // max(weight[1], 1), 1)
        ins, outs = weight[1], weight[0]
    return image[0], ins, outs, positions, prod(weight[2:]), groups, prod(image[2:]), len(image) - 2


def _strided(args: Args, index: int, size: list[int], *, transposed: bool) -> int:
    """Positions of the output: those of the input, divided by the stride (multiplied, where transposed)."""
    words = [str(text).strip("[]() ").split(",") for text in (args.get("Concrete Inputs") or [])[index + 2 :]]
    lists = [list(map(int, each)) for each in words if all(word.strip().isdigit() for word in each)]
    stride = next((found for found in lists if len(found) in (1, len(size))), [1])
    steps = [max(step, 1) for step in (stride * len(size))[: len(size)]]
    pairs = zip(size, steps, strict=True)
    return prod(length * step if transposed else max(-(-length // step), 1) for length, step in pairs)


def convolution_backward(args: Args, index: int, kernel: int, out: int, mask: int = -1) -> Dims:
    """Sizes of the convolution, and whether the input has a gradient; ``mask``: the argument that tells."""
    return (*convolution(args, index, kernel, out), int(mask < 0 or "[False" not in literal_of(args, mask)))


def tensors(args: Args) -> Dims:
    """``(numel, tensors)`` of a list of tensors."""
    shapes = all_shapes(args)
    parts = shapes[0] if shapes and isinstance(shapes[0], list) else []
    return sum(prod(shape) for shape in parts if isinstance(shape, list)), len(parts)


def dropout(args: Args) -> Dims | None:
    """``(numel,)``; None without dropout."""
    return None if literal_of(args, 1) in ("0.", "0") or literal_of(args, 2) == "False" else largest(args)


KINDS = tuple(_kinds())
