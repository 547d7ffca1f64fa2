"""Corrections of PyTorch for a fake device, where it behaves differently on a CPU or depends on values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
import torch.nn.utils.clip_grad as clip_grad
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import _sharding_prop
from torch.utils.data import DataLoader

from ..base import annotate
from ..base.patching import patch
from .distributed import install_shards
from .fake_tensors import FakeWorld, install_fused_kernels
from .recorder import COMPOSITE, OP


def install(world: FakeWorld, *, on_host: bool = False) -> None:
    """Install all corrections.

    Args:
        world: What records.
        on_host: Whether the script finds no GPU: then the CPU's own kernels are what runs.
    """
    patch(nn.Module, _apply=_apply)
    install_shards()
    _composite_ops(world)
    if not on_host:
        install_fused_kernels()
        _foreach_on_cpu()
    _data_loaders()
    _ddp(world)
    _scalers(world)
    _storages(world)
    _shardings(world)
    _processes()
    _compiles(world, on_host=on_host)
    autocast = _autocast_on_cpu(torch.autocast)
    for module in (torch, torch.amp, torch.amp.autocast_mode):
        patch(module, autocast=autocast)


def _foreach_on_cpu() -> None:
    """Optimizers use their fused and foreach forms, as for tensors of a device."""
    devices = foreach_utils._get_foreach_kernels_supported_devices()
    optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]
    patch(optimizers, _foreach_supported_types=[*optimizers._foreach_supported_types, FakeTensor])
    for module in (foreach_utils, clip_grad):
        patch(module, _has_foreach_support=lambda tensors, device: True)
    for module in (foreach_utils, optimizers):
        patch(module, _get_foreach_kernels_supported_devices=lambda: [*devices, "cpu"])


def _data_loaders() -> None:
    """Data is loaded in this process: worker processes would be outside the fake world."""
    make = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        off = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        off |= {"multiprocessing_context": None, "timeout": 0}
        kwargs = {name: off.get(name, value) for name, value in kwargs.items()}
        make(self, *args, **kwargs)

    patch(DataLoader, __init__=init)


def _ddp(world: FakeWorld) -> None:
    """DDP accepts modules on the CPU with ``device_ids``; its one-time work in the second step is not recorded."""
    reducer: Any = torch._C._distributed_c10d.Reducer
    make, rebuild = ddp.DistributedDataParallel.__init__, reducer._rebuild_buckets

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        make(self, module, None, None, *args, **kw)

    patch(ddp.DistributedDataParallel, __init__=init)
    patch(dist, _verify_params_across_processes=lambda *args: None)  # it would gather a tensor of every rank in a list
    patch(reducer, _rebuild_buckets=_unrecorded(world, rebuild))


def _processes() -> None:
    """Reject processes that a script starts: they would be outside the fake world."""

    def start(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "the script starts processes of its own, which cannot be captured: capture the script that each rank runs"
        )

    patch(BaseProcess, start=start)
    patch(os, fork=start, forkpty=start)


def _compiles(world: FakeWorld, *, on_host: bool) -> None:
    """``torch.compile`` reads regions; what that takes is imported at its first call."""
    plain = torch.compile

    def compile_(*args: Any, **kwargs: Any) -> Any:
        from . import compiled_regions

        compiled_regions.install(world, plain, on_host=on_host)
        return torch.compile(*args, **kwargs)

    patch(torch, compile=compile_)


def _unrecorded(world: FakeWorld, function: Any) -> Any:
    """A function that runs without being recorded."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with world.recorder.paused():
            return function(*args, **kwargs)

    return run


def _shardings(world: FakeWorld) -> None:
    """DTensor runs ops on full-size tensors to find shapes, once for each; this is not recorded."""
    shapes = "_propagate_tensor_meta_non_cached"
    patch(_sharding_prop, _are_we_tracing=lambda: False)
    propagator = _sharding_prop.ShardingPropagator
    patch(propagator, **{shapes: _unrecorded(world, getattr(propagator, shapes))})


def _scalers(world: FakeWorld) -> None:
    """A gradient scaler finds no overflow, and its optimizer steps."""
    scaler = torch.amp.GradScaler
    make = scaler.__init__

    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        make(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        world.recorder.wait_on_host(world.recorder.stream, "overflow found?", world.scope()[0])
        return optimizer.step(*args, **kwargs)

    patch(scaler, __init__=init, _maybe_opt_step=step)

    class CudaScaler(scaler):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("cuda", *args, **kwargs)

    patch(torch.cuda.amp, GradScaler=CudaScaler)
    patch(torch.cuda.amp.grad_scaler, GradScaler=CudaScaler)


def _storages(world: FakeWorld) -> None:
    """FSDP frees parameters by shrinking their storage."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        found = resize(self, size)
        world.recorder.resized(self)
        return found

    patch(torch.UntypedStorage, resize_=resize_)


def _autocast_on_cpu(autocast: Any) -> Any:
    """Autocast for CUDA as autocast for the CPU, on which the tensors are."""

    class autocast_on_cpu(autocast):  # type: ignore[misc]  # noqa: N801  # its name is torch's
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda" and not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float16
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return autocast_on_cpu


_NEW = "_captured_as"  # attribute of a replaced parameter: its replacement, for modules that share it


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module.to`` and its like for fake parameters: torch would swap tensors, which fake ones refuse."""
    for child in self.children() if recurse else ():
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
            if outer is not None:
                for mine, theirs in zip(outer, inside, strict=True):
                    mine.extend(theirs)
            elif writes:
                work = world.recorder.work((COMPOSITE, kind, tuple(dims), annotate.DTYPE_NAMES[dtype]))
                world.recorder.add((OP, work, -1, kind), reads, writes, scopes[0])

    patch(annotate, op=op)
