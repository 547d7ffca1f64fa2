"""What ``nvidia-smi`` says, read and summed up; a script in its place where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepsight.dataset.harness.measuring.device import Watch, ask, clocks, parse

LINES = ["1980, 3201, 41, 402.15, 0x0000000000000004", "1755, 3201, 44, [N/A], 0x0000000000000024", "[N/A], [N/A]", ""]
TOOL = """#!/bin/sh
case "$*" in
    *clocks_event_reasons*{unknown}) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
    *-lms*) while true; do echo "1980, 3201, 41, 402.15, 0x0000000000000004"; sleep 0.02; done;;
    *) echo "580.159.03";;
esac
"""


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, unknown: str = "NEVER") -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(TOOL.replace("{unknown}", unknown))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def _wait_for(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)


def test_samples_are_summed_up_and_what_is_unknown_left_out() -> None:
    samples = [sample for line in LINES if (sample := parse(line)) is not None]
    assert clocks([samples])["clocks"] == {
        "samples": 2,
        "sm_mhz": {"median": 1867.5, "least": 1755.0},
        "memory_mhz": {"median": 3201.0, "least": 3201.0},
        "temperature_c": {"median": 42.5, "least": 41.0},
        "power_w": {"median": 402.15, "least": 402.15},
        "reasons": {"power_cap": 1.0, "thermal": 0.5},
    }
    assert clocks([[]]) == {}


def test_without_reasons_the_numbers_remain() -> None:
    sample = parse("345, 3201, 30, 70.5")
    assert sample is not None
    assert sample.reasons == ()
    assert sample.numbers["sm_mhz"] == 345.0


@pytest.mark.parametrize("unknown", ["NEVER", ""])  # an older driver knows no event reasons, but throttle reasons
def test_a_gpu_is_watched_from_a_moment_on(unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, unknown)
    assert ask("0", "driver_version") == ["580.159.03"]
    watch = Watch("0")
    _wait_for(lambda: len(watch.since(0.0)) > 2)
    assert clocks([watch.since(0.0)])["clocks"]["sm_mhz"]["median"] == 1980.0
    assert watch.since(time.monotonic() + 1) == []
    watch.stop()
    assert watch._process is not None
    assert watch._process.poll() is not None


def test_where_there_is_no_tool_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepsight.dataset.harness.measuring.device.TOOL", "no-such-tool")
    assert ask("0", "driver_version") == []
    watch = Watch("0")
    assert watch.since(0.0) == []
    watch.stop()


def test_a_tool_that_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Unable to determine the device handle'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    watch = Watch("0")
    assert watch._process is None


def test_the_tool_ends_with_the_process_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when that is killed and can clean nothing up."""
    _install(tmp_path, monkeypatch)
    script = (
        "import os, signal\nfrom stepsight.dataset.harness.measuring.device import Watch\nwatch = Watch('0')\n"
        "print(watch._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    child = Path("/proc") / done.stdout.strip() / "cmdline"
    assert done.stdout.strip()
    _wait_for(lambda: not child.exists() or child.read_bytes() == b"")
    assert not child.exists() or child.read_bytes() == b""
