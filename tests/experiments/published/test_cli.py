"""``stepsight evaluate`` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

from tests.experiments.published.run_tables import run_row, write_runs


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsight", "evaluate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_answer_and_plot(tmp_path: Path) -> None:
    """``--json`` prints one object and nothing else; the plot is written."""
    write_runs(tmp_path / "runs.csv.gz", run_row(), run_row(row_id=2, tp=8, dp=1), run_row(row_id=3, vocab=""))
    done = run("runs.csv.gz", "--plot", "runs.png", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["overall"]["used"] == 2 and answer["skipped"] == {"vocab is unknown": 1}
    assert (tmp_path / "runs.png").stat().st_size > 1000
    shown = run("runs.csv.gz", cwd=tmp_path)
    assert "constant MFU x bubble" in shown.stdout and "left out 1: vocab is unknown" in shown.stdout


def test_mistakes(tmp_path: Path) -> None:
    """One line on stderr, exit code 2, nothing written."""
    write_runs(tmp_path / "runs.csv", run_row())
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    for arguments, text in (
        (("absent.csv",), "cannot read runs from absent.csv"),
        (("notes.csv",), "notes.csv lacks row_id"),
        (("runs.csv", "--source", "nobody"), "--source must match the source of a row"),
        (("runs.csv", "--plot", "runs.txt"), "--plot ends in .png"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "") and text in done.stderr
        assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs.csv", "notes.csv"}
