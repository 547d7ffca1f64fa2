from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from stepsight.experiments.studies import recommendation


def test_lookups_are_judged_on_signatures_that_taught_nothing() -> None:
    told, text = recommendation.run_lookups(argparse.Namespace(ops=6, rounds=1, seed=0))
    assert told["trained_on"] == 8 and told["table_lookup"]["judged"] == told["table_lookup_backward"]["judged"] == 2
    assert "load of the machine" in text


def test_no_placement_is_much_faster_than_the_search() -> None:
    told, _ = recommendation.run_placements(argparse.Namespace(tasks=2, trials=300, seed=0, out=None))
    assert told["search"]["regret"] < 0.05 and told["search"]["tasks"] == 2


def test_models_of_the_study_share_tables_in_three_ways() -> None:
    whole, columns, mixed = recommendation.two_rank_jobs(3)
    kinds = [{row.kind for row in job.sharding.tables} for job in (whole, columns, mixed)]
    assert columns.sharding.rule == "column-wise" and kinds == [set(), set(), {"table-wise", "data-parallel"}]
    assert whole.model == mixed.model and not whole.table_ranks.duplex


def test_steps_are_judged_by_a_predictor_of_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(recommendation, "_TAUGHT", 1)
    monkeypatch.setattr(recommendation, "SCRIPT", Path(__file__).parents[3] / recommendation.SCRIPT)
    told, _ = recommendation.run_steps(argparse.Namespace(out=tmp_path, models=1, rounds=1, event_seconds=1.0))
    assert {told[f"steps, least, {name}"]["judged"] for name in ("alone", "calibrated")} == {3}
    assert told["unequal exchanges, least"]["judged"] == len(recommendation.SPLITS)


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
        recommendation.run_steps(argparse.Namespace(out=tmp_path / "out", models=1, rounds=1, event_seconds=1.0))
