"""Trains of calls behind spins, on a device that is reckoned: its stream runs while the host's clock goes on."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from stepsight.dataset.harness.measuring import call_timing
from stepsight.dataset.harness.measuring.call_timing import Clock, queued
from stepsight.dataset.harness.ops.input_pool import Call

MOST_KERNELS = 1024  # that a stream holds


@dataclass
class Stream:
    """A device of which a call takes the host ``host`` seconds and the device ``device``, in so many kernels."""

    host: float
    device: float
    kernels: int = 1
    waits: bool = False  # whether a call ends with the host waiting for the device
    spin_rate: float = 1.0
    now: float = 0.0
    spun: float = 0.0

    def __post_init__(self) -> None:
        self.ends: list[float] = []  # of all kernels

    def _add(self, seconds: float) -> None:
        if len(self.ends) >= MOST_KERNELS:
            self.now = max(self.now, self.ends[-MOST_KERNELS])
        self.ends.append(max(self.now, self.ends[-1] if self.ends else 0.0) + seconds)

    def call(self) -> None:
        for _ in range(self.kernels):
            self.now += self.host / self.kernels
            self._add(self.device / self.kernels)
        if self.waits:
            self.wait()

    def spin(self, seconds: float) -> None:
        assert seconds <= 0.021
        self.spun += seconds
        self._add(seconds * self.spin_rate)

    def mark(self) -> float:
        self.now += 1e-6
        self._add(1e-6)
        return self.ends[-1]

    def reached(self, mark: float) -> bool:
        return self.now >= mark

    def wait(self) -> None:
        self.now = max(self.now, self.ends[-1] if self.ends else 0.0)

    def between(self, first: float, second: float) -> float:
        return second - first


def _measure(stream: Stream, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> call_timing.Samples:
    monkeypatch.setattr(call_timing, "time", SimpleNamespace(perf_counter=lambda: stream.now))
    return queued(Call(stream.call), stream, seconds)


@pytest.mark.parametrize(
    ("host", "device", "kernels"),
    [(2e-5, 3e-6, 1), (2e-5, 5e-4, 1), (1e-4, 4e-5, 12), (8e-4, 3e-4, 64), (6e-6, 3e-2, 1), (4e-6, 1e-6, 1)],
)
def test_the_device_is_measured_whoever_is_slower(
    host: float, device: float, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch-bound or not, one kernel or many: the device's seconds and the host's own, each on its own."""
    stream = Stream(host, device, kernels)
    found = _measure(stream, monkeypatch)
    assert median(found.device) == pytest.approx(device, rel=0.05)
    assert median(found.host) == pytest.approx(host, rel=1e-6)
    assert 5 <= len(found.device) == len(found.host) <= 50
    assert stream.now < 0.4


def test_a_spin_that_is_too_short_is_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device's clock has risen since the spin was measured."""
    found = _measure(Stream(2e-5, 3e-6, spin_rate=0.3), monkeypatch)
    assert median(found.device) == pytest.approx(3e-6, rel=0.05)


def test_a_call_that_waits_for_the_device_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(2e-5, 3e-4, waits=True)
    found = _measure(stream, monkeypatch)
    assert median(found.device) == pytest.approx(3.2e-4, rel=0.1)  # the device idles while the host issues
    assert stream.spun < 0.2


def test_inputs_are_made_before_the_stream_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What making them takes, kernels among it, is in no sample."""
    stream = Stream(2e-5, 3e-6)

    def inputs() -> tuple[()]:
        stream.now += 1e-3
        stream._add(1e-3)
        return ()

    monkeypatch.setattr(call_timing, "time", SimpleNamespace(perf_counter=lambda: stream.now))
    found = queued(Call(stream.call, inputs), stream, 0.05)
    assert max(found.device) == pytest.approx(3e-6, rel=0.1)
    assert max(found.host) == pytest.approx(2e-5)


def test_on_the_cpu_every_call_is_a_sample() -> None:
    clock = Clock(torch.device("cpu"))
    calls: list[int] = []
    found = clock.samples(Call(lambda: calls.append(1)), 7, 1.0)
    assert len(found.device) == len(calls) == 7
    assert min(found.device) >= 0
    assert found.host == []
