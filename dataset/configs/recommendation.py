"""Configurations of recommendation models: flags of three DLRMs and HugeCTR's JSON; torchrec's plans are written.

Sources: facebookresearch/dlrm ``dlrm_s_pytorch.py``, 2019 to 2024, and its ``torchrec_dlrm/dlrm_main.py``, 2022 to
2024; NVIDIA DeepLearningExamples, ``PyTorch/Recommendation/DLRM``, 2020 to 2023; HugeCTR's JSON of layers, until 2023.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, flat, read_source
from stepsight.dataset.configs.drafts import WHOLE, WITH_TABLES, ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import ConfigText, read_rows, rows_of
from stepsight.dataset.configs.megatron_words import reading_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding import placements_of
from stepsight.dataset.job.sharding_plans import TABLE_FIELDS, plan_tables, recommendation_model, torchrec_type

_FLAGS: Mapping[str, list[str]] = facts()["dlrm"]["flags"]
_WIDTH_AND_ROWS = ("embedding_vec_size", "slot_size_array")


def is_words(file: ConfigFile) -> bool:
    """Whether a file is a script or a file of arguments."""
    return file.path.suffix not in (*WITH_TABLES, ".py")


def has_flags(file: ConfigFile) -> bool:
    """Whether a script or a file of arguments has the flags of a DLRM."""
    text = read_source(file.path).replace("-", "_") if is_words(file) else ""
    return any(f"__{rows}" in text for rows in _FLAGS["rows"])


def _sizes(text: str, flag: str) -> list[int]:
    try:
        return [int(float(size)) for size in re.split(r"[,\-]", text.strip(",-"))]
    except (ValueError, OverflowError):
        raise JobError(f"{flag} must be whole numbers, got {text!r:.80}") from None


def read_flags(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from the flags of a DLRM and of what launches it."""
    marks = [f"--{name}" for rows in _FLAGS["rows"] for name in (rows, rows.replace("_", "-"))]
    reading = reading_of(file, draft, marks)
    reading.default = "PyTorch's default"
    read_rows(ROWS, reading)
    draft.choose("torchrec", "flags of a DLRM in PyTorch")


def _read_model(reading: Reading) -> None:
    rows, width, pooled = (reading.word(*_FLAGS[what]) for what in ("rows", "dim", "pooling"))
    if not rows or not WHOLE(width):
        raise JobError(f"a DLRM's flags must state rows and width of its tables, got {rows!r:.80} and {width!r:.40}")
    flag, hots = reading.source(*_FLAGS["rows"]), reading.source(*_FLAGS["pooling"])
    sizes, hot = _sizes(rows, flag), _sizes(pooled, hots) if pooled else [1]
    hot = hot * len(sizes) if len(hot) == 1 else hot
    if len(hot) != len(sizes):
        raise JobError(f"{hots} must have a size for each of {len(sizes)} tables, got {len(hot)}")
    pairs = zip(sizes, hot, strict=True)
    tables = [{"rows": rows, "dim": int(width), "pooling": float(min(each, rows))} for rows, each in pairs]
    model, words = dict[str, Any](tables=tables), {"tables": flag}
    for key in ("bottom_mlp", "top_mlp", "interaction", "cross_layers", "cross_rank", "dense_features"):
        flag, value = reading.source(*_FLAGS[key]), reading.word(*_FLAGS[key])
        if key.endswith("mlp") and value:
            model[key], words[key] = _sizes(value, flag), flag
        elif key == "interaction" and value:
            model[key], words[key] = "dcn-v2" if "dcn" in value else "dot", flag
        elif WHOLE(value):
            model[key], words[key] = int(value), flag
    if reading.word("arch_mlp_bot") and "bottom_mlp" in model:  # begins with the size of its input
        model["dense_features"], words["dense_features"] = model["bottom_mlp"].pop(0), words["bottom_mlp"]
    _fill(reading.draft, model, words)


def _read_precision(reading: Reading) -> None:
    for name, precision in (("allow_tf32", "tf32"), ("amp", "fp16"), ("bf16", "bf16")):
        if reading.flag(name):
            reading.map("batch.precision", precision, name)
    reading.assume("batch.precision", "fp32")


def _read_cluster(reading: Reading) -> None:
    if found := re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", reading.word("j")):  # of torchx run
        reading.map("cluster.nodes", int(found[1]), "j")
        reading.map("cluster.devices_per_node", int(found[2]), "j")


def _fill(draft: Draft, model: Mapping[str, Any], words: Mapping[str, str]) -> None:
    """Set the keys of a model: stated ones with their words, others as a ``dlrm`` has them."""
    for key, value in recommendation_model(model).items():
        reason = "of a recommendation model" if key not in TABLE_FIELDS else "no configuration states it"
        record = draft.map if key in words else draft.assume
        record(f"model.{key}", list(value) if isinstance(value, tuple) else value, words.get(key, reason))


