from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.family import decoder_layer
from stepsight.simulator.blocks.moe import HIDDEN, HYBRID_EP, experts, places_of_token, token_counts
from stepsight.simulator.blocks.step import Block, Comm, Group, RankShape, kept_bytes
from tests.simulator.blocks.shapes import collectives, flops, items, ops, parameters, small_shape, words

GROUPED = ("grouped_linear", "grouped_linear_dgrad", "grouped_linear_wgrad")


def mixture(
    ep: int = 1, tp: int = 1, family: str = "llama", model: dict[str, Any] | None = None, **changes: Any
) -> RankShape:
    sizes = {"experts": 8, "experts_per_token": 2, **(model or {})}
    return small_shape(family, tp=tp, ep=ep, model=sizes, **changes)


def test_a_mixture_routes_sends_computes_and_brings_back() -> None:
    forward = words(experts(mixture(ep=4)))
    assert forward == (
        "linear softmax reduce elementwise permute all_to_all copy "
        "grouped_linear swiglu grouped_linear copy all_to_all unpermute"
    )
    one_each = forward.replace("copy ", "").replace("grouped_linear", "linear")  # nothing to sort or to group
    assert words(experts(mixture(ep=8))) == one_each


def test_one_rank_with_all_experts_says_nothing() -> None:
    assert "all_to_all" not in words(experts(mixture()))


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_flop_are_those_of_the_experts_that_tokens_visit(ep: int) -> None:
    """6 x active parameters x tokens, however the experts are spread."""
    shape = mixture(ep=ep)
    active = 2 * 3 * 64 * 128
    assert flops(experts(shape), *GROUPED) == 6 * active * shape.rows


def test_experts_are_spread_over_the_group() -> None:
    whole, part = experts(mixture()), experts(mixture(ep=4))
    own = [sum(sum(step.parameters) for step in block if step.expert) for block in (whole, part)]
    assert own == [8 * 3 * 64 * 128, 2 * 3 * 64 * 128]
    assert parameters(whole) - own[0] == parameters(part) - own[1] == 8 * 64  # the router


def test_all_to_alls_bring_back_what_they_took() -> None:
    """Forward: one away, one back; backward the same; all of the rank's tokens times experts per token."""
    found = collectives(experts(mixture(ep=4)), "ep")
    assert found == [Collective("all_to_all", 64 * 2 * 64 * 4, 4, 4)] * 4


def test_shared_experts_run_beside_the_dispatch_both_ways() -> None:
    block = experts(mixture(ep=8, model={"shared_experts": 2}))
    assert "permute ~all_to_all linear swiglu linear | linear swiglu" in words(block)
    backward = words(block, backward=True)
    assert "~all_to_all linear_wgrad linear_dgrad swiglu_backward linear_wgrad linear_dgrad add |" in backward
    assert words(block).endswith("unpermute add")
    assert flops(block, "linear") == flops(experts(mixture(ep=8)), "linear") + 2 * 64 * 3 * 64 * 2 * 128


def test_the_busiest_rank_decides_up_to_the_capacity() -> None:
    def computed(**model: float) -> int:
        return token_counts(mixture(ep=4, model=model)).computed

    assert computed() == 128
    assert computed(imbalance=1.5) == computed(imbalance=1.5, capacity_factor=2.0) == 192
    assert computed(imbalance=1.5, capacity_factor=1.25) == 160
    assert computed(imbalance=1.5, capacity_factor=0.5) == 64
    assert token_counts(mixture(model={"imbalance": 1.5})).computed == 128  # one rank has all experts: all are as busy


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("expert_tp", [1, 2])
def test_tensor_parallel_ranks_do_half_each(expert_tp: int, sequence_parallel: bool) -> None:
    shape = mixture(ep=4, tp=2, expert_tp=expert_tp, sequence_parallel=sequence_parallel)
    assert 2 * flops(experts(shape), *GROUPED) == flops(experts(mixture(ep=4)), *GROUPED)


def tensor_parallel_words(shape: RankShape) -> list[str]:
    return [collective.kind for collective in collectives(experts(shape), "tp", backward=False)]


def test_shared_experts_weights_need_the_tokens_of_all_tensor_parallel_ranks() -> None:
    gathered = mixture(ep=4, tp=2, expert_tp=2, sequence_parallel=True)
    assert tensor_parallel_words(gathered) == ["all_gather", "reduce_scatter"]
    assert tensor_parallel_words(mixture(ep=4, tp=2, expert_tp=2)) == ["all_reduce"]
    assert tensor_parallel_words(mixture(ep=4, tp=2, sequence_parallel=True)) == []
    assert tensor_parallel_words(mixture(ep=4, tp=2)) == ["all_gather"]  # each took a half of the tokens


def test_router_and_shared_experts_keep_the_same_input_once() -> None:
    block = experts(mixture(ep=4, model={"shared_experts": 1}))
    assert sum(step.saved_bytes for step in block) - kept_bytes(block) == 64 * 64 * 4


def test_experts_of_gpt_have_biases() -> None:
    block = experts(mixture(ep=4, family="gpt"))
    assert sum(step.expert for step in block) == 2
    assert "grouped_linear_dgrad grouped_linear_wgrad bias_grad" in words(block, backward=True)


