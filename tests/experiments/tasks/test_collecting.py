"""``collect`` from job files: real runs, resumed with the same command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepsight.dataset.base.errors import CollectError, JobError, TraceError
from stepsight.dataset.base.files import read_json, write_json
from stepsight.dataset.capture.captured import Captured, read_captured, write_captured
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.running.box import check_possible
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import OP_KINDS
from stepsight.dataset.runs.run_folder import read_event_file
from stepsight.dataset.runs.run_manifest import HARDWARE as BOX_HARDWARE
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.experiments.demo.demo import sized_job
from stepsight.experiments.questions.describe import describe
from stepsight.experiments.tasks.collecting import collect_jobs, collect_ops, heavy_calls, read_plan
from stepsight.experiments.tasks.settings import CollectSettings
from stepsight.training.fitting.train_runs import train
from stepsight.training.prediction.prediction import predict

SETTINGS = CollectSettings(rounds=1, steps=2, warmup=2, profile_steps=1, event_seconds=0.5)


def collect(job: Path, out: Path, plan_only: bool = False, box: Any = None, **changes: Any) -> dict[str, Any]:
    return collect_jobs([job], out, replace(SETTINGS, **changes), plan_only=plan_only, box=box)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(sized_job(("gpt", 1, 32, 2, 2, 64, 64, 16), {}).to_json())
    return path


def test_the_same_command_goes_on(job: Path, tmp_path: Path) -> None:
    """A second call keeps what is there; another plan in the same folder is refused; ``show`` tells what was run."""
    out = tmp_path / "c"
    assert collect(job, out)["collected"] == 2
    assert collect(job, out)["kept"] == 2
    with pytest.raises(CollectError, match="one plan"):
        collect(job, out, event_seconds=1.0)
    shown = describe(out)
    assert [run["role"] for run in shown["runs"]] == ["train"] and shown["events"]["world1"] > 10
    (run,) = (out / "runs").iterdir()
    assert "linear_wgrad" in describe(run)["kinds"]


def test_a_second_model_measures_only_new_signatures(job: Path, tmp_path: Path) -> None:
    """With what an earlier collection on this machine holds; another machine's is refused."""
    collect(job, tmp_path / "first")
    other = tmp_path / "other.json"
    other.write_text(sized_job(("gpt", 1, 32, 2, 2, 96, 64, 16), {}).to_json())
    found = collect_jobs([other], tmp_path / "second", SETTINGS, reuse=[tmp_path / "first"])
    (taken,) = (tmp_path / "second" / "events").glob("reused*.json")
    measured, known = (read_json(path)["records"] for path in (tmp_path / "second" / "events" / "world1.json", taken))
    assert found["reused"] == len(known) > len(measured) > 0
    assert not [record for record in measured if record["op"] in [each["op"] for each in known]]
    path = tmp_path / "first" / "events" / "world1.json"
    told = read_json(path)
    write_json(path, {**told, "fingerprint": {**told["fingerprint"], "processor": "another"}})
    with pytest.raises(CollectError, match="--reuse takes events of this machine"):
        collect_jobs([other], tmp_path / "third", SETTINGS, reuse=[tmp_path / "first"])
    for broken in ('{"schema": 1', '{"schema": 99}', "[]"):
        path.write_text(broken)
        with pytest.raises(TraceError, match=r"world1\.json"):
            collect_jobs([other], tmp_path / "fourth", SETTINGS, reuse=[tmp_path / "first"])
        assert not (tmp_path / "fourth").exists()


def test_a_plan_runs_elsewhere(job: Path, tmp_path: Path) -> None:
    """``--plan-only`` writes what the harness reads, and never over another plan."""
    collect(job, tmp_path / "p", plan_only=True)
    plan = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert plan["runs"][0]["rounds"] == 1 and plan["events"][0]["world_size"] == 1
    collect(job, tmp_path / "p", plan_only=True)
    with pytest.raises(CollectError, match="one plan"):
        collect(job, tmp_path / "p", plan_only=True, event_seconds=9.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel": {"pp": 2}, "cluster": {"devices_per_node": 2}}, "as many micro-batches as stages, got 1 < 2"),
        (
            {
                "parallel": {"pp": 2, "schedule": "gpipe"},
                "cluster": {"devices_per_node": 2},
                "model": {"tied_embeddings": True},
            },
            "ties embeddings only within one stage",
        ),
        ({"batch": {"precision": "fp8"}}, "precisions fp32, bf16, pure-bf16 and pure-fp16, got 'fp8'"),
        ({"parallel": {"recompute": "selective"}}, "recompute none and full, got 'selective'"),
    ],
)
def test_a_plan_that_the_harness_would_refuse_is_not_written(
    job: Path, tmp_path: Path, changes: dict[str, dict[str, Any]], text: str
) -> None:
    tables = json.loads(job.read_text())
    tables["model"]["layers"] = 2
    tables["parallel"]["dp"] = 1
    for table, keys in changes.items():
        tables[table] |= keys
    job.write_text(json.dumps(tables))
    with pytest.raises(CollectError, match=text):
        collect(job, tmp_path / "p", plan_only=True)
    assert not (tmp_path / "p").exists()


