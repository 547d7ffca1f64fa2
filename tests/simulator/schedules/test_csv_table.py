"""Users' schedules: torch's CSV of actions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.simulator.clock.track import track
from stepsight.simulator.schedules import Schedule, find_schedule, read_schedule, write_schedule


def same(one: Schedule, other: Schedule) -> bool:
    return (
        all(map(np.array_equal, one.actions, other.actions))
        and np.array_equal(one.placement, other.placement)
        and all(map(np.array_equal, one.fused, other.fused))
        and one.num_micro_batches == other.num_micro_batches
    )


@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", 1), ("1f1b", 3), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2), ("dualpipev", 2)]
)
def test_what_is_written_is_read(tmp_path: Path, name: str, v: int) -> None:
    """Placement, pairs and order come back."""
    schedule = find_schedule(name, 4, 8, v)
    write_schedule(schedule, tmp_path / "schedule.csv")
    again = read_schedule(tmp_path / "schedule.csv")
    assert same(schedule, again)
    assert len(track(again, "torch").entries.op) == len(track(again).entries.op) + again_sends(again)


def test_without_pairs_nothing_is_fused(tmp_path: Path) -> None:
    """As built-in schedules have it: one array for each rank where there are pairs, else none."""
    for name, ranks in (("dualpipev", 4), ("zbv", 0)):
        write_schedule(find_schedule(name, 4, 8, 2), tmp_path / "schedule.csv")
        assert len(read_schedule(tmp_path / "schedule.csv").fused) == ranks


def again_sends(schedule: Schedule) -> int:
    """Torch waits for its sends as well."""
    return len(track(schedule).source)


@pytest.mark.parametrize(("name", "theirs"), [("zbv", "ScheduleZBVZeroBubble"), ("dualpipev", "ScheduleDualPipeV")])
def test_through_torch_and_back(tmp_path: Path, name: str, theirs: str) -> None:
    """Torch reads ours as its own, and ours is what torch writes."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = find_schedule(name, 4, 8, 2)
    runner: Any = object.__new__(schedules.PipelineScheduleMulti)
    runner.pp_group_size, runner._num_stages, runner._n_microbatches, runner._stages = 4, 8, 8, []
    runner.pipeline_order = {}
    write_schedule(schedule, tmp_path / "ours.csv")
    runner._load_csv(str(tmp_path / "ours.csv"))
    assert runner.stage_index_to_group_rank == {part: int(stage) for part, (stage, _) in enumerate(schedule.placement)}
    own: Any = object.__new__(getattr(schedules, theirs))
    own.pp_group_size, own._n_microbatches, own.num_stages = 4, 8, 8
    for rank in range(4):
        made = [action for action in own._calculate_single_rank_operations(rank) if action]
        assert runner.pipeline_order[rank] == made
    runner.pipeline_order[0].insert(3, None)  # torch leaves cells empty
    runner._dump_csv(str(tmp_path / "theirs.csv"))
    assert same(read_schedule(tmp_path / "theirs.csv"), schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"a cell must be empty, part .* got '1X0' in row 2, column 2 of .*bad.csv"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", r"or \(0F1;3B0\)OVERLAP_F_B, got '\(0B0;0F1\)OVERLAP_F_B' in row 1, column 2"),
        ("0F0,0SEND_F0,0B0\n", r"got '0SEND_F0' in row 1, column 2"),
        ("0F0,0B0\n0F1,0B1\n", r"a model part runs on one rank, got part 0 in rows 1 and 2 of .*bad.csv"),
        ("0F0,0B0\n2F0,2B0\n", r"parts must be numbered from 0 without a gap, got none numbered 1"),
        ("0F0,0B0\n\n", r"every rank must have an action, got none in row 2"),
        ("0F0,0B0,0B0\n", r"bad.csv: every part runs each micro-batch once .* got 1 F, 2 B"),
        ("0F0,0I0\n", r"bad.csv: every part runs .* got 1 F, 0 B, 1 I, 0 W for part 0, micro-batch 0"),
        ("0F999999,0B999999\n", r"1 parts and 1000000 micro-batches need .* got 2 < 2 \* 1 \* 1000000 actions in"),
        (
            "0B0,0F0\n1F0,1B0\n",
            r"bad.csv: a schedule must not deadlock, got: stage 0 at B0 of part 0 waits for",
        ),
        ("", r"a schedule is a CSV of actions like 0F0, got none in .*bad.csv"),
        ("\x00\n", r"got .*bad.csv"),
    ],
)
def test_bad_tables_name_the_cell_and_the_rule(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(JobError, match=message) as caught:
        read_schedule(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"a schedule is a CSV of actions like 0F0, got .*none.csv"):
        read_schedule(tmp_path / "none.csv")
    with pytest.raises(JobError, match="Is a directory"):
        read_schedule(tmp_path)
