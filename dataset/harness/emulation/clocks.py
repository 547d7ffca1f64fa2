"""End times of collectives in an emulated world: on a real clock, where waits take time, or on a virtual one.

On the virtual clock nobody waits.  Each stream of the script has a virtual time of its own.  What the script computes
moves the time of its current stream on, by the seconds that its thread computes; ``time.sleep`` by what it asks for; a
wait for an event, a stream or a collective moves it to when that is over.  So streams overlap as on a device, although
one thread does all the work.

Lines are what collectives pass on, one after the other.  Real ranks that share a line agree on when a collective
begins: when the last of them has issued it and the line is free.  Each has the same clock (the machine's, or
virtual times that start together), so all of them are through at the same time.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..base import cores
from ..base.errors import HarnessError
from ..base.one_rank_group import Effect, LateFuture
from ..base.patching import always, patch

Ending = Future[float]  # the end time of a collective
Tensors = list[Tensor]
Awaitable = torch.futures.Future[Tensors]
_SPIN_S = 5e-4


class HostClock:
    """The performance counter; a future gets its result at a time in seconds that may not be known yet."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, end: float) -> None:
        time.sleep(max(0.0, end - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < end:  # a sleep ends late
            pass

    def future(self, end: Ending, result: Tensors) -> Awaitable:
        future: Awaitable = torch.futures.Future()

        def set_in_time(known: float) -> None:
            timer = threading.Timer(max(0.0, known - time.perf_counter()), future.set_result, (result,))
            timer.daemon = True
            timer.start()

        _when_known(end, future, set_in_time)
        return future


class Event:
    """An event with a virtual time; replaces ``torch.cpu.Event``."""

    query = always(True)

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        with self._clock.settled():
            self.time = (stream or self._clock.stream).time
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._clock.stream).wait_event(self)

    def synchronize(self) -> None:
        self._clock.wait_until(self.time)


class Stream(Event):
    """The newest event of a stream; replaces ``torch.cpu.Stream``."""

    def wait_event(self, event: Event) -> None:
        with self._clock.settled():
            self.time = max(self.time, event.time)

    wait_stream = wait_event

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event(self._clock)).record(self)


class VirtualClock(HostClock):
    """Virtual times of the streams of this thread, of which ``stream`` is the current one."""

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
        else:
            with self.settled():
                self.stream.time += max(0.0, seconds)

    def future(self, end: Ending, result: Tensors) -> Awaitable:
        """Done when its end is known; a wait in Python, or the end of a backward pass, waits until ``end``.

        DDP waits for its futures in C++ at the end of the backward pass.
        """
        with self.settled():
            future = LateFuture(lambda: self.wait_until(end.result()))
            _when_known(end, future, lambda known: future.set_result(result))
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


def _when_known(end: Ending, future: Any, act: Callable[[float], object]) -> None:
    """Act on the end time of a collective; pass an error to its waiter."""

    def done(known: Ending) -> None:
        error = known.exception()
        act(known.result()) if error is None else future.set_exception(error)

    end.add_done_callback(done)


def ended(end: float) -> Ending:
    """A known time."""
    known: Ending = Future()
    known.set_result(end)
    return known


_FOREVER = timedelta(days=1)  # the measuring process has its own time limit
_MESSAGE = 256  # bytes in which a rank says what it calls


