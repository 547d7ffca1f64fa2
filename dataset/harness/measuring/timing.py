"""Seconds of steps, and of single calls: of the device, and on CUDA also of the host that issues them.

The iteration time of a step is the longest that any rank took from the end of its previous step to the end of this
one, steps following each other without a barrier (one barrier before the first): the steady state.  On CUDA a step ends
when the host sees that the device is through, as in loops that read the loss of every step: no step's launches begin
while the device still runs the one before.

A GPU runs what its stream holds, one kernel after the other, while the host issues the next ones.  Where the host takes
longer than the kernels do, marks between single calls show the host.  So a train of calls is issued behind a spin,
which keeps the stream busy until the host is through: what the marks then show is the device alone, the gaps between
the kernels of an op included, and what the host's clock shows is the host alone, which nothing keeps waiting.
"""

from __future__ import annotations

import gc
import gzip
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from ..base import annotate
from ..base.collective_calls import barrier, gather
from ..ops.input_pool import Call
from .device import malloc_trim

if TYPE_CHECKING:
    from ..models.parallel import ParallelTraining


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


def timed_steps(training: ParallelTraining, steps: int) -> tuple[list[float], list[Any]]:
    """Iteration time of each step over all ranks, and this rank's losses (still on the device)."""
    barrier()
    clock, losses = StepClock(training.device), []
    clock.mark()
    for _ in range(steps):
        losses.append(training.step())
        clock.mark()
    return [max(column) for column in zip(*gather(clock.seconds()), strict=True)], losses


LEAD_S = 0.05  # lead time with which all ranks learn the common start of a step


