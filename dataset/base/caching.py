"""Caches: every one is bounded, and ``clear_caches`` empties all of them.

Loops over arrays that are interpreted at first, and compiled by numba if that is worth the time.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar
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
    with _MEMOS_LOCK:
        memos = list(_MEMOS)
    for memo in memos:
        memo.clear()


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
    """Pause the garbage collector: each of its runs walks through all objects of the process.

    At the end all that was made counts as old (``freeze``, ``unfreeze``), else the next new object starts a collection.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # a caller that froze objects wants them to stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


PATIENCE_S = 0.1  # seconds of a core: also on a busy machine, a single question is answered without numba
COLD_PATIENCE_S = 3.0  # the same if no compiled code is on disk: compiling takes longer than any single question


class compiled(Generic[P]):  # noqa: N801  (a decorator)
    """A loop over arrays that is interpreted at first, and compiled by numba later.

    It is compiled once all such loops together took ``PATIENCE_S`` of a core.  Where none of its compiled code is on
    disk, as right after installing, that is ``COLD_PATIENCE_S``, and it says so on stderr.

    Loading numba costs more than a handful of predictions do, so a single question is answered sooner without.  The
    compiled code is kept on disk where a folder can be written.  Either way the results are the same.

    A loop may call plain functions of its own module, which are compiled with it.  Arguments that belong together are
    passed as one ``NamedTuple`` of arrays and numbers.
    """

    spent_s: ClassVar[float] = 0.0  # seconds of interpretation of all kernels together
    said: ClassVar[bool] = False  # whether anything is compiled

    def __init__(self, function: Callable[P, None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._native: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether the next call runs machine code."""
        return self._native is not None or compiled.spent_s > self._patience_s

    @property
    def _patience_s(self) -> float:
        return PATIENCE_S if compiled.spent_s <= PATIENCE_S or self._kept else COLD_PATIENCE_S

    @cached_property
    def _kept(self) -> bool:
        """Whether compiled code of the function is on disk, in numba's default or configured folder."""
        file = Path(self.function.__code__.co_filename)
        name = f"{file.stem}.{self.function.__qualname__}-*.nbi"
        told = os.environ.get("NUMBA_CACHE_DIR")
        try:
            if told:
                return any(Path(told).rglob(name))
            return any((file.parent / "__pycache__").glob(name)) or any((Path.home() / ".cache/numba").rglob(name))
        except (OSError, RuntimeError):  # an unreadable folder, or no home
            return False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._native is not None:
            self._native(*args, **kwargs)
        elif compiled.spent_s > self._patience_s:
            if not self._kept and not compiled.said:
                compiled.said = True
                told = "stepsight: compiling with numba, once after installing: some ten seconds"
                print(told, file=sys.stderr, flush=True)
            self._native = self.compile()
            try:
                self._native(*args, **kwargs)
            except (ImportError, AttributeError):  # the code on disk is from an earlier version of the package
                self._native = self.compile(keep=False)
                self._native(*args, **kwargs)
        else:
            begin = time.thread_time()
            self.function(*args, **kwargs)
            compiled.spent_s += time.thread_time() - begin

    def compile(self, *, keep: bool = True) -> Callable[P, None]:
        """Compile the function, and those of its module that it calls; ``keep``: on disk, and take it from there."""
        return _machine_code(self.function, keep, {})  # type: ignore[no-any-return]


def _machine_code(function: Any, keep: bool, done: dict[Any, Any]) -> Any:
    """Compile a function with numba, and with it the functions of its module that it calls, as numba calls no others.

    Functions of other modules stay as they are: numba's cache on disk would not notice that their file has changed.
    """
    import numba

    if function not in done:
        known = function.__globals__
        called = {n: known[n] for n in function.__code__.co_names if isinstance(known.get(n), FunctionType)}
        own = {name: f for name, f in called.items() if f.__module__ == function.__module__}
        helpers = {name: _machine_code(f, keep, done) for name, f in own.items()}
        linked = FunctionType(function.__code__, {**known, **helpers}, function.__name__) if helpers else function
        try:
            done[function] = numba.njit(cache=keep, nogil=True)(linked)
        except RuntimeError:  # numba finds no folder for its cache
            done[function] = numba.njit(nogil=True)(linked)
    return done[function]