class Peers:
    """Real ranks of this machine, in the order of their group, that exchange values through gloo.

    They connect on first use, through ``store``, by a ``name`` that all of them have, and no others.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, store: Any) -> None:
        self.ranks, self.index = list(ranks), ranks.index(rank)
        self._name, self._store = name, store
        self._gloo: Any = None

    @property
    def gloo(self) -> Any:
        """The process group of gloo; no ``cached_property``, whose lock all of them would share."""
        if self._gloo is None:
            store = dist.PrefixStore(self._name, self._store)  # type: ignore[attr-defined]
            with cores.any_core():
                self._gloo = dist.ProcessGroupGloo(store, self.index, len(self.ranks), _FOREVER)
        return self._gloo

    def agree(self, now: float, seconds: float, what: str) -> tuple[float, float]:
        """Wait for all of them to call the same; return the time of the last one, and the longest of their delays."""
        told, me = json.dumps([now, seconds, what]).encode().ljust(_MESSAGE), self.ranks[self.index]
        own = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in self.ranks]
        try:
            self.gloo.allgather([every], [own]).wait()
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in self.ranks if rank != me)
            why = f"which has ended: {error!s:.100}"
            raise HarnessError(f"rank {me} waits in {what} for rank {others}, {why}") from None
        times, delays, calls = zip(*(json.loads(bytes(each.tolist())) for each in every), strict=True)
        for rank, other in zip(self.ranks, calls, strict=True):
            if other != what:
                rule = "ranks of a group must call the same collectives in the same order"
                raise HarnessError(f"{rule}, but rank {me} calls {what} and rank {rank} calls {other}")
        return max(times), max(delays)


class HostLine:
    """A link of this process alone, whose free time the host knows."""

    def __init__(self, clock: HostClock) -> None:
        self._clock, self._free = clock, 0.0
        self.future = clock.future

    def issue(self, seconds: float, effect: Effect, what: str = "") -> Ending:
        """The end time, on the clock."""
        begin = max(self._free, self._clock.now())
        if effect is not None:
            effect()
        self._free = begin + seconds
        return ended(self._free)

    def wait(self, end: Ending) -> None:
        self._clock.wait_until(end.result())


class SharedLine(HostLine):
    """A link whose collectives begin when all real ranks on it have issued them, one after the other on its thread."""

    def __init__(self, clock: HostClock, peers: Peers) -> None:
        super().__init__(clock)
        self.peers = peers
        self._thread = ThreadPoolExecutor(1, initializer=cores.unpin)

    def issue(self, seconds: float, effect: Effect, what: str = "") -> Ending:
        """The end time, on the clock, known after the others have arrived; ``what`` is the same on all ranks."""
        return self._thread.submit(self._run, self._clock.now(), seconds, effect, what)

    def _run(self, now: float, seconds: float, effect: Effect, what: str) -> float:
        begin, seconds = self.peers.agree(now, seconds, what)
        if effect is not None:
            with torch.no_grad():
                effect()
        self._free = max(self._free, begin) + seconds
        return self._free


FIRST_CYCLES = 20_000_000  # some 10 ms
TELLING_S = 1e-4  # for shorter spins, the launch is too large a share
WEIGHT = 0.2  # of the newest spin


class Spinner:
    """Spins on the current stream of a device."""

    def __init__(self) -> None:
        torch.cuda._sleep(5 * FIRST_CYCLES)  # the clock goes up
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spin(FIRST_CYCLES)
        cycles, start, end = self._under_way.popleft()
        end.synchronize()
        self._cycles_per_s = cycles / (start.elapsed_time(end) * 1e-3)

    def spin(self, seconds: float) -> None:
        while self._under_way and self._under_way[0][2].query():
            cycles, start, end = self._under_way.popleft()
            self._cycles_per_s = followed(self._cycles_per_s, cycles, start.elapsed_time(end) * 1e-3)
        self._spin(round(seconds * self._cycles_per_s))

    def _spin(self, cycles: int) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        self._under_way.append((cycles, start, end))


def followed(cycles_per_s: float, cycles: int, seconds: float) -> float:
    """Cycles per second of a device after another spin: its clock depends on its load."""
    return cycles_per_s + WEIGHT * (cycles / seconds - cycles_per_s) if seconds >= TELLING_S else cycles_per_s


class DeviceLine:
    """A link as two streams: one spins, the other one does the work of the collective.

    Both come before computation where the device has to choose: a link waits for no multiprocessor.
    """

    def __init__(self, device: torch.device, spinner: Spinner) -> None:
        self._device, self._spinner = device, spinner
        self._spin, self._copy = (torch.cuda.Stream(device, priority=-1) for _ in range(2))

    def issue(self, seconds: float, effect: Effect, what: str = "") -> torch.cuda.Event:
        """An event on the stream, where it is over."""
        self._spin.wait_stream(torch.cuda.current_stream(self._device))
        if effect is not None:
            self._copy.wait_stream(self._spin)
            with torch.cuda.stream(self._copy):
                effect()
        with torch.cuda.stream(self._spin):
            self._spinner.spin(seconds)
        if effect is not None:
            self._spin.wait_stream(self._copy)
        return self._spin.record_event()

    def wait(self, end: torch.cuda.Event) -> None:
        """Make the current stream wait; the host continues."""
        torch.cuda.current_stream(self._device).wait_event(end)

    def future(self, end: torch.cuda.Event, result: Tensors) -> Awaitable:
        """Done at once for the host; streams that need the result wait for the work on this one."""
        future: Awaitable = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._spin):
            future.set_result(result)
        return future
