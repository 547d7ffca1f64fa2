import numpy as np

from stepsight.training.context.learn_context import ALONE, HeldBack, simplest


def test_the_simplest_within_one_standard_error_of_the_best_ships() -> None:
    rng = np.random.default_rng(0)
    table, noise = rng.uniform(0.4, 0.6, 12), rng.normal(0, 0.1, 12)
    noise -= noise.mean()
    assert simplest({"alone": np.ones(12), "table": table, "network": table + noise - 0.01}) == "table"
    assert simplest({"alone": np.ones(12), "table": table, "network": table + noise - 0.2}) == "network"
    assert simplest({"alone": np.ones(12), "table": np.ones(12) + 0.1}) == "alone"
    assert simplest({"alone": np.ones(1), "table": np.ones(1) - 0.1}) == "table"


def test_iterations_and_ops_count_alike_and_runs_without_one_are_judged_by_the_other() -> None:
    measured = np.array([1.0, 2.0])
    off = {ALONE: np.array([0.2, 0.2]), "table": np.array([0.1, 0.1])}
    held = HeldBack(
        measured,
        {name: measured * np.exp(each) for name, each in off.items()},
        {ALONE: np.array([0.4, np.nan, 0.4]), "table": np.array([0.4, np.nan, 0.2])},
        np.array([True, True, False]),
    )
    assert np.allclose(held.scores[ALONE], 1.0)
    assert np.allclose(held.scores["table"], [0.75, 0.5, 0.5])
    assert held.chosen == "table"
    assert [row["model"] for row in held.rows()] == [ALONE, "table"]
