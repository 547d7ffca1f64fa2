"""Hugging Face's ``config.json`` of a model to the model of a job.

Source: ``configuration_*.py`` of transformers 4.40 to 5.0: names, and defaults of what a file may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat
from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.configs.megatron_model import expert_layers

LONGEST_ASSUMED = 8192  # tokens of a training sequence, where a model takes more
# By model_type: the closest family, whether embeddings are tied where the file does not say, and what differs.
TYPES: Mapping[str, tuple[str, bool, str]] = {
    "llama": ("llama", False, ""),
    "llama4_text": ("llama", False, ""),
    "mistral": ("llama", False, ""),
    "ministral": ("llama", False, ""),
    "mixtral": ("llama", False, ""),
    "qwen": ("llama", False, "biases of query, key and value"),
    "qwen2": ("llama", False, "biases of query, key and value"),
    "qwen2_moe": ("llama", False, "biases of query, key and value"),
    "qwen3": ("llama", False, "norms of query and key"),
    "qwen3_moe": ("llama", False, "norms of query and key"),
    "qwen3_vl_text": ("llama", False, "norms of query and key"),
    "qwen3_vl_moe_text": ("llama", False, "norms of query and key"),
    "deepseek": ("llama", False, ""),
    "deepseek_v2": ("llama", False, ""),
    "deepseek_v3": ("llama", False, ""),
    "deepseek_v32": ("llama", False, "sparse attention over the index_topk keys that an indexer chooses"),
    "glm_moe_dsa": ("llama", False, "sparse attention over the index_topk keys that an indexer chooses"),
    "kimi_k2": ("llama", False, ""),
    "chatglm": ("llama", False, "biases of query, key and value"),
    "glm": ("llama", False, "biases of query, key and value"),
    "glm4": ("llama", False, "norms after blocks"),
    "glm4_moe": ("llama", False, "biases of query, key and value"),
    "ernie4_5": ("llama", True, ""),
    "ernie4_5_moe": ("llama", True, ""),
    "minimax_m2": ("llama", False, "norms of query and key"),
    "minicpm": ("llama", False, ""),
    "minicpm3": ("llama", False, ""),
    "mimo": ("llama", False, "biases of query, key and value"),
    "seed_oss": ("llama", False, "biases of query, key and value"),
    "hunyuan_v1_dense": ("llama", False, "norms of query and key"),
    "exaone": ("llama", False, ""),
    "exaone4": ("llama", False, "norms after blocks, sliding windows"),
    "cohere": ("llama", True, "LayerNorm, attention beside the MLP"),
    "cohere2": ("llama", True, "LayerNorm, attention beside the MLP, sliding windows"),
    "nemotron": ("llama", False, "LayerNorm, squared ReLU"),
    "arcee": ("llama", False, "squared ReLU"),
    "phimoe": ("llama", False, "LayerNorm, biases"),
    "granitemoe": ("llama", False, ""),
    "olmo3": ("llama", False, "norms after blocks, sliding windows"),
    "internlm": ("llama", False, "biases of query, key and value"),
    "gemma": ("llama", True, "GELU"),
    "gemma2": ("llama", True, "GELU, norms after blocks, sliding windows"),
    "gemma3_text": ("llama", True, "GELU, norms after blocks, sliding windows"),
    "phi3": ("llama", False, ""),
    "olmo": ("llama", False, "norms without parameters"),
    "olmo2": ("llama", False, "norms after blocks"),
    "olmoe": ("llama", False, "norms of query and key"),
    "granite": ("llama", False, ""),
    "internlm2": ("llama", False, ""),
    "baichuan": ("llama", False, ""),
    "stablelm": ("llama", False, "LayerNorm"),
    "smollm3": ("llama", True, ""),
    "gpt_oss": ("llama", False, "biases, attention sinks, sliding windows"),
    "dbrx": ("llama", False, "LayerNorm"),
    "gpt2": ("gpt", True, ""),
    "gpt_bigcode": ("gpt", True, ""),
    "gpt_neo": ("gpt", True, "local attention"),
    "gpt_neox": ("gpt", False, "rotary positions"),
    "gptj": ("gpt", False, "rotary positions"),
    "opt": ("gpt", True, "ReLU"),
    "bloom": ("gpt", True, "positions as biases of attention"),
    "falcon": ("gpt", True, "rotary positions, no biases"),
    "mpt": ("gpt", True, "positions as biases of attention, no biases"),
    "codegen": ("gpt", False, "rotary positions"),
    "xglm": ("gpt", True, ""),
    "phi": ("gpt", False, "rotary positions"),
    "starcoder2": ("gpt", True, "rotary positions"),
    "bert": ("bert", True, ""),
    "roberta": ("bert", True, ""),
    "xlm-roberta": ("bert", True, ""),
    "camembert": ("bert", True, ""),
    "distilbert": ("bert", True, ""),
    "electra": ("bert", True, ""),
    "modernbert": ("bert", True, "rotary positions, sliding windows"),
    "t5": ("t5", True, ""),
    "mt5": ("t5", False, ""),
    "umt5": ("t5", False, ""),
    "vit": ("vit", False, ""),
    "deit": ("vit", False, ""),
    "dinov2": ("vit", False, ""),
}
_GATED = {"nemotron": False, "arcee": False, "modernbert": True}  # where the family has it the other way
_NO_ATTENTION = (
    *(
        "mamba",
        "mamba2",
        "falcon_mamba",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "falcon_h1",
        "nemotron_h",
        "granitemoehybrid",
    ),
    *(
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "kimi_linear",
        "minimax",
        "rwkv",
        "lfm2",
    ),
)
_INNER = ("text_config", "language_config", "llm_config")
# What files of some models leave out, because it is the default of their class in transformers.
LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "falcon": {"max_position_embeddings": 2048},
    "gemma2": {"head_dim": 256},
    "gemma": {"head_dim": 256},
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    "mistral": {"num_key_value_heads": 8, "vocab_size": 32000},
    "mixtral": {"num_key_value_heads": 8, "vocab_size": 32000},
    "bert": {"vocab_size": 30522, "max_position_embeddings": 512},
    "t5": {"vocab_size": 32128, "d_kv": 64},
}  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads", "multi_query_group_num")
FFN = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_config.ffn_hidden_size", "ffn_hidden_size")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "ffn_config.moe_num_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "ffn_config.moe_top_k", "moe_k")
SHARED = ("shared_expert_intermediate_size",)
DROPOUT = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout", "dropout_rate", "residual_dropout")
SCORES_DROPOUT = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
_NOISE = (
    *("architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
    *("transformers_version", "_name_or_path", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "model_type"),
    *("id2label", "label2id", "task_specific_params", "quantization_config", "rope_scaling", "rope_parameters"),
)


def is_huggingface(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of a model's ``config.json``."""
    return "model_type" in tables or ("architectures" in tables and any(name in tables for name in (*LAYERS, *HIDDEN)))


