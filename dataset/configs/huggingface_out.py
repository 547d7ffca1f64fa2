"""A job to Hugging Face's ``config.json`` of its model, to DeepSpeed's JSON, and to Accelerate's YAML.

Each file states a part of a job.  A writer lists the keys that its file cannot state; another file may state them.
"""

from __future__ import annotations

import json
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.job_view import ConfigText, JobView
from stepsight.dataset.job.job import Job

_LLAMA = {
    "num_hidden_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.ffn",
    "vocab_size": "model.vocab",
    "max_position_embeddings": "model.seq_len",
    "tie_word_embeddings": "model.tied_embeddings",
    "attention_dropout": "model.dropout",
}
_GPT2 = {
    "n_layer": "model.layers",
    "n_embd": "model.hidden",
    "n_head": "model.heads",
    "n_inner": "model.ffn",
    "vocab_size": "model.vocab",
    "n_positions": "model.seq_len",
    "tie_word_embeddings": "model.tied_embeddings",
    "resid_pdrop": "model.dropout",
}
_BERT = {
    **{name: key for name, key in _LLAMA.items() if name not in ("num_key_value_heads", "attention_dropout")},
    "hidden_dropout_prob": "model.dropout",
}
_T5 = {
    "num_layers": "model.encoder_layers",
    "num_decoder_layers": "model.layers",
    "d_model": "model.hidden",
    "num_heads": "model.heads",
    "d_kv": "model.head_dim",
    "d_ff": "model.ffn",
    "vocab_size": "model.vocab",
    "n_positions": "model.encoder_seq_len",
    "tie_word_embeddings": "model.tied_embeddings",
    "dropout_rate": "model.dropout",
}
_VIT = {
    "num_hidden_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "intermediate_size": "model.ffn",
    "hidden_dropout_prob": "model.dropout",
}
_CLASSES = {
    "gpt": ("gpt2", "GPT2LMHeadModel", _GPT2),
    "bert": ("bert", "BertForMaskedLM", _BERT),
    "t5": ("t5", "T5ForConditionalGeneration", _T5),
    "vit": ("vit", "ViTForImageClassification", _VIT),
}
_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


def write_huggingface(job: Job) -> ConfigText:
    """Write the model of a job as ``config.json``."""
    view = JobView(job)
    if job.model.family == "llama":
        kind, name = _llama_type(job)
        table = {"model_type": kind, "architectures": [name], **view.copy(_LLAMA), "hidden_act": "silu"}
        table |= _llama_more(view, kind)
    elif job.model.family in _CLASSES:
        kind, name, pairs = _CLASSES[job.model.family]
        table = {"model_type": kind, "architectures": [name], **view.copy(pairs)}
        if kind == "vit":
            side, image = view.image()
            table |= {"patch_size": side, "image_size": image, "num_channels": 3}
            table["id2label"] = {str(label): f"LABEL_{label}" for label in range(view["model.vocab"])}
        if kind == "t5":
            table["feed_forward_proj"] = "gated-gelu" if view["model.gated_mlp"] else "relu"
            if view["model.seq_len"] != 128:
                view.unexpressed("model.seq_len")
    else:
        raise JobError(f"transformers has no model of the family {job.model.family!r:.80}")
    view.expressed("model.family", "model.gated_mlp", "model.attention_kernels")
    if not view["model.fused_attention"]:
        table["_attn_implementation"] = "eager"
    if job.model.family != "llama" and job.model.kv_heads == job.model.heads:
        view.expressed("model.kv_heads")
    if not job.model.experts:
        view.expressed("model.expert_ffn")
    table["torch_dtype"] = "float16" if job.batch.dtype == "fp16" else "bfloat16"
    ignored = tuple(text for text in view.left() if text.startswith("model."))
    notes = ("a model's file holds no strategy: write deepspeed or accelerate too", *view.notes())
    return ConfigText(text=json.dumps(table, indent=2) + "\n", suffix=".json", ignored=ignored, notes=notes)


def _llama_type(job: Job) -> tuple[str, str]:
    model = job.model
    if model.attention == "mla":
        new = model.experts and model.q_lora_rank
        return ("deepseek_v3", "DeepseekV3ForCausalLM") if new else ("deepseek_v2", "DeepseekV2ForCausalLM")
    if model.experts and (model.expert_ffn != model.ffn or model.shared_experts or model.moe_every > 1):
        return "qwen2_moe", "Qwen2MoeForCausalLM"
    return ("mixtral", "MixtralForCausalLM") if model.experts else ("llama", "LlamaForCausalLM")


def _llama_more(view: JobView, kind: str) -> dict[str, Any]:
    model = view.job.model
    table: dict[str, Any] = {}
    if kind.startswith("deepseek"):
        table |= {"q_lora_rank": view["model.q_lora_rank"] or None, "kv_lora_rank": view["model.kv_lora_rank"]}
        table |= {"qk_nope_head_dim": model.head_size, "qk_rope_head_dim": view["model.rope_head_dim"]}
        table |= {"v_head_dim": view["model.v_head_dim"], "first_k_dense_replace": view["model.dense_layers"]}
        view.expressed("model.attention", "model.head_dim")
        if model.experts:
            table |= {"n_routed_experts": view["model.experts"], "n_shared_experts": view["model.shared_experts"]}
            table |= {"moe_layer_freq": view["model.moe_every"]}
    else:
        if view["model.head_dim"]:
            table["head_dim"] = model.head_dim
    if kind == "mixtral":
        table["num_local_experts"] = view["model.experts"]
        view.expressed("model.expert_ffn")
    if kind == "qwen2_moe":
        table |= {"num_experts": view["model.experts"], "decoder_sparse_step": view["model.moe_every"]}
        table["shared_expert_intermediate_size"] = view["model.shared_experts"] * model.expert_ffn
    if model.experts:
        table["num_experts_per_tok"] = view["model.experts_per_token"]
        if kind != "mixtral":
            table["moe_intermediate_size"] = view["model.expert_ffn"]
    return table


