import pytest

from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.blocks import family
from tests.simulator.blocks.shapes import collectives, flops, items, small_shape, words

ATTENTION = ("attention", "attention_backward", "mla_attention", "mla_attention_backward")


@pytest.mark.parametrize("how", ["ring", "all_gather", "torch"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_rank_does_its_share_of_the_flop(how: str, cp: int) -> None:
    """With and without a causal mask: attention and matrix products of one rank times cp are those of all."""
    shape, alone = small_shape("llama", cp=cp, context_parallel=how), small_shape("llama")
    for kinds in (ATTENTION, ("linear", "linear_dgrad", "linear_wgrad")):
        assert flops(family.decoder_layer(shape), *kinds) * cp == flops(family.decoder_layer(alone), *kinds)
    shape, alone = small_shape("bert", cp=cp, context_parallel=how), small_shape("bert")
    assert flops(family.bert_layer(shape), *ATTENTION) * cp == flops(family.bert_layer(alone), *ATTENTION)


def test_a_ring_passes_keys_and_values_beside_the_attention() -> None:
    block = family.decoder_layer(small_shape("llama", cp=3, model={"seq_len": 24}))
    core = "~send_recv attention | ~send_recv attention add elementwise | attention add elementwise"
    assert core in words(block)


def test_gradients_of_keys_and_values_travel_home_in_the_backward() -> None:
    """cp - 1 messages of keys and values forward; backward as many again, and as many of their gradients."""
    cp, own = 4, 2 * 8 * 2 * 2 * 16 * 4  # micro-batch, tokens, keys and values, heads, their size, fp32
    block = family.decoder_layer(small_shape("llama", cp=cp))
    assert [c.num_bytes for c in collectives(block, "cp", backward=False)] == [own] * (cp - 1)
    assert [c.num_bytes for c in collectives(block, "cp", backward=True)] == [own, 2 * own, 2 * own, own]


def test_the_slowest_hop_of_a_ring_decides() -> None:
    shape = small_shape("llama", cp=4)
    assert {c.ranks_per_node for c in collectives(family.decoder_layer(shape), "cp")} == {2}
    far = type(shape.cp)(4, 2)
    crossing = type(shape)(shape.model, 2, "fp32", shape.kernels, cp=far)
    assert {c.ranks_per_node for c in collectives(family.decoder_layer(crossing), "cp")} == {1}


def test_all_gather_fetches_everything_twice_and_scatters_gradients() -> None:
    block = family.decoder_layer(small_shape("llama", cp=4, context_parallel="all_gather"))
    whole = 2 * 32 * 2 * 2 * 16 * 4
    gather, scatter = Collective("all_gather", whole, 4, 4), Collective("reduce_scatter", whole, 4, 4)
    assert collectives(block, "cp", backward=False) == [gather]
    assert collectives(block, "cp", backward=True) == [gather, scatter]


def test_compiled_pytorch_gathers_all_heads_and_waits_for_gradients_of_each_step_in_fp32() -> None:
    """Keys and values of two heads are repeated for four; gradients are home after as many messages as ranks."""
    model = {"heads": 4, "kv_heads": 2}
    block = family.decoder_layer(small_shape("llama", cp=4, model=model, context_parallel="torch", precision="bf16"))
    own = 2 * 8 * 2 * 4 * 16  # micro-batch, tokens, keys and values, heads, their size
    gather, home = Collective("all_gather", 4 * own * 2, 4, 4), Collective("send_recv", own * 4, 2, 2)
    assert collectives(block, "cp", backward=False) == [gather]
    assert collectives(block, "cp", backward=True) == [gather, *[home] * 4]
    assert "copy all_gather attention attention add attention add attention add linear" in words(block)


@pytest.mark.parametrize("how", ["ring", "all_gather", "torch"])
def test_what_is_kept_is_the_ranks_own_part(how: str) -> None:
    block, alone = family.decoder_layer(small_shape(cp=4, context_parallel=how)), family.decoder_layer(small_shape())
    assert 4 * sum(step.saved_bytes for step in block) == sum(step.saved_bytes for step in alone)


def test_norms_and_positions_work_on_the_ranks_own_rows() -> None:
    block = family.decoder_embedding(small_shape(cp=4))
    assert [item.dims for item in items(block)] == [(16, 64, 512), (16 * 64,)]
