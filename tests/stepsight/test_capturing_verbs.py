"""Capturing and predicting a script, as programs call the verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import StepsightError

pytest.importorskip("torch")

SCRIPT = """
import sys, torch
width = int(sys.argv[sys.argv.index("--width") + 1])
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(4):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(64, width, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def ask(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_from_a_script_to_a_prediction(tmp_path: Path) -> None:
    """Options behind the script are the script's own."""
    script, out = tmp_path / "train.py", tmp_path / "captured"
    script.write_text(SCRIPT, "utf-8")
    told = ask("capture", "--json", "--world-size", 8, "--out", out, script, "--width", 256)
    (rank,) = told["ranks"]
    assert rank["ops_by_kind"]["adamw"] == 1 and rank["ops_by_kind"]["gelu"] == 1
    assert rank["flops"] == 2 * 64 * 256 * 256 * 2 + 2 * 64 * 256 * 8 * 3
    assert ask("show", out, "--json")["ranks"] == told["ranks"]
    assert ask("show", out, out, "--json")["ranks"][0]["collectives"] == []
    timeline = tmp_path / "timeline.json"
    asked = ("--hardware", "h100-sxm-80gb", "--fabric", "dgx-h100", "--json")
    program = ask("predict", "--program", out, *asked, "--timeline", timeline)
    assert ask("predict", "--program", out, "--hardware", "H100", "--json")["hardware"] == "h100-sxm-80gb"
    with pytest.raises(StepsightError, match="did you mean 'h100'"):
        ask("predict", "--program", out, "--hardware", "H10")
    with pytest.raises(StepsightError, match="the captured ranks fix the number of devices"):
        ask("predict", "--program", out, "--hardware", "H100", "--nodes", 8)
    for verb in (
        ["predict", out],
        ["explain", out],
        ["compare", out, out],
        ["report", out, "--out", tmp_path / "p.html"],
    ):
        with pytest.raises(StepsightError, match="is a captured program, not a job: use `stepsight predict --program"):
            ask(*verb)
    job = ask("predict", "examples/gpt3-175b-1024.toml", "--predictor", "roofline", "--json")
    assert set(job) <= set(program)
    assert sum(program["breakdown"].values()) == pytest.approx(program["iteration_time_s"])
    events = json.loads(timeline.read_text("utf-8"))["traceEvents"]
    assert {"X", "C"} <= {event["ph"] for event in events}


def test_a_program_is_asked_about_alone(tmp_path: Path) -> None:
    for arguments in (["predict"], ["predict", "--program", tmp_path, "job.toml"]):
        with pytest.raises(StepsightError):
            ask(*arguments)


def test_a_program_takes_no_foreign_predictor_and_no_keys(tmp_path: Path) -> None:
    """A predictor serves its own hardware; what a job states cannot be set of captured ranks."""
    example = Path(__file__).parents[2] / "examples" / "local-gpt-tp2.toml"
    ask("job", example, "--program", tmp_path / "step", "--json")
    words = ("predict", "--program", tmp_path / "step")
    with pytest.raises(StepsightError, match="--set does not go with --program"):
        ask(*words, "--hardware", "h100", "--set", "model.seq_len=4")
    with pytest.raises(StepsightError, match="must be 'h100-sxm-80gb', got 'a100-sxm-80gb'"):
        ask(*words, "--hardware", "a100", "-p", "h100-sxm")


def test_from_a_model_in_a_file_to_a_prediction(tmp_path: Path) -> None:
    """For training on several replicas, or at once as inference; options for models are refused for scripts."""
    torch = pytest.importorskip("torch")
    model, out = tmp_path / "mlp.pt2", tmp_path / "mlp"
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
    torch.export.save(torch.export.export(layers, (torch.randn(64, 256),)), model)
    told = ask("capture", "--json", "--world-size", 16, "--precision", "bf16", "--out", out, model)
    assert told["ranks"][0]["collectives"][0]["num_bytes"] == 2 * (257 * 256 + 257 * 8)
    asked = ("--hardware", "h100-sxm-80gb", "--fabric", "dgx-h100", "--json")
    training, inference = (ask("predict", "--program", path, *asked) for path in (out, model))
    assert training["iteration_time_s"] > inference["iteration_time_s"] > 0
    ask("predict", "--program", out, *asked, "--timeline", tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text("utf-8"))["traceEvents"]
    assert {"X", "s", "f"} <= {event["ph"] for event in events}
    ends: dict[tuple[int, int], int] = {}  # of the last event of each thread, in nanoseconds
    for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):
        begin, lasts, thread = round(1e3 * event["ts"]), round(1e3 * event["dur"]), (event["pid"], event["tid"])
        assert begin >= ends.get(thread, 0) and lasts >= 0
        ends[thread] = begin + lasts

    (tmp_path / "train.py").write_text("", "utf-8")
    for arguments in (["--dims", "8", model], ["--inference", tmp_path / "train.py"], [model, "--batch"]):
        with pytest.raises(StepsightError):
            ask("capture", "--world-size", 1, "--out", tmp_path / "no", *arguments)


def test_what_a_model_does_not_use_is_refused(tmp_path: Path) -> None:
    """It is read and not run, so options of runs change nothing; neither does a cluster for one world size."""
    words = ("capture", "--world-size", 4, "--out", tmp_path / "no")
    for option in ("--ranks 4", "--ranks 0,0", "--timeout 0", "--warm-up -1", "--device cpu"):
        with pytest.raises(StepsightError, match=f"{option.split()[0]} is for scripts: a model is read, and not run"):
            ask(*words, *option.split(), tmp_path / "mlp.pt2")
    with pytest.raises(StepsightError, match="--fabric is for several world sizes"):
        ask(*words, "--fabric", "dgx-h100", tmp_path / "train.py")
    with pytest.raises(StepsightError, match="--dims takes each key once, got 's77' twice"):
        ask(*words, "--dims", "s77=4,s77=8", tmp_path / "mlp.pt2")


def test_world_sizes_are_compared_in_one_table(tmp_path: Path) -> None:
    """Each is a capture of its own, and its time that of a prediction of it."""
    script, out = tmp_path / "train.py", tmp_path / "captured"
    script.write_text(SCRIPT, "utf-8")
    rows = ask("capture", "--json", "--world-size", "1,2", "--hardware", "H100", "--out", out, script, "--width", 64)[
        "captures"
    ]
    assert [row["world_size"] for row in rows] == [1, 2] and rows[0]["scaling_percent"] == 100
    alone = ask("predict", "--program", out / "2", "--hardware", "H100", "--json")
    assert rows[1]["iteration_time_s"] == alone["iteration_time_s"]
    one = r"capture one without --hardware, then `stepsight predict --program .*no --hardware H100`"
    for sizes, todo in ((["1,2"], "state different sizes and --hardware"), (["1", "--hardware", "H100"], one)):
        with pytest.raises(StepsightError, match=f"several different world sizes are compared on --hardware.*: {todo}"):
            ask("capture", "--world-size", *sizes, "--out", tmp_path / "no", script)
    shown = ask("show", out, "--json")["captures"]
    assert [each["world_size"] for each in shown] == [1, 2]
    with pytest.raises(StepsightError, match=r"several world sizes: name one of .*captured/1, .*captured/2"):
        ask("predict", "--program", out, "--hardware", "H100")


def test_a_fabric_is_checked_before_anything_is_captured_or_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')", "utf-8")
    cluster = ("--hardware", "H100", "--fabric", "none such")
    for verb in (
        ("capture", "--world-size", "1,2", "--out", tmp_path / "no", *cluster, script),
        ("predict", "--program", tmp_path, *cluster),
    ):
        with pytest.raises(StepsightError, match="fabric must be"):
            ask(*verb)
