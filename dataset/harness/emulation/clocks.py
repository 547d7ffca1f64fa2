"""End times of collectives in an emulated world: on a real clock, where waits take time, or on a virtual one.

On the virtual clock nobody waits.  Each stream of the script has a virtual time of its own.  What the script computes
moves the time of its current stream on, by the seconds that its thread computes; ``time.sleep`` by what it asks for; a
wait for an event, a stream or a collective moves it to when that is over.  So streams overlap as on a device, although
one thread does all the work.
"""

from __future__ import annotations

import json
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from ..base.patching import patch
from ..base.plan_error import HarnessError

Ending = Future[float]  # the end time of a collective
Effect = Callable[[], object] | None
Tensors = list[Tensor]


_SPIN_S = 5e-4


class HostClock(Protocol):
    """A clock for collectives; times are seconds, and a future gets its result at a time that may not be known yet."""

    def now(self) -> float: ...
    def wait_until(self, end: float) -> None: ...
    def future(self, end: Ending, result: Tensors) -> torch.futures.Future[Tensors]: ...


class RealClock:
    """The performance counter."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, end: float) -> None:
        time.sleep(max(0.0, end - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < end:  # a sleep ends late
            pass

    def future(self, end: Ending, result: Tensors) -> torch.futures.Future[Tensors]:
        future: torch.futures.Future[Tensors] = torch.futures.Future()

        def set_in_time(known: Ending) -> None:
            if _failed(known, future):
                return
            timer = threading.Timer(max(0.0, known.result() - time.perf_counter()), future.set_result, (result,))
            timer.daemon = True
            timer.start()

        end.add_done_callback(set_in_time)
        return future


class Stream:
    """A stream with a virtual time; replaces ``torch.cpu.Stream``."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.time = 0.0

    def wait_stream(self, stream: Stream) -> None:
        with self._clock.settled():
            self.time = max(self.time, stream.time)

    def wait_event(self, event: Event) -> None:
        with self._clock.settled():
            self.time = max(self.time, event.time)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._clock)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._clock.wait_until(self.time)


class Event:
    """An event with a virtual time; replaces ``torch.cpu.Event``."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.time = 0.0

    def query(self) -> bool:
        return True

    def record(self, stream: Stream | None = None) -> None:
        with self._clock.settled():
            self.time = (stream or self._clock.stream).time

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._clock.stream).wait_event(self)

    def synchronize(self) -> None:
        self._clock.wait_until(self.time)


class VirtualClock:
    """Virtual times of the streams of this thread.

    Attributes:
        stream: The current stream.
    """

    def __init__(self) -> None:
        self.main = self.stream = Stream(self)
        self._late: list[Ending] = []
        self._last = time.thread_time()
        self._sleep, self._thread = time.sleep, threading.get_ident()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Charge the computation so far to the current stream; the block's computation is charged to none."""
        self.stream.time += max(0.0, time.thread_time() - self._last)
        try:
            yield
        finally:
            self._last = time.thread_time()

    def now(self) -> float:
        with self.settled():
            return self.stream.time

    def wait_until(self, end: float) -> None:
        with self.settled():
            self.stream.time = max(self.stream.time, end)

    def sleep(self, seconds: float) -> None:
        """Replaces ``time.sleep``; other threads sleep normally."""
        if threading.get_ident() != self._thread:
            self._sleep(seconds)
            return
        with self.settled():
            self.stream.time += max(0.0, seconds)

    def future(self, end: Ending, result: Tensors) -> torch.futures.Future[Tensors]:
        """Done when its end is known; a wait in Python, or the end of a backward pass, waits until ``end``.

        DDP waits for its futures in C++ at the end of the backward pass.
        """
        with self.settled():
            future = _VirtualFuture(self, end)
            end.add_done_callback(lambda known: None if _failed(known, future) else future.set_result(result))
            self._late.append(end)
            try:
                Variable._execution_engine.queue_callback(self._end_backward)
            except RuntimeError:  # no backward pass: whoever asked waits himself
                self._late.pop()
        return future

    def _end_backward(self) -> None:
        late, self._late = self._late, []
        self.wait_until(max((end.result() for end in late), default=0.0))

    @contextmanager
    def current(self, stream: Stream | None) -> Iterator[None]:
        """Replaces ``torch.cpu.stream``."""
        before = self.stream
        with self.settled():
            self.stream = stream or before
        try:
            yield
        finally:
            with self.settled():
                self.stream = before

    def install(self) -> None:
        """Replace the host's sleep and the CPU's streams and events, for the rest of the process."""
        patch(time, sleep=self.sleep)
        patch(torch.cpu, Stream=lambda *_, **__: Stream(self), Event=lambda *_, **__: Event(self))
        patch(torch.cpu, stream=self.current, current_stream=lambda device=None: self.stream)


class _VirtualFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future that is done, but at a virtual time."""

    def __init__(self, clock: VirtualClock, end: Ending) -> None:
        super().__init__()
        self._clock, self._end = clock, end

    def wait(self) -> Any:
        self._clock.wait_until(self._end.result())
        return super().wait()


def _failed(known: Ending, future: Any) -> bool:
    """Pass an error to the waiter of a collective."""
    error = known.exception()
    if error is not None:
        future.set_exception(error)
    return error is not None


def ended(end: float) -> Ending:
    """A known time."""
    known: Ending = Future()
    known.set_result(end)
    return known


class Delays:
    """Seconds of collectives by kind, bytes, group size and ranks per node, from a plan (``plan.plan_checks``).

    Between two sizes of a kind and group seconds are log-linear in bytes, beyond the ends in proportion to them.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._known: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for row in sorted(rows, key=lambda row: (row["num_bytes"], row["seconds"])):
            key = (row["kind"], row["group_size"], row["ranks_per_node"])
            self._known.setdefault(key, []).append((row["num_bytes"], row["seconds"]))

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
        """Seconds of one collective.

        Raises:
            HarnessError: If the table has none of its kind and group.
        """
        known = self._known.get((kind, group_size, ranks_per_node))
        if known is None:
            raise HarnessError(
                f"stand_in.collectives must list every collective of the job, got no {kind} of {group_size} ranks, "
                f"{ranks_per_node} on each node"
            )
        after = bisect_left(known, num_bytes, key=lambda row: row[0])
        if after in (0, len(known)):
            size, seconds = known[min(after, len(known) - 1)]
            return seconds * num_bytes / size
        (small, short), (large, long) = known[after - 1 : after + 1]
        part = math.log(num_bytes / small) / math.log(large / small)
        return math.exp((1 - part) * math.log(short) + part * math.log(long))


class AskedDelays:
    """Seconds of collectives that another process tells, each signature once.

    A question is a line of JSON with kind, bytes, group size and ranks per node; an answer is a line with the seconds,
    or ``{"error": ...}``.
    """

    def __init__(self, questions: BinaryIO, answers: BinaryIO) -> None:
        self._questions, self._answers = questions, answers
        self._known: dict[tuple[str, int, int, int], float] = {}
        self._lock = threading.Lock()

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
        """Seconds of one collective.

        Raises:
            HarnessError: If a delay is unknown.
        """
        key = (kind, num_bytes, group_size, ranks_per_node)
        with self._lock:
            if key not in self._known:
                self._questions.write(json.dumps(key).encode() + b"\n")
                self._questions.flush()
                told = json.loads(self._answers.readline() or b'{"error": "who tells delays has ended"}')
                if isinstance(told, dict):
                    raise HarnessError(told["error"])
                self._known[key] = float(told)
            return self._known[key]
