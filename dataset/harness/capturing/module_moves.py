"""``Module.to`` and its like for parameters that are fake: torch would swap tensors, which fake ones refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .patching import patch

_NEW = "_captured_as"  # attribute of a replaced parameter: its replacement, for modules that share it


def install() -> None:
    """Make modules apply functions to their parameters in this way."""
    patch(nn.Module, _apply=_apply)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for child in self.children():
            child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[name] = _applied(parameter, fn)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _applied(parameter: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    known = getattr(parameter, _NEW, None)
    if known is not None:
        return known
    with torch.no_grad():
        applied = fn(parameter)
    if applied is parameter:
        return parameter
    if isinstance(parameter, FakeTensor) and isinstance(applied, FakeTensor) and parameter.device == applied.device:
        parameter.data = applied
        return parameter
    replaced = nn.Parameter(applied, parameter.requires_grad)
    setattr(parameter, _NEW, replaced)
    return replaced
