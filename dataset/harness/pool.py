"""Inputs of ops: views into one large block that each call reads at another place, so that weights and activations
come from memory, as in a training step, and making them costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class Pool:
    """Random numbers to read inputs from, without copying.

    Args:
        device: Where.
        dtype: Of the inputs.
        numel: Least size of the block; it grows to hold an op's inputs twice.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int = 2**24) -> None:
        self.device, self.dtype = device, dtype
        self._block = self._make(numel)
        self._next = 0

    def _make(self, numel: int) -> Tensor:
        return torch.empty(numel, device=self.device, dtype=self.dtype).uniform_(-0.5, 0.5)

    def take(self, *shape: int) -> Tensor:
        """The next numbers, shaped; call after call they are other ones, until the block is through."""
        numel = 1
        for size in shape:
            numel *= size
        if 2 * numel > self._block.numel():
            self._block, self._next = self._make(2 * numel), 0
        if self._next + numel > self._block.numel():
            self._next = 0
        view = self._block[self._next : self._next + numel].view(shape)
        self._next += -(-numel // 64) * 64
        return view

    def ids(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device)


@dataclass(frozen=True)
class Call:
    """One op: ``run(*inputs())`` runs it once; making the inputs is no part of it."""

    run: Callable[..., object]
    inputs: Callable[[], Inputs] = tuple


Maker = Callable[..., Call]  # of a pool and an op's dims


def shares(count: int, groups: int) -> list[int]:
    """As equal parts of a whole as can be."""
    each, more = divmod(count, groups)
    return [each + (index < more) for index in range(groups)]
