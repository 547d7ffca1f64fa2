"""What traces do not record: waits that only times show, work that is missing, steps that nobody marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.read_rank import lateness, read_rank
from stepsight.simulator.replay.replay import replay
from tests.dataset.kineto_files import MAIN, KinetoFile


class Kernels:
    """A file of kernels with their launches, ``(stream, launched, start, length)``; microseconds."""

    def __init__(self) -> None:
        self.file, self.count = KinetoFile(), 0

    def add(self, stream: int, launched: float, start: float, length: float, name: str = "gemm") -> Kernels:
        self.count += 1
        self.file.launch(launched, self.count)
        self.file.kernel(name, start, length, stream, self.count, grid=[64, 1, 1], block=[256, 1, 1])
        return self

    def graph(self, tmp_path: Path) -> Program:
        self.file.note("ProfilerStep#1", 0.0, 20_000.0)
        return read_rank(self.file.write(tmp_path / "trace.json"))


def test_a_stream_waits_for_room_until_the_tail_of_a_kernel_that_fills_the_device(tmp_path: Path) -> None:
    graph = Kernels().add(7, 10, 20, 5000).add(20, 100, 4900, 50, "small").graph(tmp_path)
    assert lateness(graph).max() < 1e-6
    assert replay([graph]).unexplained_percent == pytest.approx(0, abs=1e-6)


def test_a_slow_event_wait_is_found_where_a_kernel_is_much_later(tmp_path: Path) -> None:
    kernels = Kernels().add(7, 10, 20, 5000).add(20, 100, 5040, 500, "late")
    assert lateness(kernels.graph(tmp_path)).max() < 50e-6


def test_idle_time_of_a_device_with_launched_work_is_work_that_was_not_recorded(tmp_path: Path) -> None:
    kernels = Kernels().add(7, 10, 20, 1000).add(7, 100, 4000, 500)
    for number in range(5):
        kernels.add(7, 110 + 5 * number, 4501 + 6 * number, 5)
    graph = kernels.graph(tmp_path)
    assert graph.unrecorded_s.max() == pytest.approx(2980e-6, rel=0.02)
    assert any("work is missing" in warning for warning in graph.warnings)


def test_layers_that_repeat_within_a_launch_are_no_steps(tmp_path: Path) -> None:
    file = KinetoFile()
    file.event("cuda_runtime", "cudaGraphLaunch", 5.0, 20.0, MAIN, {"correlation": 1})
    names = ["embed", *(f"{each}" for _ in range(6) for each in ("norm_a", "gemm", "relu_b")), "head", "pick", "copy_c"]
    for place, name in enumerate(names):
        file.kernel(name, 40.0 + 12 * place, 10.0, 7, 1)
    assert len(read_rank(file.write(tmp_path / "trace.json")).steps_s) == 1


def test_names_of_old_versions_tell_backward_and_steps(tmp_path: Path) -> None:
    file = KinetoFile()
    for step in range(4):
        at, correlation = 1000.0 * step, 2 * step
        for name, start in (
            ("aten::mm", at),
            ("CudnnConvolutionBackward", at + 100),
            ("Optimizer.step#SGD.step", at + 200),
        ):
            file.event("Operator", name, start, 50.0, MAIN, {"Input dims": [[64, 64], [64, 64]]})
        for number, start in enumerate((at + 5, at + 105)):
            file.launch(start, correlation + number)
            file.kernel("gemm", start + 10, 20.0, 7, correlation + number)
    graph = read_rank(file.write(tmp_path / "trace.json"))
    assert len(graph.steps_s) == 3
    assert set(graph.columns["phase"][graph.on_device].tolist()) == {0, 1}
    assert any(isinstance(work, Op) and work.dims == (64, 64, 64) for work in graph.works)


def test_a_trace_without_kernels_of_an_accelerator_says_so(tmp_path: Path) -> None:
    file = KinetoFile()
    file.header["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
    file.call("aten::nan_to_num", 0.0, 50.0, [64, 64])
    graph = read_rank(file.write(tmp_path / "trace.json"))
    assert any("the graph is that of the host" in warning for warning in graph.warnings)
    assert graph.columns["known"].min() == 1
