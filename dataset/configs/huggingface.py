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
from stepsight.dataset.configs.key_table import ConfigText, JobView, read_rows, rows_of
from stepsight.dataset.job.job import Job

LONGEST_ASSUMED = 8192  # tokens of a training sequence, where a model takes more
_LABELS = ("id2label", "label2id")


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


def read_adapters(file: ConfigFile, draft: Draft) -> None:
    """Fill the adapters of a draft from PEFT's ``adapter_config.json``."""
    stated = {key: None if value in ([], {}) else value for key, value in file.tables.items()}
    words, known = stated.get("target_modules") or [], facts()["lora"]["peft"]
    words = [words] if isinstance(words, str) else words
    targets = [target for word in words for target in known.get(str(word), str(word)).split()]
    values, default = {**stated, "target_modules": targets or None}, "PEFT's default"
    read_rows(rows_of("huggingface", globals(), "adapters"), Reading(draft, values, default=default, stated=stated))


def write(job: Job) -> ConfigText:
    """Write the model of a job as ``config.json``."""
    kind, name, own = _class_of(job)
    view = JobView(job, kind)
    view.put(model_type=kind, architectures=[name])
    view.write(ROWS)
    if job.model.family != "llama" and job.model.kv_heads == job.model.heads:
        view.expressed("model.kv_heads")
    view.put(torch_dtype="float16" if job.batch.dtype == "fp16" else "bfloat16")
    settings = {own.get(name, name): value for name, value in view.settings.items()}
    notes = "a model's file holds no strategy: write deepspeed or accelerate too"
    return view.text(json.dumps(settings, indent=2) + "\n", ".json", notes, sections=("model.",))


def _class_of(job: Job) -> tuple[str, str, Mapping[str, str]]:
    """Type and class of a model, and its own names of settings."""
    model = job.model
    if model.family != "llama":
        told = facts()["transformers"]["classes"][model.family]
        return told["type"], told["class"], told["names"]
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
    if kind in (gated := facts()["transformers"]["gated"]):
        reading.map("model.gated_mlp", gated[kind], words=f"model_type {kind}")
    reading.assume("model.fused_attention", True, "transformers attends with PyTorch's fused kernels since 4.36")


def _read_ffn(reading: Reading) -> None:
    kind, names, hidden = reading.word("model_type"), reading.names, reading.get("model.hidden")
    ffn = reading.copy("model.ffn", *names)
    if ffn is None and hidden:
        reading.assume("model.ffn", 4 * hidden, f"{kind} has it so")
    elif kind == "qwen" and ffn:
        reading.map("model.ffn", ffn // 2, words=f"{reading.source(*names)} {ffn}, of the gate and the other product")


def _read_image(reading: Reading) -> None:
    image, patch = reading.positive("image_size") or 224, reading.positive("patch_size") or 16
    channels = reading.positive("num_channels") or 3
    reading.map("model.patch_dim", patch * patch * channels, words=f"patch_size {patch}, {channels} channels")
    reading.map("model.seq_len", (image // patch) ** 2 + 1, words=f"image_size {image}, patch_size {patch}")
    classes = re.fullmatch(r"of (\d+) classes", reading.word("id2label"))
    words = "id2label" if classes else "classes of ImageNet"
    reading.map("model.vocab", int(classes[1]) if classes else 1000, words=words)


def _read_length(reading: Reading) -> None:
    if longest := reading.positive(*reading.names):
        why = f"a model's file does not state it: {reading.source(*reading.names)} {longest}"
        reading.assume("model.seq_len", min(longest, LONGEST_ASSUMED), why)


def _write_image(view: JobView) -> None:
    side, image = view.image()
    labels = {str(label): f"LABEL_{label}" for label in range(view["model.vocab"])}
    view.put(patch_size=side, image_size=image, num_channels=3, id2label=labels)


def _read_expert_ffn(reading: Reading) -> None:
    if reading.copy("model.expert_ffn", *reading.names) is None and reading.word("model_type") == "llama4_text":
        reading.map("model.expert_ffn", reading.get("model.ffn"), words="intermediate_size")
        reading.map("model.ffn", reading.positive("intermediate_size_mlp"), words="intermediate_size_mlp")
        reading.assume("model.shared_experts", 1, "Llama 4 has one")


def _read_dense_layers(reading: Reading) -> None:
    dense = reading.take(*reading.names)
    if dense and dense == list(range(len(dense) if isinstance(dense, list) else 0)):
        reading.map("model.dense_layers", len(dense), words=f"mlp_only_layers {dense}")
    elif dense:
        reading.ignore(f"mlp_only_layers {dense}: a job has dense layers first, or experts in every n-th layer")


def _read_tied(reading: Reading) -> None:
    if (tied := reading.flag("tie_word_embeddings")) is None:
        tied = _types()[reading.word("model_type")][1]
    reading.map("model.tied_embeddings", tied, "tie_word_embeddings")


def _read_dropout(reading: Reading) -> None:
    scores = [name for name in reading.names if name.startswith("att")]
    found = [reading.number(*names, whole=False) for names in (reading.names[: -len(scores)], scores)]
    if rates := [rate for rate in found if rate is not None]:
        reading.map("model.dropout", float(max(rates)), *reading.names)


def _read_dtype(reading: Reading) -> None:
    dtype = reading.word("torch_dtype", "dtype").removeprefix("torch.")
    if dtype in ("bfloat16", "float16", "float32"):
        reading.assume("batch.precision", "fp16" if dtype == "float16" else "bf16", f"weights are stored as {dtype}")


_LATENT = (lambda rank: "mla" if rank else None, str)
_OR_NONE = (int, lambda rank: rank or None)
ROWS = rows_of("huggingface", globals())
