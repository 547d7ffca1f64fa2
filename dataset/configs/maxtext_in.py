"""MaxText's YAML to a job: a run's file, with the model's file that it names where that lies near it.

Source: MaxText ``configs/base.yml`` (names and defaults), ``configs/models/*.yml``, 2024 to 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat, read_tables
from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.job.models import MODELS

MODEL = {
    "base_emb_dim": "hidden",
    "base_num_query_heads": "heads",
    "base_num_kv_heads": "kv_heads",
    "base_mlp_dim": "ffn",
    "base_num_decoder_layers": "layers",
    "head_dim": "head_dim",
    "vocab_size": "vocab",
    "logits_via_embedding": "tied_embeddings",
}
LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
}
EXPERTS = {
    "num_experts_per_tok": "experts_per_token",
    "shared_experts": "shared_experts",
    "first_num_dense_layers": "dense_layers",
    "interleave_moe_layer_step": "moe_every",
}
# Axes of the mesh within and between slices, and the degree of a job.
AXES = {
    "tensor": "tp",
    "tensor_sequence": "tp",
    "context": "cp",
    "sequence": "cp",
    "pipeline": "pp",
    "expert": "ep",
}
POLICIES = {"full": "full", "none": "none", "": "none", "minimal_with_context": "none", "minimal": "selective"}
_MARKS = ("base_emb_dim", "base_num_decoder_layers", "per_device_batch_size", "ici_fsdp_parallelism", "base_config")
_DEFAULT = "MaxText's base.yml"
_STATE_SPACES = ("qwen3_next", "qwen3_5")
_BASE = {  # what base.yml states, where it is not near
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16,
    "head_dim": 128,
    "vocab_size": 32000,
    "logits_via_embedding": False,
    "max_target_length": 2048,
    "per_device_batch_size": 12.0,
    "remat_policy": "full",
    "ici_fsdp_parallelism": -1,
    "dcn_data_parallelism": -1,
    "mlp_activations": ["silu", "linear"],
    "decoder_block": "llama2",
    "gradient_clipping_threshold": 1.0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_FOLDERS = ("", "models", *(f"{'../' * up}{place}" for up in range(1, 5) for place in ("models", "", "configs/models")))


def is_maxtext(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of MaxText's YAML."""
    return any(mark in tables for mark in _MARKS) or ("per_device_batch_size" in tables and "model_name" in tables)


def read_maxtext(path: Path, draft: Draft) -> None:
    """Fill a draft from a run's or a model's file.

    Raises:
        JobError: If the file names a model whose own file is not near it.
    """
    stated = flat(read_tables(path))
    defaults = dict(_BASE)
    base = _near(path.parent, str(stated.get("base_config") or ""))
    if base is not None and base != path:
        defaults |= {key: value for key, value in flat(read_tables(base)).items() if value is not None}
    name = str(stated.get("model_name") or "")
    model: dict[str, Any] = {}
    if name and name != "default" and "base_emb_dim" not in stated:
        file = _near(path.parent, f"{name}.yml")
        if file is None:
            _known_model(name, draft)
        else:
            model = flat(read_tables(file))
    settings = Settings({**model, **stated})
    draft.framework = draft.framework or "maxtext"
    _model(settings, draft, defaults)
    _parallel(settings, draft, defaults)
    _training(settings, draft, defaults)
    for text in settings.left():
        draft.ignore(text)


def _known_model(name: str, draft: Draft) -> None:
    """Sizes of a model whose own file is not near, from the catalogue.

    Raises:
        JobError: If the catalogue does not have it.
    """
    found = MODELS.get(name.replace("llama3.1-", "llama3-").replace("llama3.3-", "llama3-"))
    if found is None:
        raise JobError(f"model_name {name}: its file {name}.yml must lie beside the configuration, or in models/")
    derived = {"kv_heads": found["heads"], "gated_mlp": found["family"] == "llama", "tied_embeddings": False}
    for key, value in {**derived, "ffn": 4 * found["hidden"], **found}.items():
        if key != "seq_len":
            draft.map(f"model.{key}", value, f"model_name {name}, by the catalogue")


def _near(folder: Path, name: str) -> Path | None:
    if not name:
        return None
    places = (folder / place / Path(name).name for place in _FOLDERS)
    return next((place for place in places if place.is_file()), None)


