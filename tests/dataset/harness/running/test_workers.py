"""Processes that end together, and the places that they are given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.running import workers as rendezvous
from stepsight.dataset.harness.running.workers import Workers, places


def run(code: str, ranks: int) -> tuple[int, list[str]]:
    workers = Workers([sys.executable, "-c", code], [{**os.environ, **place} for place in places(ranks)])
    try:
        lines = list(workers.lines())
        return workers.code, lines
    finally:
        workers.close()


def test_every_rank_knows_its_place() -> None:
    assert [(place["RANK"], place["LOCAL_RANK"]) for place in places(2, nodes=3, node=1)] == [("2", "0"), ("3", "1")]
    assert {(place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) for place in places(2, nodes=3, node=1)} == {("6", "2")}


def test_lines_of_all_are_forwarded() -> None:
    code = "import os, sys; sys.stderr.write(f'rank {os.environ[\"RANK\"]}\\n')"  # in one piece
    assert sorted(run(code, 3)[1]) == ["rank 0\n", "rank 1\n", "rank 2\n"]


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_the_first_failure_ends_all_others(end: str, code: int) -> None:
    """Its exit code is what counts, not those of the others, which are killed."""
    program = f"import os, sys, time; {end} if os.environ['RANK'] == '1' else time.sleep(300)"
    assert run(program, 3) == (code, [])


def test_a_program_that_outlives_a_rank_is_not_waited_for() -> None:
    code = (
        "import subprocess, sys; print('done'); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)'])"
    )
    assert run(code, 1) == (0, ["done\n"])


LAUNCHER = """
import os, sys
from stepsight.dataset.harness.running.workers import Workers
code = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
workers = Workers([sys.executable, "-c", code], [dict(os.environ)])
print(next(iter(workers.lines())), flush=True)
os.kill(os.getpid(), 9)
"""


def test_standard_input_ends_with_the_launcher() -> None:
    """However that ends: workers watch it."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER], capture_output=True, text=True, check=False)
    process = Path("/proc") / done.stdout.strip()
    deadline = time.monotonic() + 30
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists()


def test_the_meeting_file_is_private_and_goes(tmp_path: Path) -> None:
    """What a killed launch left goes with it."""
    (tmp_path / ".rendezvous" / "old").mkdir(parents=True)
    with rendezvous.meeting_file(tmp_path) as meeting:
        folder = Path(meeting[rendezvous.FILE]).parent
        assert folder.stat().st_mode & 0o077 == 0 and list((tmp_path / ".rendezvous").iterdir()) == [folder]
        assert meeting["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert list(tmp_path.iterdir()) == []


def test_the_interface_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert rendezvous._interface_to("127.0.0.1", 29500).startswith("lo")
    with pytest.raises(HarnessError, match=r"set GLOO_SOCKET_IFNAME to the interface .* 256\.0\.0\.1"):
        rendezvous._interface_to("256.0.0.1", 29500)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert rendezvous._interface_to("256.0.0.1", 29500) == "eth7"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        HarnessError, match=r"MASTER_ADDR must be an address of rank 0's node, got 198\.51\.100\.9:29500"
    ):
        rendezvous._listen("198.51.100.9", 29500)