def read_huggingface(tables: Mapping[str, Any], draft: Draft) -> None:
    """Fill the model of a draft; of a model of text and images, the part that reads text.

    Raises:
        JobError: If the model is of a type that no family of a job comes close to.
    """
    kind = str(tables.get("model_type") or "")
    within = next((name for name in _INNER if isinstance(tables.get(name), Mapping)), "")
    if within:
        draft.ignore(f"all of {kind or 'the model'} but its {within}")
        inner = tables[within]
        tables = {**{key: tables[key] for key in ("tie_word_embeddings", "torch_dtype") if key in tables}, **inner}
        kind = str(inner.get("model_type") or kind)
    if kind in _NO_ATTENTION or str(tables.get("model_type")) in _NO_ATTENTION:
        raise JobError(f"a job has no layers with linear attention or state spaces, got model_type {kind}")
    if kind not in TYPES:
        raise JobError(f"model_type must be one of {', '.join(TYPES)}, got {kind!r:.80}")
    stated = flat(tables)
    left_out = {key: value for key, value in LEFT_OUT.get(kind, {}).items() if stated.get(key) is None}
    settings = Settings({**left_out, **{key: value for key, value in stated.items() if value is not None}})
    for key, value in left_out.items():
        draft.ignore(f"{key} is not stated: {value} is the default of {kind}")
    family, tied, differs = TYPES[kind]
    draft.framework = draft.framework or "huggingface"
    draft.map("model.family", family, f"model_type {kind}")
    if differs:
        draft.ignore(f"{differs} of {kind}: no key of a job")
    if kind in _GATED:
        draft.map("model.gated_mlp", _GATED[kind], f"model_type {kind}")
    draft.assume("model.fused_attention", True, "transformers attends with PyTorch's fused kernels since 4.36")
    if family == "t5":
        _encoder_decoder(settings, draft)
    else:
        _sizes(settings, draft, kind)
    _heads(settings, draft, kind)
    _experts(settings, draft, kind)
    _rest(settings, draft, tied, kind)
    for text in settings.left():
        if text.partition(" ")[0].partition(".")[0] not in _NOISE:
            draft.ignore(text)


