"""The command line: answers on stdout, mistakes in one line with exit code 2, nothing written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt3-175b-1024.toml"


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsight", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_predict_json_and_timeline(tmp_path: Path) -> None:
    """``predict --json`` prints one object; the timeline has events of every stage."""
    timeline = tmp_path / "timeline.json"
    done = run("predict", EXAMPLE, "--json", "--timeline", timeline, "--level", "segment")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["low_s"] <= answer["iteration_time_s"] <= answer["high_s"]
    assert sum(answer["breakdown"].values()) == pytest.approx(answer["iteration_time_s"])
    assert "roofline" in answer["source"]
    events = json.loads(timeline.read_text())["traceEvents"]
    assert len({event["pid"] for event in events if event["ph"] == "X"}) == 16


def test_search_and_show(tmp_path: Path) -> None:
    """``search`` writes a plot and its best strategy fits; ``show`` describes a job file."""
    plot = tmp_path / "search.png"
    done = run("search", EXAMPLE, "--trials", 30, "--sampler", "random", "--plot", plot, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best"]["fits"] and plot.stat().st_size > 1000
    shown = run("show", EXAMPLE)
    assert "gpt3-175b" in shown.stdout and shown.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("predict", "bad.toml"), "tp * pp * dp must equal the number of devices"),
        (("predict", "absent.toml"), "cannot read job file"),
        (("predict", "empty.json"), "is not valid JSON"),
        (("predict", EXAMPLE, "--predictor", "."), "predictor"),
        (("predict", EXAMPLE, "--level", "atom"), "--level must be segment or op"),
        (("search", "bad.toml"), "must equal"),
        (("search", EXAMPLE, "--sampler", "magic"), "sampler"),
        (("show", "nowhere"), "existing file"),
        (("show", "."), "no collection"),
        (("train", "nowhere", "--out", "p"), "nowhere"),
        (("collect", "bad.toml", "--out", "c"), "must equal"),
        (("collect", EXAMPLE, "--out", "c"), "got"),
    ],
)
def test_mistakes(arguments: tuple[object, ...], text: str, tmp_path: Path) -> None:
    """A mistake is one line on stderr, exit code 2, no traceback, nothing written."""
    (tmp_path / "bad.toml").write_text(EXAMPLE.read_text().replace("tp = 8", "tp = 7"))
    (tmp_path / "empty.json").write_text("")
    before = sorted(tmp_path.iterdir())
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("stepsight: ") == 1
    assert done.stderr.strip().splitlines()[-1].startswith("stepsight: ")
    assert sorted(tmp_path.iterdir()) == before and done.stdout == ""


def test_every_verb_teaches() -> None:
    """Each verb has help and ``--json``."""
    for verb in ("collect", "train", "predict", "search", "demo", "show"):
        done = run(verb, "--help")
        assert done.returncode == 0 and "--json" in done.stdout
