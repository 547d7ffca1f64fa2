import pytest

from stepsight.simulator.layout import neighbour_ranks_per_node, ranks_per_node


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "axis", "expected"),
    [
        (8, 8, 16, "tp", 8),  # a tensor-parallel group fills a node
        (8, 8, 16, "dp", 1),  # so every replica is on another one
        (2, 8, 1, "dp", 4),  # four replicas of two ranks on a node of eight
        (1, 8, 2, "dp", 8),
        (16, 2, 1, "tp", 8),
        (3, 1, 1, "tp", 3),
    ],
)
def test_groups_lie_on_nodes_tensor_parallel_first(tp: int, dp: int, pp: int, axis: str, expected: int) -> None:
    assert ranks_per_node(tp, dp, pp, 8, axis) == expected


def test_the_group_that_spans_most_nodes_counts() -> None:
    """Groups of three ranks on nodes of four: the second one is split."""
    assert ranks_per_node(3, 4, 1, 4, "tp") == 2


def test_neighbours_in_the_pipeline() -> None:
    """Two stages of four ranks share a node of eight, the next two the next one."""
    assert [neighbour_ranks_per_node(4, 1, 8, stage) for stage in range(3)] == [2, 1, 2]
