import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.experiments.studies import dilated
from stepsight.simulator.clock.track import Track, find_track
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.training.measured.runtime_costs import RuntimeCosts, fit_costs, measured, simulate_case, sleeps

COSTS = RuntimeCosts(sleep_s=3e-4, action_s=1e-4, host_action_s=2e-4, host_message_s=1e-4, message_s=5e-4)


def case(
    name: str, schedule: str, v: int, ranks: int = 4, micro_batches: int = 8, seconds: float = 0.05
) -> dict[str, Any]:
    return {
        "name": name,
        "schedule": schedule,
        "virtual_stages": v,
        "micro_batches": micro_batches,
        "forward_s": seconds,
        "input_s": 1.2 * seconds,
        "weight_s": seconds,
        "pace": [1.0] * ranks,
    }


def step(made: dict[str, Any], track: Track, costs: RuntimeCosts) -> dict[str, Any]:
    """A recorded step, as the simulator would have it."""
    run = simulate_case(made, track, costs)
    ranks = []
    for rank in range(track.num_stages):
        own = np.flatnonzero(track.stage == rank)
        rows = [
            (
                KIND_NAMES[track.kind[at]],
                int(track.part[at]),
                int(track.micro_batch[at]),
                run.start[at, 0],
                run.finish[at, 0],
            )
            for at in own.tolist()
        ]
        ranks.append(rows)
    return {"begin": 0.0, "ranks": ranks, "ends": []}


def test_costs_are_found_again() -> None:
    """Records made with known costs give them back."""
    records = []
    for schedule, v in (("gpipe", 1), ("1f1b", 1), ("interleaved-zb", 2)):
        made, track = case(schedule, schedule, v), find_track(schedule, 4, 8, v, "torch")
        records.append((made, track, step(made, track, COSTS)))
    found = fit_costs(records)
    for name in ("sleep_s", "action_s", "host_action_s", "host_message_s", "message_s"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), abs=1e-5), name


def test_the_first_part_needs_no_gradient_of_its_input() -> None:
    track = find_track("zb-h1", 2, 2, 1, "torch")
    seconds, goes = sleeps(case("a", "zb-h1", 1, ranks=2, micro_batches=2), track)
    by_action = {
        (int(k), int(p)): (s, int(g)) for k, p, s, g in zip(track.kind, track.part, seconds, goes, strict=True)
    }
    assert by_action[2, 0] == (0.0, 0)
    assert by_action[2, 1] == (pytest.approx(0.06), 1)
    assert by_action[3, 0] == by_action[0, 1] == (pytest.approx(0.05), 1)


def test_a_perfect_prediction_has_no_error() -> None:
    made = case("zbv-v2-r4", "zbv", 2)
    track = find_track("zbv", 4, 8, 2, "torch")
    record = {"case": made, "ranks": 4, "steps": [step(made, track, COSTS)]}
    row = dilated.compare_makespans(record, COSTS)
    assert row["error_percent"] == row["worst_start_percent"] == 0
    assert dilated.compare_makespans(record, replace(COSTS, message_s=0.02))["error_percent"] > 1
    assert "zbv-v2-r4" in dilated.dilated_text(dilated.report([record]))


def test_actions_in_another_order_are_refused() -> None:
    made, track = case("a", "1f1b", 1), find_track("1f1b", 4, 8, 1, "torch")
    other = step(made, track, COSTS)
    other["ranks"][1][0], other["ranks"][1][1] = other["ranks"][1][1], other["ranks"][1][0]
    with pytest.raises(ValueError, match="rank 1 must run the schedule's actions in order"):
        measured(other, track)


def test_cases_cover_every_schedule_and_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dilated.main(["--list", "--only", "*-r16"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == len(dilated.SCHEDULES)
    assert dilated.main(["--only", "nothing"]) == 2
    assert "constants are fitted on 4 ranks" in capsys.readouterr().err


def test_real_ranks_run_the_schedules_in_our_order(tmp_path: Path) -> None:
    """Four processes, two schedules: the same actions in the same order on every rank, none before what it needs."""
    pytest.importorskip("torch")
    cases = [
        case("one", "zb-h1", 1, seconds=0.004, micro_batches=4),
        case("two", "zbv", 2, seconds=0.004, micro_batches=4),
    ]
    records = dilated.run_cases(cases, tmp_path, repeats=1)
    assert [record["case"]["name"] for record in records] == ["one", "two"]
    for record in records:
        made = record["case"]
        track = find_track(made["schedule"], 4, 4, made["virtual_stages"], "torch")
        (only,) = record["steps"]
        start, end = measured(only, track)
        assert (start[track.target] >= end[track.source]).all()
    assert json.loads((tmp_path / "one.json").read_text())["ranks"] == 4
    again = dilated.run_cases(cases, tmp_path, repeats=1)
    assert again == records
    with pytest.raises(CollectError, match="a folder holds one kind of runs"):
        dilated.run_cases([case("one", "gpipe", 1)], tmp_path)


def test_a_failed_run_names_its_log(tmp_path: Path) -> None:
    """Torch refuses 1F1B with fewer micro-batches than stages."""
    pytest.importorskip("torch")
    with pytest.raises(CollectError, match=r"2 ranks must run every case to its end, got exit code 1; see .*log-2.txt"):
        dilated.run_cases([case("bad", "1f1b", 1, ranks=2, micro_batches=1, seconds=0.001)], tmp_path)
    assert "must be greater than" in (tmp_path / "log-2.txt").read_text()
