"""A fake CUDA device: ``torch.cuda`` answers as if it existed, and fake tensors stay on the CPU.

Kernels of the CPU stand for those of the device: shapes and types are what counts.  PyTorch is corrected where it
behaves differently on a CPU or depends on values.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
import torch.nn.utils.clip_grad as clip_grad
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor import _sharding_prop
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ..base import annotate
from ..base.patching import CAPTURED_DEVICE, MEMORY_BYTES, NoContext, always, cpu_of, cuda_answers, patch
from .distributed import NO_SPARSE, install_shards
from .fake_tensors import FakeWorld, install_attention, install_fused_kernels
from .recorder import COMPOSITE, COMPUTE, OP, Mark, Recorder

_SILENT = (  # functions of ``torch.cuda`` that do nothing
    "init", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all",
    "reset_max_memory_allocated", "ipc_collect", "set_per_process_memory_fraction", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip


class DevicesOnCpu(TorchFunctionMode):
    """Replaces CUDA devices in calls of torch by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.unflatten:  # dynamo cannot trace Python's own within a mode
            return torch.unflatten(*args, **kwargs)
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cpu")
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], Tensor):
            args = (args[0], cpu_of(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs["device"] = cpu_of(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def install_device(local_size: int, recorder: Recorder) -> None:
    """Make ``torch.cuda`` answer for ``local_size`` devices, whose streams and events are recorded."""
    _worlds[:] = [recorder]
    local_rank = int(os.environ["LOCAL_RANK"])
    answers: dict[str, Any] = {
        **cuda_answers(local_size, local_rank),
        "get_device_name": CAPTURED_DEVICE.name, "is_current_stream_capturing": False,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES), "memory_summary": "", "utilization": 0,
        "memory_stats": defaultdict(int), **dict.fromkeys(_SILENT),
    }  # fmt: skip
    patch(torch.cuda, **{name: always(value) for name, value in answers.items()}, device=NoContext, device_of=NoContext)
    state = torch.get_rng_state
    patch(torch.cuda, get_rng_state=lambda *_, **__: state(), get_rng_state_all=lambda: [state()])
    patch(torch.version, cuda="12.8")
    followed = {
        "Stream": Stream, "Event": Event, "stream": StreamContext, "StreamContext": StreamContext,
        "current_stream": current_stream, "default_stream": lambda device=None: Stream(name=COMPUTE),
        "synchronize": lambda device=None: recorder.wait_on_host(None, "synchronize", 0),
    }  # fmt: skip
    patch(torch.cuda, **followed)
    patch(torch.cpu, **{name: _other(value) for name, value in followed.items()})
    patch(torch, Stream=Stream, Event=Event)
    patch(torch._C, _get_accelerator=lambda *args: torch.device("cuda", local_rank))
    patch(torch.accelerator, **{name: _other(followed[name]) for name in ("current_stream", "synchronize")})
    patch(Tensor, record_stream=always(None), is_pinned=always(False))


def _other(value: Any) -> Any:
    """Another object for the same function: dynamo wants one for each name of ``torch``."""
    return value if isinstance(value, type) else lambda *args, **kwargs: value(*args, **kwargs)


_worlds: list[Recorder] = []  # the recorder of this process


class Stream:
    """Replaces ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **more: Any) -> None:
        self.name, self.priority, self.device = name or next(_worlds[0].stream_names), priority, device
        self.cuda_stream = self.stream_id = id(self)
        self._outer: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        _worlds[0].wait(self.name, event.mark)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        _worlds[0].wait_on_host(self.name, "stream synchronize", 0)

    query = always(True)

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
        self.mark: Mark = {}, []

    def record(self, stream: Stream | None = None) -> Event:
        self.mark = _worlds[0].mark((stream or current_stream()).name)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _worlds[0].wait_on_host(_worlds[0].stream, "event synchronize", 0)

    query, elapsed_time = always(True), always(1.0)


class StreamContext:
    """Replaces ``torch.cuda.StreamContext`` and ``torch.cuda.stream``, for dynamo a class; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream or nullcontext()

    def __enter__(self) -> Any:
        return self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(None, None, None)


def current_stream(device: Any = None) -> Stream:
    return Stream(name=_worlds[0].stream)


def install_corrections(world: FakeWorld, *, on_host: bool = False) -> None:
    """Install all corrections; ``on_host``: the script finds no GPU, and the CPU's own kernels are what runs."""
    patch(nn.Module, _apply=_apply)
    install_shards()
    _composite_ops(world)
    if not on_host:
        install_fused_kernels()
        install_attention(world.note)
        # Optimizers use their fused and foreach forms, as for tensors of a device.
        devices = foreach_utils._get_foreach_kernels_supported_devices()
        optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]
        patch(optimizers, _foreach_supported_types=[*optimizers._foreach_supported_types, FakeTensor])
        for module in (foreach_utils, clip_grad):
            patch(module, _has_foreach_support=lambda tensors, device: True)
        for module in (foreach_utils, optimizers):
            patch(module, _get_foreach_kernels_supported_devices=lambda: [*devices, "cpu"])
    _one_process()
    _mixed_precision(world)
    plain, make, resize = torch.compile, ddp.DistributedDataParallel.__init__, torch.UntypedStorage.resize_

    def compile_(*args: Any, **kwargs: Any) -> Any:
        from . import compiled_regions  # at the first call: it takes a second

        compiled_regions.install(world, plain, on_host=on_host)
        torch._dynamo.eval_frame.skip_code(DevicesOnCpu.__torch_function__.__code__)  # inlined, but no region itself
        return torch.compile(*args, **kwargs)

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        """DDP accepts modules on the CPU with ``device_ids``."""
        for name, part in module.named_modules():
            if getattr(part, "sparse", False):
                raise RuntimeError(f"{NO_SPARSE}, got sparse=True in {name or type(module).__name__}")
        make(self, module, None, None, *args, **kw)

    def resize_(self: Any, size: int) -> Any:
        """FSDP frees parameters by shrinking their storage."""
        found = resize(self, size)
        world.recorder.resized(self)
        return found

    patch(torch, compile=compile_)
    patch(ddp.DistributedDataParallel, __init__=init)
    patch(dist, _verify_params_across_processes=lambda *args: None)  # it would gather a tensor of every rank in a list
    patch(torch.UntypedStorage, resize_=resize_)
    # DDP's one-time work in the second step is not recorded, nor how DTensor finds shapes by ops on full-size tensors.
    reducer, propagator = torch._C._distributed_c10d.Reducer, _sharding_prop.ShardingPropagator
    for owner, name in ((reducer, "_rebuild_buckets"), (propagator, "_propagate_tensor_meta_non_cached")):
        patch(owner, **{name: world.recorder.paused()(getattr(owner, name))})
    patch(_sharding_prop, _are_we_tracing=lambda: False)
    _on_the_device_alone()


def _on_the_device_alone() -> None:
    """Parts of PyTorch that look whether a tensor is on a GPU."""
    device_of = _init_utils._get_compute_device
    patch(_init_utils, _get_compute_device=lambda module, ignored, _, *more: device_of(module, ignored, None, *more))
    patch(nn.SyncBatchNorm, forward=_synchronised_norm)
    patch(ddp.DistributedDataParallel, _passing_sync_batchnorm_handle=always(None))


class _SynchronisedNorm(torch.autograd.Function):
    """A batch norm of all ranks: the forward gathers statistics, the backward adds sums of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, norm: nn.SyncBatchNorm) -> Tensor:
        mine = x.new_empty(2 * x.shape[1] + 1, dtype=torch.float32)
        everyone = mine.new_empty(mine.numel() * dist.get_world_size(norm.process_group))
        dist.all_gather_into_tensor(everyone, mine, norm.process_group)
        kept = norm.running_mean, norm.running_var
        out, *saved = torch.native_batch_norm(x, weight, bias, *kept, True, 0.1, norm.eps)
        ctx.save_for_backward(x, weight, *kept, *saved)
        ctx.norm = norm
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, *saved = ctx.saved_tensors
        dist.all_reduce(x.new_empty(2 * x.shape[1], dtype=torch.float32), group=ctx.norm.process_group)
        needed = [True, weight is not None, weight is not None]
        return *torch.ops.aten.native_batch_norm_backward(gradient, x, weight, *saved, True, ctx.norm.eps, needed), None


def _synchronised_norm(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """The forward of ``SyncBatchNorm``, whose kernels are CUDA's alone."""
    if self.training and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
    if not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
        own, kept = (self.weight, self.bias), (self.running_mean, self.running_var)
        batch = self.training or kept[0] is None
        return nn.functional.batch_norm(x, *kept, *own, batch, 0.1, self.eps)
    made: Tensor = _SynchronisedNorm.apply(x, self.weight, self.bias, self)
    return made


def _one_process() -> None:
    """Load data in this process, and refuse others that a script starts: they would be outside the fake world."""
    make = DataLoader.__init__

    off = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
    off |= {"multiprocessing_context": None, "timeout": 0}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{name: off.get(name, value) for name, value in kwargs.items()})

    def start(*args: Any, **kwargs: Any) -> None:
        why = "which cannot be captured: capture the script that each rank runs"
        raise RuntimeError(f"the script starts processes of its own, {why}")

    patch(DataLoader, __init__=init)
    patch(BaseProcess, start=start)
    patch(os, fork=start, forkpty=start)


