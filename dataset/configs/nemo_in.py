"""NeMo's YAML of its 1.x releases and launchers to a job: Megatron-LM's settings in tables ``trainer`` and ``model``.

Source: NeMo ``examples/nlp/language_modeling/conf/megatron_*_config.yaml`` (r1.20 to r2.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepsight.dataset.configs.documents import flat
from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.configs.megatron_in import read_megatron
from stepsight.dataset.configs.megatron_words import canonical

_REFERENCE = re.compile(r"\$\{([.\w]+)\}")
_NAMES = {
    "trainer.devices": "devices_per_node",
    "trainer.num_nodes": "nodes",
    "trainer.gradient_clip_val": "clip_grad",
    "run.name": "run_name",
    "model.data.seq_length_dec": "decoder_seq_length",
}
_OF_MODEL = ("model.data.", "model.tokenizer.", "model.optim.", "model.nsys_profile.", "model.peft.")
_PRECISIONS = {"bf16": "bf16", "16": "fp16", "32": "fp32"}


def is_nemo(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of NeMo's YAML."""
    model = tables.get("model")
    if not isinstance(tables.get("trainer"), Mapping) or not isinstance(model, Mapping):
        return False
    encoder = model.get("encoder")
    return "hidden_size" in model or (isinstance(encoder, Mapping) and "hidden_size" in encoder)


def read_nemo(tables: Mapping[str, Any], draft: Draft) -> None:
    """Fill a draft from a configuration."""
    everything = flat(tables)
    values: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for key, value in everything.items():
        value = _resolved(key, value, everything)
        if key in _NAMES:
            name = _NAMES[key]
        elif key.startswith(("model.encoder.", "model.decoder.")):  # of T5, whose other sizes are those of the encoder
            side, _, name = key.removeprefix("model.").partition(".")
            name = f"{side}_num_layers" if name == "num_layers" else name if side == "encoder" else ""
        elif key.startswith("model.") and not key.startswith(_OF_MODEL):
            name, value = canonical(key.removeprefix("model."), value)
        elif key == "model.optim.name":
            name = "optim.name"
        elif key.startswith("model.tokenizer."):
            name = f"tokenizer_{key.rpartition('.')[2]}"
        else:
            continue
        if name and value is not None and value != "???":
            values[name], shown[name] = value, key
    if values.pop("fp8", False) is True:
        values["fp8"], shown["fp8"] = "hybrid", "model.fp8"
    precision = str(everything.get("trainer.precision") or "bf16").split("-")[0]
    if _PRECISIONS.get(precision) in ("bf16", "fp16"):
        values[_PRECISIONS[precision]], shown[_PRECISIONS[precision]] = True, f"trainer.precision {precision}"
    _experts(values)
    draft.framework = "nemo"
    if values.pop("megatron_amp_O2", None) is False:
        draft.ignore("model.megatron_amp_O2 false: gradients are taken to be as with true")
    if values.get("fsdp"):
        stage = {"full": 3, "grad": 2, "hybrid": 3}.get(str(values.get("fsdp_sharding_strategy") or "full"), 3)
        draft.map("parallel.zero_stage", stage, "model.fsdp_sharding_strategy")
    name = f"{everything.get('name') or ''} {everything.get('run.name') or ''}".lower()
    for part in ("bert", "t5"):
        if part in name or (part == "t5" and "decoder_num_layers" in values):
            draft.map("model.family", part, f"name {name}")
    attends = values.pop("transformer_engine", None) or values.get("use_flash_attention")
    settings = Settings(values, shown)
    read_megatron(settings, draft)
    if not attends and draft.get("model.fused_attention") is None:
        draft.map("model.fused_attention", False, "neither transformer_engine nor use_flash_attention")


def _experts(values: dict[str, Any]) -> None:
    if values.get("num_query_groups"):
        values["group_query_attention"] = True


def _resolved(key: str, value: Any, everything: Mapping[str, Any]) -> Any:
    """Resolve a value that refers to another one, as ``${model.encoder_seq_length}``."""
    for _ in range(5):
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return value if not (isinstance(value, str) and "${" in value) else None
        name = found[1]
        name = key.rpartition(".")[0] + name if name.startswith(".") else name
        value = everything.get(name)
    return None
