"""One round of one run: build, warm up, time steps, and in the last round profile some.

The iteration time of a step is the longest that any rank took from the end of its previous step to the end of this
one, steps following each other without a barrier (one barrier before the first): the steady state.  On CUDA a step ends
when the host sees that the device is through, as in loops that read the loss of every step: no step's launches begin
while the device still runs the one before.
"""

from __future__ import annotations

import gc
import gzip
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from .. import annotate
from ..ops.input_pool import DTYPES, Call
from ..ops.op_products import precision, scaled_product
from ..ranks import barrier, gather
from .call_timing import Clock


class Training(Protocol):
    """A job on this rank, computed or slept."""

    device: torch.device

    def step(self) -> Any:
        """Run one training step; return its loss, still on the device."""


class StepClock:
    """Ends of steps: the times when this rank's device has finished."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._ends: list[float] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(self._now())

    def seconds(self) -> list[float]:
        """Between consecutive marks."""
        return [end - start for start, end in pairwise(self._ends)]


def timed_steps(training: Training, steps: int) -> tuple[list[float], list[Any]]:
    """Iteration time of each step over all ranks, and this rank's losses (still on the device)."""
    barrier()
    clock, losses = StepClock(training.device), []
    clock.mark()
    for _ in range(steps):
        losses.append(training.step())
        clock.mark()
    return [max(column) for column in zip(*gather(clock.seconds()), strict=True)], losses


LEAD_S = 0.05  # lead time with which all ranks learn the common start of a step


def noted_steps(training: Training, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Seconds of steps that all ranks begin at one time, and what they did when.

    Returns:
        Seconds from the common start to the last rank's end, of each step; and a record of each: ``begin``, per rank
        ``spans`` (see ``annotate.Span``) and ``ends``, in monotonic seconds, and ``cpu``, the part of all cores'
        time that the ranks computed.
    """
    seconds, records = [], []
    for _ in range(steps):
        spans: list[annotate.Span] = []
        gc.collect()
        gc.disable()
        begin = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.broadcast(begin, 0)
        before = time.process_time()
        time.sleep(max(0.0, begin.item() - time.monotonic()))
        with annotate.noting(spans):
            training.step()
        end = time.monotonic()
        ranks = gather((spans, end, time.process_time() - before))
        gc.enable()
        seconds.append(max(end for _, end, _ in ranks) - begin.item())
        used = sum(computed for _, _, computed in ranks) / (seconds[-1] * (os.cpu_count() or 1))
        records.append(
            {"begin": begin.item(), "spans": [s for s, _, _ in ranks], "ends": [e for _, e, _ in ranks], "cpu": used}
        )
    return seconds, records


class StepTracer:
    """Profiles steps one after the other: ``begin`` and ``end`` of each, within the block.

    Kineto records every step.  The execution trace, which slows small ops several times more than Kineto does, is on
    in the last one alone: durations are to be read from the steps before it, dependencies from it.

    Args:
        device: Where this rank computes.
        steps: How many are wanted; one more comes before them, the profiler's own warm-up.
        folder: Where the traces are written.
        rank: Of the files' names.
    """

    def __init__(self, device: torch.device, steps: int, folder: Path, rank: int) -> None:
        self.left = steps + 1
        self._names = {"kineto": f"rank{rank}.kineto.json", "et": f"rank{rank}.et.json"}
        self._folder, self._clock = folder, StepClock(device)
        activities = [ProfilerActivity.CPU]
        config = None
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(str(folder / self._names["et"]))
        self._profiler = Profiler(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(folder / self._names["kineto"])),
            record_shapes=True,
            experimental_config=config,
        )
        self._stack = ExitStack()

    def __enter__(self) -> StepTracer:
        self._stack.callback(self._observer.unregister_callback)
        self._stack.enter_context(annotate.recording())
        self._stack.enter_context(self._profiler)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """A step begins, on all ranks at once."""
        if self.left == 1:
            self._observer.start()
        barrier()  # starting and stopping the profiler takes long, and differs between ranks
        self._clock.mark()

    def end(self) -> None:
        """A step ends on this rank."""
        self._clock.mark()
        if self.left == 1:
            self._observer.stop()
        self._profiler.step()
        self.left -= 1

    def written(self) -> tuple[list[float], dict[str, str]]:
        """This rank's seconds of each step, and the traces' names in the folder, by format; after the block."""
        names = {key: _compress(self._folder / name) for key, name in self._names.items()}
        return self._clock.seconds()[2::2], names


class Profiler(profile):
    """The harness' own profiler: a script may have profilers of its own."""


def profiled_steps(training: Training, steps: int, folder: Path, rank: int) -> tuple[list[float], dict[str, str]]:
    """Profile some steps; the traces' names within the folder, by format, are the second result."""
    with StepTracer(training.device, steps, folder, rank) as tracer:
        while tracer.left:
            tracer.begin()
            training.step()
            tracer.end()
    own, names = tracer.written()
    return [max(column) for column in zip(*gather(own), strict=True)], names


def _compress(path: Path) -> str:
    packed = path.with_name(path.name + ".gz")
    with path.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target, 2**20)
    path.unlink()
    return packed.name


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
