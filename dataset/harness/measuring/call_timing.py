"""Seconds of a call: of its device, and on CUDA also of the host that issues it.

A GPU runs what its stream holds, one kernel after the other, while the host issues the next ones.  Where the host takes
longer than the kernels do, marks between single calls show the host.  So a train of calls is issued behind a spin,
which keeps the stream busy until the host is through: what the marks then show is the device alone, the gaps between
the kernels of an op included, and what the host's clock shows is the host alone, which nothing keeps waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..ops.input_pool import Call
from .device import give_back_memory

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
            give_back_memory()
            found.append(self(call.run, *inputs))
        return found


class _Train(NamedTuple):
    samples: Samples
    ahead: bool  # whether the host stayed ahead of the device


def queued(call: Call, queue: CudaQueue, seconds: float) -> Samples:
    """Sample a warm call for about ``seconds``, issued behind spins."""
    begin = time.perf_counter()
    trial = _train(call, queue, 2, 1, _ISSUE_S).samples
    host, device = max(1e-7, *trial.host), max(1e-7, min(trial.device))
    calls = min(_MOST_CALLS, max(1, int(_ISSUE_S / host)), math.ceil(_SAMPLE_S / device))
    groups = max(1, min(_SAMPLES[1], int(_ISSUE_S / (calls * host)), int(seconds / (calls * device))))
    slack, tries = 1.5, 0
    found = Samples([], [])
    while len(found.device) < _SAMPLES[0] or (
        len(found.device) < _SAMPLES[1] and time.perf_counter() - begin < seconds
    ):
        spin_s = min(_MOST_SPIN_S, slack * groups * calls * host + _MARGIN_S)
        train = _train(call, queue, groups, calls, spin_s)
        if not train.ahead and tries < _TRIES:
            slack, groups, tries = 2 * slack, max(1, groups // 2), tries + 1
            continue
        found.device.extend(train.samples.device)
        found.host.extend(train.samples.host)
    return found


def _train(call: Call, queue: CudaQueue, groups: int, calls: int, spin_s: float) -> _Train:
    """``groups`` samples of ``calls`` calls each, issued at once behind one spin."""
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
    return _Train(Samples([queue.between(*pair) / calls for pair in pairwise(marks)], host), ahead)
