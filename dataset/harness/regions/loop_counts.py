"""What compiled functions do, from the loop bodies of Inductor's scheduler: the terms of an op ``fused_loops``.

A body is a graph of operations on numbers, with the addresses of its loads and stores as expressions of the loops'
variables.  So each operation's number of executions and the memory that it touches follow from the ranges of the loops.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor.virtualized import V

FAR, MOVES, WORK, SLOW = "far", "moves", "work", "slow"  # how dims count an operation
_TABLES = tomllib.loads(Path(__file__).with_name("costs.toml").read_text("utf-8"))
COSTS: Mapping[str, tuple[str, float, float]] = _TABLES["costs"]
_LIKE = {name: kind for kind, names in _TABLES["like"].items() for name in names.split()}
_NOTHING = "nothing"  # what some operations count as
LINE = 64  # bytes of a cache line, and of a vector
_CYCLES = (FAR, MOVES, "vector", "scalar", SLOW)
NEAR, MIDDLE = 700_000, 12_000_000  # bytes between two uses of a buffer that a core's caches, or all, still hold
_REMEMBERED = 40_000  # truth values that branch prediction learns from one call to the next


class Touch(NamedTuple):
    """A buffer that a body reads or writes."""

    buffer: str
    writes: bool
    num_bytes: float  # of all different addresses
    strided: float = 0.0  # accesses, if each takes another line than the one before and not the next; else 0


class Nest(NamedTuple):
    """Loop bodies that share their loops: what they touch, and cycles by how dims count them."""

    touches: tuple[Touch, ...]
    cycles: Mapping[str, float]


class Code(NamedTuple):
    """How a function was written: on vectors or on numbers, and names of the buffers that it takes."""

    vectors: bool
    transposes: bool
    fast_exp: bool
    buffers: frozenset[str]


class _Value(NamedTuple):
    """A value of a body: its type, the number of loops that it depends on, and how it is made."""

    dtype: torch.dtype = torch.float32
    depth: int = 0
    key: Any = None


def nests_of(nodes: Sequence[Any], code: Code) -> tuple[Nest, ...]:
    """What the loops of a function do; a body that needs the end of another's reduction has loops of its own."""
    found, group, ranges, reduced = list[list[Any]](), list[Any](), None, set[str]()
    for node in nodes:
        own = [size for part in node.get_ranges() for size in map(as_int, part) if size > 1]
        if group and (own != ranges or any(each.name in reduced for each in node.read_writes.reads)):
            group, reduced = [], set()
        if not group:
            found.append(group)
            ranges = own
        group.append(node)
        if node.is_reduction():
            reduced |= {each.name for each in node.read_writes.writes}
    nests = []
    for group in found:
        known: dict[Any, _Value] = {}
        readers = [_Reader(node._body, code, known) for node in group]
        cycles = {kind: sum(reader.cycles[kind] for reader in readers) for kind in _CYCLES}
        nests.append(Nest(tuple(touch for reader in readers for touch in reader.touches), cycles))
    return tuple(nests)


