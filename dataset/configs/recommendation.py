"""Configurations of recommendation models: flags of three DLRMs and HugeCTR's JSON; torchrec's plans are written.

Sources: facebookresearch/dlrm ``dlrm_s_pytorch.py``, 2019 to 2024, and its ``torchrec_dlrm/dlrm_main.py``, 2022 to
2024; NVIDIA DeepLearningExamples, ``PyTorch/Recommendation/DLRM``, 2020 to 2023; HugeCTR's JSON of layers, until 2023.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, read_source
from stepsight.dataset.configs.drafts import WHOLE, ConfigFile, Draft
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding import placements_of
from stepsight.dataset.job.sharding_plans import TABLE_FIELDS, plan_tables, recommendation_model

_FLAGS: Mapping[str, list[str]] = facts()["dlrm"]["flags"]
_SPARSE = {"adagrad": "rowwise-adagrad", "rwsadagrad": "rowwise-adagrad", "sgd": "sgd", "adam": "adam"}
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)(?:[=\s]+\"?'?([^\s\"'\\-][^\s\"'\\]*))?")


def is_words(file: ConfigFile) -> bool:
    """Whether a file is a script or a file of arguments."""
    return not file.has_tables and file.path.suffix != ".py"


def has_flags(file: ConfigFile) -> bool:
    """Whether a script or a file of arguments has the flags of a DLRM."""
    text = read_source(file.path).replace("-", "_") if is_words(file) else ""
    return any(f"__{rows}" in text for rows in _FLAGS["rows"])


def _sizes(text: str, flag: str) -> list[int]:
    try:
        return [int(float(size)) for size in re.split(r"[,\-]", text.strip(",-"))]
    except (ValueError, OverflowError):
        raise JobError(f"--{flag} must be whole numbers, got {text!r:.80}") from None


def read_flags(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from the flags of a DLRM."""
    lines = re.sub(r"(?m)^[ \t]*#.*", "", read_source(file.path)).replace("\\\n", " ")
    flags = {name.replace("-", "_"): value for name, value in _FLAG.findall(lines)}

    def first(what: str) -> tuple[str, str]:
        return next(((name, flags[name]) for name in _FLAGS[what] if flags.get(name)), ("", ""))

    (rows_flag, rows), (_, width), (_, pooled) = first("rows"), first("dim"), first("pooling")
    if not rows or "$" in rows or not WHOLE(width):
        raise JobError(f"a DLRM's flags must state rows and width of its tables, got {rows!r:.80} and {width!r:.40}")
    sizes, hot = _sizes(rows, rows_flag), _sizes(pooled, "multi_hot_sizes") if pooled else [1]
    hot = hot * len(sizes) if len(hot) == 1 else hot
    if len(hot) != len(sizes):
        raise JobError(f"--multi_hot_sizes must have a size for each of {len(sizes)} tables, got {len(hot)}")
    pairs = zip(sizes, hot, strict=True)
    tables = [{"rows": rows, "dim": int(width), "pooling": float(min(each, rows))} for rows, each in pairs]
    model, words = dict[str, Any](tables=tables), {"tables": f"--{rows_flag}"}
    for key in ("bottom_mlp", "top_mlp"):
        flag, value = first(key)
        if value:
            own = _sizes(value, flag)
            if flag == "arch_mlp_bot":  # begins with the size of its input
                model["dense_features"], own, words["dense_features"] = own[0], own[1:], f"--{flag}"
            model[key], words[key] = own, f"--{flag}"
    flag, interaction = first("interaction")
    if interaction:
        model["interaction"], words["interaction"] = "dcn-v2" if "dcn" in interaction else "dot", f"--{flag}"
    for key in ("cross_layers", "cross_rank", "dense_features"):
        flag, value = first(key)
        if WHOLE(value):
            model[key], words[key] = int(value), f"--{flag}"
    _fill(draft, model, words)
    _read_batch(draft, flags)
    for name in flags.keys() - {name for names in _FLAGS.values() for name in names}:
        draft.ignore(f"--{name} {flags[name]}".rstrip())


def _read_batch(draft: Draft, flags: Mapping[str, str]) -> None:
    flag = "mini_batch_size" if flags.get("mini_batch_size") else "batch_size"
    of_rank = flag == "batch_size" and "num_embeddings_per_feature" in flags  # NVIDIA's flag is of all devices
    if WHOLE(flags.get(flag, "")):
        draft.map("batch.micro_batch" if of_rank else "batch.global_batch", int(flags[flag]), f"--{flag}")
    draft.map("run.accumulation", 1, "a step has one batch")
    if "amp" in flags or "bf16" in flags:
        draft.map("batch.precision", "bf16" if "bf16" in flags else "fp16", "--bf16" if "bf16" in flags else "--amp")
    draft.assume("batch.precision", "fp32", "PyTorch's default")
    kind = flags.get("optimizer", "adagrad" if "adagrad" in flags else "")
    if kind.lower() in _SPARSE:
        draft.map("sharding.optimizer", _SPARSE[kind.lower()], "--optimizer" if "optimizer" in flags else "--adagrad")
    draft.choose("torchrec", "flags of a DLRM in PyTorch")


