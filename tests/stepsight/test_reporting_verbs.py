"""``report``, ``compare`` and ``sweep`` as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepsight.cli import app
from stepsight.dataset.base.errors import StepsightError

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB, OTHER = str(EXAMPLES / "gpt3-175b-1024.toml"), str(EXAMPLES / "gpt3-175b-1024-zero-bubble.toml")


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page holds both jobs and their comparison; ``--json`` prints the figures."""
    out = tmp_path / "page.html"
    app(["report", JOB, OTHER, "--out", str(out), "--json", "-p", "roofline"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert len(told["jobs"]) == 2 and told["comparison"]["facts"]["parallel.schedule"] == ["1f1b", "zb-h1"]
    page = out.read_text()
    assert page.startswith("<!doctype html>") and 'id="timeline-1"' in page
    app(["report", JOB, "--out", str(out), "-p", "roofline"], standalone_mode=False)  # its own file of before
    said = capsys.readouterr().out
    assert "1e+12 tokens in" in said and "no price of a100-sxm-80gb is known (--prices)" in said
    assert ": iteration " in said and "does not fit" not in said
    tight = tmp_path / "tight.toml"
    tight.write_text(Path(JOB).read_text("utf-8").replace("micro_batch = 1 ", "micro_batch = 8 "), "utf-8")
    app(["report", str(tight), "--out", str(out), "-p", "roofline"], standalone_mode=False)
    assert "\ndoes not fit: " in capsys.readouterr().out
    (tmp_path / "notes.html").write_text("precious")
    with pytest.raises(StepsightError, match="refuses to overwrite"):
        app(["report", JOB, "--out", str(tmp_path / "notes.html")], standalone_mode=False)


def test_compare_takes_a_packed_file_as_a_trace(tmp_path: Path) -> None:
    (tmp_path / "noise.json.gz").write_bytes(bytes(range(128, 256)))
    with pytest.raises(StepsightError, match=r"noise\.json\.gz must be whole JSON: it is truncated or corrupt"):
        app(["compare", str(tmp_path / "noise.json.gz"), JOB], standalone_mode=False)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """One job by two predictors, and two jobs."""
    app(["compare", JOB, "-p", "roofline", "-p", "a100-sxm"], standalone_mode=False)
    assert "gpt3-175b-1024.toml by roofline" in capsys.readouterr().out
    app(["compare", JOB, OTHER, "-p", "roofline", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["sides"][1]["percent"] < 0


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, a CSV file with a row for each job, and a plot."""
    files = ["--csv", str(tmp_path / "nodes.csv"), "--plot", str(tmp_path / "nodes.svg")]
    app(["sweep", JOB, "--vary", "cluster.nodes=64..128", "-p", "roofline", *files], standalone_mode=False)
    assert "cluster.nodes" in capsys.readouterr().out
    assert len((tmp_path / "nodes.csv").read_text().splitlines()) == 3
    assert "<svg" in (tmp_path / "nodes.svg").read_text()


def test_predict_writes_profiler_traces(tmp_path: Path) -> None:
    """One file for each stage; a folder with files is left alone."""
    job, out = str(EXAMPLES / "local-gpt-pp2.toml"), tmp_path / "traces"
    asked = ["predict", job, "-p", "roofline", "--traces", str(out)]
    app(asked, standalone_mode=False)
    assert sorted(path.name for path in out.iterdir()) == ["rank0.json", "rank1.json"]
    with pytest.raises(StepsightError, match="--traces must be a new or empty folder"):
        app(asked, standalone_mode=False)


def test_predict_prints_days_and_cost_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Days, device-hours and cost follow from tokens, tokens per second and the price."""
    prices = tmp_path / "prices.toml"
    prices.write_text("[price_per_device_hour]\na100-sxm-80gb = 2.0\n")
    asked = ["predict", JOB, "-p", "roofline", "--tokens", "3e12", "--prices", str(prices), "--json"]
    app(asked, standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    plan, hours = told["plan"], 3e12 / told["tokens_per_s"] / 3600
    assert plan["days"] == pytest.approx(hours / 24, rel=1e-3)
    assert plan["cost"] == pytest.approx(2.0 * 1024 * hours, rel=1e-3)
    with pytest.raises(StepsightError, match="--prices needs --tokens"):
        app(["predict", JOB, "-p", "roofline", "--prices", str(prices)], standalone_mode=False)


def test_page_names_the_extra_that_it_needs_and_report_needs_none(tmp_path: Path) -> None:
    """In an installation without the library of the page."""
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec; "
        "import stepsight.dataset.base.errors as errors; "
        "errors.find_spec = lambda name: None if name == 'nicegui' else found(name); "
        "sys.modules.update(dict.fromkeys(('nicegui', 'fastapi', 'uvicorn', 'starlette'))); "
        "from stepsight.cli import main; main()"
    )
    page = subprocess.run([sys.executable, "-c", code, "page"], capture_output=True, text=True, check=False)
    assert page.returncode == 2 and 'pip install "stepsight[page]"' in page.stderr
    out = tmp_path / "job.html"
    report = [sys.executable, "-c", code, "report", JOB, "-p", "roofline", "--out", str(out)]
    assert subprocess.run(report, capture_output=True, check=False).returncode == 0 and out.exists()
