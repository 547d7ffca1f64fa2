"""Finds the steps of a training script: calls that mark the end of a step, and which of them occur once per step.

Marks are, the first kind that occurs: ``stepsight.step()``, ``torch.profiler.profile.step``, and the end of an
optimizer's ``step``.  Of several optimizers the one that steps least often marks the steps, of equals the last.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..base.patching import patch

STATED, PROFILER, OPTIMIZER = "stepsight.step()", "profiler.step()", "optimizer.step()"
KINDS = (OPTIMIZER, PROFILER, STATED)  # later ones have priority over earlier ones
SEEN = 2  # marks of each optimizer before one of them is chosen

_listeners: list[StepMarks] = []  # the one of this process, which ``step`` tells


def step() -> None:
    """Say that a training step has ended, in a script that `stepsight collect --script` or `emulate` runs.

    Steps are found without it where an optimizer of ``torch.optim`` or a profiler steps.  Elsewhere it does nothing.

    Example:
        >>> import stepsight
        >>> for batch in ():
        ...     stepsight.step()
    """
    for listener in _listeners:
        listener.mark(STATED)


class StepMarks:
    """Calls ``on_step`` at the end of each step, on the thread that runs the script; first when the mark is chosen.

    ``on_restart`` is called when a better mark shows up later: what came before was no step.  ``kind`` is what marks
    the steps, "" if nothing has yet.
    """

    def __init__(self, on_step: Callable[[], None], on_restart: Callable[[], None]) -> None:
        self._on_step, self._on_restart = on_step, on_restart
        self._here = os.getpid(), threading.get_ident()
        self._counts: dict[int, int] = {}
        self._chosen: int | None = None
        self._marks = self._since = self._usual = 0  # of a profiler, optimizer's steps since its last, and usually
        self._final = False  # whether a profiler steps no more: many scripts profile only their first steps
        self.kind = ""

    @property
    def count(self) -> int:
        """Steps so far, those included from which the mark was chosen."""
        return min(self._counts.values(), default=0) if self._chosen is None else self._counts[self._chosen]

    def mark(self, kind: str, source: object = None) -> None:
        """Record a mark of one of ``KINDS``; those of forked processes and other threads are ignored."""
        key, is_other = id(source), kind != self.kind
        if (os.getpid(), threading.get_ident()) != self._here or (self.kind and is_other and not self._is_better(kind)):
            return
        if is_other or (self._chosen is not None and key not in self._counts):
            self._counts = dict.fromkeys(() if is_other else self._counts, 0)
            if self._chosen is not None:
                self._on_restart()
            self.kind, self._chosen = kind, None
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._chosen is None and min(self._counts.values()) >= (SEEN if kind == OPTIMIZER else 1):
            fewest = min(self._counts.values())
            self._chosen = [key for key, count in self._counts.items() if count == fewest][-1]
        if key == self._chosen:
            self._usual, self._since, self._marks = max(self._usual, self._since), 0, self._marks + 1
            self._on_step()

    def _is_better(self, kind: str) -> bool:
        """Whether another kind of mark has priority from now on."""
        if KINDS.index(kind) > KINDS.index(self.kind):
            return not (kind == PROFILER and self._final)
        if self.kind != PROFILER or kind != OPTIMIZER:
            return False
        self._since += 1  # an optimizer's step without the profiler's, and perhaps one too many
        self._final = self._marks > 1 and self._since > 2 * self._usual + 1
        return self._final


@contextmanager
def listening(marks: StepMarks) -> Iterator[None]:
    """Make ``step`` report to these marks."""
    _listeners.append(marks)
    try:
        yield
    finally:
        _listeners.remove(marks)


def watch_optimizers(marks: StepMarks) -> None:
    """Mark the end of ``step`` of every optimizer created from now on, for the rest of the process.

    PyTorch's own hooks come before the end of its annotation ``Optimizer.step``, which a step must hold whole.
    """
    import torch

    original = torch.optim.Optimizer.profile_hook_step
    stepping: list[object] = []

    def hooked(function: Callable[..., Any]) -> Callable[..., Any]:
        inner = original(function)

        @functools.wraps(inner)
        def step_and_mark(*args: Any, **kwargs: Any) -> Any:
            stepping.append(args[0])
            try:
                found = inner(*args, **kwargs)
            finally:
                stepping.pop()
            if not stepping:  # one optimizer may wrap another one, or call the step of its base class
                marks.mark(OPTIMIZER, args[0])
            return found

        return step_and_mark

    patch(torch.optim.Optimizer, profile_hook_step=staticmethod(hooked))


def watch_profilers(marks: StepMarks, own: type) -> None:
    """Mark ``step`` of the script's profilers, which do not start: a process can have one, and it is ours (``own``)."""
    import torch
    from torch.autograd.profiler_util import EventList

    cls: Any = torch.profiler.profile
    does_nothing = ("start", "stop", "__exit__", "export_chrome_trace", "export_stacks")
    idle: dict[str, Callable[[Any], Any]] = dict.fromkeys(does_nothing, lambda self: None)
    idle |= dict.fromkeys(("key_averages", "events"), lambda self: EventList([]))
    idle |= {"__enter__": lambda self: self, "step": lambda self: marks.mark(PROFILER)}

    def unless_own(original: Callable[..., Any], replaced: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) if isinstance(self, own) else replaced(self)

        return method

    patch(cls, **{name: unless_own(getattr(cls, name), replaced) for name, replaced in idle.items()})
