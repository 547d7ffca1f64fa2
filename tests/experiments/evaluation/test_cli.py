"""``stepsight evaluate`` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

from tests.experiments.evaluation.run_tables import run_row, write_runs

ROOT = Path(__file__).parents[3]


def run(*arguments: object, cwd: Path, verb: str = "evaluate") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsight", verb, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_answer_and_plot(tmp_path: Path) -> None:
    """``--json`` prints one object and nothing else; the plot is written."""
    write_runs(tmp_path / "runs.csv.gz", run_row(), run_row(row_id=2, tp=8, dp=1), run_row(row_id=3, hidden=""))
    done = run("runs.csv.gz", "--plot", "runs.png", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["overall"]["used"] == 2 and answer["skipped"] == {"hidden is unknown": 1}
    assert (tmp_path / "runs.png").stat().st_size > 1000
    shown = run("runs.csv.gz", cwd=tmp_path)
    assert "constant MFU x bubble" in shown.stdout and "left out 1: hidden is unknown" in shown.stdout


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
    small = run_row(gpus=8, nodes=1, dp=1, global_batch=32, iteration_time_s=0.135)
    write_runs(tmp_path / "runs.csv", small, run_row(row_id=2, iteration_time_s=0.138))
    write_runs(tmp_path / "other.csv", small, run_row(row_id=2, iteration_time_s=0.05))
    options = ("--predictor", "a100-sxm", "--json", "--out")
    done = run("runs.csv", *options, "mine", cwd=tmp_path, verb="calibrate")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["released"] and (tmp_path / "mine" / "manifest.json").exists()
    refused = run("other.csv", *options, "none", cwd=tmp_path, verb="calibrate")
    assert refused.returncode == 2 and not json.loads(refused.stdout)["released"]
    assert not (tmp_path / "none").exists()
    seen = run("runs.csv", "--predictor", "mine", "--json", cwd=tmp_path)
    assert json.loads(seen.stdout)["skipped"] == {"the predictor was fitted on it": 1}
    assert json.loads(seen.stdout)["overall"]["used"] == 1
    write_runs(tmp_path / "small.csv", small)
    alone = run("small.csv", "--predictor", "mine", cwd=tmp_path)
    assert alone.returncode == 2 and "rows that a predictor was fitted on cannot judge it" in alone.stderr


def test_mistakes(tmp_path: Path) -> None:
    """One line on stderr, exit code 2, nothing written."""
    write_runs(tmp_path / "runs.csv", run_row())
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    write_runs(tmp_path / "loose.csv", run_row(recompute="fulll"))
    for arguments, text in (
        (("absent.csv",), "cannot read runs from absent.csv"),
        (("notes.csv",), "it lacks source"),
        (("runs.csv", "--source", "nobody"), "--source must match the source of a row"),
        (("runs.csv", "--plot", "runs.txt"), "--plot ends in .png"),
        (("loose.csv",), "of 1 row of loose.csv left out: 1 x recompute is 'fulll'"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "") and text in done.stderr
        assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs.csv", "notes.csv", "loose.csv"}


def test_the_example(tmp_path: Path) -> None:
    """All its rows count, without a column ``row_id``; a job file that names the framework is predicted alike."""
    done = run(ROOT / "examples" / "runs.csv", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["skipped"] == {} and answer["warnings"] == []
    assert [row["row_id"] for row in answer["predictions"]] == [2, 3, 4, 5]
    assert answer["overall"]["mape"] < 10
    job = {
        "model": {
            "family": "gpt", "layers": 32, "hidden": 4096, "heads": 32, "vocab": 50257, "seq_len": 2048,
            "tied_embeddings": True,
        },
        "parallel": {"tp": 2, "zero_stage": 1, "sequence_parallel": True, "recompute": "none"},
        "batch": {"micro_batch": 2, "global_batch": 64, "precision": "bf16"},
        "cluster": {"hardware": "a100-sxm-80gb", "devices_per_node": 8},
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    asked = run("job.json", "--framework", "Megatron-LM 0.9", "--json", cwd=tmp_path, verb="predict")
    assert json.loads(asked.stdout)["iteration_time_s"] == answer["predictions"][0]["predicted_s"]
