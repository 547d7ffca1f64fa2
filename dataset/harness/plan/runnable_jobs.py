"""What the harness can run: models, strategies and precisions."""

from __future__ import annotations

from typing import Any

from .form import form_problems, is_of, num_micro_batches
from .parallel_rules import (
    Rules,
    check_batch,
    check_degrees,
    check_heads,
    check_rotary,
    check_sequence,
    check_shards,
    check_stages,
)

PRECISIONS = ("fp32", "bf16", "pure-bf16", "pure-fp16")
ENGINES = ("", "eager-pytorch")  # empty: the default of the precisions that the harness runs
FAMILIES = ("gpt", "llama", "bert", "t5")
OPTIMIZER = {"kind": "adamw", "fused": True, "clip_grad_norm": False, "offload": False}
_PLAIN = {
    "eager_kernels": False, "norms_again": False, "token_metrics": False, "metric_losses": 0, "fused_loss": False,
    "loss_share": 1, "unpadded_len": 0, "qk_norm": False, "expert_bias": False, "fused_experts": False,
}  # fmt: skip
ONLY: dict[str, dict[str, Any]] = {  # optional keys of a job, and their only value here
    "model": {"attention": "mha", "experts": 0, "attention_kernels": "", "dropout": 0, **_PLAIN},
    "batch": {"fp8_scaling": "delayed"},
    "parallel": {
        "cp": 1, "ep": 1, "order": "tp-cp-dp-pp", "vocab_parallel": True, "overlap_grad_reduce": True,
        "overlap_tp": "", "overlap_ep": False, "dispatcher": "alltoall", "recompute_modules": [],
        "overlap_param_gather": False, "reshard_after_forward": True, "prefetch": 1,
        "stage_layers": [], "recompute_every": 1, "offload_activations": False, "gradient_dtype": "",
        "scatter_p2p": False, "reduce_scatter": True,
    },
    "optimizer": OPTIMIZER,
    "cluster": {"stragglers": [], "slow_links": [], "mixed": []},
}  # fmt: skip


def job_problems(job: Any) -> list[str]:
    """Return every reason why the harness cannot run a job."""
    if problems := form_problems(job):
        return problems
    rules = Rules()
    check_job(rules, job)
    _check_choices(rules, job)
    _check_pipeline(rules, job)
    if job["model"]["family"] == "t5":
        _check_t5(rules, job)
    else:
        _check_one_stack(rules, job["model"])
    check_fixed(rules, job, ONLY, "the harness runs")
    return rules


def check_job(rules: Rules, job: dict[str, Any]) -> None:
    """Check the arithmetic that every job keeps."""
    model, parallel, batch, cluster = (job[name] for name in ("model", "parallel", "batch", "cluster"))
    tp, pp, dp, cp = parallel["tp"], parallel["pp"], parallel["dp"], parallel.get("cp", 1)
    devices = cluster["nodes"] * cluster["devices_per_node"]
    check_degrees(rules, tp=tp, cp=cp if is_of(cp, int) else 1, pp=pp, dp=dp, devices=devices)
    check_batch(rules, micro_batch=batch["micro_batch"], dp=dp, global_batch=batch["global_batch"])
    encoder = model.get("encoder_layers", 0)
    check_stages(rules, layers=model["layers"] + (encoder if is_of(encoder, int) else 0), pp=pp)
    check_heads(rules, hidden=model["hidden"], heads=model["heads"], kv_heads=model["kv_heads"], head_dim=0)
    check_shards(rules, tp, {key: model[key] for key in ("heads", "kv_heads", "ffn", "vocab")})


def check_fixed(rules: Rules, job: dict[str, Any], fixed: dict[str, dict[str, Any]], who: str) -> None:
    """Check optional keys of a job that may have one value only."""
    for table, only in fixed.items():
        for key, wanted in only.items():
            value = job.get(table, {}).get(key, wanted)
            value = list(value) if isinstance(value, tuple) else value  # a tuple becomes a list in JSON
            rules.require(value == wanted, f"{who} {table}.{key} = {wanted!r}, got {value!r:.80}")