def _mixed_precision(world: FakeWorld) -> None:
    """Autocast for CUDA is autocast for the CPU; a gradient scaler finds no overflow, and its optimizer steps."""
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    make = scaler.__init__

    class autocast_on_cpu(autocast):  # type: ignore[misc,valid-type]  # noqa: N801  # its name is torch's
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda" and not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float16
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    class CudaScaler(scaler):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("cuda", *args, **kwargs)

    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        make(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        world.recorder.wait_on_host(world.recorder.stream, "overflow found?", world.scope()[0])
        return optimizer.step(*args, **kwargs)

    patch(scaler, __init__=init, _maybe_opt_step=step)
    for module in (torch.cuda.amp, torch.cuda.amp.grad_scaler):
        patch(module, GradScaler=CudaScaler)
    for module in (torch, torch.amp, torch.amp.autocast_mode):
        patch(module, autocast=autocast_on_cpu)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module.to`` and its like for fake parameters: torch would swap tensors, which fake ones refuse."""

    def applied(parameter: Any) -> Any:
        if hasattr(parameter, "_captured_as"):  # its replacement, for modules that share it
            return parameter._captured_as
        with torch.no_grad():
            made = fn(parameter)
        if made is parameter:
            return parameter
        if isinstance(parameter, FakeTensor) and isinstance(made, FakeTensor) and parameter.device == made.device:
            parameter.data = made
            return parameter
        parameter._captured_as = nn.Parameter(made, parameter.requires_grad)
        return parameter._captured_as

    for child in self.children() if recurse else ():
        child._apply(fn)
    tables: Any = (self._parameters, applied), (self._buffers, fn)
    for table, change in tables:
        table.update({name: change(each) for name, each in table.items() if each is not None})
    return self


def _composite_ops(world: FakeWorld) -> None:
    """An op that the harness annotates in its own models is one node, as in its traces; collectives inside are not."""

    @contextmanager
    def op(kind: str, dims: Iterable[int], dtype: torch.dtype) -> Iterator[None]:
        outer, inside = world.composite, ([], [], [])  # type: ignore[var-annotated]
        world.composite = inside
        try:
            yield
        finally:
            world.composite = outer
            reads, writes, scopes = inside
            for mine, theirs in zip(outer or (), inside, strict=False):
                mine.extend(theirs)
            if outer is None and writes:
                work = world.recorder.work((COMPOSITE, kind, tuple(dims), annotate.DTYPE_NAMES[dtype]))
                world.recorder.add((OP, work, -1, kind), reads, writes, scopes[0])

    patch(annotate, op=op)
