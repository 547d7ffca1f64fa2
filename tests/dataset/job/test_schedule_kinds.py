"""Kinds of schedules: the built-in ones keep the contract, and a user's is declared in one place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.schedules import BACKWARD, FORWARD, SCHEDULES, Schedule, ScheduleKind, _count, loop_placement
from stepsight.simulator.schedules import find_schedule
from stepsight.testing import ScheduleContract
from stepsight.training.prediction.prediction import predict

JOB = {
    "model": {"family": "gpt", "layers": 8, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128},
    "parallel": {"tp": 1, "pp": 4, "dp": 1},
    "batch": {"micro_batch": 1, "global_batch": 8},
    "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 4, "fabric": "dgx-a100"},
}


def one_at_a_time(num_stages: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run every micro-batch forward and backward before the next one: no pipelining at all."""
    rows = [(kind, micro, 0) for micro in range(num_micro_batches) for kind in (FORWARD, BACKWARD)]
    actions = (np.array(rows, dtype=np.int32),) * num_stages
    return Schedule(actions, num_micro_batches, loop_placement(num_stages))


def _round(num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches of a round of an interleaved schedule."""
    return num_micro_batches // max(1, num_micro_batches // num_stages)


# Activations of chunks that the first stage keeps, or whichever keeps most, as published.
PUBLISHED: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda pp, m, v: m,
    "1f1b": lambda pp, m, v: pp if v == 1 else 2 * (pp - 1) + (v - 1) * _round(pp, m) + 1,
    "looped-bfs": lambda pp, m, v: m * v,
    "zb-h1": lambda pp, m, v: pp,
    "interleaved-zb": lambda pp, m, v: (v - 1) * _round(pp, m) + pp,
    "zbv": lambda pp, m, v: 2 * pp,
    "dualpipev": lambda pp, m, v: 2 * pp + 1,
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
class TestBuiltInSchedules(ScheduleContract):
    @pytest.fixture(autouse=True)
    def _bound(self, name: str) -> None:
        self.bound = PUBLISHED[name]

    @pytest.fixture
    def kind(self, name: str) -> ScheduleKind:
        return SCHEDULES[name]

    def most_in_flight(self, num_stages: int, num_micro_batches: int, virtual_stages: int) -> int:
        return self.bound(num_stages, num_micro_batches, virtual_stages)


class TestAnOwnSchedule(ScheduleContract):
    @pytest.fixture
    def kind(self) -> ScheduleKind:
        return ScheduleKind(one_at_a_time)

    def most_in_flight(self, num_stages: int, num_micro_batches: int, virtual_stages: int) -> int:
        return 1


def test_declaring_a_schedule_is_all() -> None:
    """A job that names it is valid, and takes as long as its order implies."""
    kind = SCHEDULES.register("one-at-a-time", ScheduleKind(one_at_a_time))
    try:
        assert kind.doc == "Run every micro-batch forward and backward before the next one: no pipelining at all."
        job = Job.from_dict({**JOB, "parallel": {**JOB["parallel"], "schedule": "one-at-a-time"}})
        usual = replace(job, parallel=replace(job.parallel, schedule="1f1b"))
        assert find_schedule("one-at-a-time", 4, 8).name == "one-at-a-time"
        assert predict(job).iteration_time_s > 2 * predict(usual).iteration_time_s
    finally:
        SCHEDULES.unregister("one-at-a-time")
    with pytest.raises(JobError, match=r"schedule must be one of gpipe, .* got 'one-at-a-time'"):
        find_schedule("one-at-a-time", 4, 8)


def test_names_are_taken_once() -> None:
    with pytest.raises(JobError, match="schedule '1f1b' comes with stepsight: choose another name"):
        SCHEDULES.register("1f1b", ScheduleKind(one_at_a_time))


@pytest.mark.parametrize(
    ("make", "virtual_stages", "message"),
    [
        (None, (1, 1), "make must be a function of num_stages, num_micro_batches, virtual_stages, got None"),
        (lambda num_stages: None, (1, 1), r"make must take 3 \(num_stages, .*\), got \(num_stages\)"),
        (one_at_a_time, 2, r"virtual_stages must be \(fewest, most\) .* got 2"),
        (one_at_a_time, (0, 1), r"1 <= fewest <= most <= 1024, got \(0, 1\)"),
        (one_at_a_time, (2, 1), r"1 <= fewest <= most <= 1024, got \(2, 1\)"),
        (one_at_a_time, (1, 1025), r"1 <= fewest <= most <= 1024, got \(1, 1025\)"),
    ],
)
def test_invalid_kinds_are_refused(
    make: Callable[[int, int, int], Schedule], virtual_stages: tuple[int, int], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        ScheduleKind(make, virtual_stages)


def test_what_is_made_is_what_was_asked_for() -> None:
    with pytest.raises(JobError, match="must be made as a Schedule, got 7"):
        ScheduleKind(lambda *_: 7).build("seven", 2, 4, 1)  # type: ignore[arg-type,return-value]
    with pytest.raises(JobError, match=r"were asked for, \(2, 4, 1\), got \(2, 5, 1\)"):
        ScheduleKind(lambda pp, m, v: one_at_a_time(pp, m + 1, v)).build("more", 2, 4, 1)


def _changed(**parts: Any) -> ScheduleKind:
    return ScheduleKind(lambda pp, m, v: replace(one_at_a_time(pp, m, v), **parts))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"actions": ([(0, 0, 0)], [(0, 0, 0)])},
            r"stage 0 must be whole numbers of shape \(n, 3\), got \[\(",
        ),
        ({"actions": (np.zeros((4, 2), int),) * 2}, r"actions of stage 0 must be .* got int64 of shape \(4, 2\)"),
        ({"actions": (np.zeros((4, 3)),) * 2}, r"got float64 of shape \(4, 3\)"),
        (
            {"placement": np.array([[0, 0], [2, 0]])},
            "every part a stage < 2 and a chunk >= 0 of its own",
        ),
        ({"placement": np.array([[1, 0], [1, 0]])}, r"of its own, got \[\[1, 0\], \[1, 0\]\]"),
        ({"fused": (np.zeros(4, bool),)}, "fused must be empty or hold an array for each stage"),
    ],
)
def test_arrays_of_another_shape_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        _changed(**parts).build("mine", 2, 4, 1)


def test_a_schedule_whose_function_raises_is_an_error_of_the_job() -> None:
    def wrong(num_stages: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
        raise KeyError(num_stages)

    job = Job.from_dict({**JOB, "parallel": {**JOB["parallel"], "schedule": "1f1b"}})
    SCHEDULES.register("wrong", ScheduleKind(wrong))
    try:
        with pytest.raises(JobError, match="schedule wrong cannot be made: KeyError: 4"):
            predict(replace(job, parallel=replace(job.parallel, schedule="wrong")))
    finally:
        SCHEDULES.unregister("wrong")


def test_actions_of_many_groups_are_counted_apart() -> None:
    """Numbers of more than 16 bits that differ by 65536 are not the same group."""
    groups = np.array([70000, 4464, 70000, 65535, 4464, 70000])
    assert _count(groups).tolist() == [0, 0, 1, 0, 1, 2]
    assert _count(groups % 65536).tolist() == [0, 1, 2, 0, 3, 4]


def test_virtual_stages_that_built_in_schedules_allow() -> None:
    found = {name: kind.virtual_stages for name, kind in SCHEDULES.items()}
    assert found == {
        "gpipe": (1, 1), "1f1b": (1, 1024), "looped-bfs": (1, 1024), "zb-h1": (1, 1), "interleaved-zb": (2, 1024),
        "zbv": (2, 2), "dualpipev": (2, 2),
    }  # fmt: skip
