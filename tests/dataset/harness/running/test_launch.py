"""Collections: refused, collected, killed, resumed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness_jobs as jobs
import pytest

from stepsight.dataset import harness
from stepsight.dataset.harness.plan.plan_checks import check_plan
from stepsight.dataset.harness.running import launch
from stepsight.dataset.harness.running.launch import HarnessError, collect, main

COLLECTIVES = [
    {"kind": kind, "num_bytes": 4096, "group_size": 2, "ranks_per_node": 2}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
]
OPS = [{"kind": "linear", "dims": [32, 32, 32], "dtype": "fp32"}, {"kind": "rope", "dims": [3], "dtype": "fp32"}]


def _check_complete(folder: Path, ranks: int) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["traces"]) == [str(rank) for rank in range(ranks)]
    files = {name for names in manifest["traces"].values() for name in names.values()}
    assert {path.name for path in folder.iterdir()} == files | {"manifest.json"}
    return manifest


def test_too_many_ranks_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    plan = jobs.plan([jobs.run("big", jobs.job({"vocab": 32 * cores * 8, "layers": 2}, micro_batch=1, dp=8))])
    if cores >= 8:
        pytest.skip("this machine may run eight ranks")
    with pytest.raises(HarnessError, match=rf"ranks <= cores must hold, got 8 > {cores} for big"):
        collect(plan, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"rounds": 5}, {"name": "two"}, None])
def test_another_plan_is_refused_by_what_differs(change: dict[str, Any] | None, tmp_path: Path) -> None:
    first = jobs.run("one", jobs.job({"layers": 2}, micro_batch=1))
    other = [first, {**first, "name": "two"}] if change is None else [{**first, **change}]
    (tmp_path / "plan.json").write_text(json.dumps(check_plan(jobs.plan([first]))))
    ((key, value),) = (change or {"1": "{'name': 'two'"}).items()
    told = f"runs.0.{key} is .* there and {value} here" if change else f"runs.{key} is nothing there and .*'two'"
    with pytest.raises(HarnessError, match=told):
        collect(jobs.plan(other), tmp_path, progress=False)


def test_command_line_reports_a_broken_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{")
    assert main([str(tmp_path / "plan.json"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read plan")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(HarnessError, match="new or empty folder"):
        collect(jobs.plan([]), tmp_path, progress=False)


def test_one_collection_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    collect(jobs.plan([]), tmp_path, progress=False)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HarnessError, match="another collection is writing"):
            collect(jobs.plan([]), tmp_path, progress=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_ranks_collect_runs_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError", "utf-8")
    monkeypatch.chdir(tmp_path)  # a file there must not hide a module of Python
    plan = jobs.plan(
        [jobs.run("pp", jobs.job(pp=2)), jobs.run("tp", jobs.job(tp=2), profile_steps=0)],
        [{"name": "both", "world_size": 2, "ops": OPS, "collectives": COLLECTIVES, "seconds": 0.5}],
    )
    summary = collect(plan, tmp_path / "out", progress=False)
    assert summary == {"runs": 2, "events": 1, "collected": 3, "kept": 0}
    manifest = _check_complete(tmp_path / "out/runs/pp", ranks=2)
    assert [len(seconds) for seconds in manifest["rounds"]] == [2, 2]
    assert len(manifest["losses"]) == 4
    assert len(manifest["profiled_seconds"]) == 2
    events = json.loads((tmp_path / "out/events/both.json").read_text())
    measured = [(record.get("op") or record["collective"])["kind"] for record in events["records"]]
    assert measured == ["linear", *(c["kind"] for c in COLLECTIVES)]
    assert all(0 < record["min_seconds"] <= record["seconds"] for record in events["records"])
    assert "numel must be even" in events["skipped"][0]["reason"]
    assert 0 <= events["hardware"]["comm_compute_share"] <= 1


def test_killed_collection_resumes_and_keeps_what_was_complete(tmp_path: Path) -> None:
    """A copy of the folder alone collects, is killed with -9, and goes on where it stopped."""
    copy = tmp_path / "elsewhere" / "harness"
    shutil.copytree(Path(harness.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    plan = jobs.plan([jobs.run("a", jobs.job()), jobs.run("b", jobs.job(), rounds=3, steps=150)])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "harness", str(tmp_path / "plan.json"), "--out", str(out), "--quiet"]
    process = subprocess.Popen(command, cwd=copy.parent, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (out / "runs/a/manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = (out / "runs/a/manifest.json").read_bytes()
    _check_complete(out / "runs/a", ranks=1)
    assert not (out / "runs/b").exists()
    with pytest.raises(HarnessError, match="a folder has one plan"):
        collect({**plan, "runs": plan["runs"][:1]}, out, progress=False)
    assert collect(plan, out, progress=False) == {"runs": 2, "events": 0, "collected": 1, "kept": 1}
    assert (out / "runs/a/manifest.json").read_bytes() == first
    assert len(_check_complete(out / "runs/b", ranks=1)["rounds"]) == 3
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["a", "b"]


SCARCE = """
import json, sys
from pathlib import Path
import torch
from stepsight.dataset.harness.running import collection
from stepsight.dataset.harness.running import worker

