"""Between the device and pinned memory of its host; without a GPU, from one place to another."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from .input_pool import Call, Maker, Pool


def _to_host(pool: Pool, numel: int) -> Call:
    host = _host(pool, numel)
    return Call(lambda x: host.copy_(x, non_blocking=True), lambda: (pool.take(numel),))


def _from_host(pool: Pool, numel: int) -> Call:
    here = torch.empty(numel, device=pool.device, dtype=pool.dtype)
    if pool.device.type == "cpu":
        return Call(here.copy_, lambda: (pool.take(numel),))
    host = _host(pool, numel)
    host.copy_(pool.take(numel))
    return Call(lambda: here.copy_(host, non_blocking=True))


def _host(pool: Pool, numel: int) -> Tensor:
    return torch.empty(numel, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")


MAKERS: MappingProxyType[str, Maker] = MappingProxyType({"to_host": _to_host, "from_host": _from_host})
