"""Caches: every one is bounded, and ``clear_caches`` empties all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")
V = TypeVar("V")

_FUNCTIONS: dict[str, Any] = {}  # ``lru_cache`` wrappers by their functions' full names
_MEMOS: WeakSet[Memo[Any, Any]] = WeakSet()
_MEMOS_LOCK = Lock()


def cached(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache the last ``maxsize`` results of a pure function, like ``functools.lru_cache``.

    The function must depend on nothing but its arguments, so that all predictors and threads may share its results.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        wrapper = lru_cache(maxsize=maxsize)(function)
        _FUNCTIONS[f"{function.__module__}.{function.__qualname__}"] = wrapper
        return wrapper  # type: ignore[return-value]  # typeshed's wrapper forgets the arguments' types

    return decorate


class Memo(dict[K, V]):
    """A cache owned by one object: a dictionary of at most ``maxsize`` entries.

    When it is full, it drops the older half.  Threads may share it: reading needs no lock, and an entry that another
    thread drops meanwhile is worked out again.  So read with ``get`` and use what that returned, not the memo again.
    """

    __slots__ = ("__weakref__", "_lock", "maxsize", "name")

    def __init__(self, name: str, maxsize: int) -> None:
        super().__init__()
        self.name = name
        self.maxsize = maxsize
        self._lock = Lock()
        with _MEMOS_LOCK:
            _MEMOS.add(self)

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, (self.name, self.maxsize)  # a copy starts empty, also in another process

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            if len(self) >= self.maxsize and key not in self:
                for old in list(islice(self, max(1, self.maxsize // 2))):
                    del self[old]
            super().__setitem__(key, value)

    def update(self, pairs: Mapping[K, V] | Iterable[tuple[K, V]]) -> None:  # type: ignore[override]
        """Set several entries."""
        for key, value in pairs.items() if isinstance(pairs, Mapping) else pairs:
            self[key] = value

    def clear(self) -> None:
        with self._lock:
            super().clear()


def clear_caches() -> None:
    """Empty all caches; later predictions recompute everything, with the same results.

    Call it to free memory.  Predictors and predictions stay valid; a prediction that is still used takes its details
    from what it holds, or works them out again.
    """
    for wrapper in list(_FUNCTIONS.values()):
        wrapper.cache_clear()
    for memo in _memos():
        memo.clear()


def cache_entries() -> dict[str, int]:
    """Number of entries by cache; caches of objects with the same name are added up."""
    counts = {name: int(wrapper.cache_info().currsize) for name, wrapper in list(_FUNCTIONS.items())}
    for memo in _memos():
        counts[memo.name] = counts.get(memo.name, 0) + len(memo)
    return counts


def _memos() -> list[Memo[Any, Any]]:
    with _MEMOS_LOCK:
        return list(_MEMOS)


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


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: each of its runs walks through all objects of the process."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
