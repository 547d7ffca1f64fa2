"""A job to the YAML of Nanotron and of MaxText."""

from __future__ import annotations

from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.job_view import ConfigText, JobView
from stepsight.dataset.configs.maxtext_in import LATENT
from stepsight.dataset.configs.maxtext_in import MODEL as MAXTEXT_MODEL
from stepsight.dataset.configs.nanotron_in import DTYPES
from stepsight.dataset.configs.nanotron_in import MODEL as NANOTRON_MODEL
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SPLIT_TP

_TORCH = {precision: dtype for dtype, precision in DTYPES.items()}
_JAX = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}


def _text(table: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(table, sort_keys=False))


def _refuse(job: Job, framework: str) -> None:
    if job.model.family not in ("llama", "gpt"):
        raise JobError(f"{framework} has no model of the family {job.model.family!r:.80}")


def write_nanotron(job: Job) -> ConfigText:
    """Write a job as Nanotron's YAML."""
    _refuse(job, "Nanotron")
    view = JobView(job)
    precision = view["batch.precision"]
    if precision not in _TORCH:
        view.unexpressed("batch.precision")
    model: dict[str, Any] = {"ddp_bucket_cap_mb": view["parallel.bucket_mbytes"]}
    model |= {"dtype": _TORCH.get(precision, "bfloat16"), "make_vocab_size_divisible_by": 1}
    tokens = {"sequence_length": view["model.seq_len"], "micro_batch_size": view["batch.micro_batch"]}
    table = {
        "model": {**model, "model_config": _nanotron_model(view)},
        "optimizer": _nanotron_optimizer(view),
        "parallelism": _nanotron_parallelism(view),
        "tokens": {**tokens, "batch_accumulation_per_replica": job.num_micro_batches},
    }
    view.expressed("batch.global_batch", "cluster.nodes", "cluster.devices_per_node", "model.attention_kernels")
    return ConfigText(text=_text(table), suffix=".yaml", ignored=view.left(), notes=view.notes())


def _nanotron_model(view: JobView) -> dict[str, Any]:
    model = view.job.model
    llama = view["model.family"] == "llama"
    names = {name: key for name, key in NANOTRON_MODEL.items() if name != ("num_kv_heads" if llama else "")}
    if llama:
        sizes: dict[str, Any] = {"is_qwen2_config": True} if model.experts else {"is_llama_config": True}
    else:
        del names["num_key_value_heads"]
        sizes = {"is_starcoder2_config": True, "grouped_query": True}
    sizes |= view.copy({name: f"model.{key}" for name, key in names.items()})
    sizes |= {"max_position_embeddings": view["model.seq_len"]}
    view.expressed("model.expert_ffn")
    if model.experts:
        experts = {"num_experts": view["model.experts"], "top_k": view["model.experts_per_token"]}
        experts |= {"moe_intermediate_size": model.expert_ffn, "enable_shared_expert": bool(model.shared_experts)}
        if view["model.shared_experts"]:
            experts["shared_expert_intermediate_size"] = model.shared_experts * model.expert_ffn
        sizes["moe_config"] = experts
    if model.gated_mlp == llama:
        view.expressed("model.gated_mlp")
    return sizes


def _nanotron_parallelism(view: JobView) -> dict[str, Any]:
    parallel = view.job.parallel
    pipeline = {"1f1b": "1f1b", "gpipe": "afab"}.get(view["parallel.schedule"])
    if pipeline is None or parallel.virtual_stages > 1:
        view.unexpressed("parallel.schedule")
    degrees = {"dp": "dp", "pp": "pp", "tp": "tp", "expert_parallel_size": "ep", "context_parallel_size": "cp"}
    table: dict[str, Any] = view.copy({name: f"parallel.{key}" for name, key in degrees.items()})
    if parallel.dp * parallel.cp % parallel.ep:
        view.unexpressed("parallel.ep")
        table["expert_parallel_size"] = 1
    table["pp_engine"] = pipeline or "1f1b"
    table["tp_mode"] = "REDUCE_SCATTER" if view["parallel.sequence_parallel"] else "ALL_REDUCE"
    table["tp_linear_async_communication"] = view["parallel.overlap_tp"] == "backward"
    table["recompute_layer"] = view["parallel.recompute"] == "full"
    if parallel.recompute == "selective":
        view.unexpressed("parallel.recompute")
    if parallel.overlap_tp in SPLIT_TP:
        view.unexpressed("parallel.overlap_tp")
    return table


def _nanotron_optimizer(view: JobView) -> dict[str, Any]:
    zero = view["parallel.zero_stage"]
    if zero > 1:
        view.unexpressed("parallel.zero_stage")
    if view["optimizer.kind"] != "adamw":
        view.unexpressed("optimizer.kind")
    table: dict[str, Any] = {
        "zero_stage": min(zero, 1),
        "clip_grad": 1.0 if view["optimizer.clip_grad_norm"] else None,
        "optimizer_factory": {"name": "adamW", "torch_adam_is_fused": view["optimizer.fused"]},
    }
    if view["parallel.gradient_dtype"]:
        table["accumulate_grad_in_fp32"] = view["parallel.gradient_dtype"] == "fp32"
    return table


