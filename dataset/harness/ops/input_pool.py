"""Inputs of ops: views into one large block that each call reads at another place, so that weights and activations
come from memory, as in a training step, and making them costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
NARROW = MappingProxyType({"tf32": torch.float32, "fp8": torch.float8_e4m3fn})  # of matrix products of GPUs alone
_CACHES = 8  # so many times a GPU's cache: what a call reads has left the cache since the last one that read it


class Pool:
    """Random numbers from which inputs are read without copying.

    ``name`` is a key of ``DTYPES`` or ``NARROW``; the block has at least ``numel``, and grows to hold inputs twice.
    """

    def __init__(self, device: torch.device, name: str, numel: int = 2**24) -> None:
        self.device, self.name, self.dtype = device, name, {**DTYPES, **NARROW}[name]
        self._least = max(numel, _CACHES * _cache_bytes(device) // self.dtype.itemsize)
        self._block = self._make(self._least)
        self._next = 0

    def _make(self, numel: int) -> Tensor:
        first = torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype
        return torch.empty(numel, device=self.device, dtype=first).uniform_(-0.5, 0.5).to(self.dtype)

    def take(self, *shape: int) -> Tensor:
        """The next numbers, shaped; call after call they are other ones, until the block is through."""
        numel = math.prod(shape)
        if 2 * numel > self._block.numel():
            self.clear()
            self._block = self._make(max(2 * numel, self._least))
        if self._next + numel > self._block.numel():
            self._next = 0
        view = self._block[self._next : self._next + numel].view(shape)
        self._next += -(-numel // 64) * 64
        return view

    def clear(self) -> None:
        """Free the block's memory; the next ``take`` allocates another."""
        self._block, self._next = self._block.new_empty(0), 0

    def turned(self, *shape: int) -> Tensor:
        """The next numbers, whose last two dimensions are those of memory, transposed."""
        return self.take(*shape).transpose(-1, -2)

    def ids(self, count: int, below: int) -> Tensor:
        """So many whole numbers below a bound."""
        return torch.randint(below, (count,), device=self.device)


def _cache_bytes(device: torch.device) -> int:
    """Size of a GPU's last-level cache in bytes; 0 if unknown."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


@dataclass(frozen=True)
class Call:
    """One op: ``run(*inputs())`` runs it once; making the inputs is not timed.

    ``on_host``: it is the host that computes, whatever the device.
    ``fresh``: on a CPU, measure it also with fresh memory for its results.  Within a training step many results go to
    memory that the process has just obtained from the system, and page faults take several times as long as the op.
    """

    run: Callable[..., object]
    inputs: Callable[[], Inputs] = tuple
    on_host: bool = False
    fresh: bool = False


Run = Callable[..., object]
# Of a pool and an op's dims: a call; or what runs, and of each input its shape in the pool, or what makes it.
Maker = Callable[..., Call | tuple[object, ...]]


def shares(count: int, groups: int) -> list[int]:
    """Split a whole into parts that are as equal as possible."""
    each, more = divmod(count, groups)
    return [each + (index < more) for index in range(groups)]
