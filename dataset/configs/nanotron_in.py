"""Nanotron's YAML to a job.

Source: nanotron ``config/config.py``, ``config/parallelism_config.py``, ``config/models_config.py``, 2024 to 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat
from stepsight.dataset.configs.drafts import Draft, Settings

MODEL = {
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tied_embeddings",
}
EXPERTS = {"num_experts": "experts", "top_k": "experts_per_token", "moe_intermediate_size": "expert_ffn"}
DEGREES = {"tp": "tp", "pp": "pp", "dp": "dp", "expert_parallel_size": "ep", "context_parallel_size": "cp"}
ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_TABLES = ("tokens", "parallelism", "model")
_DEFAULT = "Nanotron's default"


def is_nanotron(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of Nanotron's YAML."""
    model = tables.get("model")
    return all(isinstance(tables.get(name), Mapping) for name in _TABLES) and "model_config" in (model or {})


def read_nanotron(tables: Mapping[str, Any], draft: Draft) -> None:
    """Fill a draft from a configuration."""
    settings = Settings({key: value for key, value in flat(tables).items() if not key.startswith(("data_stages",))})
    _model(settings, draft)
    _parallel(settings, draft)
    _training(settings, draft)
    for text in settings.left():
        if text.startswith(("model.", "optimizer.", "parallelism.", "tokens.")):
            draft.ignore(text)


