"""Groups and parts of a job, against what its ranks' numbers say."""

from itertools import permutations
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.job.specs import AXES
from stepsight.simulator.blocks.step import Group
from stepsight.simulator.programs.sizes import Layout, boundary_bytes, groups_of, part_shapes, rank_shape
from tests.simulator.any_job import EXPERTS
from tests.simulator.conftest import JobMaker

ORDERS = ["-".join(axes) for axes in permutations(AXES)]


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    found = {}
    for name, size in layout.axes:
        rank, found[name] = divmod(rank, size)
    return found


def nodes_spanned(layout: Layout, axes: tuple[str, ...]) -> int:
    """Nodes of the group along some axes that spans most, rank by rank."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank in range(layout.num_ranks):
        at = coordinates(layout, rank)
        others = tuple(at[name] for name, _ in layout.axes if name not in axes)
        groups.setdefault(others, set()).add(rank // layout.devices_per_node)
    return max(map(len, groups.values()))


@pytest.mark.parametrize("order", ORDERS)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 4),
    per_node=st.sampled_from([1, 2, 4, 8]),
    axes=st.sampled_from([("tp",), ("cp",), ("dp",), ("cp", "dp"), ("tp", "pp"), ("tp", "cp", "dp")]),
)
def test_any_order_of_axes(order: str, sizes: tuple[int, ...], per_node: int, axes: tuple[str, ...]) -> None:
    """Which groups cross nodes follows from the numbers of their ranks."""
    degrees = dict(zip(AXES, sizes, strict=True))
    layout = Layout(tuple((axis, degrees[axis]) for axis in order.split("-")), per_node)
    group, spanned = layout.group(*axes), nodes_spanned(layout, axes)
    assert group.size == prod(degrees[axis] for axis in axes)
    assert group.per_node == -(-group.size // spanned)
    assert (group.per_node == group.size) == (spanned == 1)


@pytest.mark.parametrize("order", ORDERS)
@given(sizes=st.tuples(*[st.sampled_from([1, 2, 3])] * 4), per_node=st.sampled_from([1, 2, 4]))
def test_neighbours_share_a_node_if_all_pairs_do(order: str, sizes: tuple[int, ...], per_node: int) -> None:
    degrees = dict(zip(AXES, sizes, strict=True)) | {"pp": 3}
    layout = Layout(tuple((axis, degrees[axis]) for axis in order.split("-")), per_node)
    for stage in range(2):
        pairs = [
            (rank // per_node, (rank + layout.stride("pp")) // per_node)
            for rank in range(layout.num_ranks)
            if coordinates(layout, rank)["pp"] == stage
        ]
        assert layout.pipeline_neighbours(stage, stage + 1) == (2 if all(a == b for a, b in pairs) else 1)


@pytest.mark.parametrize(
    ("strategy", "ep", "holders"),
    [
        ({"tp": 2, "dp": 8, "ep": 4}, Group(4, 4), Group(2, 1)),  # four neighbours on a node of eight
        ({"tp": 2, "dp": 8, "ep": 8}, Group(8, 4), Group()),
        ({"tp": 2, "dp": 8, "ep": 4, "expert_tp": 1}, Group(4, 4), Group(4, 2)),  # tensor-parallel ranks take part
        ({"tp": 8, "dp": 2, "ep": 8, "expert_tp": 1}, Group(8, 8), Group(2, 1)),
        ({"cp": 2, "dp": 4, "ep": 4}, Group(4, 4), Group(2, 2)),
        ({"dp": 8, "tp": 2, "ep": 4, "order": "dp-tp-cp-pp"}, Group(4, 4), Group(2, 2)),
    ],
)
def test_groups_of_experts(make_job: JobMaker, strategy: dict[str, Any], ep: Group, holders: Group) -> None:
    """Who sends tokens to whom, and who holds the same experts."""
    model = {"family": "llama", **EXPERTS, "heads": 8, "kv_heads": 8}
    job = make_job(devices_per_node=8, model=model, **strategy)
    assert rank_shape(job).ep == ep
    assert groups_of(job).experts == holders


def test_without_experts_their_degree_means_nothing(make_job: JobMaker) -> None:
    groups = groups_of(make_job(tp=2, dp=2, expert_tp=1))
    assert groups.experts == groups.replicas == Group(2, 2)


@given(axes=st.permutations(["tp", "cp", "dp"]), ep=st.sampled_from([1, 2, 3, 4, 6, 12, 24]))
def test_replicas_that_are_in_one_group(axes: list[str], ep: int) -> None:
    """``together`` counts the neighbours along an axis that ``part_of`` joins."""
    sizes = {"tp": 2, "cp": 2, "dp": 6}
    layout = Layout(tuple((axis, sizes[axis]) for axis in axes), 1)
    joined = 1
    for axis in axes:
        joined *= layout.together(("tp", "cp", "dp"), ep, axis)
    assert joined == layout.part_of(("tp", "cp", "dp"), 1, ep).size == ep


def test_mixed_layers_are_divided_in_their_order(make_job: JobMaker) -> None:
    model = {"family": "llama", **EXPERTS, "layers": 7, "dense_layers": 1, "moe_every": 2}
    parts = part_shapes(make_job(pp=2, model=model, stage_layers=(3, 4)))
    assert [part.layers for part in parts] == [
        (("dense", 2), ("moe", 1)),
        (("dense", 1), ("moe", 1), ("dense", 1), ("moe", 1)),
    ]


@given(layers=st.integers(1, 40), parts=st.integers(1, 8))
def test_even_parts_differ_by_one_layer(make_job: JobMaker, layers: int, parts: int) -> None:
    if layers < parts:
        return
    found = [part.num_layers for part in part_shapes(make_job(pp=parts, model={"layers": layers}, devices_per_node=1))]
    assert sum(found) == layers
    assert found == sorted(found, reverse=True) and found[0] - found[-1] <= 1


def test_every_boundary_of_t5_passes_both_sequences(make_job: JobMaker) -> None:
    job = make_job(pp=4, model={"family": "t5", "encoder_layers": 4, "encoder_seq_len": 64})
    assert boundary_bytes(rank_shape(job), part_shapes(job)) == ((32 + 64) * 64 * 4,) * 3
