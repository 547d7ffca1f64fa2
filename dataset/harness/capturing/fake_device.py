"""A fake CUDA device: ``torch.cuda`` answers as if it existed, and fake tensors stay on the CPU.

Kernels of the CPU stand for those of the device: shapes and types are what counts.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..base.patching import CAPTURED_DEVICE, MEMORY_BYTES, NoContext, always, cuda_answers, patch
from .fake_tensors import attention, cpu_of, dropout, rms_norm
from .recorder import COMPUTE, Recorder

ATTENTION = torch.nn.functional.scaled_dot_product_attention  # context parallelism puts another in its place
_SILENT = (  # functions of ``torch.cuda`` that do nothing
    "init", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all",
    "reset_max_memory_allocated", "ipc_collect", "set_per_process_memory_fraction", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip


class DevicesOnCpu(TorchFunctionMode):
    """Replaces CUDA devices in calls of torch by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func in (torch.rms_norm, torch.nn.functional.rms_norm):
            return rms_norm(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            return dropout(*args, **kwargs)
        if func is ATTENTION:
            return attention(func, args, kwargs)
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cpu")
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], Tensor):
            args = (args[0], cpu_of(args[1]), *args[2:])
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": cpu_of(device)}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def install(local_size: int) -> None:
    """Make ``torch.cuda`` answer for ``local_size`` devices."""
    local_rank = int(os.environ["LOCAL_RANK"])
    answers: dict[str, Any] = {
        **cuda_answers(local_size, local_rank),
        "get_device_name": CAPTURED_DEVICE.name, "is_current_stream_capturing": False,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES), "memory_summary": "", "utilization": 0,
        "memory_stats": defaultdict(int), **dict.fromkeys(_SILENT),
    }  # fmt: skip
    patch(torch.cuda, **{name: always(value) for name, value in answers.items()})
    patch(torch.cuda, device=NoContext, device_of=NoContext)
    patch(torch.cuda, get_rng_state=lambda *args, **kwargs: torch.get_rng_state())
    patch(torch.cuda, get_rng_state_all=lambda: [torch.get_rng_state()])
    patch(torch.version, cuda="12.8")
    followed = {
        "Stream": Stream, "Event": Event, "stream": StreamContext,
        "StreamContext": StreamContext, "current_stream": current_stream,
        "default_stream": default_stream, "synchronize": synchronize,
    }  # fmt: skip
    patch(torch.cuda, **followed)
    patch(torch.cpu, **{name: _other(value) for name, value in followed.items()})
    patch(torch, Stream=Stream, Event=Event)
    patch(torch._C, _get_accelerator=lambda *args: torch.device("cuda", local_rank))
    others = {name: _other(followed[name]) for name in ("current_stream", "synchronize")}
    patch(torch.accelerator, **others)
    patch(Tensor, record_stream=lambda self, stream: None, is_pinned=lambda self, device=None: False)


def _other(value: Any) -> Any:
    """Another object for the same function: dynamo wants one for each name of ``torch``."""
    return value if isinstance(value, type) else lambda *args, **kwargs: value(*args, **kwargs)


_worlds: list[Recorder] = []  # the recorder of this process


def follow_streams(recorder: Recorder) -> None:
    """Connect streams and events to a recorder."""
    _worlds[:] = [recorder]


class Stream:
    """Replaces ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **more: Any) -> None:
        self.name = name or _worlds[0].new_stream()
        self.priority, self.device, self.cuda_stream, self.stream_id = priority, device, id(self), id(self)
        self._outer: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            _worlds[0].wait(self.name, event.mark)

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _worlds[0].wait_on_host(self.name, "stream synchronize", 0)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._outer.append(_worlds[0].stream)
        _worlds[0].stream = self.name
        return self

    def __exit__(self, *error: Any) -> None:
        _worlds[0].stream = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mark: Any = None

    def record(self, stream: Stream | None = None) -> Event:
        self.mark = _worlds[0].mark(stream.name if stream is not None else _worlds[0].stream)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _worlds[0].wait_on_host(_worlds[0].stream, "event synchronize", 0)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class StreamContext:
    """Replaces ``torch.cuda.StreamContext`` and ``torch.cuda.stream``; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        return None if self._stream is None else self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__()


def current_stream(device: Any = None) -> Stream:
    """The current stream."""
    return Stream(name=_worlds[0].stream)


def default_stream(device: Any = None) -> Stream:
    """The stream on which a script computes by default."""
    return Stream(name=COMPUTE)


def synchronize(device: Any = None) -> None:
    """Make the host wait for all streams."""
    _worlds[0].wait_on_host(None, "synchronize", 0)