def _model(settings: Settings, draft: Draft) -> None:
    if settings.flag("model.model_config.is_mamba_config"):
        raise JobError("a job has no layers with state spaces (Mamba), got is_mamba_config")
    starcoder = settings.flag("model.model_config.is_starcoder2_config")
    kinds = ("is_llama_config", "is_qwen2_config", "is_llamoe_config")
    kind = next((kind for kind in kinds if settings.flag(f"model.model_config.{kind}")), "")
    draft.map("model.family", "gpt" if starcoder else "llama", kind or "is_starcoder2_config" if starcoder else kind)
    settings.copy(draft, {f"model.model_config.{name}": f"model.{key}" for name, key in MODEL.items()})
    if starcoder and settings.flag("model.model_config.multi_query"):
        draft.map("model.kv_heads", 1, "model.model_config.multi_query")
    prefix = "model.model_config.moe_config."
    old = "model.model_config.moe_"  # of the example with the older model
    count = settings.number(f"{prefix}num_experts", f"{old}num_experts")
    if count and count > 1:
        settings.copy(draft, {f"{prefix}{name}": f"model.{key}" for name, key in EXPERTS.items()})
        draft.map("model.experts", count, settings.source(f"{prefix}num_experts", f"{old}num_experts"))
        used = settings.number(f"{old}num_experts_per_tok", "model.model_config.num_experts_per_tok")
        if used:
            draft.map("model.experts_per_token", used, "num_experts_per_tok")
        _shared(settings, draft, prefix)
        factor = settings.number("model.model_config.moe_capacity_factor", whole=False)
        if factor:
            draft.map("model.capacity_factor", float(factor), "model.model_config.moe_capacity_factor")
    window = settings.number("model.model_config.sliding_window_size")
    if window:
        draft.ignore(f"model.model_config.sliding_window_size {window}")
    attention = settings.word("model.model_config._attn_implementation")
    if attention:
        draft.map(
            "model.fused_attention", attention not in ("eager", "sdpa_eager"), f"_attn_implementation {attention}"
        )
    multiple = settings.positive("model.make_vocab_size_divisible_by") or 1
    size = draft.get("model.vocab")
    step = multiple * (settings.positive("parallelism.tp") or 1)
    if size is not None and size % step:
        draft.map("model.vocab", -(-size // step) * step, f"vocab_size {size}, made divisible by {step}")


def _shared(settings: Settings, draft: Draft, prefix: str) -> None:
    draft.assume("model.experts_per_token", 2, _DEFAULT)
    if draft.get("model.expert_ffn") is None and f"{prefix}num_experts" in settings:
        draft.assume("model.expert_ffn", 1408, _DEFAULT)
    shared = settings.positive(f"{prefix}shared_expert_intermediate_size")
    if settings.flag(f"{prefix}enable_shared_expert"):
        size, inner = shared or 5632, draft.get("model.expert_ffn")
        record = draft.map if shared and size % inner == 0 else draft.assume
        record("model.shared_experts", max(1, round(size / inner)), f"shared_expert_intermediate_size {size} / {inner}")


def _parallel(settings: Settings, draft: Draft) -> None:
    settings.copy(draft, {f"parallelism.{name}": f"parallel.{key}" for name, key in DEGREES.items()})
    ep, group = draft.degree("ep"), draft.degree("dp") * draft.degree("cp")
    if group % ep:
        del draft.tables["parallel"]["ep"], draft.sources["parallel.ep"]
        draft.ignore(f"parallelism.expert_parallel_size {ep}: a job's lies within dp * cp, which is {group}")
    mode = settings.word("parallelism.tp_mode").lower()
    if draft.degree("tp") > 1:
        draft.map("parallel.sequence_parallel", mode == "reduce_scatter", f"parallelism.tp_mode {mode or 'all_reduce'}")
        if settings.flag("parallelism.tp_linear_async_communication"):
            draft.map("parallel.overlap_tp", "backward", "parallelism.tp_linear_async_communication")
    engine = settings.word("parallelism.pp_engine").lower() or "afab"
    if draft.degree("pp") > 1:
        stated = settings.stated("parallelism.pp_engine")
        draft.settle("parallel.schedule", ENGINES.get(engine, "1f1b"), stated and f"{stated} {engine}", _DEFAULT)
    again = settings.flag("parallelism.recompute_layer")
    stated = settings.stated("parallelism.recompute_layer")
    draft.settle("parallel.recompute", "full" if again else "none", stated, _DEFAULT)
    stage = settings.number("optimizer.zero_stage")
    draft.settle("parallel.zero_stage", stage or 0, settings.stated("optimizer.zero_stage"), _DEFAULT)
    wide = settings.flag("optimizer.accumulate_grad_in_fp32")
    if wide is not None:
        draft.map("parallel.gradient_dtype", "fp32" if wide else "model", "optimizer.accumulate_grad_in_fp32")
    bucket = settings.positive("model.ddp_bucket_cap_mb", whole=False)
    if bucket:
        draft.map("parallel.bucket_mbytes", float(bucket), "model.ddp_bucket_cap_mb")


def _training(settings: Settings, draft: Draft) -> None:
    settings.copy(draft, {"tokens.sequence_length": "model.seq_len", "tokens.micro_batch_size": "batch.micro_batch"})
    steps = settings.positive("tokens.batch_accumulation_per_replica") or 1
    replicas, micro = draft.get("parallel.dp"), draft.get("batch.micro_batch")
    if replicas and micro:
        words = f"micro_batch_size {micro} * batch_accumulation_per_replica {steps} * dp {replicas}"
        draft.map("batch.global_batch", micro * steps * replicas, words)
    dtype = settings.word("model.dtype")
    if dtype in DTYPES:
        draft.map("batch.precision", DTYPES[dtype], f"model.dtype {dtype}")
    clip = settings.number("optimizer.clip_grad", whole=False)
    draft.settle("optimizer.clip_grad_norm", bool(clip), settings.stated("optimizer.clip_grad"), _DEFAULT)
    kind = settings.word("optimizer.optimizer_factory.name").lower() or "adamw"
    if kind in ("adam", "adamw"):
        draft.settle("optimizer.kind", kind, settings.stated("optimizer.optimizer_factory.name"), _DEFAULT)
    else:
        draft.assume("optimizer.kind", "adamw", f"a job has no optimizer {kind}")
    names = (
        "optimizer.optimizer_factory.torch_adam_is_fused",
        "optimizer.torch_adam_is_fused",
    )  # the second until 2024
    fused = settings.flag(*names)
    if fused is not None:
        draft.map("optimizer.fused", fused, settings.source(*names))
