"""Hugging Face Accelerate's YAML and training arguments to how a job is trained.

Source: accelerate ``commands/config/config_args.py``, ``utils/dataclasses.py`` (0.30 to 1.10), transformers
``training_args.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.deepspeed_in import read_deepspeed
from stepsight.dataset.configs.documents import flat, read_tables
from stepsight.dataset.configs.drafts import Draft, Settings

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
# Names and numbers of torch's ShardingStrategy: ZeRO stage, and whether shards are copied from node to node.
STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
_NUMBERS = dict(zip("12345", STRATEGIES, strict=True))
_MEGATRON = {
    "megatron_lm_config.megatron_lm_tp_degree": "parallel.tp",
    "megatron_lm_config.megatron_lm_pp_degree": "parallel.pp",
    "megatron_lm_config.megatron_lm_sequence_parallelism": "parallel.sequence_parallel",
}
_DEGREES = {
    "parallelism_config.parallelism_config_tp_size": "parallel.tp",
    "parallelism_config.parallelism_config_cp_size": "parallel.cp",
}
_FSDP = (
    *("sharding_strategy", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type"),
    *("reshard_after_forward", "activation_checkpointing", "min_num_params", "forward_prefetch", "use_orig_params"),
)
_TRAINING = ("per_device_train_batch_size", "gradient_checkpointing", "output_dir", "num_train_epochs")


def is_accelerate(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of Accelerate's YAML."""
    return "distributed_type" in tables or ("num_processes" in tables and "mixed_precision" in tables)


def is_fsdp(tables: Mapping[str, Any]) -> bool:
    """Whether tables are the ``fsdp_config`` of transformers' training arguments, in a file of their own."""
    return any(str(name).removeprefix("fsdp_") in _FSDP for name in tables)


def is_training_arguments(tables: Mapping[str, Any]) -> bool:
    """Whether tables are training arguments of transformers, or of a trainer that has the same."""
    return sum(name in tables for name in _TRAINING) >= 2


def read_fsdp(tables: Mapping[str, Any], draft: Draft) -> None:
    """Fill a draft from transformers' ``fsdp_config``: names with or without ``fsdp_`` before them."""
    values = {f"fsdp_config.fsdp_{name.removeprefix('fsdp_')}": value for name, value in flat(tables).items()}
    settings = Settings(values, {f"fsdp_config.fsdp_{name.removeprefix('fsdp_')}": name for name in flat(tables)})
    _fsdp(settings, draft)
    for text in settings.left():
        draft.ignore(text)


