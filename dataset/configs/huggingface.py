"""Hugging Face's ``config.json`` of a model.

Source: ``configuration_*.py`` of transformers 4.40 to 5.0: names, and defaults of what a file may leave out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, flat
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import OTHER, ConfigText, JobView, Row, read_rows, same
from stepsight.dataset.configs.megatron_model import expert_layers
from stepsight.dataset.job.job import Job

LONGEST_ASSUMED = 8192  # tokens of a training sequence, where a model takes more
_GATED = {"nemotron": False, "arcee": False, "modernbert": True}  # where the family has it the other way
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads", "multi_query_group_num")
_FFN = (
    *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"),
    *("ffn_config.ffn_hidden_size", "ffn_hidden_size"),
)
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "ffn_config.moe_num_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "ffn_config.moe_top_k", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DROPOUT = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout", "dropout_rate", "residual_dropout")
_SCORES_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_EVERY = ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_LABELS = ("id2label", "label2id")
# By family: the type, the class, and its own names of settings in place of the rows' first ones.
_GPT = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
_GPT |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "attention_dropout": "resid_pdrop"}
_CLASSES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "gpt": ("gpt2", "GPT2LMHeadModel", _GPT),
    "bert": ("bert", "BertForMaskedLM", {"attention_dropout": "hidden_dropout_prob"}),
    "t5": ("t5", "T5ForConditionalGeneration", {"attention_dropout": "dropout_rate"}),
    "vit": ("vit", "ViTForImageClassification", {"attention_dropout": "hidden_dropout_prob"}),
}


@cached(1)
def _types() -> Mapping[str, tuple[str, bool, str]]:
    """By model type: the closest family, whether embeddings are tied, and what differs."""
    kinds = facts()["transformers"]["kinds"]
    return {kind: (each["family"], each["tied"], each.get("differs", "")) for each in kinds for kind in each["types"]}


def read(file: ConfigFile, draft: Draft) -> None:
    """Fill the model of a draft; of a model of text and images, the part that reads text.

    Raises:
        JobError: If the model is of a type that no family of a job comes close to.
    """
    tables = file.tables
    outer = kind = str(tables.get("model_type") or "")
    parts = ("text_config", "language_config", "llm_config")
    within = next((name for name in parts if isinstance(tables.get(name), Mapping)), "")
    if within:
        draft.ignore(f"all of {kind or 'the model'} but its {within}")
        inner = tables[within]
        tables = {**{key: tables[key] for key in ("tie_word_embeddings", "torch_dtype") if key in tables}, **inner}
        kind = str(inner.get("model_type") or kind)
    if {kind, outer} & set(facts()["transformers"]["without_attention"]):
        raise JobError(f"a job has no layers with linear attention or state spaces, got model_type {kind}")
    if kind not in _types():
        raise JobError(f"model_type must be one of {', '.join(_types())}, got {kind!r:.80}")
    labels = {name: tables[name] for name in _LABELS if isinstance(tables.get(name), Mapping)}
    stated = flat({name: table for name, table in tables.items() if name not in labels})
    stated |= {name: f"of {len(table)} classes" for name, table in labels.items()}
    draft.framework = draft.framework or "huggingface"
    stated["model_type"], left_out = kind, facts()["transformers"]["left_out"].get(kind)
    read_rows(ROWS, Reading(draft, stated, default=f"the default of {kind}", defaults=left_out))


def write(job: Job) -> ConfigText:
    """Write the model of a job as ``config.json``."""
    family = job.model.family
    if family != "llama" and family not in _CLASSES:
        raise JobError(f"transformers has no model of the family {family!r:.80}")
    view = JobView(job)
    kind, name, own = _class_of(job)
    view.put(model_type=kind, architectures=[name])
    view.write(ROWS)
    view.expressed("model.family", "model.gated_mlp")
    if not job.model.experts:
        view.expressed("model.expert_ffn")
    if family != "llama" and job.model.kv_heads == job.model.heads:
        view.expressed("model.kv_heads")
    view.put(torch_dtype="float16" if job.batch.dtype == "fp16" else "bfloat16")
    settings = {own.get(name, name): value for name, value in view.settings.items()}
    notes = "a model's file holds no strategy: write deepspeed or accelerate too"
    return view.text(json.dumps(settings, indent=2) + "\n", ".json", notes, sections=("model.",))


def _class_of(job: Job) -> tuple[str, str, Mapping[str, str]]:
    """Type and class of a model, and its own names of settings."""
    model = job.model
    if model.family != "llama":
        return _CLASSES[model.family]
    if model.attention == "mla":
        new = model.experts and model.q_lora_rank
        return ("deepseek_v3", "DeepseekV3ForCausalLM", {}) if new else ("deepseek_v2", "DeepseekV2ForCausalLM", {})
    if model.experts and (model.expert_ffn != model.ffn or model.shared_experts or model.moe_every > 1):
        return "qwen2_moe", "Qwen2MoeForCausalLM", {}
    return ("mixtral", "MixtralForCausalLM", {}) if model.experts else ("llama", "LlamaForCausalLM", {})


def _read_family(reading: Reading) -> None:
    kind = reading.word("model_type")
    family, _, differs = _types()[kind]
    reading.map("model.family", family, words=f"model_type {kind}")
    if differs:
        reading.ignore(f"{differs} of {kind}: no key of a job")
    if kind in _GATED:
        reading.map("model.gated_mlp", _GATED[kind], words=f"model_type {kind}")
    reading.assume("model.fused_attention", True, "transformers attends with PyTorch's fused kernels since 4.36")


def _read_ffn(reading: Reading) -> None:
    kind, ffn, hidden = reading.word("model_type"), reading.copy("model.ffn", *_FFN), reading.get("model.hidden")
    if ffn is None and hidden:
        reading.assume("model.ffn", 4 * hidden, f"{kind} has it so")
    elif kind == "qwen" and ffn:
        reading.map("model.ffn", ffn // 2, words=f"{reading.source(*_FFN)} {ffn}, of the gate and the other product")


def _read_image(reading: Reading) -> None:
    image, patch = reading.positive("image_size") or 224, reading.positive("patch_size") or 16
    channels = reading.positive("num_channels") or 3
    reading.map("model.patch_dim", patch * patch * channels, words=f"patch_size {patch}, {channels} channels")
    reading.map("model.seq_len", (image // patch) ** 2 + 1, words=f"image_size {image}, patch_size {patch}")
    classes = re.fullmatch(r"of (\d+) classes", reading.word("id2label"))
    words = "id2label" if classes else "classes of ImageNet"
    reading.map("model.vocab", int(classes[1]) if classes else 1000, words=words)


def _read_length(reading: Reading) -> None:
    if longest := reading.positive(*_LENGTH):
        why = f"a model's file does not state it: {reading.source(*_LENGTH)} {longest}"
        reading.assume("model.seq_len", min(longest, LONGEST_ASSUMED), why)


def _write_image(view: JobView) -> None:
    side, image = view.image()
    labels = {str(label): f"LABEL_{label}" for label in range(view["model.vocab"])}
    view.put(patch_size=side, image_size=image, num_channels=3, id2label=labels)


def _read_halves(reading: Reading) -> None:
    reading.map("model.gated_mlp", "gated" in reading.word("feed_forward_proj"), words="feed_forward_proj")
    reading.assume("model.encoder_seq_len", reading.positive("n_positions") or 512, "T5's n_positions")
    reading.assume("model.seq_len", 128, "a model's file does not state how many tokens are predicted")


def _write_halves(view: JobView) -> None:
    view.put(feed_forward_proj="gated-gelu" if view["model.gated_mlp"] else "relu")
    view.put(n_positions=view["model.encoder_seq_len"], d_kv=view["model.head_dim"] or view.job.model.head_size)
    view.refuse("model.seq_len", view["model.seq_len"] != 128)


def _read_groups(reading: Reading) -> None:
    kind = reading.word("model_type")
    if reading.get("model.attention") == "mla":
        return
    old = kind == "falcon" and not reading.flag("new_decoder_architecture")
    if (old or kind == "gpt_bigcode") and reading.flag("multi_query") is not False:
        reading.map("model.kv_heads", 1, "multi_query")
    elif not old and reading.positive(*_KV_HEADS):
        reading.copy("model.kv_heads", *_KV_HEADS)


def _write_heads(view: JobView) -> None:
    model, latent = view.job.model, view["model.attention"] == "mla"
    if latent:
        view.put(qk_nope_head_dim=view.head_size(), first_k_dense_replace=view["model.dense_layers"])
    if model.family == "llama":
        view.put(hidden_act="silu", num_key_value_heads=view["model.kv_heads"])
        if not latent and view["model.head_dim"]:
            view.put(head_dim=model.head_dim)


def _read_experts(reading: Reading) -> None:
    count, kind = reading.number(*_EXPERTS), reading.word("model_type")
    if not count or count == 1:
        return
    reading.map("model.experts", count, *_EXPERTS)
    if reading.copy("model.experts_per_token", *_USED) is None:
        reading.assume("model.experts_per_token", 2, "the file does not state it")
    if reading.copy("model.expert_ffn", "moe_intermediate_size") is None and kind == "llama4_text":
        reading.map("model.expert_ffn", reading.get("model.ffn"), words="intermediate_size")
        reading.map("model.ffn", reading.positive("intermediate_size_mlp"), words="intermediate_size_mlp")
        reading.assume("model.shared_experts", 1, "Llama 4 has one")
    reading.copy("model.shared_experts", *_SHARED)
    name = "shared_expert_intermediate_size"
    shared, inner = reading.number(name), reading.get("model.expert_ffn") or reading.get("model.ffn")
    if shared and inner:
        reading.share("model.shared_experts", shared, inner, f"{name} {shared} over {inner}")
    reading.copy("model.dense_layers", "first_k_dense_replace", "moe_layer_start_index")
    dense = reading.take("mlp_only_layers")
    if dense and dense == list(range(len(dense) if isinstance(dense, list) else 0)):
        reading.map("model.dense_layers", len(dense), words=f"mlp_only_layers {dense}")
    elif dense:
        reading.ignore(f"mlp_only_layers {dense}: a job has dense layers first, or experts in every n-th layer")
    expert_layers(reading, *_EVERY)


def _write_experts(view: JobView) -> None:
    model = view.job.model
    kind = _class_of(view.job)[0]
    if kind.startswith("deepseek"):
        view.put(n_routed_experts=view["model.experts"], n_shared_experts=view["model.shared_experts"])
        view.put(moe_layer_freq=view["model.moe_every"])
    if kind == "mixtral":
        view.put(num_local_experts=view["model.experts"])
        view.expressed("model.expert_ffn")
    if kind == "qwen2_moe":
        view.put(num_experts=view["model.experts"], decoder_sparse_step=view["model.moe_every"])
        view.put(shared_expert_intermediate_size=view["model.shared_experts"] * model.expert_ffn)
    if model.family == "llama":
        view.put(num_experts_per_tok=view["model.experts_per_token"])
        if kind != "mixtral":
            view.put(moe_intermediate_size=view["model.expert_ffn"])


def _read_tied(reading: Reading) -> None:
    tied = reading.flag("tie_word_embeddings")
    value = _types()[reading.word("model_type")][1] if tied is None else tied
    reading.map("model.tied_embeddings", value, "tie_word_embeddings")


def _read_dropout(reading: Reading) -> None:
    found = [reading.number(*names, whole=False) for names in (_DROPOUT, _SCORES_DROPOUT)]
    if rates := [rate for rate in found if rate is not None]:
        reading.map("model.dropout", float(max(rates)), *_DROPOUT, *_SCORES_DROPOUT)


def _read_dtype(reading: Reading) -> None:
    dtype = reading.word("torch_dtype", "dtype").removeprefix("torch.")
    if dtype in ("bfloat16", "float16", "float32"):
        reading.assume("batch.precision", "fp16" if dtype == "float16" else "bf16", f"weights are stored as {dtype}")


_ATTENTION = ("_attn_implementation", "attn_implementation")
_T5 = {"d_model": "model.hidden", "num_heads": "model.heads", "d_ff": "model.ffn", "num_layers": "model.encoder_layers"}
_LATENT = {"kv_lora_rank": "model.kv_lora_rank", "qk_rope_head_dim": "model.rope_head_dim"}
_LATENT |= {"v_head_dim": "model.v_head_dim"}
_MLA = "model.attention=mla"
_IS_T5, _IS_VIT = "model.family=t5", "model.family=vit"
_NOT_T5, _NOT_VIT = "model.family!=t5", "model.family!=vit"
ROWS = (
    Row("model.family", read=_read_family),
    *same(_T5, needs=_IS_T5),
    Row("model.layers", ("num_decoder_layers", "num_layers"), needs=_IS_T5),
    Row("model.head_dim", "d_kv", only="read", needs=_IS_T5),
    Row("model.seq_len", read=_read_halves, write=_write_halves, needs=_IS_T5),
    Row("model.layers", LAYERS, needs=_NOT_T5),
    Row("model.hidden", HIDDEN, needs=_NOT_T5),
    Row("model.heads", _HEADS, needs=_NOT_T5),
    Row("model.ffn", _FFN, read=_read_ffn, needs=_NOT_T5),
    Row("model.seq_len", read=_read_image, write=_write_image, needs=_IS_VIT),
    Row("model.seq_len", _LENGTH, read=_read_length, needs=f"{_NOT_T5} {_NOT_VIT}"),
    Row("model.vocab", ("vocab_size", "padded_vocab_size"), needs=_NOT_VIT),
    Row("model.attention", "kv_lora_rank", (lambda rank: "mla" if rank else None, str), only="read"),
    *same(_LATENT, needs=_MLA),
    Row("model.q_lora_rank", "q_lora_rank", (int, lambda rank: rank or None), needs=_MLA),
    Row("model.head_dim", "qk_nope_head_dim", needs=_MLA, only="read"),
    Row("model.head_dim", "head_dim", needs="model.attention!=mla", only="read"),
    Row("model.kv_heads", read=_read_groups, write=_write_heads),
    Row("model.experts", read=_read_experts),
    Row("model.experts", needs="model.experts", write=_write_experts),
    Row("model.tied_embeddings", "tie_word_embeddings", read=_read_tied),
    Row("model.dropout", "attention_dropout", read=_read_dropout),
    Row("batch.precision", read=_read_dtype),
    Row("model.fused_attention", _ATTENTION, {"eager": False, OTHER: True}, omit=True),
)
