"""Dataclasses and tuples that are used as keys thousands of times a second."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T", bound=type)
Item = TypeVar("Item")


class HashedTuple(tuple[Item, ...]):
    """A tuple that caches its hash, because a long one is used as a key many times."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = super().__hash__()
        return known


def hashed_once(cls: T) -> T:
    """Make a frozen dataclass without slots cache its hash, because it is used as a key thousands of times a second."""
    compute: Any = cls.__hash__

    def remembered(self: Any) -> int:
        try:
            return self._hash  # type: ignore[no-any-return]
        except AttributeError:
            known: int = compute(self)
            object.__setattr__(self, "_hash", known)
            return known

    # Each class has code of its own: the interpreter remembers where one class keeps an attribute, not where many do.
    remembered.__code__ = remembered.__code__.replace()
    cls.__hash__ = remembered  # type: ignore[assignment]
    return cls
