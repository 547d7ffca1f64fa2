"""The model of Megatron-LM's settings, read and written.

Sources: see ``megatron.py``.
"""

from __future__ import annotations

import re

from stepsight.dataset.configs.documents import facts
from stepsight.dataset.configs.drafts import WHOLE, Reading
from stepsight.dataset.configs.key_table import JobView, rows_of

MOST_STAGES = 10_000
_REPEATED = re.compile(r"\(([^()]*)\)(?:\*(\d{1,9}))?|([A-Za-z|])\*(\d{1,9})")


def repeated(text: str) -> str:
    """A text with its repetitions written out, as ``(ab)*2`` and ``a*3``; empty if that is too long."""
    while (found := _REPEATED.search(text)) is not None:
        what, count = found[1] if found[1] is not None else found[3], int(found[2] or found[4] or 1)
        if count * len(what) > MOST_STAGES or len(text) > MOST_STAGES:
            return ""
        text = text[: found.start()] + what * count + text[found.end() :]
    return text


def read_expert_layers(reading: Reading) -> None:
    """Which layers have experts: every n-th one, or a pattern of zeros and ones, as ``[0]*3+[1]*58``."""
    frequency = reading.take(*reading.names)
    text = frequency if isinstance(frequency, str) else repr(frequency)
    if frequency is None or text.strip() in ("0", "1"):
        return
    if WHOLE(text.strip()):
        reading.map("model.moe_every", int(text))
        return
    plain = re.sub(r"[\s,'\"+]", "", text).replace("[", "(").replace("]", ")")
    layers = repeated(plain) if re.fullmatch(r"[01()*\d]*", plain) else ""
    if re.fullmatch("0*1+|0+", layers):
        reading.map("model.dense_layers", layers.count("0"))
        return
    periods = {("0" * at + "1").ljust(n, "0") * len(layers): n for n in range(2, 9) for at in range(n)}
    if every := next((n for period, n in periods.items() if layers and period.startswith(layers)), 0):
        reading.map("model.moe_every", every)
    else:
        reading.ignore(
            f"{reading.source(*reading.names)} {text}: a job has dense layers first, or experts in every n-th layer"
        )


def _write_image(view: JobView) -> None:
    patch, image = view.image()
    view.put(patch_dim=patch, img_h=image, img_w=image)


def _write_positions(view: JobView) -> None:
    view.put(max_position_embeddings=max(view["model.seq_len"], view["model.encoder_seq_len"]))


def _read_family(reading: Reading) -> None:
    norm, bias = reading.word("normalization").lower(), reading.flag("add_bias_linear", "bias")
    rotary = reading.flag("use_rotary_position_embeddings")
    position = "rope" if rotary else reading.word("position_embedding_type")
    if reading.get("model.family") is not None:
        return
    like_llama = norm == "rmsnorm" or (position == "rope" and bias is False)
    family = "llama" if like_llama else "gpt"
    reading.map("model.family", family)
    if len({norm == "rmsnorm", position == "rope", bias is False}) > 1:
        wanted = "RMSNorm, rotary positions, no biases" if like_llama else "LayerNorm, learned positions, biases"
        stated = (
            f"{norm or 'layernorm'}, positions {position or 'learned_absolute'}, bias {str(bias is not False).lower()}"
        )
        reading.ignore(f"{stated}: the family stands for {wanted}")


def _read_ffn(reading: Reading) -> None:
    hidden = reading.get("model.hidden")
    if reading.copy("model.ffn", "ffn_hidden_size") is None and hidden:
        if reading.get("model.gated_mlp"):
            reading.assume("model.ffn", int(4 * hidden * 2 / 3 / 64) * 64, f"{reading.default} with --swiglu")
        reading.assume("model.ffn", 4 * hidden)


def _read_length(reading: Reading) -> None:
    names = ["seq_length", "encoder_seq_length"]
    if "decoder_seq_length" in reading:  # of a model of images and text
        words = f"{reading.source(*names)} {reading.number(*names)}"
        reading.ignore(f"the encoder of images, with {words}: the job is the model of text alone")
        names = ["decoder_seq_length"]
    length = reading.number(*names)
    if length is not None and reading.get("model.seq_len") is None:
        reading.map("model.seq_len", length, *names)


def _read_image(reading: Reading) -> None:
    height, width = reading.positive("img_h") or 224, reading.positive("img_w") or 224
    patch, channels = reading.positive("patch_dim") or 16, reading.positive("num_channels") or 3
    reading.map("model.patch_dim", patch * patch * channels, "patch_dim")
    reading.assume("model.seq_len", (height // patch) * (width // patch) + 1, "patches and the class token")
    reading.map("model.vocab", reading.positive("num_classes") or 1000, "num_classes")


def _write_heads(view: JobView) -> None:
    if view["model.kv_heads"] != view["model.heads"] and view.job.model.attention != "mla":
        view.put(group_query_attention=True, num_query_groups=view["model.kv_heads"])


def _read_experts(reading: Reading) -> None:
    if reading.get("model.experts", 0) <= 1:
        reading.draft.drop("model.experts")


def _write_expert_layers(view: JobView) -> None:
    dense, every, layers = view["model.dense_layers"], view["model.moe_every"], view["model.layers"]
    if dense and every == 1:
        view.put(moe_layer_freq=f"([0]*{dense}+[1]*{layers - dense})")
    elif every > 1:
        view.put(moe_layer_freq=every)
        view.refuse("model.dense_layers", dense)


def _read_vocabulary(reading: Reading) -> None:
    names = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file", "run_name")
    text = " ".join([reading.word(name) for name in names]).lower().replace("_", "-")
    known = ((one["tokens"], word) for one in facts()["megatron"]["vocabularies"] for word in one["words"])
    found = next((pair for pair in known if re.search(re.escape(pair[1]) + r"(?!\d)", text)), None)
    value, reason = 32000, "give it, the tokenizer is not known"
    if reading.get("model.family") in ("bert", "t5") and "wordpiece" not in text:
        value, reason = 30522, "BERT's lower-case WordPiece"
    elif found:
        value, reason = found[0], f"tokens of the tokenizer {found[1]}"
    elif reading.word("tokenizer_type") in ("", "GPT2BPETokenizer"):
        value, reason = 50257, "GPT-2's tokens"
    reading.assume("model.vocab", value, f"no vocab_size is stated: {reason}")


def _read_dropout(reading: Reading) -> None:
    after, scores = (reading.number(f"{name}_dropout", whole=False) for name in ("hidden", "attention"))
    values = [0.1 if value is None else value for value in (after, scores)]
    if after is None and scores is None:
        reading.assume("model.dropout", 0.1)
    else:
        reading.map("model.dropout", max(values), "hidden_dropout", "attention_dropout")
    if values[0] != values[1]:
        words = f"hidden_dropout {values[0]:g} and attention_dropout {values[1]:g}"
        reading.ignore(f"{words}: a job has one for both")


MODEL_ROWS = rows_of("megatron", {**globals(), "_read_expert_layers": read_expert_layers}, "model")
