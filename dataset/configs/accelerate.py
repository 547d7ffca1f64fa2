"""How a job is trained: Accelerate's YAML, DeepSpeed's JSON, transformers' training arguments and ``fsdp_config``.

Source: accelerate ``commands/config/config_args.py``, ``utils/dataclasses.py`` (0.30 to 1.10), transformers
``training_args.py``; deepspeed.ai/docs/config-json, DeepSpeed ``runtime/config.py`` and ``runtime/zero/config.py``
(0.15 to 0.18).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, flat, nearest, yaml_text
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import ConfigText, JobView, read_rows, rows_of
from stepsight.dataset.job.job import Job

_STRATEGIES: Mapping[str, list[Any]] = facts()["fsdp"]["strategies"]
_NUMBERS = dict(zip("12345", _STRATEGIES, strict=True))
DEEPSPEED_MARKS: tuple[str, ...] = tuple(facts()["deepspeed"]["marks"])
_STAGE = "parallel.zero_stage"
_TRAINING_SECTIONS = ("parallel.", "batch.", "cluster.", "optimizer.", "execution.")  # of a job beside the model's


def read(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft; a DeepSpeed JSON of the same folder that the file names is read too."""
    ways = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed_plugin", "MEGATRON_LM": "megatron_plugin"}
    way = ways.get(str(file.tables.get("distributed_type")), "replicated")
    rows = [row for group in ("rows", way, "last") for row in rows_of("accelerate", globals(), group)]
    read_rows(rows, Reading(draft, flat(file.tables), folder=file.path.parent))