def noted_steps(training: ParallelTraining, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Seconds from the common start of all ranks to the last rank's end, of each step; and a record of each.

    A record has ``begin``, per rank ``spans`` (see ``annotate.Span``) and ``ends``, in monotonic seconds, and ``cpu``,
    the part of all cores' time that the ranks computed.
    """
    seconds, records = [], []
    for _ in range(steps):
        spans: list[annotate.Span] = []
        gc.collect()
        gc.disable()
        start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.broadcast(start, 0)
        begin, before = start.item(), time.process_time()
        time.sleep(max(0.0, begin - time.monotonic()))
        with annotate.noting(spans):
            training.step()
        own = (spans, time.monotonic(), time.process_time() - before)
        every, ends, computed = zip(*gather(own), strict=True)
        gc.enable()
        seconds.append(max(ends) - begin)
        used = sum(computed) / (seconds[-1] * (os.cpu_count() or 1))
        records.append({"begin": begin, "spans": [*every], "ends": [*ends], "cpu": used})
    return seconds, records


class StepTracer:
    """Profiles ``steps`` one after the other: ``begin`` and ``end`` of each, within the block; one more warms up.

    Kineto records every step.  The execution trace, which slows small ops several times more than Kineto does, is on
    in the last one alone: durations are to be read from the steps before it, dependencies from it.
    """

    def __init__(self, device: torch.device, steps: int, folder: Path, rank: int) -> None:
        self.left = steps + 1
        self._files = {name: folder / f"rank{rank}.{name}.json" for name in ("kineto", "et")}
        self._clock, on_gpu = StepClock(device), device.type == "cuda"
        options = torch._C._profiler._ExperimentalConfig
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(str(self._files["et"]))
        self._profiler = Profiler(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(self._files["kineto"])),
            record_shapes=True,
            experimental_config=options(enable_cuda_sync_events=True) if on_gpu else None,
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
        for path in self._files.values():
            with path.open("rb") as source, gzip.open(f"{path}.gz", "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 2**20)
            path.unlink()
        return self._clock.seconds()[2::2], {key: f"{path.name}.gz" for key, path in self._files.items()}


class Profiler(profile):
    """The harness' own profiler: a script may have profilers of its own."""


def profiled_steps(
    training: ParallelTraining, steps: int, folder: Path, rank: int
) -> tuple[list[float], dict[str, str]]:
    """Profile some steps; the traces' names within the folder, by format, are the second result."""
    with StepTracer(training.device, steps, folder, rank) as tracer:
        while tracer.left:
            tracer.begin()
            training.step()
            tracer.end()
    own, names = tracer.written()
    return [max(column) for column in zip(*gather(own), strict=True)], names


_SAMPLES = (5, 25)
_SAMPLE_S = 1e-4  # shorter calls are measured several at a time, so that a mark is a small part of a sample
_MOST_CALLS = 64  # in a sample
_ISSUE_S = 1.5e-3  # of the host for a train: a stream holds about a thousand kernels, beyond them the host waits
_MARGIN_S, _MOST_SPIN_S = 2e-4, 2e-2
_TRIES = 4  # to stay ahead of the device; what makes the host wait for it can never be


class Samples(NamedTuple):
    """Seconds of one call, sample by sample; none of the host where host and device are one."""

    device: list[float]
    host: list[float]


class CudaQueue:
    """The current stream of the current CUDA device."""

    def __init__(self) -> None:
        self._cycles_per_s = 0.0
        for _ in range(10):  # the first ones wake the device: the fastest clock makes no spin too short
            first = self.mark()
            torch.cuda._sleep(2_000_000)
            second = self.mark()
            self.wait()
            self._cycles_per_s = max(self._cycles_per_s, 2e6 / self.between(first, second))

    def spin(self, seconds: float) -> None:
        """Keep the stream busy for at least this long."""
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def mark(self) -> Any:
        """A mark that the stream reaches when all earlier work has finished."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self) -> None:
        """Wait for all work of the stream."""
        torch.cuda.synchronize()

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two marks that were reached."""
        return float(first.elapsed_time(second)) * 1e-3


class Clock:
    """Seconds that a call takes on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._queue = CudaQueue() if device.type == "cuda" else None

    def __call__(self, run: Callable[..., object], *inputs: Any) -> float:
        """Time one call from the host, until the device has finished."""
        if self._queue is not None:
            self._queue.wait()
        start = time.perf_counter()
        run(*inputs)
        if self._queue is not None:
            self._queue.wait()
        return time.perf_counter() - start

    def samples(self, call: Call, count: int, seconds: float) -> Samples:
        """Time a warm call ``count`` times, or on CUDA for about ``seconds``."""
        if self._queue is not None and not call.on_host:
            return queued(call, self._queue, seconds)
        prepared = [call.inputs() for _ in range(count)]
        return Samples([self(call.run, *inputs) for inputs in prepared], [])

    def fresh_samples(self, call: Call, count: int) -> list[float]:
        """Time a call ``count`` times with fresh memory for its results; empty on CUDA, which keeps its memory."""
        found: list[float] = []
        for _ in range(count if self._queue is None else 0):
            inputs = call.inputs()
            malloc_trim(0)
            found.append(self(call.run, *inputs))
        return found


def queued(call: Call, queue: CudaQueue, seconds: float) -> Samples:
    """Sample a warm call for about ``seconds``, issued behind spins."""
    begin = time.perf_counter()
    trial, _ = _train(call, queue, 2, 1, _ISSUE_S)
    host, device = max(1e-7, *trial.host), max(1e-7, min(trial.device))
    calls = min(_MOST_CALLS, max(1, int(_ISSUE_S / host)), math.ceil(_SAMPLE_S / device))
    groups = max(1, min(_SAMPLES[1], int(_ISSUE_S / (calls * host)), int(seconds / (calls * device))))
    slack, tries = 1.5, 0
    found = Samples([], [])
    while (count := len(found.device)) < _SAMPLES[0] or (count < _SAMPLES[1] and time.perf_counter() - begin < seconds):
        spin_s = min(_MOST_SPIN_S, slack * groups * calls * host + _MARGIN_S)
        samples, ahead = _train(call, queue, groups, calls, spin_s)
        if not ahead and tries < _TRIES:
            slack, groups, tries = 2 * slack, max(1, groups // 2), tries + 1
            continue
        found.device.extend(samples.device)
        found.host.extend(samples.host)
    return found


def _train(call: Call, queue: CudaQueue, groups: int, calls: int, spin_s: float) -> tuple[Samples, bool]:
    """``groups`` samples of ``calls`` calls each, issued at once behind one spin; whether the host stayed ahead."""
    prepared = [[call.inputs() for _ in range(calls)] for _ in range(groups)]
    queue.wait()  # making inputs may have taken kernels
    queue.spin(spin_s)
    marks, host = [queue.mark()], []
    for group in prepared:
        start = time.perf_counter()
        for inputs in group:
            call.run(*inputs)
        host.append((time.perf_counter() - start) / calls)
        marks.append(queue.mark())
    ahead = not queue.reached(marks[-2])
    queue.wait()
    return Samples([queue.between(*pair) / calls for pair in pairwise(marks)], host), ahead
