"""Scripts run for real, on one and two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.scripts.launch import Ranks, run_ranks

TRAIN = """
import os, sys, torch
from torch import nn
model = nn.Linear(16, 16)
if "RANK" in os.environ:
    torch.distributed.init_process_group()
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
print("begins", end="")
for number in range(int(sys.argv[2])):
    with torch.autocast("cpu"):
        loss = model(torch.ones(4, 16)).sum() / (number != 50)
    loss.backward()
    optimizer.step()
"""


def settings(script: Path, *arguments: str, timeout_s: float = 120) -> dict[str, Any]:
    counts = {"warmup": 1, "rounds": 2, "steps": 3, "profile_steps": 1}
    return {"script": str(script), "arguments": list(arguments), "timeout_s": timeout_s, **counts}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def run(script: Path, ranks: int | None, *arguments: str, timeout_s: float = 120) -> list[dict[str, Any]]:
    (script.parent / "out").mkdir(exist_ok=True)
    wanted = settings(script, *arguments, timeout_s=timeout_s)
    return run_ranks(wanted, script.parent / "out", script.parent / "log", _ranks(ranks), lambda doing: None)


def _ranks(count: int | None) -> Ranks:
    return Ranks.here(count)


def test_two_ranks_of_a_script_that_never_ends_are_timed_and_traced(script: Path) -> None:
    found = run(script, 2, "0.1", "1000000")
    for rank, measured in enumerate(found):
        assert (measured["rank"], measured["steps_by"]) == (rank, "optimizer.step()")
        assert [len(steps) for steps in measured["rounds"]] == [3, 3]
        assert len(measured["profiled_seconds"]) == 1
        names = {path.name for path in (script.parent / "out").glob(f"rank{rank}*")}
        assert names == set(measured["traces"].values())
    assert "begins" in (script.parent / "log").read_text()


def test_a_script_that_ends_early_is_told_how_many_steps_it_needs(script: Path) -> None:
    with pytest.raises(
        HarnessError, match=r"train\.py must run at least 10 steps, but it ended after 4 \(by optimizer"
    ):
        run(script, None, "0.1", "4")


def test_nothing_runs_on_when_the_launcher_ends(tmp_path: Path) -> None:
    """The script waits in a process of its own that it has started."""
    script = tmp_path / "train.py"
    (tmp_path / "out").mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from stepsight.dataset.harness.scripts.launch import Ranks, run_ranks\n"
        f"run_ranks({settings(script)!r}, Path('out'), Path('log'), Ranks.here(None), print)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    mark = f"{600 + os.getpid() % 100}.5"
    script.write_text(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])\n")
    _until(lambda: _sleepers(mark) == 1)
    launcher.kill()
    launcher.wait()
    _until(lambda: _sleepers(mark) == 0)


def _sleepers(mark: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes().split(b"\0")[:2] == [b"sleep", mark.encode()]
        except OSError:
            continue
    return found


def _until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
