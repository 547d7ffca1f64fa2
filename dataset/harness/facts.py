"""Hardware facts by measurement: what large matrix products and copies reach, and what overlap costs."""

from __future__ import annotations

import os
import statistics
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .measure import barrier, gather


class Clock(Protocol):
    """Seconds of a call on the device."""

    def __call__(self, call: Any) -> float: ...


def measure(device: torch.device, clock: Clock) -> dict[str, Any]:
    """Facts of one device while all ranks measure at the same time: the mean over ranks.

    ``peak_flops`` in FLOP/s by dtype, ``memory_bandwidth_bytes_per_s`` (read plus written), ``memory_bytes`` (the
    node's share of one rank on CPU), ``op_latency_s`` of an op that does nothing, and with at least two ranks
    ``comm_compute_share`` (see ``comm_compute_share``).
    """
    dtypes = {"fp32": torch.float32}
    if device.type == "cuda":
        dtypes |= {"bf16": torch.bfloat16, "fp16": torch.float16}
    found = {
        **{f"peak_flops.{name}": _peak_flops(device, dtype, clock) for name, dtype in dtypes.items()},
        "memory_bandwidth_bytes_per_s": _bandwidth(device, clock),
        "op_latency_s": _op_latency(device, clock),
    }
    everyone = gather(found)
    mean = {key: statistics.fmean(each[key] for each in everyone) for key in found}
    result: dict[str, Any] = {"peak_flops": {name: mean.pop(f"peak_flops.{name}") for name in dtypes}, **mean}
    result["memory_bytes"] = _memory_bytes(device)
    if dist.get_world_size() > 1:
        result["comm_compute_share"] = comm_compute_share(device, clock)
    return result


def _peak_flops(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    best = 0.0
    for size in (512, 1024) if device.type == "cpu" else (4096, 8192):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        barrier()
        clock(lambda a=a, b=b: a @ b)
        seconds = min(clock(lambda a=a, b=b: a @ b) for _ in range(5))
        best = max(best, 2.0 * size**3 / seconds)
    return best


def _bandwidth(device: torch.device, clock: Clock) -> float:
    numel = 2**24 if device.type == "cpu" else 2**28
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    barrier()
    clock(lambda: target.copy_(source))
    return 8.0 * numel / statistics.median(clock(lambda: target.copy_(source)) for _ in range(7))


def _op_latency(device: torch.device, clock: Clock) -> float:
    x = torch.zeros(1, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    clock(many)
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
    """The slowest rank's seconds of a call that all begin together."""
    barrier()
    return float(max(gather(clock(call))))
