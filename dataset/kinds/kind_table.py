"""Registries of kinds, their codes in features, and the records of kinds, checked when they are built.

The record has all properties of a kind, except how the harness runs it.  Functions of a kind take its dims as
positional arguments, in the order of ``dim_names``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Literal, NoReturn, TypeVar, get_args

from stepsight.dataset.base.errors import StepsightError, shorten
from stepsight.dataset.base.files import preset
from stepsight.dataset.base.registry import Registry, check_takes, instance_of

Args = Mapping[str, Any]  # of a framework's call
Dims = tuple[int, ...]
Bound = Literal["compute", "memory", "host_memory", "host_link", "host"]

STREAMED = "add"  # base of streaming kinds: an addition that moves as many bytes
_FIRST_BY_NAME, _MOST_BY_NAME = 1000, 100_000  # with a half between them, codes keep within seven digits


K = TypeVar("K", bound=Any)


class KindTable(Registry[K]):
    """A registry of kinds under their own names, of which no two in all ``tables`` of kinds have the same.

    ``check`` takes a kind that is to be added and this table; it raises ``StepsightError`` if they do not fit.
    """

    def __init__(
        self,
        noun: str,
        built_in: Iterable[K],
        group: str,
        tables: list[KindTable[Any]],
        check: Callable[[K, Mapping[str, K]], None] | None = None,
    ) -> None:
        kinds = sorted(built_in, key=lambda kind: kind.code)
        assert len({kind.code for kind in kinds}) == len({kind.name for kind in kinds}) == len(kinds), noun
        self._is_kind, self._check_beside, self._tables = instance_of(type(kinds[0])), check, tables
        tables.append(self)
        named = {kind.name: kind for kind in kinds}
        super().__init__(noun, named, group=group, check=self._check_kind, error=StepsightError)

    def _check_kind(self, name: str, thing: Any) -> K:
        kind = self._is_kind(name, thing)
        if any(name in list(table) for table in self._tables):  # of other packages, only those that are loaded
            raise StepsightError("the name is taken: choose another name")
        for other in self.values():
            if other.code == kind.code:
                found = f"{kind.code} for {other.name!r} and {kind.name!r}"
                raise StepsightError(f"codes must differ, got {found}: choose another code")
        if self._check_beside is not None:
            self._check_beside(kind, self)
        return kind


def check_record(record: Any, noun: str, choices: Mapping[str, Any], rules: Iterable[tuple[str, bool, str]]) -> None:
    """Check the fields of a record of a kind, and set its code: its own, or for -1 one derived from its name.

    ``choices``: by field the ``Literal`` that lists its values; ``rules``: other fields, whether each is right, and
    what it must be.
    """
    if not isinstance(record.name, str) or not record.name.isidentifier():
        raise StepsightError(f"{noun} {record.name!r:.80}: a name must be an identifier")
    code = type(record.code) is int and record.code >= -1
    found = [("code", code, "a whole number >= 0, or -1 for the code of the name")]
    for name, literal in choices.items():
        words = get_args(literal)
        found.append((name, getattr(record, name) in words, f"one of {', '.join(words)}"))
    flags = [one.name for one in fields(record) if isinstance(one.default, bool)]
    found += [(name, isinstance(getattr(record, name), bool), "True or False") for name in flags]
    for name, right, rule in (*found, *rules):
        if not right:
            raise StepsightError(f"{noun} {record.name!r}: {name} must be {rule}, got {getattr(record, name)!r:.80}")
    if record.code < 0:
        object.__setattr__(record, "code", _FIRST_BY_NAME + zlib.crc32(record.name.encode()) % _MOST_BY_NAME)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OpKind:
    """Properties of one kind of op: the meaning of its dims, its cost, and its names in libraries.

    Functions are called for a few dims on construction: ``StepsightError`` if they do not take them or do not return
    what they must, or if a field has a wrong type or value.
    """

    name: str  # as in ``Op.kind``
    family: str  # ops of a family share a regressor (``gemm``, ``attention``, ``norm``, …)
    dim_names: tuple[str, ...]  # of ``Op.dims``, in order
    flops: Callable[..., float]  # FLOP of one call (one multiply-add is two)
    elements: Callable[..., float]  # that one call reads plus those that it writes
    # What bounds its time: the device's arithmetic or memory, the host's memory, the link to the host, or the time in
    # which the host makes its first dim of calls.
    bound: Bound = "memory"
    # Represents the kind in the features of trees, and never changes, because trained predictors hold it.  The
    # package's first kinds have numbers of their own; -1 takes one from the name.
    code: int = -1
    flags: tuple[str, ...] = ()  # dims that are 0 or 1
    in_harness: bool = True  # whether the harness has a callable of this name (``dataset/harness/ops``)
    units: Callable[..., float] = lambda *dims: 0.0  # parts of a call that each cost time: rows, heads, tensors
    # Elements of up to three operands that caches treat differently.  None: all ``elements`` in one.
    operands: Callable[..., tuple[float, float, float]] | None = None
    keeps_second_operand: bool = False  # whether a fused kernel keeps it on the chip, as attention its scores
    # Number of independent matrices of the output, and the rows and columns of each: what a GPU cuts into tiles.  None:
    # the kind is not tiled.
    grid: Callable[..., tuple[int, int, int]] | None = None
    aligned: tuple[str, ...] = ()  # dims whose divisibility by powers of two decides which kernel runs
    padded: str = ""  # dim that GPU libraries pad to the next size that they have a kernel for
    streams: bool = False  # whether time grows in proportion to the first dim beyond the longest op that was measured
    # Kind whose efficiency tells most about this one where this one was not measured.  ``STREAMED``: an addition of as
    # many bytes.  Empty: none does.
    base: str = STREAMED
    base_dims: Callable[..., Dims] = lambda *dims: dims  # of that op
    reads_saved: bool = True  # whether it reads what forward saved for backward
    weight_gradient: bool = False  # whether it is the gradient of a linear's weight, from its input and output gradient
    slept: bool = True  # whether ranks of a cluster in a box sleep for it; False: it takes so little that they run it
    # Calls of frameworks that are this op, and how dims follow from a call's arguments (None: the call does no work).
    calls: Mapping[str, Callable[[Args], Dims | None]] = field(default_factory=dict)
    in_parts: bool = False  # whether consecutive calls of equal dims are parts of one op
    launches: int = 1  # kernels of a call on a GPU, each of which takes its launch
    chain: Callable[..., float] = lambda *dims: 0.0  # rows that a GPU's threads load one after the other

    def __post_init__(self) -> None:
        calls = isinstance(self.calls, Mapping) and all(map(callable, self.calls.values()))
        rules = [
            ("dim_names", bool(self.dim_names) and _are_names(self.dim_names), _NAMES.format(" at least 1")),
            *((name, _are_names(getattr(self, name)), _NAMES.format("")) for name in ("flags", "aligned")),
            ("family", _are_names((self.family,)), "a name"),
            ("base", self.base == "" or _are_names((self.base,)), "a name"),
            ("calls", calls, "a table of functions by names of calls"),
            ("launches", type(self.launches) is int and self.launches > 0, "a whole number >= 1"),
        ]
        check_record(self, "op kind", {"bound": Bound}, rules)
        for field_name, names in (("flags", self.flags), ("aligned", self.aligned), ("padded", (self.padded,))):
            strange = [name for name in names if name and name not in self.dim_names]
            if strange:
                rule = f"{field_name} must be among {', '.join(self.dim_names)}"
                raise StepsightError(f"op kind {self.name!r}: {rule}, got {', '.join(map(str, strange))}")
        for name, (count, low, rule) in _FUNCTIONS.items():
            if getattr(self, name) is not None or name not in ("operands", "grid"):
                self._check_function(name, count, low, rule)

    def _check_function(self, name: str, count: int | None, low: int, rule: str) -> None:
        """Call a function for a few dims, and check what it returns."""
        function, what = getattr(self, name), f"op kind {self.name!r}: {name}"
        if not callable(function):
            check_takes(what, function, self.dim_names)
        for size in _TRIED:
            dims = tuple(1 if name in self.flags else size for name in self.dim_names)
            try:
                value = function(*dims)
                numbers = (value,) if count == 1 else value
                right = isinstance(numbers, tuple) and count in (None, len(numbers))
                right = right and all(not isinstance(one, str) and low <= one < inf for one in numbers)
                right = right and (count is not None or all(int(one) == one for one in numbers))
            except Exception as error:  # a user's function can raise any exception
                check_takes(what, function, self.dim_names)
                found = f"{type(error).__name__}: {shorten(str(error))}"
                raise StepsightError(f"{what}{dims} must be {rule}, but it raises {found}") from error
            if not right:
                raise StepsightError(f"{what}{dims} must be {rule}, got {value!r:.80}")

    def __repr__(self) -> str:
        return f"<OpKind {self.name}>"


_TRIED = (8, 3, 1)  # sizes of all dims with which a kind's functions are called once
_NAMES = "a tuple of{} different identifiers"
_COST = "a finite number >= 0"
# What the functions of a kind return: how many numbers (None: any number of sizes), the least of them, and in words.
_FUNCTIONS: Mapping[str, tuple[int | None, int, str]] = {
    "flops": (1, 0, _COST),
    "elements": (1, 0, _COST),
    "units": (1, 0, _COST),
    "chain": (1, 0, _COST),
    "operands": (3, 0, "three finite numbers >= 0"),
    "grid": (3, 1, "three sizes >= 1"),
    "base_dims": (None, 0, "a tuple of sizes >= 0"),
}


def _are_names(names: Any) -> bool:
    right = isinstance(names, tuple) and all(isinstance(name, str) and name.isidentifier() for name in names)
    return right and len(set(names)) == len(names)


def refuse_cost(op: object, field: str, value: Any) -> NoReturn:
    """Report FLOP or elements of an op that are not a finite number >= 0: a mistake in the record of its kind."""
    raise StepsightError(f"{field} of {op} must be {_COST}, got {value!r:.80}: correct its OpKind")


def check_base(kind: OpKind, known: Mapping[str, OpKind]) -> None:
    """Check that the base of a kind is another kind that is known, and that ``base_dims`` returns dims of it."""
    if kind.base in ("", STREAMED):
        return
    if kind.base == kind.name or kind.base not in known:
        raise StepsightError(f"base must be another kind that is registered already, got {kind.base!r:.80}")
    takes, got = known[kind.base].dim_names, kind.base_dims(*(1 for _ in kind.dim_names))
    if len(got) != len(takes):
        raise StepsightError(f"base_dims must return the dims {takes} of {kind.base}, got {got}")


# Pattern of the transfers: around a ring of all ranks, from every rank directly to every other, or from one rank to
# one.
Route = Literal["ring", "direct", "message"]
Side = Literal["In", "Out"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CollectiveKind:
    """Properties of one kind of collective: its transfers, and its names in libraries; see ``OpKind``."""

    name: str  # as in ``Collective.kind``
    counts: str  # what ``Collective.num_bytes`` counts, for people
    route: Route = "ring"  # how the bytes travel
    passes: float = 1.0  # times that the buffer goes around the ring
    trees: bool = False  # whether NCCL may run it up and down trees over nodes
    buffers: float = 1.0  # of ``num_bytes`` that a rank holds meanwhile
    code: int = -1
    nccl_names: Mapping[str, Side] = field(default_factory=dict)  # in its records: the side whose size is ``num_bytes``
    c10d_calls: Mapping[str, int] = field(default_factory=dict)  # from C++: the input whose size is ``num_bytes``
    gloo_spans: tuple[str, ...] = ()  # of gloo's worker threads that may carry it
    test_names: tuple[str, ...] = ()  # in tables of nccl-tests and of other benchmarks

    def __post_init__(self) -> None:
        names, calls = self.nccl_names, self.c10d_calls
        passes, buffers = (isinstance(number, int | float) and number for number in (self.passes, self.buffers))
        sides = isinstance(names, Mapping) and all(side in get_args(Side) for side in names.values())
        places = isinstance(calls, Mapping) and all(type(at) is int and at >= 0 for at in calls.values())
        rules = [
            ("counts", _are_texts((self.counts,)), "a line of text"),
            ("passes", 0 < passes < inf, "a finite number > 0"),
            ("buffers", 1 <= buffers < inf, "a finite number >= 1"),
            ("nccl_names", sides and _are_texts(tuple(names)), "a table of In or Out by name"),
            ("c10d_calls", places and _are_texts(tuple(calls)), "a table of inputs by call"),
            *((key, _are_texts(getattr(self, key)), "a tuple of names") for key in ("gloo_spans", "test_names")),
        ]
        check_record(self, "collective kind", {"route": Route}, rules)

    def __repr__(self) -> str:
        return f"<CollectiveKind {self.name}>"


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text and text.isprintable() for text in value)


def with_tuples(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a record from a preset's table."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}


def sum_of_products(
    terms: str | Mapping[str, float], names: tuple[str, ...], number: type = float, flags: Sequence[str] = ()
) -> Callable[..., Any]:
    """A sum of products of dims: the factor of each product by its names; a text is one product; flags are 0 or 1."""
    factors = {terms: 1} if isinstance(terms, str) else terms
    parts = [(factor, tuple(map(names.index, words.split()))) for words, factor in factors.items()]
    switches = [names.index(flag) for flag in flags]

    def total(*dims: int) -> Any:
        sizes: list[int] = [*dims]
        result: float = 0
        for at in switches:
            sizes[at] = min(sizes[at], 1)
        for product, places in parts:  # loops: a prediction asks thousands of times
            for at in places:
                product *= sizes[at]
            result += product
        return number(result)

    return total


def sums_of_products(
    rows: Iterable[str | Mapping[str, float]], names: tuple[str, ...], number: type, flags: Sequence[str]
) -> Callable[..., Any]:
    """Several such sums, as a tuple."""
    parts = [sum_of_products(terms, names, number, flags) for terms in rows]
    return lambda *dims: tuple([part(*dims) for part in parts])


KINDS = tuple(CollectiveKind(name=name, **with_tuples(of)) for name, of in preset("collective_kinds.toml").items())
