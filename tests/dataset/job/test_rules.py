"""Rules of models: which sizes and strategies go together."""

from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job

MIXTURE = {"experts": 8, "experts_per_token": 2}
LATENT = {"attention": "mla", "kv_lora_rank": 32, "rope_head_dim": 8, "v_head_dim": 16}


def job(model: dict[str, Any], **parallel: Any) -> Job:
    """Eight devices, one sequence each at most."""
    sizes = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "seq_len": 64}
    return Job.from_dict(
        {
            "model": {**sizes, **model},
            "parallel": parallel,
            "batch": {"micro_batch": 1, "global_batch": 8},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
        }
    )


@pytest.mark.parametrize(
    ("model", "parallel", "text"),
    [
        ({"seq_len": 60}, {"cp": 8}, r"context parallelism needs 2 \* cp to divide model.seq_len, got 60 % 16 = 12"),
        (
            {"family": "bert", "seq_len": 60},
            {"cp": 8},
            "context parallelism needs cp to divide model.seq_len, got 60 % 8 = 4",
        ),
        ({"dropout": 1.0}, {}, r"model.dropout must lie in \[0, 1\), got 1.0"),
        (
            {"fused_attention": False, "attention_kernels": "flash-2"},
            {},
            "attention_kernels are of fused attention, got 'flash-2' with fused_attention false",
        ),
        (
            {"fused_attention": False},
            {"cp": 2},
            "context_parallel 'ring' needs fused_attention, got .* false with cp 2",
        ),
        (
            {},
            {"offload_activations": True, "recompute": "full"},
            "offload_activations needs recompute 'none', got 'full'",
        ),
        ({"family": "bert", **LATENT}, {}, "attention 'mla' is for gpt and llama, got family 'bert'"),
        ({**LATENT, "kv_heads": 2}, {}, "with attention 'mla' kv_heads = heads, got 2 and 4 heads"),
        ({"attention": "mla"}, {}, "model.kv_lora_rank must be > 0 with model.attention = mla, got 0"),
        ({**MIXTURE, "expert_ffn": 16}, {"ep": 3}, r"parallel.ep must divide dp \* cp, got 8 % 3 = 2"),
        ({**MIXTURE, "experts": 12}, {"ep": 8}, "parallel.ep must divide model.experts, got 12 % 8 = 4"),
        ({}, {"ep": 2}, "parallel.ep > 1 needs model.experts, got ep 2 with a dense model"),
        (
            {**MIXTURE, "shared_experts": 1, "expert_ffn": 18},
            {"tp": 4, "expert_tp": 1},
            r"parallel.tp must divide model.shared_experts \* expert_ffn, got 18 % 4 = 2",
        ),
        (
            {**MIXTURE, "seq_len": 30},
            {"tp": 4, "expert_tp": 1},
            r"parallel.tp must divide micro_batch \* seq_len, got 30 % 4 = 2",
        ),
        ({"hidden": 2**31}, {}, "model.hidden must be > 0 and <= 16777216, got 2147483648"),
        ({"seq_len": 2**31}, {}, "model.seq_len must be > 0 and <= 16777216, got 2147483648"),
        (
            {"hidden": 2**24, "ffn": 2**24, "layers": 8192},
            {},
            r"layers \* hidden \* widest dimension must be <= 7.21e\+16, got 2.31e\+18",
        ),
        (
            {"seq_len": 2**24, "heads": 1024, "head_dim": 64},
            {},
            r"micro_batch \* heads \* seq_len \* seq_len must be <=",
        ),
        (
            {**MIXTURE, "seq_len": 2**24, "ffn": 2**24, "imbalance": 1e6},
            {},
            r"micro_batch \* seq_len \* widest dimension must be <= 7.21e\+16, got 2.25e\+21",
        ),
        ({"family": "vit"}, {}, "model.patch_dim must be > 0 with model.family = vit, got 0"),
        ({"family": "t5"}, {}, "model.encoder_layers must be > 0 with model.family = t5, got 0"),
    ],
)
def test_models_and_strategies_that_do_not_go_together(
    model: dict[str, Any], parallel: dict[str, Any], text: str
) -> None:
    """Each is a JobError with the rule and the values."""
    with pytest.raises(JobError, match=text):
        job(model, **parallel)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({"family": "bert", "seq_len": 60}, {"cp": 4}),
        ({"fused_attention": False}, {"cp": 2, "context_parallel": "all_gather"}),
        (LATENT, {"tp": 2}),
        (MIXTURE, {"tp": 2, "ep": 8, "expert_tp": 1}),
        (MIXTURE, {"cp": 2, "ep": 8}),
    ],
)
def test_what_goes_together(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert job(model, **parallel).parallel.dp >= 1


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"lora_rank": 8}, r"adapters need model.lora_targets, got \[\] with model.lora_rank 8$"),
        ({"lora_targets": ["qkv"]}, r"model.lora_targets need model.lora_rank > 0 of a transformer, got \['qkv'\]$"),
        ({"lora_rank": 8, "lora_targets": ["qkv"], "lora_dropout": 1.0}, r"lora_dropout must be in \[0, 1\), got 1.0$"),
        ({"lora_rank": 8, "lora_targets": ["qkv", "qkv"]}, "'qkv' is there twice$"),
        ({"lora_rank": 4096, "lora_targets": ["qkv"]}, r"at most the smaller side of its matrix, .*\['qkv'\]"),
        ({"lora_rank": 8, "lora_targets": ["qkv", "q"]}, "'q' is part of another one"),
        ({"lora_rank": 8, "lora_targets": ["fc1"], **MIXTURE}, "'fc1' is not in this model"),
        ({"lora_rank": 8, "lora_targets": ["up"], "gated_mlp": False}, "'up' is not in this model"),
        ({"lora_rank": 8, "lora_targets": ["qkv"], **LATENT}, "'qkv' is not in this model"),
        ({"lora_rank": 8, "lora_targets": ["query"]}, "model.lora_targets must be one of qkv"),
        ({"lora_rank": 9, "lora_targets": ["qkv"]}, "parallel.tp must divide model.lora_rank, got 9 % 2 = 1"),
    ],
)
def test_adapters_that_do_not_go_with_the_model(model: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(model, tp=2)
