"""Training steps of a script, found by the steps of its optimizer.

A step lasts from the end of one call of an optimizer's ``step`` to the end of the next call of the same optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .fake_tensors import FakeWorld


class Captured(BaseException):
    """The step that was asked for is over: the script need not go on."""


class Steps:
    """Starts the recording after so many steps, and ends the script a step later.

    Args:
        world: What records.
        warm_up: Steps that come before.
        leave: Ends the process with the step written down, where the script catches ``Captured`` and goes on.

    Attributes:
        seen: Steps so far.
        done: Whether the step that was asked for is over.
    """

    def __init__(self, world: FakeWorld, warm_up: int, leave: Callable[[], None]) -> None:
        self._world, self._warm_up, self._leave = world, warm_up, leave
        self._marker: Any = None  # the optimizer whose steps count
        self._depth = 0
        self.seen = 0
        self.done = False
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        self._world.in_optimizer += 1

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        self._world.in_optimizer -= 1
        if self._depth:
            return  # within the step of another optimizer, as ZeRO's
        if self._marker is None:
            self._marker = optimizer
        if optimizer is not self._marker:
            return
        if self.done:
            self._leave()
        self.seen += 1
        if self._world.recorder.active:
            self.done, self._world.recorder.active = True, False
            raise Captured
        if self.seen > self._warm_up - 1:
            self._world.collectives.start()
            self._world.recorder.start()
