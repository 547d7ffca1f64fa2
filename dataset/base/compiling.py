"""Loops over arrays that are interpreted at first, and compiled by numba if that is worth the time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Generic, ParamSpec

P = ParamSpec("P")

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
            self._announce()
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

    def _announce(self) -> None:
        """Say once that loops are being compiled, if that takes long."""
        if not self._kept and not compiled.said:
            compiled.said = True
            told = "stepsight: compiling with numba, once after installing: some ten seconds"
            print(told, file=sys.stderr, flush=True)

    def compile(self, *, keep: bool = True) -> Callable[P, None]:
        """Compile the function, and the functions of its module that it calls.

        Args:
            keep: Whether to take it from disk, and to keep it there.
        """
        return _machine_code(self.function, keep, {})  # type: ignore[no-any-return]


def _machine_code(function: Any, keep: bool, done: dict[Any, Any]) -> Any:
    """Compile a function with numba.

    numba calls compiled functions only, so each function of the same module that ``function`` calls is compiled too
    and takes its place among the global names.  Functions of other modules stay as they are: numba's cache on disk
    would not notice that their file has changed.
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
