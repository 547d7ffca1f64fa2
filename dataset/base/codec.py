"""Trained models as JSON, by the fields of their dataclasses.

Reading makes texts, numbers, arrays and the classes that the annotations name; nothing in a file is executed or
imported.  A class that is saved in another form than its fields overrides one of the two methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

import numpy as np

from stepsight.dataset.base.caching import cached

UNSAVED: Mapping[str, Any] = {"saved": False}  # metadata of a field that stays out of the file
OPTIONAL: Mapping[str, Any] = {"optional": True}  # of one that files of earlier versions lack
IF_SET: Mapping[str, Any] = {"optional": True, "if_set": True}  # of one that is left out while it has its default
ROUNDED: Mapping[str, Any] = {"digits": 6}  # of numbers that are saved with so many digits after the point

_hints: Any = cached(1024)(get_type_hints)


class Saved:
    """A dataclass that is saved as JSON by its fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``from_dict`` reads them."""
        table = {}
        for each in _saved_fields(type(self)):
            value = plain(getattr(self, each.name), each.metadata.get("digits"))
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if not (each.metadata.get("if_set") and value == plain(default)):
                table[each.name] = value
        return table

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], **given: Any) -> Self:
        """Read the result of ``to_dict``; ``given``: fields that are not in it.

        Raises ``KeyError``, ``TypeError`` or ``ValueError`` if a field is missing, or is not of its type.
        """
        hints = _hints(cls)
        for each in _saved_fields(cls):
            if each.name in value:
                given[each.name] = _read(hints[each.name], value[each.name], each.name)
            elif each.name not in given and not each.metadata.get("optional"):
                raise KeyError(each.name)
        return cls(**given)


def plain(value: Any, digits: int | None = None) -> Any:
    """A value of a field as JSON has it; ``digits``: of its numbers after the point, None: all."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, np.ndarray | float) and digits is not None:
        return np.round(value, digits).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(item, digits) for key, item in value.items()}
    return [plain(item, digits) for item in value] if isinstance(value, tuple | list) else value


def _saved_fields(cls: Any) -> list[Field[Any]]:
    return [each for each in fields(cls) if each.init and each.metadata.get("saved", True)]


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value of an annotated type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _read(next(a for a in arguments if a is not type(None)), value, name)
    if origin is np.ndarray:
        return np.array(value, dtype=np.float64)
    if origin is tuple:
        check_type(value, list, name)
        items = arguments[:1] * len(value) if Ellipsis in arguments else arguments
        return tuple(_read(of, item, name) for of, item in zip(items, value, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        check_type(value, dict, name)
        return {arguments[0](key): _read(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    if hasattr(kind, "_fields"):
        return kind(**{key: _read(of, value[key], f"{name}.{key}") for key, of in _hints(kind).items()})
    if kind is float:
        check_type(value, float, name)
        return float(value)
    check_type(value, kind, name)
    return value


_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"
}  # fmt: skip


def check_type(value: Any, kind: type[Any], name: str) -> None:
    """Raise ``ValueError`` unless a value is of a type; whole numbers are numbers, true and false are not."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r:.80}")
