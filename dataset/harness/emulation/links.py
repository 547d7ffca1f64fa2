"""Links between real ranks of an emulated world: they meet, exchange values, and wait for a delay.

The ranks agree on when a collective begins: when the last of them has issued it and the link is free.  Each has the
same clock (the machine's, or virtual times that start together), so all of them are through at the same time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base import cores
from ..base.plan_error import HarnessError
from .clocks import Effect, Ending, HostClock, Tensors, ended

_FOREVER = timedelta(days=1)  # the measuring process has its own time limit
_MESSAGE = 256  # bytes in which a rank says what it calls


class Peers:
    """Real ranks of this machine that exchange values through gloo, which connects them on first use.

    ``ranks`` are in the order of their group.  ``name`` is the same on all of them, and on no others; they find each
    other in ``store``.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, store: Any) -> None:
        self.ranks, self.index = list(ranks), ranks.index(rank)
        self._name, self._store = name, store
        self._gloo: Any = None

    @property
    def gloo(self) -> Any:
        """The process group of gloo."""
        if self._gloo is None:
            store = dist.PrefixStore(self._name, self._store)  # type: ignore[attr-defined]
            with cores.any_core():
                self._gloo = dist.ProcessGroupGloo(store, self.index, len(self.ranks), _FOREVER)
        return self._gloo

    def agree(self, now: float, seconds: float, what: str) -> tuple[float, float]:
        """Wait for all of them; return the time of the last one, and the longest of their delays.

        Raises:
            HarnessError: If one of them calls something else, or has ended.
        """
        told = json.dumps([now, seconds, what]).encode().ljust(_MESSAGE)
        own = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in self.ranks]
        try:
            self.gloo.allgather([every], [own]).wait()
        except RuntimeError as error:
            others = ", ".join(str(rank) for at, rank in enumerate(self.ranks) if at != self.index)
            raise HarnessError(
                f"rank {self.ranks[self.index]} waits in {what} for rank {others}, which has ended: {error!s:.100}"
            ) from None
        said = [json.loads(bytes(each.tolist())) for each in every]
        for rank, (_, _, other) in zip(self.ranks, said, strict=True):
            if other != what:
                raise HarnessError(
                    f"ranks of a group must call the same collectives in the same order, but rank "
                    f"{self.ranks[self.index]} calls {what} and rank {rank} calls {other}"
                )
        return max(each[0] for each in said), max(each[1] for each in said)


class HostLine:
    """A link of this process alone, whose free time the host knows."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._free = 0.0

    def issue(self, seconds: float, effect: Effect, what: str = "") -> Ending:
        """The end time, on the clock."""
        begin = max(self._free, self._clock.now())
        if effect is not None:
            effect()
        self._free = begin + seconds
        return ended(self._free)

    def wait(self, end: Ending) -> None:
        self._clock.wait_until(end.result())

    def future(self, end: Ending, result: Tensors) -> torch.futures.Future[Tensors]:
        return self._clock.future(end, result)


class SharedLine(HostLine):
    """A link whose collectives begin when all real ranks on it have issued them.

    They run on a thread of the link, one after the other, while the script goes on.
    """

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


class Pace:
    """Cycles per second of a device, from its last spins, because its clock depends on its load."""

    def __init__(self, cycles_per_s: float) -> None:
        self.cycles_per_s = cycles_per_s

    def cycles(self, seconds: float) -> int:
        return round(seconds * self.cycles_per_s)

    def learn(self, cycles: int, seconds: float) -> None:
        """Add a spin: its cycles and its seconds."""
        if seconds >= TELLING_S:
            self.cycles_per_s += WEIGHT * (cycles / seconds - self.cycles_per_s)


class Spinner:
    """Spins on the current stream of a device."""

    def __init__(self) -> None:
        torch.cuda._sleep(5 * FIRST_CYCLES)  # the clock goes up
        start, end = _spin(FIRST_CYCLES)
        end.synchronize()
        self._pace = Pace(FIRST_CYCLES / (start.elapsed_time(end) * 1e-3))
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def spin(self, seconds: float) -> None:
        while self._under_way and self._under_way[0][2].query():
            cycles, start, end = self._under_way.popleft()
            self._pace.learn(cycles, start.elapsed_time(end) * 1e-3)
        cycles = self._pace.cycles(seconds)
        self._under_way.append((cycles, *_spin(cycles)))


def _spin(cycles: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Spin; events before and after it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    return start, end


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
        end: torch.cuda.Event = self._spin.record_event()
        return end

    def wait(self, end: torch.cuda.Event) -> None:
        """Make the current stream wait; the host continues."""
        torch.cuda.current_stream(self._device).wait_event(end)

    def future(self, end: torch.cuda.Event, result: Tensors) -> torch.futures.Future[Tensors]:
        """Done at once for the host; streams that need the result wait for the work on this one."""
        future: torch.futures.Future[Tensors] = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._spin):
            future.set_result(result)
        return future
