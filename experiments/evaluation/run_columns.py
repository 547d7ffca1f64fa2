"""Columns of a table of measured runs: their usual names and units, and what each means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepsight.dataset.base.errors import TableError
from stepsight.experiments.reports.text_table import table


@dataclass(frozen=True, slots=True)
class Column:
    """A column that is read.

    Attributes:
        name: As stepsight calls it.
        meaning: For people.
        example: A cell of the template.
        others: Names that others give it; with a unit at their end where the column has one.
        unit: Key of ``UNITS`` that its name stands for; empty: a number or a text without one.
    """

    name: str
    meaning: str
    example: str = ""
    others: tuple[str, ...] = ()
    unit: str = ""


# How many of the column's own unit one of another is, by kind of unit.
UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    "gb": {"gb": 1.0, "gib": 1.073741824, "mb": 1e-3, "mib": 1.048576e-3, "bytes": 1e-9},
}

COLUMNS = (
    Column("source", "who measured it; rows of one source are reported together", "mine", ("dataset", "experiment")),
    Column("hardware", "devices, as H100 or a preset's name", "H100", ("gpu", "gpu_model", "gpu_type", "accelerator")),
    Column("gpu_mem_gb", "memory of a device, in GB", "80", ("gpu_memory",), "gb"),
    Column("nodes", "number of nodes", "2", ("num_nodes", "n_nodes", "nnodes")),
    Column(
        "gpus_per_node", "devices of a node", "8", ("devices_per_node", "num_gpus_per_node", "nproc_per_node")
    ),
    Column(
        "gpus", "devices of the run", "16",
        ("num_gpus", "n_gpus", "ngpus", "gpu_count", "num_devices", "n_devices", "world_size", "total_gpus"),
    ),
    Column("inter_interconnect", "network between nodes: a preset's name, or words", "", ("network", "fabric")),
    Column("framework", "what ran it, as megatron-core or torchtitan", "megatron-core", ("software", "library")),
    Column("date", "when it ran, as 2025-04: it tells generations of a framework apart", "", ("month", "year")),
    Column("container", "its image, as nvcr.io/nvidia/nemo:24.07: it tells releases of a framework apart", "",
           ("image", "docker_image", "container_image")),
    Column("cuda", "version of CUDA, as 12.4; does not change the answer", "", ("cuda_version",)),
    Column("cublas", "version of cuBLAS; does not change the answer", "", ("cublas_version",)),
    Column("nccl", "version of NCCL, as 2.21.5; a warning says if the model does not describe it", "",
           ("nccl_version",)),
    Column("attention", "attention kernels, as unfused, flash-attn 2.5.8 or cuDNN 9; default: as the framework has it",
           "", ("attention_backend", "attn_impl", "attention_kernels")),
    Column("kernels", "software whose measured kernels are taken, as TensorRT-LLM or SGLang; default: the predictor's"),
    Column("model_name", "name of the model", "my-7b", ("model",)),
    Column("family", "gpt, llama, bert, t5 or vit", "llama", ("architecture", "model_family", "model_type")),
    Column("layers", "layers", "32", ("num_layers", "n_layers", "n_layer", "num_hidden_layers")),
    Column("hidden", "hidden size", "4096", ("hidden_size", "hidden_dim", "d_model", "dim", "n_embd", "embed_dim")),
    Column("ffn", "inner size of the MLP", "11008", ("ffn_hidden_size", "intermediate_size", "d_ff", "ffn_dim")),
    Column("heads", "attention heads", "32", ("num_heads", "n_heads", "n_head", "num_attention_heads")),
    Column("kv_heads", "heads of keys and values", "32", ("num_kv_heads", "num_key_value_heads", "n_kv_heads",
           "num_query_groups")),
    Column("vocab", "vocabulary", "32000", ("vocab_size", "padded_vocab_size")),
    Column("seq_len", "tokens of a sequence", "4096", ("seq_length", "sequence_length", "max_seq_len",
           "context_length", "seqlen")),
    Column("experts", "experts of a layer", "", ("num_experts", "n_experts", "num_local_experts")),
    Column("top_k", "experts of a token", "", ("topk", "moe_router_topk", "num_experts_per_tok")),
    Column("gated_mlp", "yes or no", "", ("swiglu",)),
    Column("tied_embeddings", "yes or no", "", ("tie_word_embeddings",)),
    Column("tp", "tensor parallel ranks", "8", ("tensor_parallel", "tensor_parallel_size", "tp_size",
           "tensor_model_parallel_size", "tensor_parallel_degree")),
    Column("pp", "pipeline stages", "2", ("pipeline_parallel", "pipeline_parallel_size", "pp_size",
           "pipeline_model_parallel_size", "pipeline_parallel_degree")),
    Column("vp", "virtual stages of a pipeline stage", "1", ("virtual_stages", "vpp",
           "virtual_pipeline_model_parallel_size")),
    Column("cp", "context parallel ranks", "1", ("context_parallel", "context_parallel_size", "cp_size")),
    Column("ep", "expert parallel ranks", "1", ("expert_parallel", "expert_model_parallel_size", "ep_size")),
    Column("dp", "data parallel ranks", "1", ("data_parallel", "data_parallel_size", "dp_size")),
    Column("zero_stage", "0 to 3; FSDP is 3", "1", ("zero", "zero_optimization_stage")),
    Column("sequence_parallel", "yes or no", "yes", ("sp",)),
    Column("micro_batch", "sequences of a micro-batch of a replica", "1", ("micro_batch_size", "mbs",
           "per_device_batch_size", "per_device_train_batch_size", "local_batch_size")),
    Column("global_batch", "sequences of an iteration", "128", ("global_batch_size", "gbs", "train_batch_size")),
    Column("recompute", "none, selective or full", "none", ("activation_checkpointing", "recompute_granularity",
           "activation_recompute")),
    Column("precision", "bf16, fp16, fp8 or fp32", "bf16", ("dtype", "data_type")),
    Column("iteration_time_s", "seconds of one optimizer step", "4.5", ("iteration_time", "iter_time", "step_time",
           "time_per_step", "time_per_iteration", "elapsed_time_per_iteration"), "s"),
    Column("memory_gb", "peak memory of a device, in GB", "", ("memory", "peak_memory", "max_memory"), "gb"),
    Column("quality", "C: too much of it is guessed, it is left out"),
    Column("notes", "settings as overlap_grad_sync=true; SUSPECT: predicted but not scored"),
)  # fmt: skip
_NAMES = frozenset(column.name for column in COLUMNS)
_UNIT = re.compile(r"[ _]*(?:\(([a-z]+)\)|\[([a-z]+)\])$")


def read_header(names: Sequence[str]) -> list[tuple[str, float]]:
    """Stepsight's name of each column, and the factor from its unit to stepsight's.

    A column that is not known keeps its name, in lower case, and so does another name of a column that is there itself.

    Raises:
        TableError: If two columns mean the same, or a unit is not one of the column's.
    """
    plain = [name.strip().lower() for name in names]
    found = [(own, 1.0) if own in _NAMES else _read_name(own) for own in plain]
    found = [
        (own, 1.0) if name in plain and own != name else (name, f) for own, (name, f) in zip(plain, found, strict=True)
    ]
    for name in {name for name, _ in found}:
        same = [names[index].strip() for index, (other, _) in enumerate(found) if other == name]
        if len(same) > 1:
            raise TableError(f"a table has a column once, got twice {name} ({', '.join(same)})")
    return found


def _read_name(written: str) -> tuple[str, float]:
    lower = written.strip().lower()
    stated = _UNIT.search(lower)
    unit = next(filter(None, stated.groups()), "") if stated else ""
    bare = re.sub(r"[ -]+", "_", _UNIT.sub("", lower).strip())
    for column in COLUMNS:
        units = UNITS.get(column.unit, {})
        if unit and units and unit not in units and bare in (column.name, *column.others):
            raise TableError(f"the unit of {written.strip()!r:.80} must be one of {', '.join(units)}")
        if bare in (column.name, *column.others):
            return column.name, units.get(unit, 1.0)
        for suffix, factor in units.items():
            own = column.name.removesuffix(f"_{column.unit}")
            if any(bare == f"{name}_{suffix}" for name in (own, *column.others)):
                return column.name, factor
    return lower, 1.0


def template() -> str:
    """A table with one made-up run, to be filled in."""
    filled = [column for column in COLUMNS if column.example]
    header, row = (",".join(getattr(column, key) for column in filled) for key in ("name", "example"))
    return f"{header}\n{row}"


def explanation(needed: Sequence[str]) -> str:
    """Every column, for the terminal.

    Args:
        needed: Those that must be there.
    """
    rows = [[c.name, "yes" if c.name in needed else "", c.meaning, ", ".join(c.others)] for c in COLUMNS]
    units = "; ".join(f"{', '.join(units)} for {kind}" for kind, units in UNITS.items())
    legend = f"a unit may stand at the end of a name, as step_time_ms, or behind it, as step_time (ms): {units}"
    return f"{table(['column', 'needed', 'meaning', 'also called'], rows)}\n{legend}"