def read_hugectr(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from HugeCTR's JSON of a solver, an optimizer and layers."""
    stated = file.tables.get("layers")
    layers = [flat(layer) for layer in stated if isinstance(layer, Mapping)] if isinstance(stated, list) else []
    kinds = [str(layer.get("type", "")) for layer in layers]
    of_kind = {kind: layer for kind, layer in reversed([*zip(kinds, layers, strict=True)])}
    sparse, data, cross = list[dict[str, Any]](), of_kind.get("Data", {}), of_kind.get("MultiCross", {})
    for layer in (layer for layer, kind in zip(layers, kinds, strict=True) if "SparseEmbedding" in kind):
        width, rows = (layer.get(f"sparse_embedding_hparam.{name}") for name in _WIDTH_AND_ROWS)
        if type(width) is not int or not isinstance(rows, list) or not all(type(size) is int for size in rows):
            raise JobError(f"HugeCTR's sparse embedding must state {' and '.join(_WIDTH_AND_ROWS)}")
        sparse += [{"rows": size, "dim": width, "pooling": min(_pooling(data), float(size))} for size in rows]
    if not sparse:
        raise JobError("HugeCTR's layers must have a sparse embedding, got " + ", ".join(kinds)[:120])
    meets = next((at for at, kind in enumerate(kinds) if kind in ("Interaction", "MultiCross", "Concat")), len(kinds))
    outs = [(at, layer.get("fc_param.num_output")) for at, layer in enumerate(layers)]
    bottom, top = (
        [size for at, size in outs if type(size) is int and (at > meets) is above] for above in (False, True)
    )
    model: dict[str, Any] = {"tables": sparse, "interaction": "dcn-v2" if cross else "dot"}
    model |= {"bottom_mlp": bottom or [512, 256, sparse[0]["dim"]], "top_mlp": top or [1]}
    whole = {"cross_layers": cross.get("mc_param.num_layers"), "cross_rank": cross.get("mc_param.projection_dim")}
    whole["dense_features"] = data.get("dense.dense_dim")
    model |= {name: value for name, value in whole.items() if type(value) is int and value > 0}
    _fill(draft, model, dict.fromkeys(model, "layers"))
    others = flat(file.tables)
    if type(size := others.get("solver.batchsize")) is int:
        draft.map("batch.global_batch", size, "solver.batchsize")
    draft.map("run.accumulation", 1, "a step has one batch")
    draft.map("batch.precision", "fp16" if others.get("solver.mixed_precision") else "fp32", "solver.mixed_precision")
    if isinstance(gpus := others.get("solver.gpu"), list) and gpus:
        nodes = [node for node in gpus if isinstance(node, list)] or [gpus]
        draft.map("cluster.nodes", len(nodes), "solver.gpu")
        draft.map("cluster.devices_per_node", len(nodes[0]), "solver.gpu")
    kind = str(others.get("optimizer.type", "")).lower()
    for key in ("sharding.optimizer", "optimizer.kind") if kind in ("adam", "adagrad", "sgd") else ():
        draft.map(key, kind, "optimizer.type")
    draft.choose("hugectr", "layers")
    read = {key for key in others if re.sub(r"^layers\.\d+\.", "", key) in facts()["hugectr"]["of_layers"]}
    Reading(draft, {key: others[key] for key in others if key not in read and not draft.names(key)}).ignore_rest()


def _pooling(data: Mapping[str, Any]) -> float:
    """Indices of a slot in HugeCTR's layer of data."""
    names = ("max_feature_num_per_sample", "slot_num", "nnz_per_slot")
    most, slots, each = (data.get(f"sparse.0.{name}") for name in names)
    if type(most) is int and type(slots) is int and slots > 0:
        return max(most / slots, 1.0)
    return float(each) if isinstance(each, int | float) and each > 0 else 1.0


def write_plan(job: Job) -> ConfigText:
    """Write where the tables of a job lie as torchrec's plan."""
    ranks = job.table_ranks
    places = placements_of(job.model.tables, replace(job.sharding, partial_rows=False), ranks)
    if lost := [place.name for place in places if torchrec_type(place, ranks) is None]:
        rule = f"torchrec cuts a table by rows over all {ranks.num} ranks or over the {ranks.per_node} of a node"
        found = f"{len(lost)} lie on others ({', '.join(lost[:3])})"
        raise JobError(f"{rule}, and {found}: state sharding.partial_rows = false")
    plan = plan_tables(job.model.tables, places, ranks)
    note = "the key of the plan is the path of the EmbeddingBagCollection in the model: rename it"
    return ConfigText(text=json.dumps(plan, indent=1) + "\n", suffix=".json", notes=(note,))


ROWS = rows_of("recommendation", globals())