def test_dense_layers_of_a_mixture_have_an_ordinary_mlp() -> None:
    assert decoder_layer(mixture(), "dense") == decoder_layer(
        small_shape("llama", model={"experts": 8, "experts_per_token": 2})
    )
    assert not ops(decoder_layer(mixture(), "dense"), *GROUPED)
    assert ops(decoder_layer(mixture(), "moe"), *GROUPED)


def test_overlapped_all_to_alls_save_the_published_part_of_their_bytes() -> None:
    """What is waited for and what runs beside the computation are all that travels."""
    apart, beside = (experts(mixture(ep=4, overlap_ep=overlap)) for overlap in (False, True))
    waited, whole = (sum(found.num_bytes for found in collectives(block, "ep")) for block in (beside, apart))
    assert waited == whole  # counted with what runs beside
    hidden = sum(item.work.num_bytes for step in beside for item in (*step.forward, *step.backward)
                 if isinstance(item, Comm) and item.beside)  # fmt: skip
    assert hidden == pytest.approx(HIDDEN * whole, rel=1e-4)


def test_biases_of_experts_move_the_bytes_that_their_kernels_do() -> None:
    """In bf16, with sums in fp32: 28 B of each output forward and 40 B backward; clamps 16 and 32 B of half a gate."""
    plain, biased = (experts(mixture(ep=4, precision="bf16", model={"expert_bias": on})) for on in (False, True))
    rows, width, ffn = 64 * 2, 64, 128

    def moved(block: Block, backward: bool) -> float:
        return sum(item.num_bytes for item in items(block, backward=backward) if isinstance(item, Op))

    assert moved(biased, False) - moved(plain, False) == rows * (28 * width + 16 * ffn)
    assert moved(biased, True) - moved(plain, True) == rows * (40 * width + 32 * ffn)


def test_fused_experts_have_neither_an_activation_nor_its_casts() -> None:
    plain, fused = (experts(mixture(ep=4, precision="fp8", model={"fused_experts": on})) for on in (False, True))
    apart = "copy copy copy grouped_linear swiglu copy grouped_linear copy copy"  # sorted, padded, cast
    assert words(plain).replace(apart, "copy copy linear linear copy") == words(fused)  # one kernel for all experts
    assert "swiglu" not in words(fused, backward=True)
    in_bf16 = [experts(mixture(ep=4, precision="bf16", model={"fused_experts": on})) for on in (False, True)]
    assert in_bf16[0] == in_bf16[1]


def test_tokens_travel_once_to_each_rank_that_has_one_of_their_experts() -> None:
    """Two of eight experts: on four ranks of two experts a token goes to 4 (1 - C(6,2)/C(8,2)) = 13/7 of them."""
    shape = mixture(ep=4, dispatcher="hybridep")
    assert places_of_token(shape, 4) == pytest.approx(13 / 7)
    assert places_of_token(shape, 8) == 2 and places_of_token(shape, 1) == 1
    found = collectives(experts(shape), "ep")
    rows = round(64 * 13 / 7)
    assert found == [Collective("all_to_all", round(rows * HYBRID_EP) * 64 * 4, 4, 4)] * 4
    nccl = collectives(experts(replace(shape, dispatcher="deepep")), "ep")
    assert nccl == [Collective("all_to_all", rows * 64 * 4, 4, 4)] * 4
    assert token_counts(shape).computed == 128
    assert words(experts(shape)) == (
        "linear softmax reduce elementwise all_to_all permute grouped_linear swiglu grouped_linear unpermute all_to_all"
    )
    assert experts(mixture(dispatcher="hybridep")) == experts(mixture())  # one rank has all experts


def test_tokens_cross_to_a_node_once() -> None:
    """Four nodes of two ranks: tokens are sent for each node, in a group of one rank of each, the own node's like the
    others': of the group's bytes a quarter stays.
    """
    shape = mixture(ep=8, dispatcher="deepep")
    across = replace(shape, ep=Group(8, 2))
    nodes = round(64 * 2 * (13 / 7) / 2 * 4 / 3)
    assert collectives(experts(across), "ep") == [Collective("all_to_all", nodes * 64 * 4, 4, 1)] * 4


def test_rows_are_padded_for_products_in_8_bits_unless_the_dispatcher_does() -> None:
    def copies(**changes: Any) -> int:
        return words(experts(mixture(ep=4, **changes))).count("copy")

    sort, casts = 2, 2
    assert copies(precision="bf16") == sort
    assert copies(precision="fp8") == copies(precision="fp8", dispatcher="deepep") + sort == sort + casts + 2
    assert copies(precision="fp8", dispatcher="hybridep") == casts
    assert copies(precision="fp8", model={"capacity_factor": 1.0}) == sort + casts + 2  # permutations are copies there


def test_experts_are_cast_one_by_one_with_scales_of_blocks() -> None:
    """As many bytes in as many kernels as there are experts on the rank."""
    together, apart = (experts(mixture(ep=4, precision="fp8", kernels={"casts_by_group": on})) for on in (False, True))
    for backward in (False, True):
        one, many = (items(block, backward=backward) for block in (together, apart))
        assert len(many) - len(one) == 2 * (2 - 1)
        assert sum(item.num_bytes for item in one if isinstance(item, Op)) == sum(
            item.num_bytes for item in many if isinstance(item, Op)
        )
