"""``show`` says what is there, or in one line why it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.tables import read_table
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.questions.describe import describe, names
from tests.dataset.kineto_files import tiny_step
from tests.dataset.run_folders import job_tables, write_events, write_run
from tests.experiments.evaluation.run_tables import run_row, write_runs


def test_a_collection_and_what_it_lacks(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    write_events(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"runs": [{"name": "one"}, {"name": "two"}], "events": []}))
    shown = describe(tmp_path)
    (row,) = shown["runs"]
    assert (row["name"], row["ranks"], row["steps"], row["measured_s"]) == ("one", 2, 3, 1e-3)
    assert shown["events"] == {"ops-1": 2} and shown["absent"] == ["runs/two"]
    assert shown["text"].endswith("planned but absent: runs/two")


def test_an_imported_run_shows_its_traced_steps(tmp_path: Path) -> None:
    found = import_ranks([tiny_step().write(tmp_path / "trace.json")])
    write_imported(found.graphs, found.sources, tmp_path / "runs", None, found.warnings)
    shown = describe(tmp_path / "runs")
    (row,) = shown["runs"]
    (graph,) = found.graphs
    assert row["traced_steps"] == len(graph.steps_s) and "steps" not in row
    assert row["traced_s"] == pytest.approx(float(graph.steps_s[0, 1] - graph.steps_s[0, 0]))
    assert "steps under the profiler" in shown["text"]


def test_a_graph_dataset(tmp_path: Path) -> None:
    found = import_ranks([tiny_step().write(tmp_path / "trace.json")])
    write_imported(found.graphs, found.sources, tmp_path / "runs", None, found.warnings)
    made = make_dataset([tmp_path / "runs"], tmp_path / "data")
    shown = describe(tmp_path / "data")
    assert all(shown[name] == made[name] for name in ("graphs", "nodes", "edges", "version", "runs"))
    assert shown["text"].startswith(f"dataset {tmp_path / 'data'}: {made['graphs']} graphs")


def test_a_table_of_measurements(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("op,m,n,k,dtype,latency_ms\ngemm,8,8,8,bf16,0.1\n", "utf-8")
    read_table("csv", tmp_path / "mine.csv").to_parquet(tmp_path / "mine.parquet")
    told = describe(tmp_path / "mine.parquet")
    assert "1 measurements from 1 files" in told["text"] and "linear" in told["text"] and "evaluate" in told["text"]
    (tmp_path / "other.parquet").write_bytes(b"no table")
    with pytest.raises(StepsightError, match=r"cannot read table .* must be a whole Parquet file"):
        describe(tmp_path / "other.parquet")


def test_a_predictor_that_was_set_aside(tmp_path: Path) -> None:
    (tmp_path / ".mine.x1" / "mine").mkdir(parents=True)
    with pytest.raises(StepsightError, match=r"mine is missing: .* To restore it: mv"):
        describe(tmp_path / "mine")


def test_a_run_by_kinds(tmp_path: Path) -> None:
    shown = describe(write_run(tmp_path, 2))
    assert shown["kinds"]["all_reduce"]["calls"] == 2 and "2 rank(s)" in shown["text"]


def test_a_stand_in_says_whose_place_it_took(tmp_path: Path) -> None:
    traces = {"1": {"kineto": "rank0.kineto.json.gz"}}
    told = {"job": job_tables(2), "world_size": 1, "traces": traces, "stand_in": {"rank": 1}}
    shown = describe(write_run(tmp_path, files=[tiny_step(1, 2)], **told))
    assert shown["stand_in"] == 1
    assert "1 rank(s), in place of rank 1 of 2" in shown["text"]


@pytest.mark.parametrize(
    "changes",
    [{"rounds": []}, {"rounds": [[]]}, {"rounds": "fast"}, {"world_size": "1"}, {"role": "a\nb"}, {"name": None}],
)
def test_a_damaged_run_is_one_line_that_names_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = write_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text()) | changes
    (run / "manifest.json").write_text(json.dumps(manifest))
    for path in (run, tmp_path):
        with pytest.raises(StepsightError, match=r"^.*manifest\.json(: .*)?$"):
            describe(path)


@pytest.mark.parametrize("value", [{"heldout": 3}, {"heldout": []}, {"heldout": [{}]}])
def test_a_damaged_summary_is_one_line(tmp_path: Path, value: dict[str, Any]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(value))
    with pytest.raises(StepsightError, match=r"^.*summary\.json must be the summary of a demo: .*$"):
        describe(tmp_path)


GPU = """
[hardware.my-gpu]
kind = "gpu"
peak_flops = { bf16 = 4e14 }
memory_bandwidth_bytes_per_s = 3e12
memory_bytes = 8e10
"""
LINKS = """
[fabric.my-nodes]
intra_node = { bandwidth_gbytes_per_s = 300.0, latency_us = 5.0 }
inter_node = { bandwidth_gbytes_per_s = 25.0, latency_us = 10.0 }
"""


def test_presets_by_name() -> None:
    """Hardware with its usual fabric, a fabric, and a framework's profile."""
    shown = describe(Path("h200-sxm-141gb"))
    assert shown["hardware"]["h200-sxm-141gb"]["usual_fabric"] == "dgx-h100"
    assert "peak_flops.fp8" in shown["text"] and "\nusual fabric  dgx-h100\n" in shown["text"]
    assert describe(Path("dgx-a100"))["fabric"]["dgx-a100"]["intra_node"]["bandwidth_bytes_per_s"] == 300e9
    assert describe(Path("torchtitan"))["framework"]["torchtitan"]["fp8_scaling"] == "dynamic"
    with pytest.raises(StepsightError, match=r"got 'torchtitam' \(did you mean 'torchtitan'.*`stepsight show` lists"):
        describe(Path("torchtitam"))


