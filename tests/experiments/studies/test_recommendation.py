from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from stepsight.dataset.runs.run_manifest import read_box
from stepsight.experiments.search.sharding import has_torchrec
from stepsight.experiments.studies import recommendation


def test_lookups_are_judged_on_signatures_that_taught_nothing() -> None:
    told, text = recommendation.run_lookups(argparse.Namespace(ops=6, rounds=1, seed=0))
    assert told["trained_on"] == 8 and told["table_lookup"]["judged"] == told["table_lookup_backward"]["judged"] == 2
    assert "load of the machine" in text


def test_models_of_the_study_share_tables_in_three_ways() -> None:
    whole, columns, mixed = recommendation.two_rank_jobs(3)
    kinds = [{row.kind for row in job.sharding.tables} for job in (whole, columns, mixed)]
    assert columns.sharding.rule == "column-wise" and kinds == [set(), set(), {"table-wise", "data-parallel"}]
    assert whole.model == mixed.model and whole.table_ranks.two_way == 1.0


def test_steps_are_judged_by_a_predictor_of_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(recommendation, "_TAUGHT", 1)
    monkeypatch.setattr(recommendation, "SCRIPT", Path(__file__).parents[3] / recommendation.SCRIPT)
    counts = {"models": 1, "rounds": 1, "event_seconds": 1.0, "torchrec": False, "box": None}
    told, _ = recommendation.run_steps(argparse.Namespace(out=tmp_path, **counts))
    assert {told[f"steps, {name}"]["judged"] for name in ("alone", "calibrated")} == {3}
    assert {told[each]["judged"] for each in ("unequal exchanges", "measured again")} == {
        len(recommendation.EXCHANGES["unequal"])
    }


def test_torchrecs_pipeline_trains_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script, awake and asleep."""
    if not has_torchrec():
        pytest.skip("torchrec is not installed")
    script = Path(__file__).parents[3] / recommendation.PIPELINE
    options = argparse.Namespace(out=tmp_path, rounds=1, box=None)
    jobs = recommendation.two_rank_jobs(3, pipelined=True)
    measured = recommendation._measured(3, jobs, options, script)
    assert [seconds.min() > 0 for _, seconds in measured] == [True] * 3
    asleep = recommendation._steps(["--sleep", str(tmp_path / "3-0.toml")], "asleep", 1, options, script)
    assert asleep.min() > 0


def test_jobs_of_a_box_share_tables_over_its_nodes() -> None:
    whole, columns = recommendation.two_rank_jobs(3, box=read_box("4x1@400mbit"))
    assert (
        whole.table_ranks.num == 4 and whole.table_ranks.two_way == pytest.approx(2 / 3) and columns.sharding.pipelined
    )
    assert whole.batch.global_batch == 4 * whole.batch.micro_batch


def test_overheads_of_a_host_are_those_between_and_within_operators() -> None:
    """T1 to T5 of two operators, the first with two launches; a call within an operator is a part of it."""
    told = [("cpu_op", "a", 0, 20), ("cpu_op", "within", 1, 9), ("cuda_runtime", "cudaLaunchKernel", 3, 4)]
    told += [("cuda_runtime", "cudaLaunchKernel", 10, 5), ("cpu_op", "b", 26, 7), ("cpu_op", "b", 5000, 7)]
    events = [{"cat": cat, "name": name, "ts": at, "dur": dur, "tid": 1} for cat, name, at, dur in told]
    micro = {
        key: [round(1e6 * seconds, 6) for seconds in found]
        for key, found in recommendation.overheads_of([*events, {"ph": "M"}]).items()
    }
    expected = {("T2", "a"): [3.0], ("T3", "a"): [5.0], ("T4", ""): [4.0, 5.0], ("T5", "a"): [3.0]}
    assert micro == {**expected, ("launch", "a"): [10.0, 10.0], ("T1", ""): [6.0], ("T2", "b"): [7.0, 7.0]}


def test_host_time_follows_from_other_workloads(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, slower in zip(paths, (1, 2), strict=True):
        told = [("cpu_op", "a", 0, 20), ("cuda_runtime", "cudaLaunchKernel", 3, 4), ("cpu_op", "a", 22, 20)]
        events = [{"cat": c, "name": n, "ts": slower * at, "dur": slower * dur, "tid": 1} for c, n, at, dur in told]
        path.write_text(json.dumps({"traceEvents": events}))
    (one, two), text = recommendation.run_overheads(argparse.Namespace(traces=paths))
    assert one["five"] == pytest.approx(1.0) and two["five"] == pytest.approx(-0.5) and "T1 us" in text


def test_placements_are_measured_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(recommendation, "_TAUGHT", 1)
    monkeypatch.setattr(recommendation, "SCRIPT", Path(__file__).parents[3] / recommendation.SCRIPT)
    counts = {"tasks": 1, "trials": 300, "seed": 0, "rounds": 1, "event_seconds": 1.0}
    told, _ = recommendation.run_placements(argparse.Namespace(out=tmp_path, **counts))
    assert {"search", "size-greedy", "lookup-greedy", "norm-greedy", "random"} <= told.keys()
    assert min(each["regret"] for each in told.values()) >= 0.0


def test_steps_need_the_script_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="begin it in the root of a checkout"):
        recommendation.run_steps(argparse.Namespace(out=tmp_path / "out", torchrec=False, box=None))
