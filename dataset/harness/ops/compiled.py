"""Composite ops compiled with ``torch.compile``, if a plan requests it: one or two kernels instead of one per step.

Each shape is compiled on its own, by PyTorch's own compiler, when it is met first.  Every shape has a function of its
own too: PyTorch counts the shapes of a function, and beyond eight runs it as it is written, without a word (and the
setting of that limit does not reach the thread in which autograd runs on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..base.plan_error import HarnessError

F = TypeVar("F", bound=Callable[..., Any])
BACKEND = "inductor"


class _State:
    active = False  # for the whole process: threads of autograd call composites too


def composite(function: F) -> F:
    """A function of tensors and plain numbers that runs compiled once ``enable`` was called."""
    return _composite(function, function)


def composite_as(whole: F) -> Callable[[F], F]:
    """Like ``composite``, with ``whole`` as the function to compile, if the compiler refuses the written one."""
    return lambda function: _composite(function, whole)


def _composite(function: F, whole: F) -> F:
    made: dict[Any, Callable[..., Any]] = {}

    @wraps(function)
    def run(*args: Any) -> Any:
        if not _State.active:
            return function(*args)
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in args)
        found = made.get(key)
        if found is None:
            made[key] = found = _compile(whole, len(made))
        return found(*args)

    return cast(F, run)


def _compile(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    plain = cast(FunctionType, function)
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{number}")
    own = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    found: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True, backend=BACKEND)
    return found


def enable(device: torch.device) -> None:
    """Make composites of this process run compiled from now on.

    Raises:
        HarnessError: If nothing can be compiled here.
    """
    _State.active = True
    try:
        found = _trial(torch.ones(4, 64, device=device))
        if found.tolist() != [192.0] * 4:
            raise HarnessError(f"got {found.tolist()} for 64 times 3")
    except Exception as error:  # whatever a compiler that is missing or broken raises
        _State.active = False
        why = " ".join(str(error).split())
        raise HarnessError(
            f"compile needs a compiler that works here (gcc or g++, on a GPU also Triton), got "
            f"{type(error).__name__}: {why:.200}"
        ) from None


@composite
def _trial(x: Tensor) -> Tensor:
    return (2 * x + 1).sum(-1)
