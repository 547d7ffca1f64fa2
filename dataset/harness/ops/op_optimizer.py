"""The optimizer's step, on the device or on the host, and the norm of all gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MappingProxyType

import torch

from .input_pool import Call, Maker, Pool, shares


def _adamw(pool: Pool, numel: int, tensors: int) -> Call:
    return Call(_step(pool.device, pool.dtype, numel, tensors))


def _adamw_host(pool: Pool, numel: int, tensors: int) -> Call:
    """AdamW on the host: with this rank's share of the cores beside a GPU, otherwise with the rank's own cores."""
    step = _step(torch.device("cpu"), pool.dtype, numel, tensors)
    if pool.device.type == "cpu":
        return Call(step, on_host=True)
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        step()
        torch.set_num_threads(before)

    return Call(run, on_host=True)


def _step(device: torch.device, dtype: torch.dtype, numel: int, tensors: int) -> Callable[[], object]:
    sizes = shares(numel, tensors)
    block = torch.empty(2, numel, device=device, dtype=dtype).uniform_(-0.5, 0.5)
    parameters = [torch.nn.Parameter(part) for part in block[0].split(sizes)]
    for parameter, gradient in zip(parameters, block[1].split(sizes), strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step


def _grad_norm(pool: Pool, numel: int, tensors: int) -> Call:
    each = max(1, numel // tensors)
    return Call(
        lambda *grads: torch.nn.utils.get_total_norm(grads), lambda: tuple(pool.take(each) for _ in range(tensors))
    )


MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {"adamw": _adamw, "adamw_host": _adamw_host, "grad_norm": _grad_norm}
)
