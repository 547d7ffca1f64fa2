"""Low-rank adapters: what is computed, exchanged and kept."""

from __future__ import annotations

from typing import Any

import pytest

from stepsight.simulator.blocks.family import LOWEST, embedding_block, head_block, layer_block, layer_kinds
from stepsight.simulator.blocks.step import kept_bytes
from tests.simulator.blocks.shapes import collectives, flops, ops, parameters, small_model, small_shape, words

RANK = 4


def lora(*targets: str, dropout: float = 0.0) -> dict[str, Any]:
    return {"lora_rank": RANK, "lora_targets": targets, "lora_dropout": dropout}


def closed_form(targets: tuple[str, ...]) -> int:
    """Parameters of one layer's adapters in the small Llama, on all ranks together: rank * (inputs + outputs)."""
    hidden, keys, ffn = 64, 32, 256
    sizes = {
        "qkv": (hidden, hidden + 2 * keys),
        "q": (hidden, hidden),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "proj": (hidden, hidden),
        "fc1": (hidden, 2 * ffn),
        "gate": (hidden, ffn),
        "up": (hidden, ffn),
        "fc2": (ffn, hidden),
    }
    return sum(RANK * sum(sizes[target]) for target in targets)


@pytest.mark.parametrize("targets", [("qkv", "proj"), ("q", "v"), ("qkv", "proj", "fc1", "fc2"), ("gate", "up")])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_only_adapters_are_trained(targets: tuple[str, ...], tp: int, apart: bool) -> None:
    """Each rank has its part of every adapter; all other parameters of the layer are frozen."""
    shape = small_shape("llama", tp=tp, model=lora(*targets), kernels={"separate_linears": apart})
    block, full = layer_block(shape, "layer"), layer_block(small_shape("llama", tp=tp), "layer")
    assert parameters(block) * tp == closed_form(targets)
    assert sum(sum(step.frozen) for step in block) == parameters(full)
    for ends in (embedding_block(shape), head_block(shape)):
        assert not parameters(ends)


def test_frozen_weights_have_no_product_for_their_gradient() -> None:
    """Backward computes the input's gradient alone of what is frozen; adapters have both products."""
    shape = small_shape("llama", model=lora("qkv", "proj"))
    block, full = layer_block(shape, "layer"), layer_block(small_shape("llama"), "layer")
    thin = 2 * 2.0 * shape.rows * closed_form(("qkv", "proj")) / 2  # FLOP of the forward of all adapters
    assert flops(block, "linear") == flops(full, "linear") + thin
    assert flops(block, "linear_dgrad") == flops(full, "linear_dgrad") + thin
    assert flops(block, "linear_wgrad") == thin


def test_no_gradient_goes_beyond_the_first_adapter() -> None:
    """The first layer's norm and the product before its first adapter have no backward, and keep nothing."""
    shape = small_shape("llama", model=lora("qkv", "proj"))
    assert layer_kinds(shape.model) == ((LOWEST + "layer", 1), ("layer", 1))
    lowest, other = (layer_block(shape, kind) for kind in (LOWEST + "layer", "layer"))
    assert words(lowest) == words(other)
    assert not [item for step in lowest[:2] for item in step.full_backward]
    assert parameters(lowest) == parameters(other)
    assert len(ops(other, "linear_dgrad")) - len(ops(lowest, "linear_dgrad")) == 2
    assert kept_bytes(lowest) < kept_bytes(other)
    assert words(embedding_block(shape), backward=True) == ""


def test_adapters_keep_their_input_and_frozen_linears_none() -> None:
    """The output of attention is kept for its own backward."""
    rows, size = 64, 4
    full = kept_bytes(layer_block(small_shape("llama"), "layer"))
    inputs = {"qkv": 64, "proj": 64, "fc1": 64, "fc2": 256}
    for targets in (("qkv", "proj"), ("fc1",)):
        own = kept_bytes(layer_block(small_shape("llama", model=lora(*targets)), "layer"))
        others = sum(width for target, width in inputs.items() if target not in (*targets, "proj"))
        assert own == full - rows * size * others + rows * size * RANK * len(targets)
    dropped = kept_bytes(layer_block(small_shape("llama", model=lora("fc1", dropout=0.1)), "layer"))
    assert dropped == own + rows * 64  # the mask


@pytest.mark.parametrize("together", [False, True])
def test_tensor_parallel_adapters_exchange_narrow_activations(together: bool) -> None:
    """The narrow activation is gathered or summed; the wide one of a row-parallel linear is exchanged or gathered."""
    plain = small_shape("llama", tp=2, sequence_parallel=together)
    shape = small_shape("llama", tp=2, sequence_parallel=together, model=lora("qkv", "proj"))
    narrow, wide = shape.rows * RANK * 4, shape.rows * 64 * 4
    added = collectives(layer_block(shape, "layer"), "tp")
    for work in collectives(layer_block(plain, "layer"), "tp"):
        added.remove(work)
    found = sorted((work.kind, work.num_bytes) for work in added)
    moved = [("all_to_all", wide // 2)] * 2 if together else [("all_gather", wide), ("all_reduce", wide)]
    assert found == sorted([("all_gather", narrow), *[("all_reduce", narrow)] * 3, *moved])


def test_other_models_have_no_adapters() -> None:
    assert layer_kinds(small_model("llama")) == (("layer", 2),)