def _number(settings: Settings, draft: Draft, key: str, names: tuple[str, ...]) -> Any:
    settings.copy(draft, {settings.find(*names): key})
    return settings.number(*names)


def _sizes(settings: Settings, draft: Draft, kind: str) -> None:
    _number(settings, draft, "model.layers", LAYERS)
    hidden = _number(settings, draft, "model.hidden", HIDDEN)
    _number(settings, draft, "model.heads", HEADS)
    ffn = _number(settings, draft, "model.ffn", FFN)
    if ffn is None and hidden:
        draft.assume("model.ffn", 4 * hidden, f"{kind} has it so")
    elif kind == "qwen":
        draft.map("model.ffn", ffn // 2, f"{settings.source(*FFN)} {ffn}, of the gate and the other product")
    _number(settings, draft, "model.vocab", ("vocab_size", "padded_vocab_size"))
    if kind in ("vit", "deit"):
        image, patch = settings.positive("image_size") or 224, settings.positive("patch_size") or 16
        channels = settings.positive("num_channels") or 3
        draft.map("model.patch_dim", patch * patch * channels, f"patch_size {patch}, {channels} channels")
        draft.map("model.seq_len", (image // patch) ** 2 + 1, f"image_size {image}, patch_size {patch}")
        labels = sum(text.startswith("id2label.") for text in settings.left())
        draft.map("model.vocab", labels or 1000, "id2label" if labels else "classes of ImageNet")
        return
    longest = settings.positive(*LENGTH)
    if longest:
        why = f"a model's file does not state it: {settings.source(*LENGTH)} {longest}"
        draft.assume("model.seq_len", min(longest, LONGEST_ASSUMED), why)


def _encoder_decoder(settings: Settings, draft: Draft) -> None:
    layers = _number(settings, draft, "model.encoder_layers", ("num_layers",))
    decoder = settings.positive("num_decoder_layers") or layers
    draft.map("model.layers", decoder, settings.source("num_decoder_layers", "num_layers"))
    for key, name in (("hidden", "d_model"), ("heads", "num_heads"), ("head_dim", "d_kv"), ("ffn", "d_ff")):
        _number(settings, draft, f"model.{key}", (name,))
    _number(settings, draft, "model.vocab", ("vocab_size",))
    draft.map("model.gated_mlp", "gated" in settings.word("feed_forward_proj"), "feed_forward_proj")
    draft.assume("model.encoder_seq_len", settings.positive("n_positions") or 512, "T5's n_positions")
    draft.assume("model.seq_len", 128, "a model's file does not state how many tokens are predicted")


def _heads(settings: Settings, draft: Draft, kind: str) -> None:
    if settings.number("kv_lora_rank"):
        draft.map("model.attention", "mla", "kv_lora_rank")
        names = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "head_dim"}
        for name, key in {**names, "qk_rope_head_dim": "rope_head_dim", "v_head_dim": "v_head_dim"}.items():
            _number(settings, draft, f"model.{key}", (name,))
        settings.find("num_key_value_heads", "head_dim")
        return
    groups = settings.positive(*KV_HEADS)
    if kind == "falcon" and not settings.flag("new_decoder_architecture"):
        groups = 1 if settings.flag("multi_query") is not False else None
    elif kind == "gpt_bigcode" and settings.flag("multi_query") is not False:
        groups = 1
    if groups:
        draft.map("model.kv_heads", groups, settings.source(*KV_HEADS))
    if settings.positive("head_dim") and draft.get("model.family") != "t5":
        draft.map("model.head_dim", settings.number("head_dim"), "head_dim")


def _experts(settings: Settings, draft: Draft, kind: str) -> None:
    count = settings.number(*EXPERTS)
    if not count or count == 1:
        return
    draft.map("model.experts", count, settings.source(*EXPERTS))
    if _number(settings, draft, "model.experts_per_token", USED) is None:
        draft.assume("model.experts_per_token", 2, "the file does not state it")
    size = settings.positive("moe_intermediate_size")
    if size:
        draft.map("model.expert_ffn", size, "moe_intermediate_size")
    elif kind == "llama4_text":
        dense = settings.positive("intermediate_size_mlp")
        draft.map("model.expert_ffn", draft.get("model.ffn"), "intermediate_size")
        draft.map("model.ffn", dense, "intermediate_size_mlp")
        draft.assume("model.shared_experts", 1, "Llama 4 has one")
    _number(
        settings, draft, "model.shared_experts", ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    )
    shared = settings.number(*SHARED)
    inner = draft.get("model.expert_ffn") or draft.get("model.ffn")
    if shared and inner:
        exact = shared % inner == 0
        record = draft.map if exact else draft.assume
        record("model.shared_experts", max(1, round(shared / inner)), f"{SHARED[0]} {shared} over {inner}")
    _number(settings, draft, "model.dense_layers", ("first_k_dense_replace", "moe_layer_start_index"))
    dense = settings.take("mlp_only_layers")
    if dense and dense == list(range(len(dense))):
        draft.map("model.dense_layers", len(dense), f"mlp_only_layers {dense}")
    elif dense:
        draft.ignore(f"mlp_only_layers {dense}: a job has dense layers first, or experts in every n-th layer")
    every = settings.find("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    if isinstance(settings.take(every), list):
        expert_layers(draft, settings.take(every), every)
    elif every and settings.positive(every) > 1:
        draft.map("model.moe_every", settings.number(every), every)


def _rest(settings: Settings, draft: Draft, tied: bool, kind: str) -> None:
    stated = settings.flag("tie_word_embeddings")
    if stated is not None:
        draft.map("model.tied_embeddings", stated, "tie_word_embeddings")
    else:
        draft.assume("model.tied_embeddings", tied, f"transformers' default for {kind}")
    drops = [settings.number(*names, whole=False) for names in (DROPOUT, SCORES_DROPOUT)]
    found = [value for value in drops if value is not None]
    if found:
        draft.map("model.dropout", float(max(found)), settings.source(*DROPOUT, *SCORES_DROPOUT))
    attends = settings.word("_attn_implementation", "attn_implementation")
    if attends:
        draft.map("model.fused_attention", attends != "eager", f"attn_implementation {attends}")
    dtype = settings.word("torch_dtype", "dtype").removeprefix("torch.")
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if dtype in names and draft.get("batch.precision") is None:
        draft.assume("batch.precision", "bf16" if dtype != "float16" else "fp16", f"weights are stored as {dtype}")
    settings.find("hidden_act", "hidden_activation", "activation_function", "moe_intermediate_size")
