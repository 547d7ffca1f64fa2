"""``stepsight evaluate`` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

from tests.experiments.published.run_tables import run_row, write_runs


def run(*arguments: object, cwd: Path, verb: str = "evaluate") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsight", verb, *map(str, arguments)]
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


def test_calibrated_figures_beside_those_as_shipped(tmp_path: Path) -> None:
    """``--calibrate`` adds to the answer and changes nothing of it."""
    small = run_row(gpus=8, nodes=1, dp=1, global_batch=32, iteration_time_s=0.9)
    write_runs(tmp_path / "runs.csv", small, run_row(row_id=2))
    plain, more = (
        json.loads(run("runs.csv", "--json", *own, cwd=tmp_path).stdout) for own in ((), ("--calibrate", "8gpus"))
    )
    assert {key: more[key] for key in plain} == plain
    assert set(more) - set(plain) == {"calibrated", "calibrated_by_source"}
    assert more["calibrated"]["sources"]["lab"]["used"] == 1


def test_calibrate_writes_or_refuses(tmp_path: Path) -> None:
    """Exit code 0 with a predictor, 2 without one; ``--json`` says why."""
    small = run_row(gpus=8, nodes=1, dp=1, global_batch=32, iteration_time_s=0.9)
    write_runs(tmp_path / "runs.csv", small, run_row(row_id=2, iteration_time_s=0.92))
    write_runs(tmp_path / "other.csv", small, run_row(row_id=2, iteration_time_s=0.1))
    options = ("--predictor", "a100-sxm", "--json", "--out")
    done = run("runs.csv", *options, "mine", cwd=tmp_path, verb="calibrate")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["released"] and (tmp_path / "mine" / "manifest.json").exists()
    refused = run("other.csv", *options, "none", cwd=tmp_path, verb="calibrate")
    assert refused.returncode == 2 and not json.loads(refused.stdout)["released"]
    assert not (tmp_path / "none").exists()
    seen = run("runs.csv", "--predictor", "mine", cwd=tmp_path)
    assert seen.returncode == 2 and "rows that a predictor was fitted on cannot judge it" in seen.stderr


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
