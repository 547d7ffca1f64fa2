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
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from ..base import annotate
from ..base.collective_calls import barrier, gather


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
    """Seconds from the common start of all ranks to the last rank's end, of each step; and a record of each.

    A record has ``begin``, per rank ``spans`` (see ``annotate.Span``) and ``ends``, in monotonic seconds, and ``cpu``,
    the part of all cores' time that the ranks computed.
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
    """Profiles ``steps`` one after the other: ``begin`` and ``end`` of each, within the block; one more warms up.

    Kineto records every step.  The execution trace, which slows small ops several times more than Kineto does, is on
    in the last one alone: durations are to be read from the steps before it, dependencies from it.
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
        for name in self._names.values():
            path = self._folder / name
            with path.open("rb") as source, gzip.open(f"{path}.gz", "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 2**20)
            path.unlink()
        return self._clock.seconds()[2::2], {key: f"{name}.gz" for key, name in self._names.items()}


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
