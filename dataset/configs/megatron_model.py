"""The model of Megatron-LM's settings."""

from __future__ import annotations

import ast
import re
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.job.rules import MOST_LAYERS

DIRECT = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_experts": "model.experts",
}
EXPERTS = {
    "moe_router_topk": "model.experts_per_token",
    "moe_expert_capacity_factor": "model.capacity_factor",
}
DEEPSPEED_EXPERTS = {  # Megatron-DeepSpeed's own arguments
    "topk": "model.experts_per_token",
    "expert_interval": "model.moe_every",
    "moe_train_capacity_factor": "model.capacity_factor",
    "moe_expert_parallel_size": "parallel.ep",
}
LATENT = {
    "q_lora_rank": "model.q_lora_rank",
    "kv_lora_rank": "model.kv_lora_rank",
    "qk_head_dim": "model.head_dim",
    "qk_pos_emb_head_dim": "model.rope_head_dim",
    "v_head_dim": "model.v_head_dim",
}
_LATENT_DEFAULTS = {"kv_lora_rank": 32, "head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
# Words of a tokenizer's type or name, and the tokens that it has.
_VOCABULARIES = (
    ("gpt2", 50257),
    ("256k", 256000),
    ("250k", 250680),  # BigScience's, of BLOOM
    ("llama-3", 128256),
    ("llama3", 128256),
    ("llama2", 32000),
    ("llama-2", 32000),
    ("mixtral", 32000),
    ("mistral", 32000),
    ("deepseek-v3", 129280),
    ("deepseek-r1", 129280),
    ("kimi-k2", 163840),
    ("gpt-oss", 201088),
    ("llama-4", 202048),
    ("nemotron-mini", 256000),
    ("deepseek-v2", 102400),
    ("qwen3", 151936),
    ("qwen2", 152064),
    ("bertwordpiecelowercase", 30522),
    ("bertwordpiececase", 28996),
    ("baichuan2", 125696),
    ("falcon", 65024),
    ("gemma", 256000),
    ("nemotron", 256000),
    ("starcoder", 49152),
    ("qwen", 151936),
    ("llama", 32000),
)
_GATED = ("swiglu", "geglu", "quick_geglu", "gated_linear_unit")
_GATED_WORDS = ("swiglu", "fast-swiglu", "geglu", "fast-geglu", "reglu", "fast-reglu")
_DEFAULT = "Megatron-LM's default"


def read_model(settings: Settings, draft: Draft) -> None:
    """Fill the table of the model."""
    hybrid = settings.find("hybrid_layer_pattern", "hybrid_override_pattern", "hybrid_attention_ratio")
    if hybrid:
        raise JobError(f"a job has no layers with state spaces (Mamba), got {settings.source(hybrid)}")
    if "encoder_num_layers" in settings and "decoder_seq_length" in settings:
        draft.assume("model.family", "t5", "an encoder and a decoder have layers")
    if draft.get("model.family") == "t5":
        _encoder(settings, draft)
    settings.copy(draft, DIRECT)
    _family(settings, draft)
    _sizes(settings, draft)
    _attention(settings, draft)
    _experts(settings, draft)
    _vocabulary(settings, draft)
    tied = settings.flag("share_embeddings_and_output_weights")
    untied = settings.flag("untie_embeddings_and_output_weights")
    if tied is not None or untied is not None:
        source = settings.source("share_embeddings_and_output_weights", "untie_embeddings_and_output_weights")
        draft.map("model.tied_embeddings", tied if tied is not None else not untied, source)
    else:
        draft.assume("model.tied_embeddings", True, _DEFAULT)
    _dropout(settings, draft)


def _encoder(settings: Settings, draft: Draft) -> None:
    pairs = {"encoder_num_layers": "model.encoder_layers", "encoder_seq_length": "model.encoder_seq_len"}
    settings.copy(draft, {**pairs, "decoder_seq_length": "model.seq_len", "decoder_num_layers": "model.layers"})
    layers = settings.number("num_layers")
    if layers is not None:
        for key in ("model.encoder_layers", "model.layers"):
            if draft.get(key) is None:
                draft.map(key, layers, settings.source("num_layers"))
    length = settings.number("seq_length")
    if length is not None:
        draft.map("model.encoder_seq_len", length, settings.source("seq_length"))


def _family(settings: Settings, draft: Draft) -> None:
    norm = settings.word("normalization").lower()
    bias = settings.flag("add_bias_linear", "bias")
    position = settings.word("position_embedding_type")
    if settings.flag("use_rotary_position_embeddings"):
        position = "rope"
    facts = [norm or "layernorm", f"positions {position or 'learned_absolute'}", f"bias {bias is not False}".lower()]
    if draft.get("model.family") is None:
        like_llama = norm == "rmsnorm" or (position == "rope" and bias is False)
        family = "llama" if like_llama else "gpt"
        says = bool(norm or position or bias is not None)
        draft.settle("model.family", family, ", ".join(facts) if says else "", _DEFAULT)
        exact = (norm == "rmsnorm", position == "rope", bias is False)
        if len(set(exact)) > 1:
            wanted = "RMSNorm, rotary positions, no biases" if like_llama else "LayerNorm, learned positions, biases"
            draft.ignore(f"{', '.join(facts)}: the family stands for {wanted}")
    activation = settings.word("activation", "activation_func").lower()
    gated = next((name for name in _GATED if settings.flag(name)), "")
    if gated:
        draft.map("model.gated_mlp", True, settings.source(gated))
    elif activation:
        draft.map("model.gated_mlp", activation in _GATED_WORDS, settings.source("activation", "activation_func"))
    else:
        draft.assume("model.gated_mlp", False, _DEFAULT)


def _sizes(settings: Settings, draft: Draft) -> None:
    hidden = draft.get("model.hidden")
    ffn = settings.positive("ffn_hidden_size")
    if ffn:
        draft.map("model.ffn", ffn, settings.source("ffn_hidden_size"))
    elif hidden and draft.get("model.gated_mlp"):
        draft.assume("model.ffn", int(4 * hidden * 2 / 3 / 64) * 64, "Megatron-LM's default with --swiglu")
    elif hidden:
        draft.assume("model.ffn", 4 * hidden, "Megatron-LM's default")
    _length(settings, draft)
    if draft.get("model.family") == "vit":
        _patches(settings, draft)


def _length(settings: Settings, draft: Draft) -> None:
    """Tokens of a sequence; of models of images and text those of the text."""
    names: tuple[str, ...] = ("seq_length", "encoder_seq_length")
    if "decoder_seq_length" in settings and draft.get("model.family") != "t5":
        source, length = settings.source(*names), settings.number(*names)
        draft.ignore(f"the encoder of images, with {source} {length}: the job is the model of text alone")
        names = ("decoder_seq_length",)
    length = settings.number(*names)
    if length is not None and draft.get("model.seq_len") is None:
        draft.map("model.seq_len", length, settings.source(*names))


def _patches(settings: Settings, draft: Draft) -> None:
    height, width = settings.positive("img_h") or 224, settings.positive("img_w") or 224
    patch, channels = settings.positive("patch_dim") or 16, settings.positive("num_channels") or 3
    draft.map("model.patch_dim", patch * patch * channels, f"{settings.source('patch_dim')} {patch}")
    draft.assume("model.seq_len", (height // patch) * (width // patch) + 1, "patches and the class token")
    classes = settings.positive("num_classes")
    draft.map("model.vocab", classes or 1000, settings.source("num_classes"))


def _attention(settings: Settings, draft: Draft) -> None:
    groups = settings.positive("num_query_groups")
    switch = settings.flag("group_query_attention")
    if groups and (switch or (switch is None and groups > 1)):
        draft.map("model.kv_heads", groups, settings.source("num_query_groups"))
    size = settings.positive("kv_channels")
    if settings.flag("multi_latent_attention"):
        draft.map("model.attention", "mla", settings.source("multi_latent_attention"))
        settings.copy(draft, LATENT)
        for name, value in _LATENT_DEFAULTS.items():
            draft.assume(f"model.{name}", value, _DEFAULT)
        draft.tables["model"].pop("kv_heads", None)
        draft.sources.pop("model.kv_heads", None)
    elif size:
        draft.map("model.head_dim", size, settings.source("kv_channels"))
    backend = settings.word("attention_backend").removeprefix("AttnBackend.")
    if settings.flag("use_flash_attn", "use_flash_attn_v2", "use_flash_attention") or backend in ("flash", "fused"):
        source = settings.source("use_flash_attn", "use_flash_attn_v2", "use_flash_attention", "attention_backend")
        draft.map("model.fused_attention", True, source)
    elif backend in ("unfused", "local"):
        draft.map("model.fused_attention", False, settings.source("attention_backend"))
    elif settings.word("transformer_impl") == "local":
        draft.map("model.fused_attention", False, settings.source("transformer_impl"))


def _experts(settings: Settings, draft: Draft) -> None:
    if draft.get("model.experts", 0) <= 1:
        draft.tables["model"].pop("experts", None)
        draft.sources.pop("model.experts", None)
        return
    settings.copy(draft, EXPERTS)
    if draft.framework == "megatron-deepspeed":
        settings.copy(draft, DEEPSPEED_EXPERTS)
        for key, value in (("experts_per_token", 1), ("moe_every", 2), ("capacity_factor", 1.0)):
            draft.assume(f"model.{key}", value, "Megatron-DeepSpeed's default")
    draft.assume("model.experts_per_token", 2, _DEFAULT)
    size = settings.positive("moe_ffn_hidden_size")
    if size:
        draft.map("model.expert_ffn", size, settings.source("moe_ffn_hidden_size"))
    size = size or draft.get("model.ffn") or 0
    shared = settings.number("moe_shared_expert_intermediate_size")
    if shared and size:
        source = settings.source("moe_shared_expert_intermediate_size")
        if shared % size == 0:
            draft.map("model.shared_experts", shared // size, source)
        else:
            count = max(1, round(shared / size))
            draft.assume("model.shared_experts", count, f"{source} {shared} is {shared / size:.2f} experts of {size}")
    frequency = settings.take("moe_layer_freq")
    if frequency is not None:
        expert_layers(draft, frequency, settings.source("moe_layer_freq"))
    dense = settings.number("first_k_dense_replace")
    if dense:
        draft.map("model.dense_layers", dense, settings.source("first_k_dense_replace"))


def expert_layers(draft: Draft, frequency: Any, source: str) -> None:
    """Which layers have experts: every n-th one, or a pattern of zeros and ones."""
    text = frequency if isinstance(frequency, str) else repr(frequency)
    if text.strip().isdigit():
        if int(text) > 1:
            draft.map("model.moe_every", int(text), source)
        return
    pattern = _pattern(text)
    dense = next((place for place, one in enumerate(pattern) if one), len(pattern))
    if pattern and all(pattern[dense:]):
        draft.map("model.dense_layers", dense, f"{source} {text}")
        return
    places = [(every, place) for every in range(2, 9) for place in range(every)]
    every = next((n for n, k in places if pattern == [int(i % n == k) for i in range(len(pattern))]), 0)
    if every:
        draft.map("model.moe_every", every, f"{source} {text}")
    else:
        draft.ignore(f"{source} {text}: a job has dense layers first, or experts in every n-th layer")


def _pattern(text: str) -> list[int]:
    """A list written as Python: ``[0]*3+[1]*58``; empty if it is something else."""
    try:
        return _listed(ast.parse(text.strip().strip("'\""), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _listed(node: ast.AST) -> list[int]:
    if isinstance(node, ast.List) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [int(item.value == 1) for item in node.elts if isinstance(item, ast.Constant)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _listed(node.left) + _listed(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        count = node.right.value
        if type(count) is not int or not 0 <= count <= MOST_LAYERS:
            raise ValueError("a pattern's count must be a small whole number")
        found = _listed(node.left) * count
    else:
        raise ValueError("a pattern is made of lists, + and *")
    if len(found) > MOST_LAYERS:
        raise ValueError("a pattern is longer than any model")
    return found


def _vocabulary(settings: Settings, draft: Draft) -> None:
    if draft.get("model.vocab") is not None:
        return
    sizes = ("vocab_size", "padded_vocab_size", "override_vocab_size", "pad_vocab_size_to")
    size = settings.positive(*sizes)
    if size:
        draft.map("model.vocab", size, settings.source(*sizes))
        return
    names = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file", "run_name")
    words = [settings.word(name) for name in names]
    text = " ".join(words).lower().replace("_", "-")
    if draft.get("model.family") in ("bert", "t5") and "wordpiece" not in text:
        draft.assume("model.vocab", 30522, "no vocab_size is stated: BERT's lower-case WordPiece")
        return
    found = next((pair for pair in _VOCABULARIES if re.search(re.escape(pair[0]) + r"(?!\d)", text)), None)
    if found:
        draft.assume("model.vocab", found[1], f"no vocab_size is stated: tokens of the tokenizer {found[0]}")
    elif settings.word("tokenizer_type") in ("", "GPT2BPETokenizer"):
        draft.assume("model.vocab", 50257, "no vocab_size is stated: GPT-2's tokens")
    else:
        draft.assume("model.vocab", 32000, "no vocab_size is stated, and the tokenizer is not known: give it")


def _dropout(settings: Settings, draft: Draft) -> None:
    after = settings.number("hidden_dropout", whole=False)
    scores = settings.number("attention_dropout", whole=False)
    if after is None and scores is None:
        draft.assume("model.dropout", 0.1, _DEFAULT)
        return
    values = [value if value is not None else 0.1 for value in (after, scores)]
    draft.map("model.dropout", max(values), settings.source("hidden_dropout", "attention_dropout"))
    if values[0] != values[1]:
        draft.ignore(f"hidden_dropout {values[0]:g} and attention_dropout {values[1]:g}: a job has one for both")