def write_deepspeed(job: Job) -> ConfigText:
    """Write how a job is trained as DeepSpeed's JSON."""
    view = JobView(job)
    zero: dict[str, Any] = {"stage": view["parallel.zero_stage"], "overlap_comm": view["parallel.overlap_grad_reduce"]}
    size = 4 if job.batch.precision == "fp32" else 2
    zero["reduce_bucket_size"] = round(view["parallel.bucket_mbytes"] * 2**20 / size)
    zero["reduce_scatter"] = view["parallel.reduce_scatter"]
    if view["optimizer.offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    if view["parallel.dp_shard"]:
        zero["mics_shard_size"] = job.parallel.dp_shard
    precision = view["batch.precision"]
    table: dict[str, Any] = {
        "train_batch_size": view["batch.global_batch"],
        "train_micro_batch_size_per_gpu": view["batch.micro_batch"],
        "gradient_accumulation_steps": job.num_micro_batches,
        "gradient_clipping": 1.0 if view["optimizer.clip_grad_norm"] else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": precision in ("bf16", "fp8")},
        "fp16": {"enabled": precision == "fp16"},
        "optimizer": {"type": "Adam" if view["optimizer.kind"] == "adam" else "AdamW"},
    }
    if precision not in ("bf16", "fp16", "fp32"):
        view.unexpressed("batch.precision")
    if view["parallel.tp"] > 1:
        table["tensor_parallel"] = {"autotp_size": job.parallel.tp}
    if view["parallel.gradient_dtype"] == "fp32":
        table["data_types"] = {"grad_accum_dtype": "fp32"}
    elif job.parallel.gradient_dtype in ("model", "model-fused"):
        table["data_types"] = {"grad_accum_dtype": job.batch.dtype if precision != "fp8" else "bf16"}
    elif job.parallel.gradient_dtype:
        view.unexpressed("parallel.gradient_dtype")
    view.expressed("parallel.dp", "cluster.nodes", "cluster.devices_per_node")
    ignored = tuple(text for text in view.left() if not text.startswith("model."))
    notes = ("the model's sizes stand in its config.json: write huggingface too",)
    return ConfigText(text=json.dumps(table, indent=2) + "\n", suffix=".json", ignored=ignored, notes=notes)


def write_accelerate(job: Job) -> ConfigText:
    """Write how a job is trained as Accelerate's YAML: FSDP where parameters or gradients are sharded."""
    import yaml

    view, parallel = JobView(job), job.parallel
    stage, precision = view["parallel.zero_stage"], view["batch.precision"]
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": view["cluster.nodes"],
        "num_processes": job.cluster.num_devices,
        "mixed_precision": {"fp32": "no"}.get(precision, precision),
        "gradient_accumulation_steps": job.num_micro_batches,
    }
    if precision not in ("fp32", "bf16", "fp16", "fp8"):
        view.unexpressed("batch.precision")
        table["mixed_precision"] = job.batch.dtype
    again = view["parallel.recompute"] == "full" and view["parallel.recompute_every"] == 1
    if stage in (2, 3):
        hybrid = bool(view["parallel.dp_shard"]) and parallel.dp_shard == job.cluster.devices_per_node
        strategy = ("HYBRID_SHARD" if stage == 3 else "HYBRID_SHARD_ZERO2") if hybrid else _STRATEGIES[stage]
        config: dict[str, Any] = {"fsdp_version": 1, "fsdp_sharding_strategy": strategy}
        config |= {"fsdp_activation_checkpointing": again, "fsdp_offload_params": view["optimizer.offload"]}
        config["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        config["fsdp_backward_prefetch"] = "BACKWARD_PRE" if view["parallel.prefetch"] else "NO_PREFETCH"
        if parallel.prefetch > 1:
            view.unexpressed("parallel.prefetch")
        if parallel.dp_shard and not hybrid:
            view.unexpressed("parallel.dp_shard")
        table |= {"distributed_type": "FSDP", "fsdp_config": config}
    elif stage == 1:
        device = "cpu" if view["optimizer.offload"] else "none"
        config = {"zero_stage": 1, "offload_optimizer_device": device}
        config["gradient_clipping"] = 1.0 if view["optimizer.clip_grad_norm"] else 0.0
        table |= {"distributed_type": "DEEPSPEED", "deepspeed_config": config}
    else:
        table["distributed_type"] = "MULTI_GPU"
    if not (again and stage in (2, 3)) and parallel.recompute != "none":
        view.unexpressed("parallel.recompute", "parallel.recompute_every")
    view.expressed("parallel.dp", "cluster.devices_per_node")
    ignored = tuple(text for text in view.left() if not text.startswith("model."))
    notes = ("the model's sizes stand in its config.json, the micro-batch in the training arguments",)
    return ConfigText(text=yaml.safe_dump(table, sort_keys=False), suffix=".yaml", ignored=ignored, notes=notes)
