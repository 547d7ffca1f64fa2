"""Checks of the records of kinds when they are built, so that mistakes are found early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NoReturn, get_args

from stepsight.dataset.base.errors import StepsightError, shorten
from stepsight.dataset.base.registry import check_takes

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