class Training(collection.Training):
    def __init__(self, job, device, *more):
        if job["model"]["hidden"] == 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB\\nand more lines")
        super().__init__(job, device, *more)

collection.Training = Training
worker.collect_rank(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
"""


def test_a_run_that_no_memory_holds_is_rejected_and_the_others_go_on(tmp_path: Path) -> None:
    big = jobs.run("big", jobs.job({"hidden": 32}))
    plan = check_plan(jobs.plan([big, jobs.run("small", jobs.job(), rounds=2, profile_steps=0)]))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alone["MASTER_PORT"] = str(free.getsockname()[1])
    subprocess.run([sys.executable, "-c", SCARCE, str(path)], env={**os.environ, **alone}, check=True)
    manifest = json.loads((tmp_path / "rejected/big/manifest.json").read_text())
    assert manifest["rejected"] == "CUDA out of memory. Tried to allocate 1 TiB"
    assert (manifest["name"], manifest["rounds"]) == ("big", [])
    _check_complete(tmp_path / "runs/small", ranks=0)
    assert collect(plan, tmp_path, progress=False) == {
        "runs": 2, "events": 0, "collected": 0, "kept": 2, "rejected": ["big"]
    }  # fmt: skip


def test_failing_worker_is_reported_with_its_run_and_log(tmp_path: Path) -> None:
    """The run, the reason and where the log is reach the user in one line."""
    plan = check_plan(jobs.plan([jobs.run("bad", jobs.job(), rounds=1)]))
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text(json.dumps(plan))
    (out / "runs").touch()  # where a folder should be
    with pytest.raises(HarnessError, match=r"^a worker of 1 ranks failed in bad round 1/1: FileExists.*world1\.log$"):
        collect(plan, out, progress=False)


def test_a_killed_worker_is_one_short_line(tmp_path: Path) -> None:
    plan, out = jobs.plan([jobs.run("a", jobs.job(), steps=10**6)]), tmp_path / "out"
    threading.Thread(target=_kill_worker, args=(str(out),), daemon=True).start()
    with pytest.raises(
        HarnessError, match=r"^a worker of 1 ranks failed in a round 1/2: killed by SIGKILL .*; see .*$"
    ):
        collect(plan, out, progress=False)


def _kill_worker(out: str) -> None:
    """Kill the rank that writes this folder, once it trains."""
    deadline = time.monotonic() + 120
    while not (Path(out) / "fingerprint.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if out in words and "torch.distributed.run" not in words:
                os.kill(int(entry.name), signal.SIGKILL)


def test_an_interrupted_collection_says_how_to_go_on(tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C end the workers; one line says what to do."""
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    plan.write_text(json.dumps(jobs.plan([jobs.run("a", jobs.job(), steps=10**6)])))
    command = [sys.executable, "-m", "stepsight.dataset.harness", str(plan), "--out", str(out), "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (out / "fingerprint.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.communicate(timeout=60)[1] == "interrupted; start again with the same plan to go on\n"
    assert process.returncode == 130


def test_a_busy_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others compute before the first measurement is told; a machine that does not say is taken as quiet."""
    monkeypatch.setattr(launch, "_busy_seconds", time.monotonic)  # one core
    note = launch.busy_note(0.01)
    assert note.startswith("measuring needs") and "got 1.0" in note and "\n" not in note
    monkeypatch.setattr(launch, "_busy_seconds", lambda: 0.0)
    assert launch.busy_note(0.01) == ""
    monkeypatch.undo()
    assert launch._busy_seconds() > 0


@pytest.mark.parametrize("text", ["[" * 10**5, '{"schema": 1, "schema": 1}', '{"schema": NaN}', '{"a": "\\ud800"}'])
def test_a_plan_that_is_no_json_is_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert main([str(tmp_path / "plan.json"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot read plan") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_a_refusal_of_the_worker_is_one_line(tmp_path: Path) -> None:
    plan = {**jobs.plan([jobs.run("a", jobs.job())]), "device": "cuda"}
    with pytest.raises(
        HarnessError, match=r"^every rank needs its own GPU: ranks per node <= GPUs must hold, got 1 > 0$"
    ):
        collect(plan, tmp_path / "out", progress=False)


def test_importing_the_launcher_imports_no_torch_and_no_stepsight(tmp_path: Path) -> None:
    copy = tmp_path / "harness"
    shutil.copytree(Path(harness.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys, harness.running.launch; print(sorted({'torch', 'stepsight', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