def write_maxtext(job: Job) -> ConfigText:
    """Write a job as MaxText's YAML, the model's sizes in the same file."""
    _refuse(job, "MaxText")
    view, parallel = JobView(job), job.parallel
    block = "gpt3" if view["model.family"] == "gpt" else "deepseek" if job.model.attention == "mla" else "llama2"
    table: dict[str, Any] = {"base_config": "base.yml", "model_name": "default"}
    table |= {"decoder_block": "mixtral" if job.model.experts and block == "llama2" else block}
    latent = view["model.attention"] == "mla"
    pairs = {key: name for key, name in MAXTEXT_MODEL.items() if not (latent and name == "head_dim")}
    table |= view.copy({key: f"model.{name}" for key, name in pairs.items()})
    if latent:
        table |= {"attention_type": "mla", **view.copy({key: f"model.{name}" for key, name in LATENT.items()})}
        table["qk_nope_head_dim"] = job.model.head_size
    else:
        table["head_dim"] = job.model.head_size
        view.expressed("model.head_dim")
    table["mlp_activations"] = ["silu", "linear"] if view["model.gated_mlp"] else ["gelu"]
    if job.model.experts:
        names = {"num_experts": "experts", "num_experts_per_tok": "experts_per_token", "base_moe_mlp_dim": "expert_ffn"}
        names |= {"shared_experts": "shared_experts", "first_num_dense_layers": "dense_layers"}
        table |= view.copy({name: f"model.{key}" for name, key in names.items()})
        table["interleave_moe_layer_step"] = view["model.moe_every"]
        table["capacity_factor"] = view["model.capacity_factor"] or -1.0
    view.expressed("model.expert_ffn")
    table |= {"max_target_length": view["model.seq_len"], "dropout_rate": view["model.dropout"]}
    table["attention"] = "cudnn_flash_te" if view["model.fused_attention"] else "dot_product"
    table |= _mesh(view)
    others = parallel.tp * parallel.cp * parallel.pp
    pieces = 1 if parallel.pp == 1 else job.num_micro_batches
    table["per_device_batch_size"] = view["batch.micro_batch"] * pieces / others
    table["gradient_accumulation_steps"] = job.num_micro_batches // pieces
    if parallel.pp > 1:
        table["num_pipeline_microbatches"] = pieces
        table["num_pipeline_repeats"] = view["parallel.virtual_stages"]
        if view["parallel.schedule"] not in ("gpipe", "looped-bfs"):
            view.unexpressed("parallel.schedule")
    policies = {"none": "minimal_with_context", "full": "full", "selective": "minimal"}
    table["remat_policy"] = policies[view["parallel.recompute"]]
    precision = view["batch.precision"]
    table["dtype"] = _JAX.get(precision, "bfloat16")
    if precision == "fp8":
        table["quantization"] = "fp8"
    elif precision not in _JAX:
        view.unexpressed("batch.precision")
    table["gradient_clipping_threshold"] = 1.0 if view["optimizer.clip_grad_norm"] else 0.0
    table["optimizer_memory_host_offload"] = view["optimizer.offload"]
    view.expressed("batch.global_batch", "cluster.nodes", "cluster.devices_per_node", "model.attention_kernels")
    if view["optimizer.kind"] != "adamw":
        view.unexpressed("optimizer.kind")
    return ConfigText(text=_text(table), suffix=".yml", ignored=view.left(), notes=view.notes())


def _mesh(view: JobView) -> dict[str, Any]:
    """Sizes of the mesh's axes; expert parallelism takes a part of the data-parallel ranks."""
    parallel = view.job.parallel
    ep, shard = view["parallel.ep"], view["parallel.dp_shard"] or view["parallel.dp"]
    if shard % ep:  # expert parallelism also divides the tensor-parallel ranks
        view.unexpressed("parallel.ep")
        ep = 1
    if view["parallel.zero_stage"] in (1, 2) or (ep > 1 and parallel.zero_stage == 0):
        view.unexpressed("parallel.zero_stage")  # MaxText's expert axis also shards all other weights
    fsdp = shard if parallel.zero_stage == 3 else 1
    table: dict[str, Any] = {"ici_fsdp_parallelism": max(1, fsdp // ep), "ici_data_parallelism": 1}
    table |= {"dcn_data_parallelism": max(1, parallel.dp // max(fsdp, ep)), "dcn_fsdp_parallelism": 1}
    spread = "tensor_sequence" if view["parallel.sequence_parallel"] else "tensor"
    axes = {spread: "tp", "context": "cp", "pipeline": "pp", "expert": "ep"}
    table |= {f"ici_{axis}_parallelism": view[f"parallel.{name}"] for axis, name in axes.items()}
    table["ici_expert_parallelism"] = ep
    if parallel.cp > 1:
        table["context_parallel_strategy"] = view["parallel.context_parallel"]
    return table
