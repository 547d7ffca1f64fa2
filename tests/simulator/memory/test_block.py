"""What a layer keeps and needs: closed forms."""

import pytest

from stepsight.dataset.job.specs import ModelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.step import Group, RankShape, Saved, Step
from stepsight.simulator.memory.part import BlockMemory, Gradients, block_memory, layer_memory
from tests.simulator.blocks.shapes import default_kernels

S, B, H, A = 2048, 2, 4096, 32
NONE = Gradients()


def layer(recompute: str = "none", *, fused: bool = False, **shape: object) -> BlockMemory:
    model = ModelSpec(
        family="gpt", layers=1, hidden=H, heads=A, kv_heads=A, ffn=4 * H, vocab=51200, seq_len=S, gated_mlp=False,
        fused_attention=fused,
    )  # fmt: skip
    return layer_memory(RankShape(model, B, "bf16", default_kernels("bf16"), **shape), "layer", recompute, NONE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "per_sbh"),
    [
        (1, False, "none", 34 - 2 + 2 * A * S / H),
        (8, False, "none", 10 - 2 + 24 / 8 + 2 * A * S / H / 8),
        (8, True, "none", (34 - 2) / 8 + 2 * A * S / H / 8),
        (8, False, "selective", 10 - 2 + 24 / 8),
        (8, True, "selective", (34 - 2) / 8),
        (8, True, "full", 2 / 8),
        (8, False, "full", 2),
    ],
)
def test_kept_by_a_layer(tp: int, sequence_parallel: bool, recompute: str, per_sbh: float) -> None:
    """Korthikanti et al. 2022, table 2, less what dropout adds: two masks of a byte (2 s b h), and of the scores a mask
    and another copy (3 of 5 a s^2 b)."""
    kept = layer(recompute, tp=Group(tp, tp), sequence_parallel=sequence_parallel).kept
    assert kept == pytest.approx(per_sbh * S * B * H)


def test_fused_attention_keeps_no_score_matrix() -> None:
    """Instead one number in fp32 per row and head, that selective recomputation makes again."""
    assert layer(fused=True).kept == pytest.approx(32 * S * B * H + 4 * S * B * A)
    assert layer("selective", fused=True).kept == pytest.approx(32 * S * B * H)


def test_recomputing_needs_the_layer_for_a_moment() -> None:
    """The peak of a recomputed layer's backward is that of one that kept everything."""
    none, selective, full = (layer(how) for how in ("none", "selective", "full"))
    assert full.backward == none.backward
    assert selective.backward <= none.backward
    assert full.forward < selective.forward <= none.forward


def test_parameters_of_a_layer() -> None:
    """12 h^2 and 13 h."""
    assert layer().numel == 12 * H**2 + 13 * H
    assert layer().expert_numel == 0


def test_split_backward_keeps_inputs_and_output_gradients_of_linears() -> None:
    """In elements per s b h: qkv 1 and 3, out 1 and 1, fc1 1 and 4, fc2 4 and 1."""
    assert layer().deferred == pytest.approx(2 * (7 + 9) * S * B * H)


def test_split_backward_keeps_gathered_gradients_with_sequence_parallelism() -> None:
    """Inputs wait as the rank's own part, but output gradients of out and fc2 (1 and 1) are of all rows."""
    one = layer(tp=Group(8, 8), sequence_parallel=True)
    assert one.deferred == pytest.approx(2 * (7 + 3 + 4 + 8 * (1 + 1)) / 8 * S * B * H)
    assert one.weight == pytest.approx(2 * 7 / 8 * S * B * H)  # the input of qkv or fc1 from the other seven
    assert layer().weight == 0


def test_names_are_kept_once() -> None:
    """Two steps that keep the same tensor."""
    block = (Step("a", saved=(Saved(100, "x"),)), Step("b", saved=(Saved(100, "x"), Saved(10))))
    assert block_memory(block, "none", 0, 0, NONE).kept == 110


def test_working_bytes_follow_from_ops() -> None:
    """An activation's backward reads what was kept, and works on two gradients; ``temporary_bytes`` come on top."""
    numel = 1000
    ops = {"forward": (Op("gelu", (numel,)),), "backward": (Op("gelu_backward", (numel,)),)}
    plain = block_memory((Step("gelu", **ops, saved=(Saved(2 * numel),)),), "none", 0, 0, NONE)
    assert (plain.forward, plain.backward) == (6 * numel, 6 * numel)
    more = block_memory((Step("gelu", **ops, saved=(Saved(2 * numel),), temporary_bytes=7),), "none", 0, 0, NONE)
    assert more.backward == plain.backward + 7


def test_gradients_grow_in_the_first_backward() -> None:
    """Those of later steps are there when earlier ones run; afterwards a fresh one is there for a moment."""
    block = (Step("a", parameters=(10,)), Step("b", parameters=(5,), expert=True))
    memory = block_memory(block, "none", 0, 0, Gradients(4.0, 2.0, 4.0))
    assert (memory.grown, memory.backward_first, memory.backward) == (50, 50, 40)
