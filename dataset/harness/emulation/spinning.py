"""Links of an emulated rank on CUDA: kernels that spin for the duration of a collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

FIRST_CYCLES = 20_000_000  # some 10 ms
TELLING_S = 1e-4  # for shorter spins, the launch is too large a share
WEIGHT = 0.2  # of the newest spin


class Pace:
    """Cycles per second of a device, from its last spins, because its clock depends on its load.

    Args:
        cycles_per_s: At first.
    """

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

    def issue(self, seconds: float, effect: Callable[[], object] | None) -> torch.cuda.Event:
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

    def future(self, end: torch.cuda.Event, result: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
        """Done at once for the host; streams that need the result wait for the work on this one."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._spin):
            future.set_result(result)
        return future
