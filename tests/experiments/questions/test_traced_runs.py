"""Causes of slow runs, planted in traces made by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware_facts import Fabric, Link
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.traced_runs import _clock_causes, _message_causes, diagnose, diagnosis_text
from tests.dataset.kineto_files import KinetoFile


def host_bound_trace(path: Path) -> Path:
    """Kernels of 10 us that the host launches every 100 us."""
    file = KinetoFile()
    for step in range(2):
        begin = 10_000.0 * (step + 1)
        file.note(f"ProfilerStep#{step}", begin, 2_000.0)
        for number in range(18):
            at, correlation = begin + 100.0 * number, 100 * step + number + 1
            file.call("aten::mm", at, 90.0, [64, 64], [64, 64])
            file.launch(at + 5.0, correlation)
            file.kernel("ampere_sgemm_64x64", at + 30.0, 10.0, 7, correlation)
    return file.write(path)


def test_a_slow_host_is_named(tmp_path: Path) -> None:
    found = import_ranks([host_bound_trace(tmp_path / "trace.json")])
    write_imported(found.graphs, found.sources, tmp_path / "runs", None, [])
    told = diagnose(tmp_path / "runs")
    assert told["causes"][0]["cause"] == "host_bound" and told["causes"][0]["share"] > 0.5
    assert told["predicted_s"] is None and "CUDA graphs" in diagnosis_text(told)


def messages(num_bytes: int, seconds: float, count: int) -> Any:
    """What ``_message_causes`` reads of a rank: collectives of eight ranks, one on each node."""
    nodes = {"step": np.zeros(count, dtype=int), "work": np.zeros(count, dtype=int)}
    work = Collective("all_reduce", num_bytes, 8, 1)
    return SimpleNamespace(
        works=(work,), columns=nodes, duration_s=np.full(count, seconds), on_device=np.ones(count, dtype=bool)
    )


def test_small_messages_and_slow_links_are_named() -> None:
    """Many messages of 1 KB; large ones at a hundredth of the stated bandwidth; and neither."""
    fabric = Fabric("toy", Link(300e9, 1e-6), Link(25e9, 1e-5))
    assert [each["cause"] for each in _message_causes([messages(1024, 1e-3, 50)], 0.1, fabric)] == ["small_messages"]
    slow = messages(64 << 20, (64 << 20) / 0.25e9, 2)
    assert [each["cause"] for each in _message_causes([slow], 10.0, fabric)] == ["slow_transport"]
    assert _message_causes([slow], 10.0, None) == []
    assert _message_causes([messages(64 << 20, (64 << 20) / 20e9, 2)], 10.0, fabric) == []


def test_throttling_is_read_from_the_clocks(tmp_path: Path) -> None:
    clocks = {"samples": 10, "reasons": {"power_cap": 0.4, "idle": 0.5}}
    (tmp_path / "manifest.json").write_text(json.dumps({"clocks": clocks}))
    (cause,) = _clock_causes(tmp_path)
    assert cause["cause"] == "throttling" and cause["evidence"] == "power_cap in 40 % of the samples"
    (tmp_path / "manifest.json").write_text(json.dumps({"clocks": {"reasons": {"idle": 1.0}}}))
    assert _clock_causes(tmp_path) == []


def test_a_folder_without_a_traced_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepsightError, match="a run folder or a collection"):
        diagnose(tmp_path)
