"""Registries of kinds, the codes of kinds in features, and checks of the records when they are built."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NoReturn, Protocol, TypeVar, get_args

from stepsight.dataset.base.errors import StepsightError, shorten
from stepsight.dataset.base.registry import Registry, check_takes, instance_of

_FIRST_BY_NAME, _MOST_BY_NAME = 1000, 100_000  # with a half between them, codes keep within seven digits


class _Kind(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def code(self) -> int: ...


K = TypeVar("K", bound=_Kind)


def code_of(name: str, code: int) -> int:
    """The code of a kind: its own, or for -1 one derived from its name, independent of other kinds."""
    return code if code >= 0 else _FIRST_BY_NAME + zlib.crc32(name.encode()) % _MOST_BY_NAME


class KindTable(Registry[K]):
    """A registry of kinds of one noun, which are registered under their own names.

    Args:
        noun: What the kinds are, for messages: ``"op kind"``.
        built_in: Kinds of the package, which stay.
        group: The entry points' group.
        tables: All tables of kinds: no two kinds in them have the same name.
        check: Takes a kind that is to be added and this table; it raises ``StepsightError`` if they do not fit.
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
        self._is_kind = instance_of(type(kinds[0]))
        self._check_beside = check
        self._tables = tables
        tables.append(self)
        named = {kind.name: kind for kind in kinds}
        super().__init__(noun, named, group=group, check=self._check_kind, error=StepsightError)

    def add(self, kind: K) -> K:
        """Register a kind.

        Raises:
            StepsightError: If its name or its code is taken.
        """
        return self.register(kind.name, kind)

    @contextmanager
    def added(self, kind: K) -> Iterator[K]:
        """Register a kind for the duration of a ``with`` block, as tests do."""
        with self.registered(kind.name, kind):
            yield kind

    def _check_kind(self, name: str, thing: Any) -> K:
        kind = self._is_kind(name, thing)
        if any(name in list(table) for table in self._tables):  # of other packages, only those that are loaded
            raise StepsightError("the name is taken: choose another name")
        for other in self.values():
            if other.code == kind.code:
                raise StepsightError(
                    f"codes must differ, got {kind.code} for {other.name!r} and {kind.name!r}: choose another code"
                )
        if self._check_beside is not None:
            self._check_beside(kind, self)
        return kind


_TRIED = (8, 3, 1)  # sizes of all dims with which a kind's functions are called once


def check_record(record: Any, noun: str, choices: Mapping[str, Any], flags: Sequence[str]) -> None:
    """Check what op kinds and collective kinds have in common.

    Args:
        record: With ``name`` and ``code``.
        noun: What it is, for messages.
        choices: By field: the ``Literal`` type that lists its values.
        flags: Fields that are True or False.

    Raises:
        StepsightError: If a field has a wrong type or value.
    """
    if not isinstance(record.name, str) or not record.name.isidentifier():
        raise StepsightError(f"{noun} {record.name!r:.80}: a name must be an identifier")
    if type(record.code) is not int or record.code < -1:
        raise StepsightError(
            f"{noun} {record.name!r}: code must be a whole number >= 0, or -1 for the code of the name, "
            f"got {record.code!r:.80}"
        )
    for field, literal in choices.items():
        if getattr(record, field) not in get_args(literal):
            raise StepsightError(
                f"{noun} {record.name!r}: {field} must be one of {', '.join(get_args(literal))}, "
                f"got {getattr(record, field)!r:.80}"
            )
    for field in flags:
        if not isinstance(getattr(record, field), bool):
            raise StepsightError(
                f"{noun} {record.name!r}: {field} must be True or False, got {getattr(record, field)!r:.80}"
            )


def check_names(what: str, names: Any, *, among: Sequence[str] | None = None, at_least: int = 0) -> None:
    """Check that ``names`` is a tuple of different identifiers, all in ``among`` if that is given."""
    if (
        not isinstance(names, tuple)
        or not all(isinstance(name, str) and name.isidentifier() for name in names)
        or len(set(names)) != len(names)
        or len(names) < at_least
    ):
        least = f" at least {at_least}" if at_least else ""
        raise StepsightError(f"{what} must be a tuple of{least} different identifiers, got {names!r:.200}")
    strange = [name for name in names if among is not None and name not in among]
    if strange:
        raise StepsightError(f"{what} must be among {', '.join(among or ())}, got {', '.join(strange)}")


def check_functions(kind: Any) -> None:
    """Call the functions of an op kind for a few dims, and check what they return.

    Raises:
        StepsightError: If one is not callable, does not take the kind's dims, raises, or returns a wrong value.
    """
    functions = {
        "flops": (kind.flops, _is_cost, "a finite number >= 0"),
        "elements": (kind.elements, _is_cost, "a finite number >= 0"),
        "units": (kind.units, _is_cost, "a finite number >= 0"),
        "operands": (kind.operands, _three(_is_cost), "three finite numbers >= 0"),
        "grid": (kind.grid, _three(_is_size), "three sizes >= 1"),
        "base_dims": (kind.base_dims, _is_dims, "a tuple of sizes >= 0"),
    }
    for field, (function, is_right, rule) in functions.items():
        if function is None and field in ("operands", "grid"):
            continue
        for size in _TRIED:
            dims = tuple(1 if name in kind.flags else size for name in kind.dim_names)
            if not callable(function):
                check_takes(f"op kind {kind.name!r}: {field}", function, kind.dim_names)
            try:
                value = function(*dims)
                right = is_right(value)
            except Exception as error:  # a user's function can raise any exception
                check_takes(f"op kind {kind.name!r}: {field}", function, kind.dim_names)
                raise StepsightError(
                    f"op kind {kind.name!r}: {field}{dims} must be {rule}, but it raises {type(error).__name__}: "
                    f"{shorten(str(error))}"
                ) from error
            if not right:
                raise StepsightError(f"op kind {kind.name!r}: {field}{dims} must be {rule}, got {value!r:.80}")


def refuse_cost(op: object, field: str, value: Any) -> NoReturn:
    """Report FLOP or elements of an op that are not a finite number >= 0: a mistake in the record of its kind."""
    raise StepsightError(f"{field} of {op} must be a finite number >= 0, got {value!r:.80}: correct its OpKind")


def _is_cost(value: Any) -> bool:
    return not isinstance(value, str) and bool(0 <= value < inf)


def _is_size(value: Any) -> bool:
    return bool(1 <= value < inf)


def _is_dims(value: Any) -> bool:
    return isinstance(value, tuple) and all(bool(0 <= size < inf) and int(size) == size for size in value)


def _three(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) == 3 and all(map(is_right, value))
