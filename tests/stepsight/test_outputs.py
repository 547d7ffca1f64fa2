"""Every option that names an output: what is checked before the work, and what a mistake leaves behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from stepsight.cli import main

ROOT = Path(__file__).parents[2]
JOB, RUNS, COLLECTION = (ROOT / "examples" / name for name in ("gpt3-175b-1024.toml", "runs.csv", "collection"))
FILES = [
    ("predict", JOB, "--timeline", "t.json"),
    ("predict", JOB, "--schedule", "s.csv"),
    ("predict", "--program", "captured", "--timeline", "t.json"),
    ("search", JOB, "--out", "best.toml"),
    ("search", JOB, "--to", "megatron-script", "--out", "train.sh"),
    ("search", JOB, "--plot", "p.png"),
    ("search", JOB, "--csv", "s.csv"),
    ("search", JOB, "--study", "s", "--storage", "s.journal"),
    ("search", JOB, "--study", "s", "--storage", "sqlite:///nope/s.db"),
    ("sweep", JOB, "--vary", "cluster.nodes=64,128", "--plot", "p.png"),
    ("sweep", JOB, "--vary", "cluster.nodes=64,128", "--csv", "s.csv"),
    ("report", JOB, "--out", "page.html"),
    ("job", JOB, "--out", "job.toml"),
    ("job", JOB, "--to", "torchtitan", "--out", "new.toml"),
    ("evaluate", RUNS, "--plot", "p.png"),
    ("plan-profile", "--hardware", "a100-sxm-80gb", "--out", "plan.json"),
    ("replay", COLLECTION, "--timeline", "t.json"),
    ("show", COLLECTION, "--table", "t.parquet"),
    ("import", "csv", "rows.csv", "--out", "t.parquet"),
    ("train", COLLECTION, "--out", "predictor", "--tracking-uri", "sqlite:///nope/m.db"),
]
FOLDERS = [
    ("predict", "bad.toml", "--traces"),
    ("collect", "bad.toml", "--out"),
    ("verify", "bad.toml", "--out"),
    ("train", "nowhere", "--out"),
    ("train", "bad.parquet", "--out"),
    ("calibrate", RUNS, "--predictor", "nowhere", "--out"),
    ("calibrate", "bad.csv", "--predictor", "a100-sxm", "--out"),
    ("import", "kineto", "bad.json", "--out"),
    ("dataset", "nowhere", "--out"),
    ("capture", "--world-size", 2, "model.onnx", "--out"),
    ("job", "bad.toml", "--program"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that nothing can read."""
    for name in ("bad.toml", "bad.csv", "bad.json", "bad.parquet", "model.onnx"):
        (tmp_path / name).write_bytes(b"\x00\xff\x01 no file of its format")
    (tmp_path / "rows.csv").write_text("op,dims,dtype,microseconds\nlinear,4x4x4,bf16,5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """Lines on stderr of a command that fails, and prints no answer."""
    monkeypatch.setattr(sys, "argv", ["stepsight", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    return err.splitlines()


@pytest.mark.parametrize("words", FILES, ids=lambda words: " ".join(map(str, words[:1] + words[-2:])))
def test_a_file_needs_a_folder_that_is_there(
    words: tuple[object, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name may be mistyped: no folder is made for it, and nothing else is written."""
    *others, name = words
    wanted = name if "nope/" in str(name) else f"nope/deep/{name}"
    before = sorted(folder.rglob("*"))
    (line,) = refused(monkeypatch, capsys, *others, wanted)
    assert line.startswith("error: an output file needs a folder that is there, got 'nope/") and "make it" in line
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("words", FOLDERS, ids=lambda words: " ".join(map(str, words)))
def test_a_mistake_makes_no_folder(
    words: tuple[object, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new folder of output, and what is above it, are made once there is something to write."""
    before = sorted(folder.rglob("*"))
    *_, last = refused(monkeypatch, capsys, *words, "nope/deep/out")
    assert last.startswith("error: ")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("verb", ["predict", "explain", "search", "report", "sweep", "compare", "collect", "verify"])
def test_an_error_is_the_only_output(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes about what was assumed belong to an answer."""
    more = {"report": ["--out", "page.html"], "sweep": ["--vary", "cluster.nodes=64"]}.get(verb, [])
    more += ["--out", "c"] if verb in ("collect", "verify") else []
    (line,) = refused(monkeypatch, capsys, verb, JOB, "--hardware", "bad.toml", *more)
    assert line.startswith("error: ") and "bad.toml: cannot read it" in line
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 3}')
    (line,) = refused(monkeypatch, capsys, verb, "config.json", "--hardware", "a100-sxm-80gb", *more)
    assert line.startswith("error: ")


def test_a_note_stands_once_before_the_answer() -> None:
    """However often a search reads the job."""
    words = ["search", JOB, "--hardware", "h100-sxm-80gb", "--trials", 2, "-p", "roofline", "--nodes", 64]
    command = [sys.executable, "-m", "stepsight", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("replaces the job's own") == 1
