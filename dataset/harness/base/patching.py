"""Replacing functions of torch by those of the fake world, and what a CUDA device that is not there answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

MEMORY_BYTES = 80 * 10**9
CAPTURED_DEVICE = SimpleNamespace(  # properties of an H100
    name="captured device", major=9, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=132,
    L2_cache_size=50 * 2**20, warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    max_threads_per_block=1024, shared_memory_per_block_optin=232448, gcnArchName="", uuid="0",
)  # fmt: skip


def patch(owner: Any, **values: Any) -> None:
    """Set attributes of a module or class of torch."""
    for name, value in values.items():
        setattr(owner, name, value)


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes within the block."""
    before = {name: getattr(owner, name) for name in values}
    patch(owner, **values)
    try:
        yield
    finally:
        patch(owner, **before)


def always(value: Any) -> Callable[..., Any]:
    """A function that returns the value, whatever it is given."""
    return lambda *args, **kwargs: value


def cuda_answers(device_count: int, current_device: int) -> dict[str, Any]:
    """Results of functions of ``torch.cuda`` as if there were devices, by name."""
    return {
        "is_available": True, "is_initialized": True, "device_count": device_count, "current_device": current_device,
        "get_device_properties": CAPTURED_DEVICE, "get_device_capability": (9, 0), "get_arch_list": ["sm_90"],
        "is_bf16_supported": True, "_lazy_init": None, "set_device": None,
    }  # fmt: skip


class NoContext(nullcontext[None]):
    """Replaces guards of the current device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = 0


def cpu_of(device: Any) -> Any:
    """The CPU instead of a CUDA device; other arguments unchanged."""
    if isinstance(device, str):
        return "cpu" if device.split(":")[0] == "cuda" else device
    on_gpu = device.type == "cuda" if isinstance(device, torch.device) else type(device) is int
    return torch.device("cpu") if on_gpu else device
