"""Causes of slow runs, planted in traces made by hand; three verbs agree on what each is worth."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware_facts import Fabric, Link
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.traced_runs import (
    ReplayedRun,
    _clock_causes,
    _of_messages,
    diagnose,
    diagnosis_text,
    replay_runs,
    replay_text,
    write_timeline,
)
from stepsight.experiments.questions.what_if import what_if
from stepsight.experiments.tasks.settings import TraceChanges
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.traced_jobs import two_ranks


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
    assert told["causes"][0]["cause"] == "host_bound" and told["causes"][0]["saved_percent"] > 50
    assert told["predicted_s"] is None and "CUDA graphs" in diagnosis_text(told)
    job = Job.from_file(Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml")
    told = diagnose(tmp_path / "runs", job, "roofline")
    assert "roofline" in told["source"] and f" by {told['source']}" in diagnosis_text(told)


def messages(num_bytes: int, seconds: float, count: int) -> Any:
    """What ``_of_messages`` reads of a rank: collectives of eight ranks, one on each node."""
    nodes = {"step": np.zeros(count, dtype=int), "work": np.zeros(count, dtype=int)}
    work = Collective("all_reduce", num_bytes, 8, 1)
    return SimpleNamespace(
        works=(work,), columns=nodes, duration_s=np.full(count, seconds), on_device=np.ones(count, dtype=bool)
    )


def test_small_messages_and_slow_links_are_named() -> None:
    """Many messages of 1 KB; large ones at a hundredth of the stated bandwidth; and neither."""
    fabric = Fabric("toy", Link(300e9, 1e-6), Link(25e9, 1e-5))
    assert [name for name, _, _ in _of_messages([messages(1024, 1e-3, 50)], 0.1, fabric)] == ["small_messages"]
    slow = messages(64 << 20, (64 << 20) / 0.25e9, 2)
    assert [name for name, _, _ in _of_messages([slow], 10.0, fabric)] == ["slow_transport"]
    assert _of_messages([slow], 10.0, None) == []
    assert _of_messages([messages(64 << 20, (64 << 20) / 20e9, 2)], 10.0, fabric) == []


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


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two ranks of which the second computes longer, so that the first waits in the all-reduce."""
    found = import_ranks([file.write(tmp_path / f"{rank}.json") for rank, file in enumerate(two_ranks())])
    write_imported(found.graphs, found.sources, tmp_path / "runs", None, [])
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("cause", "asked"),
    [
        ("waiting_for_peers", TraceChanges(remove_straggler=True)),
        ("waiting_for_communication", TraceChanges(faster={"communication": 9e8})),
        ("host_bound", TraceChanges(cuda_graph=True)),
    ],
)
def test_three_verbs_agree_on_what_a_cause_is_worth(pair: Path, cause: str, asked: TraceChanges) -> None:
    worth = [
        next(each["saved_percent"] for each in told["causes"] if each["cause"] == cause)
        for told in (replay_runs(pair), diagnose(pair))
    ]
    worth.append(100 * (1 - 1 / what_if(pair, asked)["speedup"]))
    assert worth == pytest.approx([worth[0]] * 3, abs=0.01)
    assert (worth[0] > 20) == (cause == "waiting_for_peers")


def test_a_replay_tells_causes_exposed_communication_and_the_critical_path(pair: Path) -> None:
    told = replay_runs(pair)
    saved = [cause["saved_percent"] for cause in told["causes"]]
    assert saved == sorted(saved, reverse=True) and {"cause", "seconds", "saved_percent"} <= set(told["causes"][0])
    percent = told["exposed_communication_percent"]
    assert set(percent) == {"0", "1"} and percent["0"] > percent["1"] > 0  # the fast rank waits in the all-reduce
    path = told["critical_path"]
    assert path == sorted(path, key=lambda node: node["start_s"]) and {node["rank"] for node in path} >= {1}
    step, ranks = (
        sum(node["seconds"] for node in path),
        len(ReplayedRun.of(*(pair / "runs").iterdir()).graphs),
    )
    assert ranks == 2 and 0 < step <= 2 * told["step_s"] * 1.01
    assert replay_text(told).startswith("exposed communication of a step: rank 0 ")


def test_a_timeline_marks_the_critical_path_causes_and_predicted_durations(pair: Path, tmp_path: Path) -> None:
    """No thread does two things at once, and the path leaves out no time of the step."""
    told = write_timeline(pair, tmp_path / "step.json")
    assert told == f"wrote {tmp_path / 'step.json'}"
    events = json.loads((tmp_path / "step.json").read_text("utf-8"))["traceEvents"]
    spans = sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"])
    ends: dict[tuple[int, int], float] = {}
    for event in spans:
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(thread, 0.0) - 1e-6 and event["dur"] >= 0
        ends[thread] = event["ts"] + event["dur"]
    marked = [event for event in spans if event.get("args", {}).get("critical")]
    path = [event for event in spans if event["cat"] == "critical"]
    assert 0 < len(path) <= len(marked) and {event["args"]["rank"] for event in path} >= {1}
    assert any("predicted_us" in event["args"] for event in marked if event["name"].endswith(" linear"))
    assert {event["name"] for event in spans if event["cat"] == "idle"} >= {"host_bound"}
    assert max(event["args"]["value"] for event in events if event["ph"] == "C") >= 1
    assert {"s", "f", "M"} <= {event["ph"] for event in events}
