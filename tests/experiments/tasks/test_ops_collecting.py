"""A captured program, its heavy calls measured, and what a predictor then knows of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepsight.dataset.capture.captured import Captured, read_captured, write_captured
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.runs.event_file import read_event_file
from stepsight.experiments.tasks.collecting import collect_ops, heavy_calls

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
assert not torch.cuda.is_available()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("program")
    (folder / "train.py").write_text(SCRIPT)
    write_captured(capture(CaptureRequest(folder / "train.py", (), 1, device="cpu")), folder / "out")
    return read_captured(folder / "out")


def test_a_script_on_a_cpu_has_the_ops_of_a_cpu(captured: Captured) -> None:
    """Adam goes over parameters one by one, as it does where no GPU is."""
    graph = captured.ranks[0].graph
    names = [graph.names[name] for name in graph.nodes["name"].tolist()]
    assert graph.device == "cpu"
    assert names.count("aten::addcdiv_") == 4
    assert not any("foreach" in name for name in names)


def test_heavy_calls_are_measured_with_their_own_arguments(captured: Captured, tmp_path: Path) -> None:
    told = collect_ops(captured, None, tmp_path / "ops", 1.0, progress=False)
    assert told["known_share"] == 0.0
    file = read_event_file(tmp_path / "ops" / "events" / "ops.json")
    assert {"aten::convolution", "aten::convolution_backward", "aten::addmm"} <= set(file.calls)
    assert all(seconds > 0 for seconds in file.fresh_seconds)
    skipped = json.loads((tmp_path / "ops" / "events" / "ops.json").read_text())["skipped"]
    assert not skipped


def test_products_and_convolutions_come_first(captured: Captured) -> None:
    chosen, known = heavy_calls(captured, None, HARDWARE["local-cpu"])
    bounds = [each.op.record.bound for each in chosen]
    assert bounds == sorted(bounds, key=lambda bound: bound != "compute")
    assert known == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_calls_of_a_gpu_measured_on_a_cpu_are_a_warning(captured: Captured, tmp_path: Path) -> None:
    """They say nothing about the GPU that the script was captured for."""
    (rank,) = captured.ranks
    of_gpu = replace(captured, ranks=(replace(rank, graph=replace(rank.graph, device="cuda")),))
    (warning,) = collect_ops(of_gpu, None, tmp_path / "gpu", 0.2, progress=False)["warnings"]
    assert "was captured for a GPU" in warning
    assert not collect_ops(captured, None, tmp_path / "cpu", 0.2, progress=False)["warnings"]
