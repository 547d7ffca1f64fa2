"""Hardware facts by measurement: the throughput of large matrix products and copies, and the cost of overlap."""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..base.ranks import barrier, gather
from ..ops.input_pool import DTYPES, Call
from ..ops.op_products import precision, scaled_product
from .call_timing import Clock

_SECONDS = 0.1  # for one fact, on CUDA


def measure_facts(device: torch.device, clock: Clock, dtypes: Collection[str] = ()) -> dict[str, Any]:
    """Facts of one device while all ranks measure at the same time: the mean over ranks.

    ``peak_flops`` in FLOP/s by dtype, ``memory_bandwidth_bytes_per_s`` (read plus written), ``memory_bytes`` (the
    node's share of one rank on CPU), ``op_latency_s`` of an op that does nothing, and with at least two ranks
    ``comm_compute_share`` (see ``comm_compute_share``).

    Args:
        dtypes: Of the ops that are measured: on a CPU, peaks of others than fp32 are measured only for them.
    """
    peaks = _peaks(device, clock, dtypes)
    found = {
        **{f"peak_flops.{name}": peak for name, peak in peaks.items()},
        "memory_bandwidth_bytes_per_s": _bandwidth(device, clock),
        "op_latency_s": _op_latency(device, clock),
    }
    everyone = gather(found)
    mean = {key: statistics.fmean(each[key] for each in everyone) for key in found}
    result: dict[str, Any] = {"peak_flops": {name: mean.pop(f"peak_flops.{name}") for name in peaks}, **mean}
    result["memory_bytes"] = _memory_bytes(device)
    if dist.get_world_size() > 1:
        result["comm_compute_share"] = comm_compute_share(device, clock)
    return result


def _peaks(device: torch.device, clock: Clock, dtypes: Collection[str]) -> dict[str, float]:
    """Measure the peak by dtype, for the dtypes in which this GPU has products."""
    if device.type == "cpu":
        return {name: _peak_flops(device, name, clock) for name in DTYPES if name == "fp32" or name in dtypes}
    peaks = {name: _peak_flops(device, name, clock) for name in DTYPES}
    capability = torch.cuda.get_device_capability(device)
    for name, since in (("tf32", (8, 0)), ("fp8", (8, 9))):
        if capability >= since:
            with suppress(RuntimeError):
                peaks[name] = _peak_flops(device, name, clock)
    return peaks


def _peak_flops(device: torch.device, dtype: str, clock: Clock) -> float:
    best = 0.0
    for size in (512, 1024) if device.type == "cpu" else (4096, 8192):
        call = _product(device, dtype, size)
        barrier()
        with torch.no_grad(), precision(dtype):
            clock(call.run)
            seconds = min(clock.samples(call, 5, _SECONDS).device)
        best = max(best, 2.0 * size**3 / seconds)
    return best


def _product(device: torch.device, dtype: str, size: int) -> Call:
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if dtype == "fp8":
        product = scaled_product(device, fast=True)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return Call(lambda: product(a, b.t()))
    if dtype != "tf32":
        a, b = a.to(DTYPES[dtype]), b.to(DTYPES[dtype])
    return Call(lambda: a @ b)


def _bandwidth(device: torch.device, clock: Clock) -> float:
    numel = 2**24 if device.type == "cpu" else 2**28
    source, target = torch.rand(numel, device=device), torch.empty(numel, device=device)
    barrier()
    clock(target.copy_, source)
    return 8.0 * numel / statistics.median(clock.samples(Call(lambda: target.copy_(source)), 7, _SECONDS).device)


def _op_latency(device: torch.device, clock: Clock) -> float:
    """Measure the latency of an op on the device alone, if the device is not the host."""
    x = torch.zeros(1, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    clock(many)
    if device.type == "cuda":
        return statistics.median(clock.samples(Call(lambda: x.add_(1.0)), 1, _SECONDS).device)
    return clock(many) / calls


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def comm_compute_share(device: torch.device, clock: Clock, num_bytes: int = 2**22, repeats: int = 7) -> float:
    """Part of an all-reduce's time by which it slows compute that runs beside it, between 0 and 1.

    ``(t_both - t_compute) / t_comm`` with about three times as much compute as communication, medians over
    interleaved repeats, the slowest rank of each.
    """
    message = torch.zeros(num_bytes // 4, device=device)
    size = 256 if device.type == "cpu" else 2048
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    t_comm = statistics.median(_together(lambda: dist.all_reduce(message), clock) for _ in range(repeats))
    one = statistics.median(_together(lambda: a @ b, clock) for _ in range(repeats))
    count = max(1, int(3 * t_comm / one))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    pairs = [(_together(compute, clock), _together(both, clock)) for _ in range(repeats)]
    t_compute, t_both = (statistics.median(column) for column in zip(*pairs, strict=True))
    return float(min(1.0, max(0.0, (t_both - t_compute) / t_comm)))


def _together(call: Any, clock: Clock) -> float:
    """The slowest rank's seconds of a call that all ranks start together."""
    barrier()
    return float(max(gather(clock(call))))
