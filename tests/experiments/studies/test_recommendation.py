from __future__ import annotations

import argparse

from stepsight.experiments.studies import recommendation


def test_lookups_are_judged_on_signatures_that_taught_nothing() -> None:
    told, text = recommendation.run_lookups(argparse.Namespace(ops=6, rounds=1, seed=0))
    assert told["trained_on"] == 8 and told["table_lookup"]["judged"] == told["table_lookup_backward"]["judged"] == 2
    assert "load of the machine" in text


def test_no_placement_is_much_faster_than_the_search() -> None:
    told, _ = recommendation.run_placements(argparse.Namespace(tasks=2, trials=300, seed=0))
    assert told["search"]["regret"] < 0.05 and told["search"]["tasks"] == 2
