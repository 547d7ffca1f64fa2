"""A job to torchtitan's TOML (``config/job_config.py`` of its releases of 2025 to early 2026)."""

from __future__ import annotations

from typing import Any

from stepsight.dataset.configs.documents import toml_text
from stepsight.dataset.configs.job_view import ConfigText, JobView
from stepsight.dataset.configs.torchtitan_flavors import FLAVORS
from stepsight.dataset.configs.torchtitan_in import even_stages
from stepsight.dataset.job.job import Job

_SCHEDULES = {
    ("1f1b", False): "1F1B",
    ("1f1b", True): "Interleaved1F1B",
    ("gpipe", False): "GPipe",
    ("looped-bfs", True): "LoopedBFS",
    ("interleaved-zb", True): "InterleavedZeroBubble",
    ("zbv", True): "ZBVZeroBubble",
    ("dualpipev", True): "DualPipeV",
}
_SIZES = (
    *("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "gated_mlp", "tied_embeddings"),
    *("attention", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "experts", "experts_per_token"),
    *("expert_ffn", "shared_experts", "dense_layers", "moe_every"),
)


def write_torchtitan(job: Job) -> ConfigText:
    """Write a job as TOML; if the model is none of torchtitan's flavors, its sizes are listed as not expressed."""
    view, notes = JobView(job), []
    tables: dict[str, dict[str, Any]] = {"model": {}}
    found = _flavor(job)
    if found is not None:
        tables["model"] |= {"name": found[0], "flavor": found[1]}
        view.expressed(*(f"model.{name}" for name in _SIZES))
    else:
        notes.append("no flavor of torchtitan has these sizes: add one to its models, and name it in [model]")
        view.expressed("model.gated_mlp")
    tables["training"] = _training(view)
    tables["parallelism"] = _parallelism(view)
    tables["activation_checkpoint"] = table = _recompute(view)
    if table.get("selective_ac_option") == "2":
        notes.append("a job takes selective_ac_option op as every second layer too: write op if that is meant")
    if job.batch.precision == "fp8":
        tables["model"]["converters"] = ["float8"]
    if not view["model.eager_kernels"]:
        tables["compile"] = {"enable": True, "components": ["model", "loss"]}
    tables["optimizer"] = {"name": "Adam" if view["optimizer.kind"] == "adam" else "AdamW"}
    tables["optimizer"]["implementation"] = "fused" if view["optimizer.fused"] else "foreach"
    view.expressed("cluster.nodes", "cluster.devices_per_node", "model.fused_attention", "model.attention_kernels")
    notes.append(f"torchrun --nnodes {job.cluster.nodes} --nproc_per_node {job.cluster.devices_per_node}")
    text = toml_text(tables)
    return ConfigText(text=text, suffix=".toml", ignored=view.left(), notes=tuple(notes))


def _flavor(job: Job) -> tuple[str, str] | None:
    """Name and flavor whose sizes a model has; its vocabulary may be padded."""
    for name, flavors in FLAVORS.items():
        for flavor, sizes in flavors.items():
            exact = {key: value for key, value in sizes.items() if key != "vocab"}
            same = all(getattr(job.model, key) == value for key, value in exact.items())
            others = {key for key in ("experts", "attention", "tied_embeddings") if key not in exact}
            plain = all(getattr(job.model, key) in (0, "mha", False) for key in others)
            if same and plain and 0 <= job.model.vocab - sizes["vocab"] < 1024 and job.model.gated_mlp:
                return name, flavor
    return None


def _training(view: JobView) -> dict[str, Any]:
    parallel, batch = view.job.parallel, view.job.batch
    local = batch.micro_batch * (view.job.num_micro_batches if parallel.pp > 1 else 1)
    table = {"local_batch_size": local, "global_batch_size": view["batch.global_batch"]}
    table |= {"seq_len": view["model.seq_len"], "max_norm": 1.0 if view["optimizer.clip_grad_norm"] else 0.0}
    view.expressed("batch.micro_batch")
    match view["batch.precision"]:
        case "pure-bf16":
            table["dtype"] = "bfloat16"
        case "fp32":
            table["mixed_precision_param"] = "float32"
        case "fp16" | "pure-fp16":
            view.unexpressed("batch.precision")
    if view["batch.fp8_scaling"] != "dynamic" and batch.precision == "fp8":
        view.unexpressed("batch.fp8_scaling")
    if view["optimizer.offload"]:
        table["enable_cpu_offload"] = True
    return table


def _parallelism(view: JobView) -> dict[str, Any]:
    parallel = view.job.parallel
    shard = view["parallel.dp_shard"] or view["parallel.dp"]
    stage = view["parallel.zero_stage"]
    replicate = parallel.dp // shard if stage else parallel.dp
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": parallel.dp // replicate,
        "tensor_parallel_degree": view["parallel.tp"],
        "context_parallel_degree": view["parallel.cp"],
        "pipeline_parallel_degree": view["parallel.pp"],
        "expert_parallel_degree": view["parallel.ep"],
    }
    if stage in (1, 2):
        view.unexpressed("parallel.zero_stage")
    if parallel.dp // replicate > 1:
        usual = parallel.pp == 1
        again = view["parallel.reshard_after_forward"]
        table["fsdp_reshard_after_forward"] = "default" if again == usual else "always" if again else "never"
    if parallel.tp > 1:
        if not view["parallel.sequence_parallel"]:
            view.unexpressed("parallel.sequence_parallel")
        if view["parallel.overlap_tp"] == "torch-async":
            table["enable_async_tensor_parallel"] = True
        elif parallel.overlap_tp:
            view.unexpressed("parallel.overlap_tp")
        if parallel.ep > 1:
            table["expert_tensor_parallel_degree"] = view["parallel.expert_tp"] or parallel.tp
    if parallel.cp > 1:
        gathered = view["parallel.context_parallel"] == "all_gather"
        table["context_parallel_rotate_method"] = "allgather" if gathered else "alltoall"
    if parallel.pp > 1:
        table |= _stages(view)
    view.expressed("parallel.expert_tp", "parallel.runtime")
    if view["parallel.gradient_dtype"] not in ("", "fp32"):
        view.unexpressed("parallel.gradient_dtype")
    if not view["parallel.overlap_grad_reduce"]:
        view.unexpressed("parallel.overlap_grad_reduce")
    return table


