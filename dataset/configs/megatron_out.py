"""A job to Megatron-LM's arguments (names as in its ``arguments.py``, core 0.12 to 0.19)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from stepsight.dataset.configs.job_view import ConfigText, JobView
from stepsight.dataset.job.job import Job

_PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "vit": "pretrain_vision_classify.py"}
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
_BACKENDS = {"flash-1": "flash", "flash-2": "flash", "flash-3": "fused"}


def write_megatron(job: Job, *, script: bool = False) -> ConfigText:
    """Write a job as arguments, one to a line, or as a shell script that launches them with torchrun."""
    view = JobView(job)
    lines = [
        " ".join([f"--{flag}", *(shlex.quote(str(value)) for value in values)])
        for part in (_model(view), _attention(view), _experts(view), _parallel(view), _batch(view), _rest(view))
        for flag, *values in part
    ]
    view.expressed("cluster.nodes", "cluster.devices_per_node", "parallel.dp", "parallel.runtime")
    program = _PROGRAMS.get(job.model.family, "pretrain_gpt.py")
    notes = (f"they are for {program}; give the tokenizer and the data: --tokenizer-type, --data-path", *view.notes())
    text = "\n".join(lines) + "\n"
    if script:
        launch = f"torchrun --nproc-per-node {job.cluster.devices_per_node} --nnodes {job.cluster.nodes}"
        body = "\n".join(f"    {line}" for line in lines)
        more = '    "$@"  # --tokenizer-type, --data-path, --node-rank ...'
        text = (
            f"#!/bin/bash\n# {shlex.quote(job.name)}\nARGS=(\n{body}\n{more}\n)\n{launch} {program} " + '"${ARGS[@]}"\n'
        )
    return ConfigText(text=text, suffix=".sh" if script else ".txt", ignored=view.left(), notes=notes)


Flags = Iterator[tuple[object, ...]]


def _model(view: JobView) -> Flags:
    family = view["model.family"]
    if family == "t5":
        yield "encoder-num-layers", view["model.encoder_layers"]
        yield "decoder-num-layers", view["model.layers"]
        yield "encoder-seq-length", view["model.encoder_seq_len"]
        yield "decoder-seq-length", view["model.seq_len"]
    else:
        yield "num-layers", view["model.layers"]
        if family != "vit":
            yield "seq-length", view["model.seq_len"]
    yield "hidden-size", view["model.hidden"]
    yield "ffn-hidden-size", view["model.ffn"]
    yield "num-attention-heads", view["model.heads"]
    if family == "vit":
        yield "num-classes", view["model.vocab"]
        patch, image = view.image()
        yield "patch-dim", patch
        yield "img-h", image
        yield "img-w", image
    else:
        yield "vocab-size", view["model.vocab"]
        yield "max-position-embeddings", max(view["model.seq_len"], view["model.encoder_seq_len"])
        yield "position-embedding-type", "rope" if family == "llama" else "learned_absolute"
    yield "normalization", "RMSNorm" if family == "llama" else "LayerNorm"
    if family == "llama":
        yield ("disable-bias-linear",)
    if view["model.gated_mlp"]:
        yield ("swiglu",)
    if not view["model.tied_embeddings"]:
        yield ("untie-embeddings-and-output-weights",)
    yield "attention-dropout", view["model.dropout"]
    yield "hidden-dropout", view["model.dropout"]


def _attention(view: JobView) -> Flags:
    heads, groups = view["model.heads"], view["model.kv_heads"]
    if view["model.attention"] == "mla":
        yield ("multi-latent-attention",)
        if view["model.q_lora_rank"]:
            yield "q-lora-rank", view["model.q_lora_rank"]
        yield "kv-lora-rank", view["model.kv_lora_rank"]
        yield "qk-head-dim", view["model.head_dim"] or view.job.model.head_size
        yield "qk-pos-emb-head-dim", view["model.rope_head_dim"]
        yield "v-head-dim", view["model.v_head_dim"]
    else:
        if groups != heads:
            yield ("group-query-attention",)
            yield "num-query-groups", groups
        if view["model.head_dim"]:
            yield "kv-channels", view["model.head_dim"]
    if not view["model.fused_attention"]:
        yield "attention-backend", "unfused"
    elif view["model.attention_kernels"]:
        yield "attention-backend", _BACKENDS[view["model.attention_kernels"]]


def _experts(view: JobView) -> Flags:
    if not view["model.experts"]:
        view.expressed("model.expert_ffn", "model.moe_every", "model.dense_layers", "model.experts_per_token")
        return
    yield "num-experts", view["model.experts"]
    yield "moe-router-topk", view["model.experts_per_token"]
    yield "moe-ffn-hidden-size", view["model.expert_ffn"]
    if view["model.shared_experts"]:
        yield "moe-shared-expert-intermediate-size", view["model.shared_experts"] * view["model.expert_ffn"]
    dense, every, layers = view["model.dense_layers"], view["model.moe_every"], view["model.layers"]
    if dense and every == 1:
        yield "moe-layer-freq", f"([0]*{dense}+[1]*{layers - dense})"
    elif every > 1:
        yield "moe-layer-freq", every
        if dense:
            view.unexpressed("model.dense_layers")
    if view["model.capacity_factor"]:
        yield "moe-expert-capacity-factor", view["model.capacity_factor"]
    yield ("moe-grouped-gemm",)
    yield "moe-token-dispatcher-type", "alltoall"


def _parallel(view: JobView) -> Flags:
    tp, pp, cp = view["parallel.tp"], view["parallel.pp"], view["parallel.cp"]
    yield "tensor-model-parallel-size", tp
    yield "pipeline-model-parallel-size", pp
    if cp > 1:
        yield "context-parallel-size", cp
        yield "cp-comm-type", {"ring": "p2p", "all_gather": "allgather"}[view["parallel.context_parallel"]]
    if view["parallel.ep"] > 1:
        yield "expert-model-parallel-size", view["parallel.ep"]
    if view["parallel.expert_tp"]:
        yield "expert-tensor-parallel-size", view["parallel.expert_tp"]
    if view["parallel.sequence_parallel"] and tp > 1:
        yield ("sequence-parallel",)
    yield from _stages(view)
    yield from _replicas(view)
    if view["parallel.order"] == "tp-cp-pp-dp":
        yield ("use-tp-pp-dp-mapping",)
    elif view["parallel.order"] != "tp-cp-dp-pp":
        view.unexpressed("parallel.order")
    if view["parallel.overlap_tp"] == "split":
        yield ("tp-comm-overlap",)
    elif view["parallel.overlap_tp"] == "torch-async":
        view.unexpressed("parallel.overlap_tp")
    if view["parallel.overlap_ep"] and view["parallel.ep"] > 1:
        yield ("overlap-moe-expert-parallel-comm",)
    if view["parallel.dispatcher"] != "alltoall":
        yield "moe-token-dispatcher-type", "flex"
        yield "moe-flex-dispatcher-backend", view["parallel.dispatcher"]
    view.expressed("parallel.recompute_modules")
    view.expressed("parallel.scatter_p2p")
    if not view["parallel.vocab_parallel"]:
        view.unexpressed("parallel.vocab_parallel")


def _stages(view: JobView) -> Flags:
    chunks, layers = view["parallel.virtual_stages"], view.stage_layers()
    if view["parallel.schedule"] != "1f1b":
        view.unexpressed("parallel.schedule")
    if len(set(layers)) > 1 and view.job.model.family == "t5":
        view.unexpressed("parallel.stage_layers")
        if chunks > 1:
            yield "num-virtual-stages-per-pipeline-rank", chunks
    elif len(set(layers)) > 1:
        stages = ["t" * count for count in layers]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        yield "pipeline-model-parallel-layout", "|".join(stages)
    elif chunks > 1:
        yield "num-virtual-stages-per-pipeline-rank", chunks


def _replicas(view: JobView) -> Flags:
    stage, parallel = view["parallel.zero_stage"], view.job.parallel
    if stage == 1:
        yield ("use-distributed-optimizer",)
    elif stage:
        yield ("use-distributed-optimizer",)
        yield ("use-megatron-fsdp",)
        yield "data-parallel-sharding-strategy", _STRATEGIES[stage]
    if view["parallel.dp_shard"] and parallel.dp_shard < parallel.dp:
        yield "num-distributed-optimizer-instances", parallel.dp // parallel.dp_shard
    overlaps = view["parallel.overlap_grad_reduce"]
    if overlaps:
        yield ("overlap-grad-reduce",)
        small = parallel.gradient_dtype in ("model", "model-fused") and view.job.batch.precision in ("bf16", "fp8")
        size = 2 if small else 4
        yield "ddp-bucket-size", round(view["parallel.bucket_mbytes"] * 2**20 / size)
    view.expressed("parallel.bucket_mbytes")  # without overlap there is one bucket
    if view["parallel.overlap_param_gather"] and stage:
        yield ("overlap-param-gather",)
    match view["parallel.gradient_dtype"]:
        case "fp32":
            yield ("accumulate-allreduce-grads-in-fp32",)
        case "model" if view.job.batch.precision in ("bf16", "fp8"):
            yield ("grad-reduce-in-bf16",)
        case "model" if view.job.batch.precision == "fp16":
            pass  # as it is without a flag
        case "fp32-cast" | "model" if view.job.batch.precision != "fp32":
            view.unexpressed("parallel.gradient_dtype")


def _batch(view: JobView) -> Flags:
    yield "micro-batch-size", view["batch.micro_batch"]
    yield "global-batch-size", view["batch.global_batch"]
    match view["batch.precision"]:
        case "bf16" | "fp16" as name:
            yield (name,)
        case "fp8":
            yield ("bf16",)
            yield "fp8-format", "hybrid"
            scaling = view["batch.fp8_scaling"]
            yield "fp8-recipe", scaling if scaling in ("delayed", "mxfp8") else "tensorwise"
            if scaling == "rowwise":
                view.unexpressed("batch.fp8_scaling")
        case "fp32":
            pass
        case _:
            view.unexpressed("batch.precision")
    view.expressed("batch.fp8_scaling")


def _rest(view: JobView) -> Flags:
    kind, every = view["parallel.recompute"], view["parallel.recompute_every"]
    if kind == "selective":
        yield "recompute-granularity", "selective"
        if modules := view["parallel.recompute_modules"]:
            yield "recompute-modules", " ".join(modules)
    elif kind == "full":
        yield "recompute-granularity", "full"
        per_stage = view.job.model.total_layers // view.job.parallel.pp
        exact = every == 1 or per_stage % every == 0
        yield "recompute-method", "uniform" if every == 1 else "block"
        yield "recompute-num-layers", 1 if every == 1 else max(1, per_stage // every)
        if not exact:
            view.unexpressed("parallel.recompute_every")
    if view["parallel.offload_activations"]:
        view.unexpressed("parallel.offload_activations")
    yield "optimizer", "adam"
    if view["optimizer.kind"] != "adamw":
        view.unexpressed("optimizer.kind")
    yield "clip-grad", 1.0 if view["optimizer.clip_grad_norm"] else 0.0
    if view["optimizer.offload"]:
        yield ("optimizer-cpu-offload",)
        yield ("use-precision-aware-optimizer",)