@pytest.mark.parametrize(
    ("name", "text", "nouns", "says"),
    [
        ("gpu.toml", GPU + LINKS, ["hardware", "fabric"], "usual fabric  my-nodes\n"),
        ("gpu.toml", GPU, ["hardware"], "usual fabric  none: a job must state cluster.fabric"),
        ("links.toml", LINKS, ["fabric"], "intra_node.bandwidth_bytes_per_s  3e+11"),
        ("train.toml", "[mine]\ndropout = 0.1\n", ["framework"], "dropout                0.1"),
        ("train.json", '{"mine": {"dropout": 0.1}}', ["framework"], "framework mine in "),
    ],
)
def test_files_of_facts(tmp_path: Path, name: str, text: str, nouns: list[str], says: str) -> None:
    (tmp_path / name).write_text(text)
    shown = describe(tmp_path / name)
    assert says in shown.pop("text") and list(shown) == nouns
    assert json.loads(json.dumps(shown)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"job.toml: a job needs a table \[model\]"),
        ("[cluster]\nnodes = 1\n", r"job.toml: a job needs a table \[model\]"),
        (GPU.replace('"gpu"', '"tpu"'), "job.toml: hardware my-gpu: kind must be gpu or cpu, got 'tpu'"),
        ("[mine]\ndropout = 'x'\n", "job.toml: framework.mine.dropout must be a number, got 'x'"),
        ("x =", "job.toml is not valid TOML"),
    ],
)
def test_a_file_with_a_mistake_is_told_as_what_it_looks_like(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(StepsightError, match=message):
        describe(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.pt2", r"`stepsight capture` models \(.onnx, .pt2\)$"), ("a.json.gz", "a.json.gz must be whole JSON")],
)
def test_a_file_of_noise_is_told_without_names_of_functions(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(bytes(range(128, 256)))
    with pytest.raises(StepsightError, match=message):
        describe(tmp_path / name)


def test_a_table_of_runs(tmp_path: Path) -> None:
    """Rows, devices and frameworks of each source; another table is refused with what reads it."""
    write_runs(tmp_path / "runs.csv.gz", run_row(source="lab"), run_row(source="lab", gpus=8, dp=1))
    told = describe(tmp_path / "runs.csv.gz")
    assert told["sources"]["lab"]["rows"] == 2 and told["sources"]["lab"]["gpus"] == ["8", "16"]
    assert "8 to 16" in told["text"] and "`stepsight evaluate`" in told["text"]
    (tmp_path / "ops.csv").write_text("op,dims,us\nlinear,4x4x4,1\n")
    with pytest.raises(StepsightError, match=r"lacks source, .*`stepsight import csv"):
        describe(tmp_path / "ops.csv")


def test_words_of_predictors_are_described_and_names_are_listed() -> None:
    assert "without the correction" in describe(Path("physics"))["text"]
    assert {"physics", "roofline", "h100-sxm"} <= set(names()["predictor"])
    with pytest.raises(StepsightError, match=r"did you mean 'h100-sxm' or .* or ") as refused:
        describe(Path("h100sxm"))
    assert len(str(refused.value)) < 300
