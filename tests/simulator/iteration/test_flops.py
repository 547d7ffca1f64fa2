"""Work of an iteration against the published formulas."""

from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.programs.lower import iteration_flops, lower
from tests.simulator.any_job import LATENT
from tests.simulator.conftest import JobMaker


@pytest.mark.parametrize("strategy", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2}, {"tp": 2, "pp": 2, "dp": 2}])
def test_a_gpt_needs_what_the_formula_says(make_job: JobMaker, gpu: Hardware, strategy: dict[str, int]) -> None:
    """Narayanan et al. 2021, equation 3 without recomputation: 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)); causal
    attention is half of theirs.  Together all ranks do that, however it is divided."""
    job = make_job(micro_batches=4, **strategy)
    batch, seq, layers, hidden, vocab = job.batch.global_batch, 32, 4, 64, 256
    formula = 72 * batch * seq * layers * hidden**2 * (1 + seq / (12 * hidden) + vocab / (12 * layers * hidden))
    needed, _ = iteration_flops(lower(job, gpu))
    ranks = job.parallel.tp * job.parallel.cp * job.parallel.dp
    assert needed * ranks == pytest.approx(formula)


def test_recomputation_is_done_but_not_needed(make_job: JobMaker, gpu: Hardware) -> None:
    """A full recomputation is a fourth pass over the layers."""
    (needed, done), (same, more) = (
        iteration_flops(lower(make_job(recompute=how, precision="bf16"), gpu)) for how in ("none", "full")
    )
    vocabulary = 2 * 4 * 32 * 256 * 64  # the head is not repeated
    assert same == needed
    assert more - done == pytest.approx(needed / 3 - vocabulary)


LORA = {"family": "llama", "lora_rank": 4, "lora_targets": ("qkv", "proj")}


@pytest.mark.parametrize("model", [{"family": "gpt"}, LORA, {"family": "vit", "patch_dim": 48}])
@pytest.mark.parametrize("modules", [(), ("core_attn",), ("mlp",)])
@pytest.mark.parametrize("strategy", [{}, {"pp": 2}])
def test_no_model_needs_recomputation(
    make_job: JobMaker, gpu: Hardware, model: dict[str, Any], modules: tuple[str, ...], strategy: dict[str, int]
) -> None:
    """Of frozen weights the gradient of the input alone is needed: less than three forward passes."""
    again: dict[str, Any] = (
        {"recompute": "selective", "recompute_modules": modules} if modules else {"recompute": "full"}
    )
    (needed, done), (same, more) = (
        iteration_flops(lower(make_job(model=model, micro_batches=4, precision="bf16", **strategy, **how), gpu))
        for how in ({}, again)
    )
    assert same == needed <= done <= more


def test_frozen_weights_need_no_gradient(make_job: JobMaker, gpu: Hardware) -> None:
    """By hand, of a token of a layer: products twice, adapters and attention three times; what lies before the first
    adapter once."""
    job = make_job(model=LORA, micro_batches=1)
    model, tokens = job.model, job.batch.micro_batch * job.model.seq_len
    kv = 2 * model.kv_heads * model.head_size
    qkv, others = model.hidden * (model.hidden + kv), model.hidden * (model.hidden + 3 * model.ffn)
    adapters = 4 * (model.hidden + model.hidden + kv) + 4 * 2 * model.hidden
    attention = model.seq_len * model.hidden  # both products, half of the pairs
    layer = 2 * (qkv + others) + 3 * (adapters + attention)
    first = qkv + 4 * model.hidden  # no gradient of its input, nor through the first adapter to it
    whole = 2 * tokens * (model.layers * layer - first + 2 * model.hidden * model.vocab)
    assert iteration_flops(lower(job, gpu))[0] == pytest.approx(whole)


def test_latent_attention_counts(make_job: JobMaker, gpu: Hardware) -> None:
    """Keys of 8 + 8 and values of 8 numbers: 2 * 24 FLOP for each of the pairs that a causal mask leaves."""
    job = make_job(model={"family": "llama", **LATENT, "v_head_dim": 8}, micro_batches=1)
    low = lower(job, gpu)
    works = [node.work for node in low.program("forward").nodes if isinstance(node.work, Op)]
    cores = sum(work.flops for work in works if work.kind == "mla_attention")
    linears = sum(work.flops for work in works if work.kind == "linear")
    assert cores == 4 * 4 * 2 * (16 + 8) * 32 * 32 / 2
    assert iteration_flops(low)[0] == pytest.approx(3 * (cores + linears))


def test_nobody_needs_the_gradient_of_an_image(make_job: JobMaker, gpu: Hardware) -> None:
    """A vision transformer's patches are given: with nothing done twice, no more is needed than is done."""
    needed, done = iteration_flops(lower(make_job(model={"family": "vit", "patch_dim": 48}), gpu))
    assert needed <= done
