"""Megatron-LM's settings by name, from command-line words, scripts and YAML files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.configs.shell_scripts import ShellScript

# Flags that set another name to false (megatron/training/arguments.py, ``dest`` with ``store_false``).
_SWITCHED_OFF = {
    "disable_bias_linear": "add_bias_linear",
    "no_position_embedding": "add_position_embedding",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_scatter_gather_tensors_in_pipeline": "scatter_gather_tensors_in_pipeline",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_async_tensor_model_parallel_allreduce": "async_tensor_model_parallel_allreduce",
    "torch_fsdp2_no_reshard_after_forward": "torch_fsdp2_reshard_after_forward",
    "no_query_key_layer_scaling": "apply_query_key_layer_scaling",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
}
# Other names of the same setting: of older releases, Megatron-Core's dataclasses, NeMo's files and launchers.
_SAME = {
    "fp8_format": "fp8",
    "num_moe_experts": "num_experts",
    "model_parallel_size": "tensor_model_parallel_size",
    "batch_size": "micro_batch_size",
    "nproc_per_node": "devices_per_node",
    "nproc-per-node": "devices_per_node",
    "num_gpus": "devices_per_node",
    "gpus_per_node": "devices_per_node",
    "ntasks_per_node": "devices_per_node",
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "checkpoint_activations": "activations_checkpoint",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "checkpoint_num_layers": "recompute_num_layers",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "use_custom_fsdp": "use_megatron_fsdp",
    "ub_tp_comm_overlap": "tp_comm_overlap",
}
_PROGRAMS = (("bert", "bert"), ("t5", "t5"), ("vision", "vit"), ("vit", "vit"))  # part of a program's name: family
# Variables by which scripts name the size of the cluster.
_VARIABLES = {
    "nodes": ("NNODES", "NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "devices_per_node": ("GPUS_PER_NODE", "NUM_GPUS_PER_NODE", "NPROC_PER_NODE", "GPU_PER_NODE"),
}
_NUMBER = re.compile(r"-?\d")


def canonical(name: str, value: Any) -> tuple[str, Any]:
    """A setting's name and value as ``megatron_in`` reads them."""
    name = name.lstrip("-").replace("-", "_")
    if name in _SWITCHED_OFF:
        return _SWITCHED_OFF[name], not (value is True or value == "true")
    return _SAME.get(name, name), value


def settings_of_words(words: Sequence[str], launcher: Sequence[str] = ()) -> Settings:
    """Settings from the words of a command: ``--name``, ``--name=value``, ``--name value value``.

    Args:
        words: Of the command.
        launcher: Words of a batch system (``#SBATCH``), which the command's own win over.
    """
    values: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for number, source in enumerate((launcher, words)):
        for flag, value in _flags(source):
            name, value = canonical(flag, value)
            if number == 0:
                name, value = _of_slurm(name, value)
            if name:
                values[name], shown[name] = value, flag
    for name in ("nodes", "devices_per_node"):
        if not re.fullmatch(r"\d+", str(values.get(name, 1))):  # a place that the user fills in
            values.pop(name)
    return Settings(values, shown)


def _flags(words: Sequence[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    flag, values = "", list[str]()
    for word in (*words, "--"):
        if word.startswith("-") and not _NUMBER.match(word) and len(word) > 1:
            if flag:
                found.append((flag, True if not values else values[0] if len(values) == 1 else values))
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        elif word.endswith(".py"):  # the program: what stands before it is the launcher's
            found += [(flag, True if not values else values[0])] if flag else []
            flag, values = "", []
        elif flag:
            values.append(word)
    return found


def _of_slurm(name: str, value: Any) -> tuple[str, Any]:
    """A batch system's option as a setting; its other options say nothing about the job."""
    if name in ("nodes", "N"):
        return "nodes", value
    if name in ("devices_per_node", "gres", "gpus_per_node"):
        digits = re.findall(r"\d+", str(value))
        return ("devices_per_node", digits[-1]) if digits else ("", None)
    return "", None


def settings_of_script(script: ShellScript, draft: Draft) -> Settings:
    """Settings of the command of a script that trains a model: the one with the most options.

    A script that only sets variables is read as one command of all words in them.

    Raises:
        JobError: If there is none.
    """

    def options(words: Sequence[str]) -> int:
        return sum(word.startswith("--") for word in words)

    words = max(script.commands, key=options, default=[])
    if "--num-layers" not in words and "--hidden-size" not in words:
        held = (value.split() if isinstance(value, str) else value for value in script.variables.values())
        longest = max(held, key=options, default=[])
        if options(longest) > options(words):
            words = longest
            model = script.variables.get("HF_MODEL_CKPT") or script.variables.get("TOKENIZER_MODEL")
            words = [*words, "--tokenizer-name-or-path", model] if isinstance(model, str) and model else words
    if not options(words):
        raise JobError("a script must hold a command with options of Megatron-LM, as --num-layers, got none")
    words = [*words, *_cluster_words(script, words)]
    for condition in script.undecided:
        draft.ignore(f"condition taken as false: {condition}")
    for name in script.unset:
        if any(name in word for word in ("SLURM_NNODES", "WORLD_SIZE", "NNODES", "NUM_LAYERS", "HIDDEN_SIZE")):
            draft.ignore(f"variable {name} is not set in the script")
    settings = settings_of_words(words, script.batch_options)
    program = next((word for word in words if word.endswith(".py")), "")
    for part, family in _PROGRAMS:
        if part in program.rpartition("/")[2]:
            draft.assume("model.family", family, f"the program is {program}")
            break
    return settings


def _cluster_words(script: ShellScript, words: Sequence[str]) -> list[str]:
    """Options for the size of the cluster, where only the script's variables state it."""
    found = []
    stated = {canonical(flag, None)[0] for flag, _ in _flags([*script.batch_options, *words])}
    for setting, names in _VARIABLES.items():
        values = (script.variables.get(name) for name in names)
        value = next((value for value in values if isinstance(value, str) and value.isdigit()), "")
        if value and setting not in stated and not stated & {"gres", "N"}:
            found += [f"--{setting}", value]
    return found


def settings_of_tables(tables: Mapping[str, Any], keep: Sequence[str] = ()) -> Settings:
    """Settings of a YAML file: the innermost name of each value, as Megatron-Core's and NeMo's files have it.

    Args:
        tables: Of the file.
        keep: Names of inner tables whose values keep the table's name before theirs (``optim.name``).
    """
    values: dict[str, Any] = {}
    shown: dict[str, str] = {}

    def walk(table: Mapping[str, Any], path: str, prefix: str) -> None:
        for key, value in table.items():
            place = f"{path}{key}"
            if isinstance(value, Mapping):
                inner = str(key)
                walk(value, f"{place}.", f"{inner}." if inner in keep else prefix)
                continue
            name, value = canonical(prefix + str(key), value)
            if value is not None and (name not in values or not prefix):
                values[name], shown[name] = value, place

    walk(tables, "", "")
    return Settings(values, shown)