def check_1f1b(rules: Rules, job: dict[str, Any]) -> None:
    """Check what PyTorch's 1F1B schedule requires."""
    parallel, count = job["parallel"], num_micro_batches(job)
    rules.require(
        parallel["pp"] == 1 or parallel["schedule"] != "1f1b" or count >= parallel["pp"],
        f"schedule 1f1b needs as many micro-batches as stages, got {count} < {parallel['pp']}",
    )


def _check_choices(rules: Rules, job: dict[str, Any]) -> None:
    model, parallel, batch = job["model"], job["parallel"], job["batch"]
    head_dim, dp = model["hidden"] // model["heads"], parallel["dp"]
    for table, key, allowed, words in (
        (model, "family", FAMILIES, "families gpt, llama, bert and t5"),
        (model, "head_dim", (0, head_dim), f"head_dim = hidden / heads = {head_dim}"),
        (batch, "precision", PRECISIONS, "precisions fp32, bf16, pure-bf16 and pure-fp16"),
        (parallel, "zero_stage", (0, 3), "zero_stage 0 (DDP) and 3 (FSDP2)"),
        (parallel, "dp_shard", (0, dp), f"zero_stage over all {dp} replicas (dp_shard)"),
        (parallel, "recompute", ("none", "full"), "recompute none and full"),
        (parallel, "schedule", ("gpipe", "1f1b"), "schedules gpipe and 1f1b"),
        (parallel, "virtual_stages", (1,), "virtual_stages = 1"),
        (parallel, "runtime", ("", "torch"), "PyTorch's own pipeline runtime"),
        (job.get("execution", {}), "engine", ENGINES, "the engine eager-pytorch"),
        (job.get("execution", {}), "checkpoint", ("", "early-stop"), "PyTorch's non-reentrant checkpoint"),
    ):
        value = table.get(key, allowed[0])
        rules.require(value in allowed, f"the harness runs {words}, got {value!r:.80}")
    rules.require(
        batch.get("precision") != "bf16" or job.get("execution", {}).get("engine") == "eager-pytorch",
        'mixed precision runs as in PyTorch: execution.engine = "eager-pytorch" must say so',
    )
    if model["family"] == "llama":
        check_rotary(rules, head_dim)


def _check_pipeline(rules: Rules, job: dict[str, Any]) -> None:
    model, parallel = job["model"], job["parallel"]
    rules.require(
        not (model["tied_embeddings"] and parallel["pp"] > 1),
        f"the harness ties embeddings only within one stage, got tied_embeddings and pp = {parallel['pp']}",
    )
    check_1f1b(rules, job)
    if parallel["sequence_parallel"]:
        check_sequence(rules, "seq_len", model["seq_len"], tp=parallel["tp"])


def _check_one_stack(rules: Rules, model: dict[str, Any]) -> None:
    """Check a model that has no encoder besides its layers."""
    fused, layers = model.get("fused_attention", True), model.get("encoder_layers", 0)
    rules.require(fused is True, f"the harness runs model.fused_attention = True, got {fused!r:.80}")
    rules.require(layers == 0, f"the harness runs model.encoder_layers = 0 but for t5, got {layers!r:.80}")


def _check_t5(rules: Rules, job: dict[str, Any]) -> None:
    """Check an encoder and a decoder whose attention scores have a learned bias."""
    model, parallel = job["model"], job["parallel"]
    layers, length, fused = (model.get(key, 0) for key in ("encoder_layers", "encoder_seq_len", "fused_attention"))
    rules.require(
        fused is False,
        "no fused CPU kernel computes the gradient of t5's learned bias: the harness runs "
        f"model.fused_attention = False, got {fused!r:.80}",
    )
    for key, value in (("encoder_layers", layers), ("encoder_seq_len", length)):
        good = is_of(value, int) and value > 0
        rules.require(good, f"model.{key} of t5 must be a whole number > 0, got {value!r:.80}")
    heads, kv_heads, pp = model["heads"], model["kv_heads"], parallel["pp"]
    rules.require(kv_heads == heads, f"the harness runs t5 with kv_heads = heads, got {kv_heads} and {heads}")
    rules.require(
        pp == 1,
        f"stages of t5 would have to share its tables of relative positions: the harness runs t5 with pp = 1, got {pp}",
    )
    if parallel["sequence_parallel"] and is_of(length, int):
        check_sequence(rules, "encoder_seq_len", length, tp=parallel["tp"])
