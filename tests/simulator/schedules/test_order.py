from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.simulator.clock.track import track
from stepsight.simulator.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KIND_NAMES,
    Schedule,
    find_schedule,
    order_actions,
    read_schedule,
    schedule_of,
    write_schedule,
)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 17))
def test_every_dependency_comes_first(name: str, stages: int, micro_batches: int) -> None:
    schedule = find_schedule(name, stages, micro_batches)
    order = order_actions(schedule)
    assert len(order) == 2 * stages * micro_batches
    assert (order.source < np.arange(len(order))).all()
    for at, source in enumerate(order.source.tolist()):
        if source >= 0:
            assert order.micro_batch[source] == order.micro_batch[at]
            assert abs(order.part[source] - order.part[at]) == 1
    for stage in range(stages):
        own = order.stage == stage
        rows = np.stack([order.kind[own], order.micro_batch[own]], axis=1)
        assert (rows == schedule.actions[stage][:, :2]).all()


def table(*stages: list[tuple[int, int]], parts: int | None = None) -> Schedule:
    actions = tuple(np.array([(kind, micro, 0) for kind, micro in rows], dtype=np.int32) for rows in stages)
    placement = np.array([(stage, 0) for stage in range(len(stages))], dtype=np.int32)
    return Schedule(actions, 1 + max(micro for rows in stages for _, micro in rows), placement)


def test_a_circle_is_explained() -> None:
    """Stage 0 wants the gradient before it has sent the activation."""
    schedule = table([(BACKWARD, 0), (FORWARD, 0)], [(FORWARD, 0), (BACKWARD, 0)])
    with pytest.raises(
        JobError, match=r"stage 0 at B0 of part 0 waits for .*F0 of part 0; stage 1 at F0 of part 1 waits"
    ):
        order_actions(schedule)


def test_missing_and_repeated_actions_are_refused() -> None:
    with pytest.raises(JobError, match=r"once backward .*, got 1 F, 0 B, 0 I, 0 W for part 0, micro-batch 0"):
        order_actions(table([(FORWARD, 0)]))
    with pytest.raises(JobError, match="got 2 F, 1 B"):
        order_actions(table([(FORWARD, 0), (FORWARD, 0), (BACKWARD, 0)]))


def test_actions_out_of_range_are_refused() -> None:
    schedule = Schedule((np.array([[0, 5, 0]], dtype=np.int32),), 1, np.array([[0, 0]], dtype=np.int32))
    with pytest.raises(JobError, match=r"micro_batch < 1 .* got \(0, 5, 0\) on stage 0"):
        order_actions(schedule)


@pytest.mark.parametrize("row", [(-1, 0, 0), (4, 0, 0), (0, -1, 0), (0, 1, 0), (0, 0, -1), (0, 0, 1)])
def test_the_action_that_is_out_of_range_is_named(row: tuple[int, int, int]) -> None:
    """Behind one that is right; and a chunk that only another stage holds is as wrong as one that none holds."""
    right = [(FORWARD, 0, 0), (BACKWARD, 0, 0)]
    actions = tuple(np.array(rows, dtype=np.int32) for rows in (right, [*right[:1], row, *right[1:]]))
    for placement in ([[0, 0], [1, 0]], [[0, 0], [1, 0], [0, 1]]):
        schedule = Schedule(actions, 1, np.array(placement, dtype=np.int32))
        with pytest.raises(JobError, match=rf"got \({row[0]}, {row[1]}, {row[2]}\) on stage 1$"):
            order_actions(schedule)


def test_what_is_repeated_is_named_where_it_is() -> None:
    twice = [(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 1)]
    with pytest.raises(JobError, match=r"got 1 F, 2 B, 0 I, 0 W for part 0, micro-batch 1$"):
        order_actions(table(twice))


def test_a_weight_gradient_waits_for_its_input_gradient() -> None:
    with pytest.raises(JobError, match=r"stage 0 at W0 of part 0 waits for I0 of part 0$"):
        order_actions(table([(FORWARD, 0), (BACKWARD_WEIGHT, 0), (BACKWARD_INPUT, 0)]))


def test_what_actions_need_is_where_it_is() -> None:
    """Indices of what each needs, -1 for what needs nothing."""
    order = order_actions(
        table([(FORWARD, 0), (BACKWARD_INPUT, 0), (BACKWARD_WEIGHT, 0)], [(FORWARD, 0), (BACKWARD, 0)])
    )
    names = [order.name(at) for at in range(len(order))]
    found = {name: (order.source[at], order.own[at]) for at, name in enumerate(names)}
    at = {name: index for index, name in enumerate(names)}
    assert found == {
        "F0 of part 0": (-1, -1),
        "F0 of part 1": (at["F0 of part 0"], -1),
        "B0 of part 1": (-1, at["F0 of part 1"]),
        "I0 of part 0": (at["B0 of part 1"], at["F0 of part 0"]),
        "W0 of part 0": (-1, at["I0 of part 0"]),
    }
    assert [order.by_stage[order.first[stage] : order.first[stage + 1]].tolist() for stage in range(2)] == [
        [at["F0 of part 0"], at["I0 of part 0"], at["W0 of part 0"]],
        [at["F0 of part 1"], at["B0 of part 1"]],
    ]


def test_split_backwards_are_understood() -> None:
    """Zero-bubble tables: the weight gradient comes any time after the input's."""
    split = [(FORWARD, 0), (BACKWARD_INPUT, 0), (BACKWARD_WEIGHT, 0)]
    order = order_actions(table(split, split))
    before = {(int(p), int(k)): i for i, (p, k) in enumerate(zip(order.part, order.kind, strict=True))}
    assert before[1, BACKWARD_INPUT] < before[0, BACKWARD_INPUT] < before[0, BACKWARD_WEIGHT]
    assert order.source[before[0, BACKWARD_INPUT]] == before[1, BACKWARD_INPUT]


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


def words(schedule: Schedule, stage: int) -> str:
    return " ".join(KIND_NAMES[kind] + str(micro) for kind, micro, _ in schedule.actions[stage].tolist())


def chunk_words(schedule: Schedule, stage: int) -> str:
    return " ".join(f"{KIND_NAMES[kind]}{micro}{'abc'[c]}" for kind, micro, c in schedule.actions[stage].tolist())


def test_one_f_one_b_as_published() -> None:
    schedule = find_schedule("1f1b", 3, 4)
    assert words(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_gpipe_runs_all_forwards_first() -> None:
    assert words(find_schedule("gpipe", 2, 2), 1) == "F0 F1 B0 B1"


def test_breadth_first_runs_chunk_by_chunk_and_backwards_in_reverse() -> None:
    expected = "F0a F1a F0b F1b B1b B0b B1a B0a"
    assert chunk_words(find_schedule("looped-bfs", 2, 2, 2), 1) == expected


def test_interleaved_as_published() -> None:
    """Figure 4 of Narayanan et al. 2021: rounds of as many micro-batches as stages."""
    schedule = find_schedule("1f1b", 2, 4, 2)
    assert chunk_words(schedule, 1) == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


def test_zero_bubble_keeps_the_first_stages_memory() -> None:
    """ZB-H1: no stage has more micro-batches between forward and weight gradient than 1F1B's first stage has."""
    schedule = find_schedule("zb-h1", 4, 8)
    assert words(schedule, 3)[:35] == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1"
    for rows in schedule.actions:
        held = np.select([rows[:, 0] == 0, rows[:, 0] == 3], [1, -1], 0).cumsum()
        assert held.max() == 4


def test_one_stage_alternates_whatever_the_schedule() -> None:
    for name in SCHEDULES:
        assert words(find_schedule(name, 1, 2), 0) == "F0 B0 F1 B1"
    assert chunk_words(find_schedule("1f1b", 1, 2, 2), 0) == "F0a F0b B0b B0a F1a F1b B1b B1a"


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.integers(1, 9),
    micro_batches=st.integers(1, 24),
    v=st.integers(1, 4),
)
def test_every_schedule_is_complete_and_runs(name: str, stages: int, micro_batches: int, v: int) -> None:
    """Or says in one line which rule does not hold."""
    try:
        schedule = find_schedule(name, stages, micro_batches, v)
    except JobError as error:
        assert "\n" not in str(error) and ", got " in str(error)
        assert not SCHEDULES[name].allows(v) or v > 1
        return
    order = order_actions(schedule)
    assert schedule.num_parts == stages * v
    assert len(order) == sum(len(rows) for rows in schedule.actions)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(JobError, match=r"schedule must be one of gpipe, 1f1b, .*, got 'zigzag'"):
        find_schedule("zigzag", 2, 2)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "v", "message"),
    [
        ("gpipe", 4, 8, 2, r"schedule gpipe has virtual_stages = 1, got 2"),
        ("zbv", 4, 8, 3, r"schedule zbv has virtual_stages = 2, got 3"),
        ("interleaved-zb", 4, 8, 1, r"schedule interleaved-zb has virtual_stages from 2 to 1024, got 1"),
        ("1f1b", 4, 9, 2, r"num_micro_batches % \(num_micro_batches // pp\) must be 0, got 9 % \(9 // 4\) = 1"),
        ("dualpipev", 4, 7, 2, r"dualpipev needs num_micro_batches >= 2 \* pp, got 7 < 2 \* 4 = 8"),
    ],
)
def test_rules_are_said_with_their_values(name: str, stages: int, micro_batches: int, v: int, message: str) -> None:
    with pytest.raises(JobError, match=message):
        find_schedule(name, stages, micro_batches, v)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zbv", 2)])
def test_a_pipeline_is_emptied_several_times(name: str, v: int) -> None:
    """Gradient accumulation around it repeats the schedule, each time with the next micro-batches."""
    once, twice = schedule_of(name, 4, 8, v), schedule_of(name, 4, 16, v, flushes=2)
    assert twice is schedule_of(name, 4, 16, v, flushes=2) and twice.num_micro_batches == 16
    for first, rows in zip(once.actions, twice.actions, strict=True):
        assert (rows[: len(first)] == first).all() and (rows[len(first) :] - first == [0, 8, 0]).all()
    track(twice, "torch")
    assert schedule_of("1f1b", 1, 16, flushes=2) is schedule_of("1f1b", 1, 16)  # nothing is empty on one stage
