"""Simple models beside the predictions of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight import predict
from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.experiments.studies.small_to_large import closed_form
from tests.experiments.evaluation.run_tables import run_row, write_runs
from tests.experiments.evaluation.simple_models import BASELINES, baseline_figures, baselines_text

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
    assert "baseline, percent" in baselines_text(found)
