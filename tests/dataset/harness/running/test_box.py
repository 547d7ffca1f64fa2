"""Clusters in a box: what they need, that their links are limited, and that nothing of them is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.plan.plan_checks import MOST_CPU, check_plan
from stepsight.dataset.harness.running import box as boxes
from stepsight.dataset.harness.running import launch
from stepsight.dataset.harness.running.box import check_possible
from stepsight.dataset.harness.running.collection import Collection
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_manifest import HARDWARE, read_box, read_manifest
from stepsight.training.measured.planning import SleepingLatency, box_plan

TWO = read_box("2x1@200mbit")
BUFFER = 2**20
NETWORK = Path("/sys/class/net")


@pytest.fixture
def possible() -> None:
    """Skips where there can be no box."""
    try:
        check_possible(TWO.to_dict())
    except HarnessError as error:
        pytest.skip(str(error))


def _plan(rounds: int = 2, **parallel: Any) -> dict[str, Any]:
    """A run of two ranks, and an all-reduce."""
    hardware = find_hardware(HARDWARE)
    assert hardware is not None
    job = Job(
        model=ModelSpec(family="gpt", layers=2, hidden=256, heads=16, vocab=2048, seq_len=128),
        parallel=ParallelSpec(**(parallel or {"pp": 2, "dp": 1})),
        batch=BatchSpec(micro_batch=1, global_batch=2, precision="fp32"),
        cluster=ClusterSpec(hardware=HARDWARE, devices_per_node=2),
    )
    counts = {"rounds": rounds, "steps": 1, "warmup": 1, "profile_steps": 0}
    return box_plan(
        TWO,
        [("a", "train", job, counts)],
        SleepingLatency(hardware, TWO.links),
        collectives=[Collective("all_reduce", BUFFER, 2, 1)],
        event_seconds=1.0,
    )


def _until(there: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)


def _processes(word: str) -> list[int]:
    """Processes whose command line has this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if word in words:
            found.append(int(entry.name))
    return found


@pytest.mark.usefixtures("possible")
def test_a_killed_box_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    """After kill -9 of the launcher all processes end, and with them their networks; finished rounds are kept."""
    out, links = tmp_path / "out", sorted(NETWORK.iterdir())
    plan = _plan(rounds=3)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code = "import sys; from stepsight.dataset.harness.running.launch import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(tmp_path / "plan.json"), "--out", str(out), "--quiet"]
    process = subprocess.Popen(command, start_new_session=True)
    _until((out / ".rounds/a.json").exists, 120)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = json.loads((out / ".rounds/a.json").read_text())["rounds"]
    _until(lambda: not _processes(str(out)), 10)
    assert _processes(str(out)) == []
    assert sorted(NETWORK.iterdir()) == links

    summary = launch.collect(plan, out, progress=False)
    assert summary == {"runs": 1, "events": 1, "collected": 2, "kept": 0, "rejected": summary["rejected"]}
    assert _processes(str(out)) == []
    assert sorted(NETWORK.iterdir()) == links
    _check_run(out / ("rejected" if summary["rejected"] else "runs") / "a", kept, plan)
    (record,) = json.loads((out / "events/world2.json").read_text())["records"]
    assert record["seconds"] > 0.8 * BUFFER * 8 / 200e6  # each rank sends its buffer's size


def _check_run(folder: Path, kept: list[list[float]], plan: dict[str, Any]) -> None:
    manifest = read_manifest(folder)
    assert (manifest.box, manifest.traces) == (TWO, {})
    assert [list(seconds) for seconds in manifest.rounds[: len(kept)]] == kept and len(manifest.rounds) == 3
    steps = json.loads((folder / "records.json").read_text())["steps"]
    assert len(steps) == 3
    sleeps = plan["runs"][0]["sleeps"]
    for step, (seconds,) in zip(steps, manifest.rounds, strict=True):
        assert 0 <= step["cpu"] <= 1 and max(step["ends"]) - step["begin"] == pytest.approx(seconds)
        for rank, spans in enumerate(step["spans"]):
            labels = [label for label, *_ in spans]
            assert sorted(labels) == ["backward"] * 2 + ["forward"] * 2 + ["optimizer", "step"]
            slept = sum(
                item[4]
                for number in sleeps["parts"][rank]
                for part in sleeps["blocks"][number]
                for key in ("forward", "backward", "weight")
                for item in part[key]
            )
            assert sum(end - start for label, *_, start, end in spans if "ward" in label) > 2 * 0.9 * slept


@pytest.mark.usefixtures("possible")
def test_every_rank_is_alone_with_its_node_behind_a_limited_link() -> None:
    code = """
import os, subprocess, sys, time
from stepsight.dataset.harness.running.box import run_box
def work():
    time.sleep(0.2 * int(os.environ["RANK"]))  # one after the other: their lines stay whole
    link = subprocess.run("tc qdisc show dev eth0".split(), capture_output=True, text=True).stdout
    host = subprocess.run("ip -o -4 addr show dev eth0".split(), capture_output=True, text=True).stdout.split()[3]
    place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    print(*place, host, "tbf" in link, link.split("rate ")[1].split()[0], flush=True)
sys.exit(run_box({"nodes": 2, "ranks_per_node": 2, "mbits_per_s": [200, 50]}, work))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "0 4 0 10.77.0.1/24 True 200Mbit",
        "1 4 1 10.77.0.1/24 True 200Mbit",
        "2 4 0 10.77.0.2/24 True 50Mbit",
        "3 4 1 10.77.0.2/24 True 50Mbit",
    ]


@pytest.mark.usefixtures("possible")
def test_a_rank_that_fails_ends_all_others() -> None:
    code = """
