"""Let Inductor's scheduler decide for a GPU on a machine without one, by tensors and properties of a device.

Only what is fused is decided: no code is generated, so neither Triton nor CUDA is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

_DEVICE = "cuda:0"
_PROPERTIES = SimpleNamespace(  # of an H100: what the scheduler asks for
    name="captured device", major=9, minor=0, total_memory=80 * 10**9, multi_processor_count=132,
    L2_cache_size=50 * 2**20, warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    max_threads_per_block=1024, shared_memory_per_block_optin=232448, gcnArchName="", uuid="0",
)  # fmt: skip


def on_device(graph: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A copy of a graph of framework ops on the CPU, and its fake inputs, as they are on a GPU."""
    made = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in made.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(_moved, node.meta["val"])
        node.kwargs = {name: torch.device(_DEVICE) if _is_device(each) else each for name, each in node.kwargs.items()}
    return made, [_moved(each) for each in inputs]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


def _moved(value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with value.fake_mode:
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, torch.device(_DEVICE))


@contextmanager
def device_answers() -> Iterator[None]:
    """``torch.cuda`` and Inductor find the device within the block."""
    state = torch.get_rng_state()
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": _PROPERTIES,
        "get_device_capability": (9, 0), "is_initialized": True, "_lazy_init": None, "set_device": None,
        "synchronize": None, "get_arch_list": ["sm_90"], "get_rng_state": state, "set_rng_state": None,
        "is_bf16_supported": True,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _always(value)))
        for name in ("device", "_DeviceGuard"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _NoContext))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        for owner in (CudaInterface, CudaInterface.Worker):
            told = staticmethod(_always(_PROPERTIES))
            stack.enter_context(mock.patch.object(owner, "get_device_properties", told))
        for name, value in (("is_triton_capable", True), ("raise_if_triton_unavailable", None)):
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(_always(value)), create=True))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", _always(True), create=True))
        yield


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _NoContext:
    """Replaces a guard of the current device."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass
