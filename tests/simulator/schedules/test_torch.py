"""Schedules equal those of ``torch.distributed.pipelining``, action by action, without any process."""

from typing import Any

import pytest

from stepsight.simulator.schedules import KIND_NAMES, Schedule, find_schedule

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

Row = list[tuple[str, int, int]]


def our_row(schedule: Schedule, stage: int) -> Row:
    """``(kind, part, micro_batch)`` of a stage."""
    part_of = schedule.part_of
    return [
        (KIND_NAMES[kind], int(part_of[stage, chunk]), micro) for kind, micro, chunk in schedule.actions[stage].tolist()
    ]


def torch_row(name: str, pp: int, micro_batches: int, v: int, rank: int) -> Row:
    schedule: Any = object.__new__(getattr(schedules, name))
    schedule.pp_group_size = pp
    schedule._n_microbatches = micro_batches
    schedule._stages = [None] * v
    schedule.n_local_stages, schedule.num_stages = v, pp * v
    schedule.number_of_rounds = max(1, micro_batches // pp)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    row: Row = []
    for action in schedule._calculate_single_rank_operations(rank):
        for leaf in (action.sub_actions or (action,)) if action else ():
            row.append((leaf.computation_type.value, leaf.stage_index, leaf.microbatch_index))
    return row


@pytest.mark.parametrize(
    ("ours", "theirs", "sizes"),
    [
        ("looped-bfs", "ScheduleLoopedBFS", [(2, 3, 1), (4, 6, 2), (8, 8, 3)]),
        ("1f1b", "ScheduleInterleaved1F1B", [(2, 2, 2), (4, 8, 2), (4, 10, 3), (4, 3, 2), (8, 32, 4)]),
        ("interleaved-zb", "ScheduleInterleavedZeroBubble", [(2, 2, 2), (4, 8, 2), (4, 10, 3), (4, 3, 2), (8, 32, 4)]),
        ("zbv", "ScheduleZBVZeroBubble", [(2, 1, 2), (4, 3, 2), (4, 7, 2), (8, 32, 2)]),
        ("dualpipev", "ScheduleDualPipeV", [(2, 4, 2), (4, 8, 2), (4, 11, 2), (5, 13, 2), (8, 32, 2)]),
    ],
)
def test_equal_to_torch(ours: str, theirs: str, sizes: list[tuple[int, int, int]]) -> None:
    for pp, micro_batches, v in sizes:
        schedule = find_schedule(ours, pp, micro_batches, v)
        for rank in range(pp):
            assert our_row(schedule, rank) == torch_row(theirs, pp, micro_batches, v, rank), (
                pp,
                micro_batches,
                v,
                rank,
            )