def _fill(draft: Draft, model: Mapping[str, Any], words: Mapping[str, str]) -> None:
    """Set the keys of a model: stated ones with their words, others as a ``dlrm`` has them."""
    for key, value in recommendation_model(model).items():
        reason = "of a recommendation model" if key not in TABLE_FIELDS else "no configuration states it"
        record = draft.map if key in words else draft.assume
        record(f"model.{key}", list(value) if isinstance(value, tuple) else value, words.get(key, reason))


def read_hugectr(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from HugeCTR's JSON of a solver, an optimizer and layers."""
    tables = file.tables
    stated = tables.get("layers")
    layers = [layer for layer in stated if isinstance(layer, Mapping)] if isinstance(stated, list) else []
    kinds = [str(layer.get("type", "")) for layer in layers]
    found = [layer for layer, kind in zip(layers, kinds, strict=True) if "SparseEmbedding" in kind]
    if not found:
        raise JobError("HugeCTR's layers must have a sparse embedding, got " + ", ".join(kinds)[:120])
    sparse: list[dict[str, Any]] = []
    data = next((layer for layer, kind in zip(layers, kinds, strict=True) if kind == "Data"), {})
    hot = _pooling(data)
    for layer in found:
        own = _table(layer, "sparse_embedding_hparam")
        width, rows = own.get("embedding_vec_size"), own.get("slot_size_array")
        if type(width) is not int or not isinstance(rows, list) or not all(type(size) is int for size in rows):
            raise JobError("HugeCTR's sparse embedding must state embedding_vec_size and slot_size_array")
        sparse += [{"rows": size, "dim": width, "pooling": min(hot, float(size))} for size in rows]
    model: dict[str, Any] = {"tables": sparse}
    meets = next((at for at, kind in enumerate(kinds) if kind in ("Interaction", "MultiCross", "Concat")), len(kinds))
    outs = [(at, _table(layer, "fc_param").get("num_output")) for at, layer in enumerate(layers)]
    bottom = [size for at, size in outs if type(size) is int and at < meets]
    model["bottom_mlp"] = bottom or [512, 256, sparse[0]["dim"]]
    model["top_mlp"] = [size for at, size in outs if type(size) is int and at > meets] or [1]
    model["interaction"] = "dcn-v2" if "MultiCross" in kinds else "dot"
    cross = next((_table(layer, "mc_param") for layer in layers if layer.get("type") == "MultiCross"), _table({}, ""))
    whole = {"cross_layers": cross.get("num_layers"), "cross_rank": cross.get("projection_dim")}
    whole["dense_features"] = _table(data, "dense").get("dense_dim")
    model |= {name: value for name, value in whole.items() if type(value) is int and value > 0}
    _fill(draft, model, dict.fromkeys(model, "layers"))
    solver = _table(tables, "solver")
    if type(solver.get("batchsize")) is int:
        draft.map("batch.global_batch", solver["batchsize"], "solver.batchsize")
    draft.map("run.accumulation", 1, "a step has one batch")
    draft.map("batch.precision", "fp16" if solver.get("mixed_precision") else "fp32", "solver.mixed_precision")
    gpus = solver.get("gpu")
    if isinstance(gpus, list) and gpus:
        nodes = [node for node in gpus if isinstance(node, list)] or [gpus]
        draft.map("cluster.nodes", len(nodes), "solver.gpu")
        draft.map("cluster.devices_per_node", len(nodes[0]), "solver.gpu")
    kind = str(_table(tables, "optimizer").get("type", "")).lower()
    if kind in ("adam", "adagrad", "sgd"):
        draft.map("sharding.optimizer", kind, "optimizer.type")
        draft.map("optimizer.kind", kind, "optimizer.type")
    draft.choose("hugectr", "layers")


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a table; empty if it is none."""
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}


def _pooling(data: Mapping[str, Any]) -> float:
    """Indices of a slot in HugeCTR's layer of data."""
    sparse = data.get("sparse")
    first = sparse[0] if isinstance(sparse, list) and sparse and isinstance(sparse[0], Mapping) else {}
    most, slots = first.get("max_feature_num_per_sample"), first.get("slot_num")
    if type(most) is int and type(slots) is int and slots > 0:
        return max(most / slots, 1.0)
    each = first.get("nnz_per_slot")
    return float(each) if isinstance(each, int | float) and each > 0 else 1.0


def write_plan(job: Job) -> ConfigText:
    """Write where the tables of a job lie as torchrec's plan."""
    places = placements_of(job.model.tables, job.sharding, job.table_ranks)
    plan = plan_tables(job.model.tables, places, job.table_ranks.per_node)
    note = "the key of the plan is the path of the EmbeddingBagCollection in the model: rename it"
    return ConfigText(text=json.dumps(plan, indent=1) + "\n", suffix=".json", notes=(note,))