def _stages(view: JobView) -> dict[str, Any]:
    parallel, layers = view.job.parallel, view.job.model.layers
    name = _SCHEDULES.get((view["parallel.schedule"], view["parallel.virtual_stages"] > 1))
    table: dict[str, Any] = {"pipeline_parallel_microbatch_size": view["batch.micro_batch"]}
    if name is None:
        view.unexpressed("parallel.schedule")
    else:
        table["pipeline_parallel_schedule"] = name
    stages = parallel.pp * parallel.virtual_stages
    counts = view.stage_layers()
    first, last = (0, 0) if len(set(counts)) == 1 else (1, 1)
    if counts == even_stages(stages, layers, first, last):
        table["pipeline_parallel_first_stage_less_layers"] = first
        table["pipeline_parallel_last_stage_less_layers"] = last
        if parallel.virtual_stages > 2:
            table["pipeline_parallel_layers_per_stage"] = -(-(layers + first + last) // stages)
    else:
        table["module_fqns_per_model_part"] = _parts(counts)
    return table


def _parts(counts: list[int]) -> list[list[str]]:
    """Names of the modules of each stage."""
    parts, start = [], 0
    for count in counts:
        parts.append([f"layers.{layer}" for layer in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(view: JobView) -> dict[str, Any]:
    kind, every = view["parallel.recompute"], view["parallel.recompute_every"]
    if kind == "full" and every > 1:
        return {"mode": "selective", "selective_ac_option": str(every)}
    if kind == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": kind}
