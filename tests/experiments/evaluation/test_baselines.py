"""Simple models beside the predictions of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepsight import predict
from stepsight.cli import app
from stepsight.dataset.base.errors import StepsightError
from stepsight.experiments.evaluation.baselines import BASELINES, baseline_figures, closed_form, read_baselines
from stepsight.experiments.evaluation.evaluate import evaluate
from tests.experiments.evaluation.run_tables import run_row, write_runs

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("example", "lacks"),
    [("gpt3-175b-1024", set()), ("llama3-70b-fsdp-512", {"tensor_communication", "pipeline_communication", "bubble"})],
)
def test_terms_of_the_closed_form(example: str, lacks: set[str]) -> None:
    """They are near the simulation, and only those of axes that a job uses are there."""
    found = predict(EXAMPLES / f"{example}.toml")
    terms = closed_form(found.simulation)
    assert sum(terms.values()) == pytest.approx(found.simulation.iteration_time_s, rel=0.15)
    assert {name for name, seconds in terms.items() if not seconds} - {"data_communication"} == lacks


def test_baselines_answer_the_same_rows(tmp_path: Path) -> None:
    """Each with errors and regret, beside ours on the rows that it answers."""
    path = write_runs(tmp_path / "runs.csv", run_row(), run_row(row_id=2, tp=8, dp=1, iteration_time_s=0.7))
    result = evaluate(path, "roofline")
    found = baseline_figures(result.scored, lambda _: None, BASELINES)
    assert set(found) == set(BASELINES)
    assert found["roofline"]["mape"] == found["roofline"]["ours"]["mape"] == result.to_dict()["overall"]["mape"]
    assert all(each["used"] == 2 and {"regret", "ours"} <= set(each) for each in found.values())
    done = CliRunner().invoke(app, ["evaluate", str(path), "--predictor", "roofline", "--baseline", "mfu", "--json"])
    assert json.loads(done.stdout)["baselines"] == {"mfu": found["mfu"]}
    shown = CliRunner().invoke(app, ["evaluate", str(path), "--predictor", "roofline", "--baseline", "mfu,analytic"])
    assert "baseline, percent" in shown.stdout


def test_terms_are_printed_beside_a_prediction() -> None:
    job = str(EXAMPLES / "gpt3-175b-1024.toml")
    done = CliRunner().invoke(app, ["predict", job, "--baseline", "analytic", "--json"])
    told = json.loads(done.stdout)["analytic"]
    assert told["iteration_time_s"] == pytest.approx(sum(told["terms"].values()))
    assert "bubble" in CliRunner().invoke(app, ["predict", job, "--baseline", "analytic"]).stdout


def test_other_names_are_refused() -> None:
    assert read_baselines("mfu, analytic") == ("mfu", "analytic")
    for text in ("", "mfu,guess"):
        with pytest.raises(StepsightError, match="--baseline takes some of roofline, analytic, mfu"):
            read_baselines(text)
