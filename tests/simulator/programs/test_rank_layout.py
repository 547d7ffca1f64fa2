import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.simulator.blocks.step import Group
from stepsight.simulator.programs.sizes import Layout


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
    assert Layout((("tp", tp), ("dp", dp), ("pp", pp)), 8).group(axis).per_node == expected


def test_the_group_that_spans_most_nodes_counts() -> None:
    """Groups of three ranks on nodes of four: the second one is split."""
    assert Layout((("tp", 3), ("dp", 4)), 4).group("tp").per_node == 2


def test_neighbours_in_the_pipeline() -> None:
    """Two stages of four ranks share a node of eight, the next two the next one."""
    layout = Layout((("tp", 4), ("dp", 1), ("pp", 4)), 8)
    assert [layout.pipeline_neighbours(stage, stage + 1) for stage in range(3)] == [2, 1, 2]


def test_the_order_of_axes_decides_what_shares_a_node() -> None:
    """Pipeline neighbours next to each other, tensor-parallel ranks on nodes of their own."""
    layout = Layout((("pp", 4), ("dp", 2), ("tp", 2)), 8)
    assert [layout.group(axis).per_node for axis in ("pp", "dp", "tp")] == [4, 2, 1]
    assert layout.pipeline_neighbours(0, 1) == 2


def test_groups_along_two_axes_and_parts_of_them() -> None:
    """Context- and data-parallel ranks hold the same parameters; experts' ranks divide them into neighbours."""
    layout = Layout((("tp", 2), ("cp", 2), ("dp", 8), ("pp", 1)), 8)
    assert layout.group("cp", "dp") == Group(16, 4)
    assert layout.part_of(("cp", "dp"), 1, 4) == Group(4, 4)
    assert layout.part_of(("cp", "dp"), 4, 4) == Group(4, 1)


@given(
    st.permutations(["tp", "cp", "dp", "pp"]),
    st.tuples(*(st.integers(1, 4) for _ in range(4))),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sets(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1),
)
def test_nodes_of_groups_are_counted_right(
    names: list[str], sizes: tuple[int, ...], per_node: int, axes: set[str]
) -> None:
    """Against counting the nodes of every group."""
    layout = Layout(tuple(zip(names, sizes, strict=True)), per_node)
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank in range(layout.num_ranks):
        others = tuple(rank // layout.stride(name) % size for name, size in layout.axes if name not in axes)
        groups.setdefault(others, set()).add(rank // per_node)
    group = layout.group(*axes)
    assert group.size == layout.num_ranks // len(groups)
    assert group.per_node == -(-group.size // max(map(len, groups.values())))
