import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.simulator.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
    find_schedule,
    order_actions,
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