def read_accelerate(tables: Mapping[str, Any], draft: Draft, folder: Path) -> None:
    """Fill a draft; a DeepSpeed JSON of the same folder that the file names is read too."""
    settings = Settings(flat(tables))
    processes, machines = settings.positive("num_processes"), settings.positive("num_machines") or 1
    if processes:
        draft.map("cluster.nodes", machines, "num_machines")
        if processes % machines == 0:
            draft.map("cluster.devices_per_node", processes // machines, f"num_processes {processes}")
        draft.facts["devices"] = processes
    mixed = settings.word("mixed_precision")
    if mixed in PRECISIONS:
        draft.map("batch.precision", PRECISIONS[mixed], f"mixed_precision {mixed}")
    kind = settings.word("distributed_type")
    settings.copy(draft, _DEGREES)
    if kind == "FSDP":
        _fsdp(settings, draft)
    elif kind == "DEEPSPEED":
        _deepspeed(settings, draft, folder)
    elif kind == "MEGATRON_LM":
        _megatron(settings, draft)
    else:
        draft.assume("parallel.zero_stage", 0, f"distributed_type {kind} replicates parameters")
    _replicas(settings, draft)
    steps = settings.positive("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
    if steps:
        draft.facts["accumulation"] = steps
    for text in settings.left():
        draft.ignore(text)


def _fsdp(settings: Settings, draft: Draft) -> None:
    strategy = settings.word("fsdp_config.fsdp_sharding_strategy")
    reshard = settings.word("fsdp_config.fsdp_reshard_after_forward").upper()
    name = _NUMBERS.get(strategy, strategy) or _NUMBERS.get(reshard, reshard)
    if name in STRATEGIES:
        stage, hybrid = STRATEGIES[name]
        draft.map("parallel.zero_stage", stage, f"fsdp_sharding_strategy {name}")
        if hybrid and isinstance(draft.get("cluster.devices_per_node"), int) and draft.get("cluster.nodes", 1) > 1:
            draft.map("parallel.dp_shard", draft.get("cluster.devices_per_node"), f"fsdp_sharding_strategy {name}")
    else:
        draft.map("parallel.zero_stage", 3, "distributed_type FSDP")
        if reshard in ("TRUE", "FALSE"):
            draft.map("parallel.reshard_after_forward", reshard == "TRUE", "fsdp_reshard_after_forward")
    if settings.flag("fsdp_config.fsdp_activation_checkpointing"):
        draft.map("parallel.recompute", "full", "fsdp_activation_checkpointing")
    if settings.flag("fsdp_config.fsdp_offload_params"):
        draft.map("optimizer.offload", True, "fsdp_offload_params")
    if settings.word("fsdp_config.fsdp_backward_prefetch") in ("NO_PREFETCH", "3"):
        draft.map("parallel.prefetch", 0, "fsdp_backward_prefetch")


def _deepspeed(settings: Settings, draft: Draft, folder: Path) -> None:
    named = settings.word("deepspeed_config.deepspeed_config_file")
    if named:
        _read_named(named, "deepspeed_config_file", draft, folder)
    stage = settings.number("deepspeed_config.zero_stage")
    if stage is not None:
        draft.map("parallel.zero_stage", stage, "deepspeed_config.zero_stage")
    elif not named:
        draft.assume("parallel.zero_stage", 2, "Accelerate's default with DeepSpeed")
    if settings.word("deepspeed_config.offload_optimizer_device") in ("cpu", "nvme"):
        draft.map("optimizer.offload", True, "deepspeed_config.offload_optimizer_device")
    clip = settings.number("deepspeed_config.gradient_clipping", whole=False)
    if clip is not None:
        draft.map("optimizer.clip_grad_norm", clip > 0, "deepspeed_config.gradient_clipping")


def _read_named(named: str, key: str, draft: Draft, folder: Path) -> None:
    """Read the DeepSpeed JSON that a file names, where it is named or beside the file."""
    path = next((path for path in (folder / named, folder / Path(named).name) if path.is_file()), None)
    if path is None:
        draft.ignore(f"{key} {named}: not found beside the file; name it too")
    else:
        read_deepspeed(read_tables(path), draft)


def _megatron(settings: Settings, draft: Draft) -> None:
    draft.framework = "megatron-core"
    settings.copy(draft, _MEGATRON)
    if settings.flag("megatron_lm_config.megatron_lm_use_distributed_optimizer"):
        draft.map("parallel.zero_stage", 1, "megatron_lm_use_distributed_optimizer")
    if settings.flag("megatron_lm_config.megatron_lm_recompute_activations"):
        draft.map("parallel.recompute", "selective", "megatron_lm_recompute_activations")
    count = settings.positive("megatron_lm_config.megatron_lm_num_micro_batches")
    if count:
        draft.facts["accumulation"] = count


def _replicas(settings: Settings, draft: Draft) -> None:
    replicate = settings.positive("parallelism_config.parallelism_config_dp_replicate_size") or 1
    shard = settings.positive("parallelism_config.parallelism_config_dp_shard_size") or 1
    if replicate * shard > 1:
        draft.map("parallel.dp", replicate * shard, "dp_replicate_size * dp_shard_size")
        draft.map("parallel.zero_stage", 3 if shard > 1 else 0, "dp_shard_size")
        if replicate > 1 and shard > 1:
            draft.map("parallel.dp_shard", shard, "dp_shard_size")


def read_training_arguments(tables: Mapping[str, Any], draft: Draft, folder: Path) -> None:
    """Fill a draft from training arguments; a DeepSpeed JSON of the same folder that they name is read too."""
    settings = Settings(flat(tables))
    settings.copy(draft, {"per_device_train_batch_size": "batch.micro_batch"})
    steps = settings.positive("gradient_accumulation_steps") or 1
    draft.facts["accumulation"] = steps
    if settings.flag("bf16") and settings.flag("fp16"):
        raise JobError("only one of bf16 and fp16 must be true, got both")
    for name in ("bf16", "fp16"):
        if settings.flag(name):
            draft.map("batch.precision", name, name)
    if settings.flag("gradient_checkpointing") is not None:
        value = "full" if settings.flag("gradient_checkpointing") else "none"
        draft.map("parallel.recompute", value, "gradient_checkpointing")
    length = settings.positive("max_seq_length", "max_length", "model_max_length", "cutoff_len", "sequence_len")
    if length:
        draft.map("model.seq_len", length, "max_seq_length")
    clip = settings.number("max_grad_norm", whole=False)
    stated = settings.stated("max_grad_norm")
    draft.settle("optimizer.clip_grad_norm", clip is None or clip > 0, stated, "transformers' default: max_grad_norm 1")
    if "adamw_torch_fused" in settings.word("optim"):
        draft.map("optimizer.fused", True, "optim")
    named = settings.word("deepspeed")
    if named:
        _read_named(named, "deepspeed", draft, folder)
    if "full_shard" in settings.word("fsdp"):
        draft.map("parallel.zero_stage", 3, "fsdp")
    elif "shard_grad_op" in settings.word("fsdp"):
        draft.map("parallel.zero_stage", 2, "fsdp")
    for text in settings.left():
        draft.ignore(text)
