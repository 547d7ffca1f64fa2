"""The package's kinds of ops: ``presets/op_kinds.toml``, and the costs that are no sums of products of dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds import call_dims
from stepsight.dataset.kinds.call_dims import Args, Dims
from stepsight.dataset.kinds.kind_table import OpKind

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


def _convolution(*dims: int) -> float:
    """FLOP of one product, or of the gradients of the weight and, if the last dim says so, of the input."""
    b, i, o, p, w, _, q, _, *input_gradient = dims
    return (1.0 + sum(input_gradient)) * (2.0 * b * i * o * w * min(p, q))


_OWN: Mapping[str, Mapping[str, Function]] = {
    "conv": {"flops": _convolution, "base_dims": lambda b, i, o, p, w, g, q, s: (b * min(p, q), o, i * w)},
    "conv_backward": {"flops": _convolution},
    "grouped_linear": {
        "grid": lambda g, m, n, k: (g, -(-m // max(g, 1)), n),
        "base_dims": lambda g, m, n, k: (max(m // max(g, 1), 1), n, k),  # one product after another
    },
    "grouped_linear_dgrad": {"grid": lambda g, m, n, k: (g, -(-m // max(g, 1)), k)},
    "mla_attention": {"base_dims": lambda b, h, q, k, d, v, c: (b, h, h, q, k, (d + v) // 2, c)},
    "table_lookup": {"elements": _lookup, "base_dims": lambda *dims: (int(_lookup(*dims)) // 3 + 1,)},
    "table_lookup_backward": {
        "elements": _lookup_backward,
        "base_dims": lambda *dims: (int(_lookup_backward(*dims)) // 3 + 1,),
    },
    "fused_loops": {"base_dims": lambda near, middle, far, *others: (max((near + middle + far) // 4, 1),)},
}


def _sum(terms: str | Mapping[str, float], names: tuple[str, ...], number: type = float) -> Function:
    """A sum of products of dims: the factor of each product by its names; a text is one product."""
    factors = {terms: 1} if isinstance(terms, str) else terms
    parts = [(factor, tuple(map(names.index, words.split()))) for words, factor in factors.items()]
    return lambda *dims: number(sum([prod([dims[at] for at in places], start=factor) for factor, places in parts]))


def _kind(name: str, told: Mapping[str, Any]) -> OpKind:
    names = tuple(told["dims"].split())
    plain = {key: value for key, value in told.items() if key not in ("like", "dims")}
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    for key in {"flops", "elements", "units"} & set(told):
        fields[key] = _sum(told[key], names)
    for key in {"operands", "grid", "base_dims"} & set(told):
        terms = [told["elements"] if part == "elements" else part for part in told[key]]
        parts = [_sum(part, names, float if key == "operands" else int) for part in terms]
        fields[key] = lambda *dims, parts=parts: tuple([part(*dims) for part in parts])
    calls = {
        call if "::" in call else f"aten::{call}": _dims_of(*words.split())
        for words, text in told["calls"].items()
        for call in text.split()
    }
    return OpKind(**{**fields, **_OWN.get(name, {}), "name": name, "dim_names": names, "calls": calls})


def _dims_of(function: str, *places: str) -> Callable[[Args], Dims | None]:
    of, numbers = getattr(call_dims, function), [*map(int, places)]
    return lambda args: of(args, *numbers)


def _kinds() -> Iterator[OpKind]:
    """The kinds; ``like``: the fields of another one, but for its calls and its code."""
    found: dict[str, dict[str, Any]] = {}
    for name, told in preset("op_kinds.toml").items():
        found[name] = {**found.get(told.get("like", ""), {}), "calls": {}, "code": -1, **told}
        yield _kind(name, found[name])


KINDS = tuple(_kinds())