def test_a_role_must_be_a_word(job: Path, tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="role must be a word, got ''"):
        collect(job, tmp_path / "p", plan_only=True, role="")


@pytest.mark.parametrize(
    "changes", [{"runs": 3}, {"schema": 9}, {"events": 3}, {"runs": [{"name": "a", "role": "train", "job": {}}]}]
)
def test_a_plan_changed_by_hand_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": 1, "runs": [], "events": [], **changes}))
    with pytest.raises(CollectError, match=r"^cannot read plan .*plan\.json: .*$"):
        collect(path, tmp_path / "c", plan_only=True)
    assert not (tmp_path / "c").exists()


BOX_JOB = Path(__file__).parents[3] / "examples" / "box-gpt-pp4.toml"
BOX_COUNTS: dict[str, Any] = {"rounds": 1, "steps": 1, "warmup": 1, "profile_steps": 0}


def test_a_box_replaces_the_jobs_cluster(tmp_path: Path) -> None:
    """The plan holds what every rank sleeps, and of events only what is real in a box."""
    box = read_box("2x2@100mbit")
    collect(BOX_JOB, tmp_path, plan_only=True, **BOX_COUNTS, box=box)
    plan = read_plan(tmp_path / "plan.json")
    (run,) = plan["runs"]
    assert plan["box"] == box.to_dict()
    assert run["job"]["cluster"]["nodes"] == 2 and len(run["sleeps"]["paces"]) == 4
    (events,) = plan["events"]
    assert not any(OP_KINDS[op["kind"]].slept for op in events["ops"])
    assert {c["kind"] for c in events["collectives"]} == {"send_recv"}
    with pytest.raises(CollectError, match="a plan says its own"):
        collect(tmp_path / "plan.json", tmp_path, plan_only=True, box=box)


@pytest.mark.parametrize(
    ("text", "says"), [("2x1@100mbit", "must equal the number of devices"), ("8x1@100mbit", "number of devices")]
)
def test_a_box_of_another_size_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        collect(BOX_JOB, tmp_path / "p", plan_only=True, **BOX_COUNTS, box=read_box(text))
    assert not (tmp_path / "p").exists()


def test_a_machine_without_boxes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepsight.dataset.harness.running.box.shutil.which", lambda tool: None)
    with pytest.raises(CollectError, match=r"^a box needs iproute2 and util-linux \(.*\): ip, tc, unshare not found$"):
        collect(BOX_JOB, tmp_path / "c", **BOX_COUNTS, box=read_box("4x1@100mbit"))


def test_rejected_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    summary = {"runs": 1, "events": 0, "collected": 1, "kept": 0, "rejected": ["a"]}
    monkeypatch.setattr("stepsight.experiments.tasks.collecting.run_plan", lambda *_, **__: summary)
    text = collect(BOX_JOB, tmp_path, **BOX_COUNTS, box=read_box("4x1@100mbit"))["text"]
    assert text.splitlines()[-1] == "rejected, more than 25 % CPU: a"


def test_traced_runs_of_two_ranks_of_a_box_train(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kineto traces of sleeping ranks are read, learned from, and the run itself is predicted."""
    tmp_path = tmp_path_factory.mktemp("box")
    box = read_box("2x1@200mbit")
    try:
        check_possible(box.to_dict())
    except HarnessError as error:
        pytest.skip(str(error))
    tables = Job.from_file(BOX_JOB).to_dict()
    tables["model"]["layers"] = 2
    tables["parallel"] |= {"pp": 1, "tp": 2, "dp": 1, "virtual_stages": 1}
    tables["batch"] |= {"global_batch": 1}
    tables["cluster"] |= {"nodes": 2}
    job = tmp_path / "job.json"
    job.write_text(json.dumps(tables))
    collect(job, tmp_path / "c", **{**BOX_COUNTS, "profile_steps": 1}, box=box)
    folders = [*(tmp_path / "c").glob("runs/*")]
    if not folders:
        pytest.skip("the ranks computed too much of the time: the machine is busy")
    (folder,) = folders
    found = describe(folder)
    assert {"linear", "adamw", "attention", "all_reduce"} <= set(found["kinds"])
    predictor = train([tmp_path / "c"], tmp_path / "p", hardware_name=BOX_HARDWARE, progress=False)
    predicted = predict(box.holds(Job.from_file(job)), predictor).iteration_time_s
    assert 0.6 < predicted / found["measured_s"] < 1.6  # however slow the machine was: it learned from this run


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
    names = [graph.names[name] for name in graph.columns["name"].tolist()]
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
    of_gpu = replace(captured, ranks=(replace(rank, graph=rank.graph.replace(device="cuda")),))
    (warning,) = collect_ops(of_gpu, None, tmp_path / "gpu", 0.2, progress=False)["warnings"]
    assert "was captured for a GPU" in warning
    assert not collect_ops(captured, None, tmp_path / "cpu", 0.2, progress=False)["warnings"]