import os, sys, time
from stepsight.dataset.harness.running.box import run_box
def work():
    if os.environ["RANK"] == "2":
        return 3
    time.sleep(300)
sys.exit(run_box({"nodes": 2, "ranks_per_node": 2, "mbits_per_s": [200, 200]}, work))
"""
    marker = f"#{os.getpid()}"
    done = subprocess.run([sys.executable, "-c", code, marker], capture_output=True, timeout=60, check=False)
    assert done.returncode == 3
    _until(lambda: not _processes(marker), 10)
    assert _processes(marker) == []


@pytest.mark.parametrize(
    ("lacking", "box", "says"),
    [
        ("tool", {}, r"needs iproute2 and util-linux \(.*\): ip, tc, unshare not found"),
        ("tbf", {}, r"needs root \(CAP_NET_ADMIN and CAP_SYS_ADMIN\) and a kernel with veth, bridge and tbf, got uid"),
        (
            "netem",
            {"latency_ms": [0, 2]},
            "latency_ms of a box needs netem, but this kernel has no sch_netem: no",
        ),
    ],
)
def test_a_machine_that_cannot_hold_a_box_says_why(
    lacking: str, box: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(boxes.shutil, "which", lambda tool: None if lacking == "tool" else tool)
    monkeypatch.setattr(boxes, "_lacks", lambda *commands: "no" if any(lacking in c for c in commands) else "")
    plan = _plan()
    plan["box"] |= box
    with pytest.raises(HarnessError, match=says):
        launch.collect(plan, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_links_that_are_not_late_need_no_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(boxes, "_lacks", lambda *commands: "netem" if any("netem" in c for c in commands) else "")
    check_possible(TWO.to_dict())
    check_possible({**TWO.to_dict(), "latency_ms": [0, 0.0]})


@pytest.mark.parametrize(("cpu", "place"), [(MOST_CPU - 0.01, "runs"), (MOST_CPU + 0.01, "rejected")])
def test_a_run_that_kept_the_cores_too_busy_is_rejected(
    cpu: float, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept apart, counts as done, and the summary names it."""
    plan = check_plan(_plan(rounds=1))
    (run,) = plan["runs"]
    rank = Collection.__new__(Collection)
    rank.plan, rank.out, rank.rank, rank.size = plan, tmp_path, 0, 2
    rank.fingerprint, rank.versions, rank.device = {}, {}, type("Device", (), {"type": "cpu"})()
    rank.boxed, rank.compile, rank._samples, rank._took = {"box": plan["box"]}, {}, defaultdict(list), defaultdict(dict)
    records = [[{"cpu": 0.01}, {"cpu": cpu}]]
    rank._finish(run, {"rounds": [[1.0]], "losses": [0.0, 0.0], "records": records}, None)  # type: ignore[arg-type]
    assert [path.parent.parent.name for path in tmp_path.glob("*/a/manifest.json")] == [place]

    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "world2.json").write_text("{}")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(launch, "check_possible", lambda box: None)
    summary = launch.collect(plan, tmp_path, progress=False)
    assert (summary["kept"], summary["rejected"]) == (2, ["a"] if place == "rejected" else [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"box": {"nodes": 2}}, "a box has nodes, ranks_per_node, mbits_per_s and maybe latency_ms"),
        ({"box": read_box("4x1@200mbit").to_dict()}, "as many ranks as its box, got 2 != 4"),
        ({"box": read_box("3x1@200mbit").to_dict()}, "a box holds events of 3 ranks, got world_size 2"),
        ({"sleeps": None}, "a run in a box has sleeps with blocks, boundary_numel"),
        ({"sleeps": {"parts": [[0]]}}, r"sleeps\.parts must be a list of 2"),
        ({"sleeps": {"paces": [1.0]}}, r"sleeps\.paces must be a list of 2"),
        ({"sleeps": {"paces": [1.0, 0.0]}}, r"sleeps\.paces must be numbers > 0"),
        ({"sleeps": {"parts": [[0], [99]]}}, r"sleeps\.parts must be lists of numbers of blocks"),
        ({"sleeps": {"root": [-1]}}, r"sleeps\.root must be a list of numbers of blocks"),
        ({"sleeps": {"boundary_numel": [1e300]}}, r"sleeps\.boundary_numel must be whole numbers"),
        ({"sleeps": {"optimizer": [["op", "adamw", [9], "fp32", 1e300]] * 2}}, r"sleeps\.optimizer must be ops"),
        ({"sleeps": {"blocks": [[{"forward": 1e300}]]}}, r"sleeps\.blocks must be lists of steps"),
        ({"sleeps": {"blocks": 3}}, r"sleeps\.blocks must be lists of steps, got 3"),
        ({"sleeps": {"table": 3}}, r"sleeps\.table must be text, got 3"),
        ({"warmup": 0}, "warmup must be a whole number >= 1, got 0"),
    ],
)
def test_a_plan_for_a_box_is_checked_whole(change: dict[str, Any], says: str) -> None:
    plan = _plan()
    (run,) = plan["runs"]
    if "box" in change:
        plan["box"] = change["box"]
    elif change.get("sleeps"):
        run["sleeps"] |= change["sleeps"]
    else:
        run |= change
    with pytest.raises(HarnessError, match=says):
        check_plan(plan)


def test_sleeps_are_for_boxes_alone() -> None:
    plan = _plan()
    del plan["box"]
    with pytest.raises(HarnessError, match="unknown key 'sleeps'"):
        check_plan(plan)