class _Reader:
    """Counts the operations of one body; ``known``: what those before it made, by how it is made."""

    def __init__(self, body: Any, code: Code, known: dict[Any, _Value]) -> None:
        self._body, self._code, self._known = body, code, known
        self._names = [symbol for symbol, size in body.var_ranges.items() if as_int(size) > 1]
        self._sizes = tuple(as_int(body.var_ranges[symbol]) for symbol in self._names)
        self._outer = len([size for size in body.sizes[0] if as_int(size) > 1])
        self.cycles = dict.fromkeys(_CYCLES, 0.0)
        self.touches: list[Touch] = []
        self._masked = 0  # blocks around that run where a condition holds
        votes = dict.fromkeys(range(len(self._names)), 0.0)
        for index in body.indexing_exprs.values():
            factors = self._factors(index)
            for at, factor in enumerate(factors):
                votes[at] += self._distinct(factors) * (factor == 1)
        self._tile = max(votes, key=lambda at: (votes[at], at), default=0)  # the loop over lanes
        self._block(body.root_block.graph)

    def _block(self, graph: Any) -> _Value:
        """Count the operations of a block, and return the last value that it makes."""
        values: dict[Any, _Value] = {}
        made = _Value()
        for node in graph.nodes:
            given = [values[each] for each in node.all_input_nodes if each in values]
            if node.op == "call_module" and node.target.startswith("masked_subblock"):
                self._masked += 1
                given.append(self._block(self._body.subblocks[node.target].graph))
                self._masked -= 1
                values[node] = made = self._do("select", given[-1].dtype, given, "masked")
            elif node.op == "call_module" and node.target.startswith("set_indirect"):
                values[node] = given[0]
            elif node.op == "call_method":
                values[node] = made = self._operation(node, given)
        return made

    def _operation(self, node: Any, given: Sequence[_Value]) -> _Value:
        name, arguments = node.target, node.args[1:]
        dtypes = [each for each in arguments if isinstance(each, torch.dtype)]
        if name == "load":
            index = self._body.indexing_exprs[arguments[1].args[0]]
            key = "load", arguments[0], str(index), self._sizes
            if key not in self._known:
                depth = len(self._sizes) if _is_indirect(index) else self._depth(index)
                self._known[key] = _Value(V.graph.get_dtype(arguments[0]), depth, hash(key))
                self._access(arguments[0], index, depth, writes=False)
            return self._known[key]
        if name in ("store", "store_reduction"):
            index = self._body.indexing_exprs[arguments[1].args[0]]
            if name == "store":
                self._known["load", arguments[0], str(index), self._sizes] = given[-1]
            self._access(arguments[0], index, self._depth(index), writes=True)
            return given[-1]
        if name == "index_expr":
            index = self._body.indexing_exprs[arguments[0].args[0]]
            return self._do("range", dtypes[0], [_Value(depth=self._depth(index), key=str(index))], name)
        if name == "reduction":
            kind = _TABLES["reductions"].get(arguments[2], "carried")
            inner = self._do(kind, dtypes[1], [*given, _Value(depth=len(self._sizes))], arguments[2])
            self._add(f"{kind}_end" if f"{kind}_end" in COSTS else "reduce", self._outer)
            return inner._replace(dtype=dtypes[0], depth=self._outer)
        kinds = [*dtypes, *([torch.bool] if _LIKE.get(name) == "compare" else []), *(each.dtype for each in given[-1:])]
        made = kinds[0] if kinds else torch.float32
        if name == "to_dtype":
            of = given[0].dtype
            wide, narrow = (each.itemsize == 2 and each.is_floating_point for each in (of, made))
            cast = _NOTHING if of == made else "narrow" if narrow else "widen" if wide else "convert"
            return self._do(cast, made, given, (name, made))
        counted = _LIKE.get(name, name if name in COSTS else "other")
        if counted == "arithmetic" and not made.is_floating_point:
            counted = "integer"
        plain = tuple(each for each in arguments if isinstance(each, int | float | str))
        return self._do(counted, made, given, (name, plain))

    def _do(self, name: str, dtype: torch.dtype, given: Sequence[_Value], what: Any) -> _Value:
        """An operation on values, once; ``name`` is one of ``COSTS``, or nothing."""
        key = what, self._sizes, tuple(each.key for each in given)
        if key not in self._known or name == "rand":
            depth = max((each.depth for each in given), default=0)
            self._known[key] = _Value(dtype, depth, hash(key))
            vectors = self._code.vectors and depth > self._tile
            if name != _NOTHING and depth:
                self._add(name, depth, LINE // max(dtype.itemsize, 4) if vectors else 1)
        return self._known[key]

    def _add(self, name: str, depth: int, lanes: int = 1, share: float = 1.0, *, vector: bool = True) -> None:
        """An operation in that share of the rounds of the loops up to a depth, with so many lanes in a round; unless
        ``vector``, on one number for all of them.
        """
        name = "exp_u20" if name == "exp" and self._code.fast_exp else name
        what, of_vector, of_number = COSTS[name]
        vector = vector and lanes > 1
        key = what if what != WORK else "vector" if vector else "scalar"
        self.cycles[key] += (of_vector if vector else of_number) * self._runs(depth, lanes) * share

    def _access(self, name: str, index: Any, depth: int, *, writes: bool) -> None:
        """Add a touch and the operations that access memory, if the buffer is in memory."""
        name = V.graph.scheduler.mutation_real_name.get(name, name)
        if name not in self._code.buffers:
            return
        dtype, what = V.graph.get_dtype(name), "store" if writes else "load"
        size, whole = dtype.itemsize, float(as_int(V.graph.get_numel(name)) * dtype.itemsize)
        factors, width = self._factors(index), LINE // max(dtype.itemsize, 4) if self._code.vectors else 1
        along = factors[self._tile] if factors else 0
        lanes = width if along < 2 or self._code.transposes else 1
        if _is_indirect(index):
            self.touches.append(Touch(name, writes, min(self._runs(depth) * size, whole)))
            self._add("scatter" if writes else "gather", depth, lanes if along else 1)
            return
        moving = max((at for at, factor in enumerate(factors) if factor), default=-1)
        stride = factors[moving] * size * (lanes if moving == self._tile and along == 1 else 1) if moving >= 0 else 0
        far = stride >= 2 * LINE and stride > size * (lanes if along else 1)
        moved = min(self._distinct(factors) * size, whole)
        self.touches.append(Touch(name, writes, moved, self._runs(depth, lanes) if far else 0.0))
        part = 0.0
        if along > 1:  # a block at a time, or a lane of a vector at a time
            what = "transpose" if lanes > 1 else what
            self._add("copy", depth, width, float(lanes == 1 < width))
        elif along and dtype == torch.bool and lanes > 1:
            what = f"{'many_' * (self._runs(depth) > _REMEMBERED)}mask_{what}"
        elif along and lanes > 1:
            rounds = -(-self._sizes[self._tile] // lanes)
            part = 1.0 if self._masked else (self._sizes[self._tile] % lanes > 0) / rounds
            self._add(f"part_{what}", depth, lanes, part)
        self._add(what, depth, lanes, 1.0 - part, vector=along > 0)

    def _runs(self, depth: int, lanes: int = 1) -> float:
        """How often what is in the loops up to a depth runs, where a round has so many lanes."""
        sizes = list(self._sizes[:depth])
        if lanes > 1 and depth > self._tile:
            sizes[self._tile] = -(-sizes[self._tile] // lanes)
        return math.prod(sizes, start=1.0)

    def _factors(self, index: Any) -> list[int]:
        """Elements between two rounds of each loop."""
        return [abs(as_int(index.coeff(symbol))) for symbol in self._names]

    def _distinct(self, factors: Sequence[int]) -> float:
        """How many addresses differ."""
        return math.prod([size for size, factor in zip(self._sizes, factors, strict=True) if factor], start=1.0)

    def _depth(self, expression: Any) -> int:
        """The number of loops up to the innermost one whose variable an expression has."""
        free = {str(symbol) for symbol in expression.free_symbols}
        return max((at for at, symbol in enumerate(self._names, 1) if str(symbol) in free), default=0)


def _is_indirect(index: Any) -> bool:
    return any(str(symbol).startswith("indirect") for symbol in index.free_symbols)


def as_int(value: Any) -> int:
    """A size, or what Inductor guesses for one that is not known."""
    return int(V.graph.sizevars.optimization_hint(value, fallback=1))


def launch_dims(nests: Sequence[Nest], since: Mapping[str, float]) -> tuple[int, ...]:
    """Dims of the op ``fused_loops`` that a call of a compiled function is.

    ``since``: bytes that were touched since each buffer was, before this call; absent: it never was.
    """
    levels, strided, cycles = [0.0, 0.0, 0.0], [0.0, 0.0], dict.fromkeys(_CYCLES, 0.0)
    passed, last = 0.0, dict[str, float]()
    for nest in nests:
        uses: dict[str, list[float]] = {}  # bytes that it reads and writes of a buffer, and its strided accesses
        for touch in nest.touches:
            use = uses.setdefault(touch.buffer, [0.0, 0.0, 0.0])
            use[touch.writes] = max(use[touch.writes], touch.num_bytes)
            use[2] += touch.strided
        own = sum(max(read, written) for read, written, _ in uses.values())
        for name, (read, written, accesses) in uses.items():
            distance = passed - last[name] if name in last else since.get(name, math.inf) + passed
            distance += 0.5 * (own + max(read, written))
            level = 0 if distance < NEAR else 1 if distance < MIDDLE else 2
            levels[level] += read + written
            strided[level > 0] += accesses
            last[name] = passed + own
        passed += own
        for kind, spent in nest.cycles.items():
            cycles[kind] += spent
    return tuple(round(each) for each in (*levels, *strided, *cycles.values(), len(nests)))