def _number(settings: Settings, defaults: Mapping[str, Any], key: str) -> Any:
    value = settings.number(key, whole=False)
    return defaults.get(key) if value is None else value


def _copy(settings: Settings, draft: Draft, pairs: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
    settings.copy(draft, {key: f"model.{name}" for key, name in pairs.items()})
    for key, name in pairs.items():
        if defaults.get(key) is not None:
            draft.assume(f"model.{name}", defaults[key], _DEFAULT)


def _model(settings: Settings, draft: Draft, defaults: Mapping[str, Any]) -> None:
    block = settings.word("decoder_block") or str(defaults["decoder_block"])
    if block in _STATE_SPACES:
        raise JobError(f"a job has no layers with linear attention or state spaces, got decoder_block {block}")
    kind = settings.word("attention_type")
    if kind == "compressed":
        raise JobError(f"a job has no layers with compressed attention, got decoder_block {block}")
    if kind not in ("", "global", "mla"):
        draft.ignore(f"attention_type {kind}: a job attends to all tokens before")
    stated = settings.stated("decoder_block")
    draft.settle("model.family", "gpt" if block == "gpt3" else "llama", stated and f"{stated} {block}", _DEFAULT)
    latent = kind == "mla"
    pairs = {key: name for key, name in MODEL.items() if not (latent and name in ("head_dim", "kv_heads"))}
    _copy(settings, draft, pairs, defaults)
    settings.find("head_dim", "base_num_kv_heads")
    if block == "gemma2" and draft.get("model.layers"):
        draft.map("model.layers", 2 * draft.get("model.layers"), "base_num_decoder_layers, of two layers each")
    if latent:
        draft.map("model.attention", "mla", "attention_type")
        _copy(settings, draft, LATENT, defaults)
    settings.find(*LATENT)
    activations = settings.take("mlp_activations", default=defaults["mlp_activations"])
    stated = settings.stated("mlp_activations")
    words = stated and f"{stated} {' '.join(map(str, activations))}"
    draft.settle("model.gated_mlp", "linear" in activations, words, _DEFAULT)
    experts = settings.positive("num_experts") or 1
    if experts > 1:
        draft.map("model.experts", experts, "num_experts")
        settings.copy(draft, {key: f"model.{name}" for key, name in EXPERTS.items()})
        factor = settings.number("capacity_factor", whole=False)
        if factor and factor > 0:
            draft.map("model.capacity_factor", float(factor), "capacity_factor")
        inner = settings.positive("base_moe_mlp_dim", auto=-1)
        if inner is not None:
            draft.map("model.expert_ffn", inner, "base_moe_mlp_dim")
    attends = settings.word("attention")
    if attends:
        draft.map("model.fused_attention", attends != "dot_product", f"attention {attends}")
    rate = settings.number("dropout_rate", whole=False)
    if rate is not None:
        draft.map("model.dropout", float(rate) if settings.flag("enable_dropout") is not False else 0.0, "dropout_rate")
    settings.find("enable_dropout", "model_name", "base_config")


def _parallel(settings: Settings, draft: Draft, defaults: Mapping[str, Any]) -> None:
    degrees = {"tp": 1, "cp": 1, "pp": 1, "ep": 1}
    for axis, name in AXES.items():
        for mesh in ("ici", "dcn"):
            degrees[name] *= max(1, _size(settings, defaults, f"{mesh}_{axis}_parallelism"))
    for name, value in degrees.items():
        if value > 1:
            draft.map(f"parallel.{name}", value, f"axes {', '.join(a for a, n in AXES.items() if n == name)}")
    if (settings.positive("ici_tensor_sequence_parallelism", auto=-1) or 1) > 1:
        draft.map("parallel.sequence_parallel", True, "ici_tensor_sequence_parallelism")
    shard = _axis(settings, defaults, "fsdp") * _axis(settings, defaults, "fsdp_transpose")
    data = _axis(settings, defaults, "data")
    sharded = shard not in (0, 1) or degrees["ep"] > 1 or _number(settings, defaults, "ici_fsdp_parallelism") == -1
    axes = [f"{mesh}_{axis}_parallelism" for mesh in ("ici", "dcn") for axis in ("fsdp", "fsdp_transpose", "expert")]
    draft.settle("parallel.zero_stage", 3 if sharded else 0, settings.stated(*axes), _DEFAULT)
    if shard and data and shard * data > 1:
        draft.map("parallel.dp", shard * data * max(1, degrees["ep"]), "axes data, fsdp, expert")
        if data > 1 and shard > 1:
            draft.map("parallel.dp_shard", shard * max(1, degrees["ep"]), "axis fsdp")
    if degrees["cp"] > 1:
        way = settings.word("context_parallel_strategy") or "all_gather"
        draft.map("parallel.context_parallel", "ring" if way == "ring" else "all_gather", f"strategy {way}")
    policy = settings.word("remat_policy") or str(defaults["remat_policy"])
    if policy in POLICIES:
        stated = settings.stated("remat_policy")
        draft.settle("parallel.recompute", POLICIES[policy], stated and f"{stated} {policy}", _DEFAULT)
    else:
        draft.assume("parallel.recompute", "selective", f"a job has no remat_policy {policy}")
    if settings.flag("optimizer_memory_host_offload"):
        draft.map("optimizer.offload", True, "optimizer_memory_host_offload")
    repeats = settings.positive("num_pipeline_repeats", auto=-1) or 1
    if degrees["pp"] > 1:
        name = "looped-bfs" if repeats > 1 else "gpipe"
        draft.map("parallel.schedule", name, "the pipeline is differentiated as a whole")
        draft.map("parallel.virtual_stages", repeats, "num_pipeline_repeats")


def _axis(settings: Settings, defaults: Mapping[str, Any], axis: str) -> int:
    """Size of an axis over both meshes; 0: what remains."""
    sizes = [_size(settings, defaults, f"{mesh}_{axis}_parallelism") for mesh in ("ici", "dcn")]
    return 0 if -1 in sizes else sizes[0] * sizes[1]


def _size(settings: Settings, defaults: Mapping[str, Any], key: str) -> int:
    """Size of an axis in one mesh; -1: what remains."""
    stated = settings.positive(key, auto=-1)
    return int(stated or (-1 if key in settings else defaults.get(key) or 1))


def _training(settings: Settings, draft: Draft, defaults: Mapping[str, Any]) -> None:
    length = settings.positive("max_target_length")
    if length:
        draft.map("model.seq_len", length, "max_target_length")
    draft.assume("model.seq_len", defaults["max_target_length"], _DEFAULT)
    size = settings.positive("per_device_batch_size", whole=False) or defaults["per_device_batch_size"]
    steps = settings.positive("gradient_accumulation_steps") or 1
    others = 1
    for name in ("tp", "cp", "pp"):
        others *= draft.get(f"parallel.{name}", 1)
    sequences = size * others  # of one replica, which has as many devices
    if sequences >= 1:
        pieces = settings.positive("num_pipeline_microbatches", auto=-1) or draft.degree("pp")
        stated = settings.stated("per_device_batch_size")
        words = stated and f"{stated} {size:g}"
        draft.settle("batch.micro_batch", max(1, int(sequences) // pieces), words, _DEFAULT)
        draft.facts["local_batch"] = int(sequences) * steps
    else:
        draft.assume("batch.micro_batch", 1, f"per_device_batch_size {size:g} is less than a sequence")
    dtype = settings.word("dtype") or "bfloat16"
    quantized = settings.word("quantization")
    if "fp8" in quantized:
        draft.map("batch.precision", "fp8", f"quantization {quantized}")
        draft.assume("batch.fp8_scaling", "delayed", "scales are those of earlier steps")
    else:
        stated = settings.stated("dtype")
        precision = {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")
        draft.settle("batch.precision", precision, stated and f"{stated} {dtype}", _DEFAULT)
    clip = _number(settings, defaults, "gradient_clipping_threshold")
    stated = settings.stated("gradient_clipping_threshold")
    draft.settle("optimizer.clip_grad_norm", bool(clip and clip > 0), stated, _DEFAULT)
    kind = settings.word("opt_type") or "adamw"
    if kind not in ("adamw", "adam_pax"):
        draft.assume("optimizer.kind", "adamw", f"a job has no optimizer {kind}")
    settings.find("weight_dtype", "grad_dtype", "mu_dtype")
