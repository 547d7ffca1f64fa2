"""One pass through a block: which gradients, what is run again, where it can be cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.family import layer_block
from stepsight.simulator.blocks.step import Block, Join
from stepsight.simulator.programs.block_pass import (
    BACKWARD,
    INPUT,
    WEIGHT,
    BackwardSpec,
    backward_pass,
    forward_pass,
)
from stepsight.simulator.programs.op_level import dependencies
from tests.simulator.any_job import EXPERTS, LATENT
from tests.simulator.blocks.shapes import small_shape

BLOCKS: dict[str, Block] = {
    "gpt": layer_block(small_shape(), "layer"),
    "llama tp": layer_block(small_shape("llama", tp=2, sequence_parallel=True, precision="bf16"), "layer"),
    "ring": layer_block(small_shape("llama", cp=4), "layer"),
    "experts": layer_block(small_shape("llama", model={**EXPERTS, "shared_experts": 1}, ep=4), "moe"),
    "latent": layer_block(small_shape("llama", model={**LATENT, "kv_heads": 4}), "layer"),
}
blocks = st.sampled_from(sorted(BLOCKS)).map(BLOCKS.__getitem__)


@given(block=blocks, accumulate=st.booleans(), bucket=st.booleans())
def test_the_halves_of_a_backward_are_the_whole(block: Block, accumulate: bool, bucket: bool) -> None:
    """Input's and weights' gradients together run what the backward runs; gradients come with the weights'."""
    whole, of_input, of_weights = (
        backward_pass(block, BackwardSpec(part, accumulate=accumulate, bucket=bucket))
        for part in (BACKWARD, INPUT, WEIGHT)
    )
    works = [sorted(str(node.work) for node in passage.program.nodes) for passage in (whole, of_input, of_weights)]
    assert works[0] == sorted(works[1] + works[2])
    sizes = [[numel for _, numel, _ in passage.gradients] for passage in (whole, of_input, of_weights)]
    assert sizes == [sizes[0], [], sizes[0]]
    assert sum(sizes[0]) == sum(sum(step.parameters) for step in block)


@given(block=blocks, how=st.sampled_from(["none", "selective", "full"]))
def test_parameters_are_cast_where_they_are_used_and_their_gradients_back(block: Block, how: str) -> None:
    """Once forward, once more where all of the block runs again, and once backward, before the gradient is there."""
    sizes = sorted(numel for step in block for numel in step.parameters)
    spec = BackwardSpec(recompute=how, whole=True)
    forward, backward = forward_pass(block, "bf16"), backward_pass(block, spec, "bf16")
    casts = [[node.dims[0] for node in passage.nodes if isinstance(node, Op) and node.kind == "cast"]
             for passage in (forward, backward)]  # fmt: skip
    assert sorted(casts[0]) == sizes
    assert sorted(casts[1]) == sorted(sizes * (2 if how == "full" else 1))
    for node, numel, _ in backward.gradients:
        assert backward.nodes[node - 1] == Op("cast", (numel,), "bf16")
    plain, uncast = forward_pass(block), [item for item, name, _ in forward.items if not name.endswith(".cast")]
    assert uncast == [item for item, *_ in plain.items]


@given(block=blocks, spec=st.builds(BackwardSpec, recompute=st.sampled_from(["none", "selective", "full"])))
def test_a_gradient_is_there_after_the_op_that_makes_it(block: Block, spec: BackwardSpec) -> None:
    """Nodes never go back, and the last gradient is there when the passage ends."""
    nodes = [node for node, _, _ in backward_pass(block, spec).gradients]
    assert nodes == sorted(nodes)
    assert nodes[0] > 0 and nodes[-1] <= backward_pass(block, spec).num_nodes


@given(block=blocks)
def test_recomputing_all_runs_the_whole_forward_again(block: Block) -> None:
    forward = [str(node.work) for node in forward_pass(block).program.nodes]
    none, full = (
        sorted(str(node.work) for node in backward_pass(block, BackwardSpec(recompute=how, whole=True)).program.nodes)
        for how in ("none", "full")
    )
    assert full == sorted(none + forward)


@given(block=blocks, data=st.data())
def test_what_is_cut_is_whole(block: Block, data: st.DataObject) -> None:
    """Items before a cut and after it are all items, in their order."""
    passage = backward_pass(block, BackwardSpec())
    at = data.draw(st.integers(0, passage.num_nodes))
    pieces = [*passage.between(0, at), *passage.between(at, passage.num_nodes)]
    assert [each for each in pieces if not isinstance(each[0], Join)] == [
        each for each in passage.items if not isinstance(each[0], Join)
    ]
    if at < passage.num_nodes:
        assert pieces == list(passage.items)


@pytest.mark.parametrize(("name", "serial"), [("gpt", True), ("llama tp", True), ("ring", False), ("experts", False)])
def test_a_passage_with_streams_beside_each_other_is_not_cut(name: str, serial: bool) -> None:
    assert forward_pass(BLOCKS[name]).serial == serial


@given(block=blocks)
def test_dependencies_look_back_and_are_there_once(block: Block) -> None:
    pointer, before = dependencies(forward_pass(block).program)
    for node in range(len(pointer) - 1):
        own = before[pointer[node] : pointer[node + 1]].tolist()
        assert len(set(own)) == len(own)
        assert all(0 <= needed < node for needed in own)


def test_accumulation_adds_each_tensor_once() -> None:
    block = BLOCKS["gpt"]
    plain, adding = (
        [node.work for node in backward_pass(block, BackwardSpec(accumulate=how)).program.nodes]
        for how in (False, True)
    )
    more = [work for work in adding if isinstance(work, Op) and work not in plain and work.kind == "add"]
    assert {work.dims[0] for work in more} <= {numel for step in block for numel in step.parameters}
    assert len(adding) - len(plain) == sum(len(step.parameters) for step in block)
