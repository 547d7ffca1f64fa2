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
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from .. import annotate
from ..ranks import barrier, gather


class Training(Protocol):
    """A job on this rank, computed or slept."""

    device: torch.device

    def step(self) -> Any:
        """Run one training step; return its loss, still on the device."""


class _StepClock:
    """Ends of steps: when this rank's device is through."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[float] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between consecutive marks."""
        return [end - start for start, end in pairwise(self._ends)]


def timed_steps(training: Training, steps: int) -> tuple[list[float], list[Any]]:
    """Iteration time of each step over all ranks, and this rank's losses (still on the device)."""
    barrier()
    clock, losses = _StepClock(training.device), []
    clock.mark()
    for _ in range(steps):
        losses.append(training.step())
        clock.mark()
    return [max(column) for column in zip(*gather(clock.seconds()), strict=True)], losses


LEAD_S = 0.05  # all ranks know the common start of a step so long before it


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


def profiled_steps(training: Training, steps: int, folder: Path, rank: int) -> tuple[list[float], dict[str, str]]:
    """Profile some steps; the traces' names within the folder, by format, are the second result.

    Kineto records every step.  The execution trace, which slows small ops several times more than Kineto does, is on
    in the last one alone: durations are to be read from the steps before it, dependencies from it.
    """
    names = {"kineto": f"rank{rank}.kineto.json", "et": f"rank{rank}.et.json"}
    activities = [ProfilerActivity.CPU]
    config = None
    if training.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(folder / names["et"]))
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / names["kineto"])),
        record_shapes=True,
        experimental_config=config,
    )
    clock = _StepClock(training.device)
    try:
        with annotate.recording(), profiler:
            for index in range(steps + 1):  # the first is the profiler's own warm-up
                if index == steps:
                    observer.start()
                barrier()  # starting and stopping the profiler takes long, and differs between ranks
                clock.mark()
                training.step()
                clock.mark()
                if index == steps:
                    observer.stop()
                profiler.step()
    finally:
        observer.unregister_callback()
    own = clock.seconds()[2::2]
    seconds = [max(column) for column in zip(*gather(own), strict=True)]
    for key, name in list(names.items()):
        names[key] = _compress(folder / name)
    return seconds, names


def _compress(path: Path) -> str:
    packed = path.with_name(path.name + ".gz")
    with path.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target, 2**20)
    path.unlink()
    return packed.name
