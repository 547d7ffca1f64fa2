"""What is run of a search in a box, and how its choice is judged."""

from __future__ import annotations

from typing import cast

import pytest

from stepsight.dataset.runs.box_spec import read_box
from stepsight.experiments.search.choices import Choice
from stepsight.experiments.search.strategies import Grid
from stepsight.experiments.studies import box_regret
from stepsight.experiments.tasks.verifying import runnable


class Timed:
    """A strategy with a predicted time."""

    def __init__(self, seconds: float) -> None:
        self.timed = (seconds, seconds, seconds)


def test_the_fastest_and_a_sample_are_run() -> None:
    """Half of them are the fastest; of the rest none is drawn that is three times as slow."""
    choices = [cast(Choice, Timed(float(seconds))) for seconds in range(10, 60)]
    run = [choice.timed[0] for choice in box_regret.chosen(choices, 10, 3.0, seed=1)]
    assert run[:5] == [10, 11, 12, 13, 14] and run == sorted(set(run)) and len(run) == 10
    assert max(run) <= 30
    assert box_regret.chosen(choices[:4], 10, 3.0, seed=1) == choices[:4]


@pytest.mark.parametrize("model", box_regret.MODELS)
def test_most_of_the_space_can_run(model: str) -> None:
    """On four nodes."""
    box = read_box("4x1@100mbit")
    job = box_regret.job_in(box, box_regret.MODELS[model])
    grid = Grid(job, box_regret.SPACE)
    held, _ = runnable([grid.strategy(index) for index in range(0, len(grid), 4)], None, box)
    assert len(held) > len(grid) / 8


def test_the_choice_is_judged_by_what_counts() -> None:
    """The one predicted fastest kept the cores busy; the second is 5 % slower than the best."""
    rows = [{"name": name, "predicted_s": said, "measured_s": seconds} for name, said, seconds in
            (("c", 3.0, 2.0), ("b", 2.0, 2.1), ("d", 4.0, 4.0))]  # fmt: skip
    found = box_regret.judged(["a", "b", "c", "d"], rows)
    assert (found["chosen"], found["faster_too_busy"], found["place"], found["measured"]) == ("b", 1, 2, 3)
    assert found["regret_percent"] == pytest.approx(5.0) and found["random_regret_percent"] == pytest.approx(35.0)
    row = {"model": "m", "legal": 9, "runnable": 5, "run": 4, "text": "table", **found}
    assert "place 2 of 3 measured, regret 5.0 %" in box_regret.study_text([row])
    none = {**row, **box_regret.judged(["a"], [])}
    assert "0 of them" in box_regret.study_text([none])
