"""Trains of calls behind spins, on a device that is reckoned: its stream runs while the host's clock goes on."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import harness_jobs as jobs
import pytest
import torch

from stepsight.dataset.harness.measuring import timing
from stepsight.dataset.harness.measuring.timing import Clock, profiled_steps, queued, timed_steps
from stepsight.dataset.harness.models.parallel import Training
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


def _measure(stream: Stream, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> timing.Samples:
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: stream.now))
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

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: stream.now))
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


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trace")
    training = Training(jobs.job({**jobs.LLAMA, "layers": 1}, micro_batch=4), torch.device("cpu"))
    timed_steps(training, 2)
    seconds, names = profiled_steps(training, 2, folder, rank=0)
    return seconds, {key: json.loads(gzip.decompress((folder / name).read_bytes())) for key, name in names.items()}


def _names(trace: dict[str, Any], start: str) -> list[str]:
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event["name"].startswith(start)]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


def test_each_profiled_step_is_timed_and_traced(profiled: tuple[list[float], dict[str, Any]]) -> None:
    seconds, traces = profiled
    assert len(seconds) == 2
    assert min(seconds) > 0
    segments = _names(traces["kineto"], "stepsight::segment")
    micro_batch = [
        f"stepsight::segment label={w} micro_batch={i} stage=0" for i in (0, 1) for w in ("forward", "backward")
    ]
    assert segments == 2 * ["stepsight::segment label=step", *micro_batch, "stepsight::segment label=optimizer stage=0"]


def test_composite_ops_are_annotated(profiled: tuple[list[float], dict[str, Any]]) -> None:
    found = _names(profiled[1]["kineto"], "stepsight::op")[:10]
    kinds = [name.split()[1].removeprefix("kind=") for name in found]
    backward = ["rms_norm_backward", "swiglu_backward", "rms_norm_backward"]
    forward = ["rms_norm", "rope", "rms_norm", "swiglu", "rms_norm", "cross_entropy"]
    assert kinds == [*forward, "cross_entropy_backward", *backward]
    assert found[1] == f"stepsight::op kind=rope dims={4 * 8 * 6 * 4} dtype=fp32"


def test_execution_trace_joins_kineto_in_the_last_step(profiled: tuple[list[float], dict[str, Any]]) -> None:
    kineto, et = profiled[1]["kineto"], profiled[1]["et"]
    known = {event["args"].get("Record function id") for event in kineto["traceEvents"] if "args" in event}
    attributes = [{a["name"]: a["value"] for a in node.get("attrs", [])} for node in et["nodes"]]
    ids = {a["rf_id"] for a in attributes if a.get("rf_id")}
    assert len(ids & known) > 0.9 * len(ids) > 50


def test_timed_steps_record_losses_that_fall() -> None:
    training = Training(jobs.job(), torch.device("cpu"))
    seconds, losses = timed_steps(training, 3)
    assert len(seconds) == 3
    assert losses[2] < losses[0]