def read_fsdp(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from transformers' ``fsdp_config``: names with or without ``fsdp_`` before them."""
    settings = flat(file.tables)
    names = {f"fsdp_config.fsdp_{name.removeprefix('fsdp_')}": name for name in settings}
    read_rows(
        rows_of("accelerate", globals(), "fsdp"),
        Reading(draft, {name: settings[shown] for name, shown in names.items()}, names),
    )


def read_training(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from training arguments; a DeepSpeed JSON of the same folder that they name is read too."""
    draft.assume("run.accumulation", 1, "transformers' default")
    default = "transformers' default: max_grad_norm 1"
    reading = Reading(draft, flat(file.tables), default=default, folder=file.path.parent)
    read_rows(rows_of("accelerate", globals(), "training"), reading)


def read_deepspeed(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft; values that are ``"auto"`` are left to other configurations.

    Raises:
        JobError: If a value stands where DeepSpeed has a table, or both bf16 and fp16 are enabled.
    """
    for name, example in facts()["deepspeed"]["tables"].items():
        if file.tables.get(name) is not None and not isinstance(file.tables[name], Mapping):
            raise JobError(f"{name} must be a table, as {example}, got {file.tables[name]!r:.80}")
    settings = flat(file.tables)
    stated = {key: value for key, value in settings.items() if value != "auto"}
    read_rows(rows_of("accelerate", globals(), "deepspeed"), Reading(draft, stated, default="DeepSpeed's default"))
    for name in settings:
        if name not in stated:
            draft.ignore(f"{name} auto: left to other configurations")


def write(job: Job) -> ConfigText:
    """Write how a job is trained as Accelerate's YAML: FSDP where parameters or gradients are sharded."""
    view = JobView(job)
    view.write(rows_of("accelerate", globals()))
    note = "the model's sizes stand in its config.json, the micro-batch in the training arguments"
    return view.text(yaml_text(view.tables()), ".yaml", note, sections=_TRAINING_SECTIONS)


def write_deepspeed(job: Job) -> ConfigText:
    """Write how a job is trained as DeepSpeed's JSON."""
    view = JobView(job)
    view.write(rows_of("accelerate", globals(), "deepspeed"))
    text = json.dumps(view.tables(), indent=2) + "\n"
    notes = ["the model's sizes stand in its config.json: write huggingface too"]
    if job.parallel.recompute == "full" and job.parallel.recompute_every == 1:
        view.expressed("parallel.recompute")
        notes.append("recomputation is the model's: call model.gradient_checkpointing_enable() in the script")
    return view.text(text, ".json", *notes, sections=_TRAINING_SECTIONS)


def _read_devices(reading: Reading) -> None:
    processes, machines = reading.positive("num_processes"), reading.positive("num_machines") or 1
    if processes:
        reading.map("cluster.nodes", machines)
        if processes % machines == 0:
            reading.map("cluster.devices_per_node", processes // machines, "num_processes")
        reading.map("run.devices", processes, "num_processes")


def _write_strategy(view: JobView) -> None:
    parallel = view.job.parallel
    hybrid = bool(view["parallel.dp_shard"]) and parallel.dp_shard == view.job.cluster.devices_per_node
    strategy = next(name for name, each in _STRATEGIES.items() if each == [view[_STAGE], hybrid])
    view.put(**{"fsdp_config.fsdp_sharding_strategy": strategy})
    view.refuse("parallel.dp_shard", parallel.dp_shard and not hybrid)


def _read_deepspeed_way(reading: Reading) -> None:
    _read_named(reading)
    reading.find("distributed_type")
    if reading.copy(_STAGE, "deepspeed_config.zero_stage") is None and not reading.word(*reading.names):
        reading.assume(_STAGE, 2, "Accelerate's default with DeepSpeed")


def _read_megatron(reading: Reading) -> None:
    reading.draft.choose("megatron-core", reading.word("distributed_type"))


def _read_fsdp(reading: Reading) -> None:
    names = ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward")
    strategy, reshard = reading.word(names[0]), reading.word(names[1]).upper()
    name = _NUMBERS.get(strategy, strategy) or _NUMBERS.get(reshard, reshard)
    reading.find("distributed_type")
    if name in _STRATEGIES:
        stage, hybrid = _STRATEGIES[name]
        reading.map(_STAGE, stage)
        per_node = reading.get("cluster.devices_per_node")
        if hybrid and isinstance(per_node, int) and reading.get("cluster.nodes", 1) > 1:
            reading.map("parallel.dp_shard", per_node, *names)
    else:
        reading.map(_STAGE, 3, words="FSDP")
        if reshard in ("TRUE", "FALSE"):
            reading.map("parallel.reshard_after_forward", reshard == "TRUE", names[1])


def _read_named(reading: Reading) -> None:
    """Read the DeepSpeed JSON that a file names, where it is named or beside the file."""
    named = reading.word(*reading.names)
    path = nearest(reading.folder, (named, Path(named).name))
    if path is not None:
        read_deepspeed(ConfigFile.open(path), reading.draft)
    elif named:
        reading.ignore(f"{reading.names[0]} {named}: not found beside the file; name it too")


def _read_replicas(reading: Reading) -> None:
    names = [f"parallelism_config.parallelism_config_dp_{name}_size" for name in ("replicate", "shard")]
    replicate, shard = (reading.positive(name) or 1 for name in names)
    if replicate * shard > 1:
        reading.map("parallel.dp", replicate * shard)
        reading.map(_STAGE, 3 if shard > 1 else 0, *reversed(names))
        if replicate > 1 and shard > 1:
            reading.map("parallel.dp_shard", shard, names[1])


def _read_accumulation(reading: Reading) -> None:
    names = ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
    if steps := reading.positive(*names):
        reading.map("run.accumulation", steps, *names)
        total, micro = reading.get("batch.global_batch"), reading.get("batch.micro_batch")
        if total and micro and names[0] in reading and total % (micro * steps) == 0:
            reading.map("run.replicas", total // (micro * steps), names[0])


def _read_halves(reading: Reading) -> None:
    names = {name: "fp16" if "fp16" in name else "bf16" for name in reading.names if reading.flag(name)}
    if len(set(names.values())) > 1:
        raise JobError(f"only one of {' and '.join(names)} must be true, got both")
    for name, precision in [*names.items()][:1]:
        reading.map("batch.precision", precision, name)
    if not names and "fp16.enabled" in reading.names and reading.find(*reading.names):  # DeepSpeed has no other one
        reading.map("batch.precision", "fp32")
