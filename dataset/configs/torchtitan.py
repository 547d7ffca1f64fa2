"""torchtitan's TOML of its releases of 2024 to early 2026; its Python registry builds the same settings.

Source: torchtitan ``config_manager.py`` (2024), ``config/job_config.py`` (2025), ``config/configs.py`` (2026), and
``distributed/pipeline_parallel.py`` for layers per stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, flat, read_source, toml_text
from stepsight.dataset.configs.drafts import WHOLE, ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import ConfigText, JobView, Row, even_stages, read_rows, rows_of
from stepsight.dataset.configs.torchtitan_models import flavor_of, flavor_sizes, flavors, registry_settings
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.rules import MOST_LAYERS

_SCHEDULES: Mapping[str, list[Any]] = facts()["torchtitan_code"]["schedules"]
_PRESET = re.compile(r"preset for (\d{1,9}) (\w+) GPUs?")  # a comment in the published files
_DEVICES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb", "b200": "b200-sxm-180gb"}


def read(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from a configuration, whose comments may name the devices."""
    if preset := _PRESET.search(read_source(file.path)):
        draft.map("run.devices", int(preset[1]), f"comment: {preset[0]}")
        if hardware := _DEVICES.get(preset[2].lower()):
            draft.map("cluster.hardware", hardware, f"comment: {preset[0]}")
    first = (Row("model.family", read=_read_flavor),) if "model" in file.tables else ()
    _read(flat(file.tables), draft, first)


def read_registry(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from one function of a Python registry."""
    _read(registry_settings(file, draft), draft)


def _read(settings: Mapping[str, Any], draft: Draft, first: tuple[Row, ...] = ()) -> None:
    draft.framework = "torchtitan"
    defaults = {"activation_checkpoint.mode": "selective"}
    read_rows((*first, *ROWS), Reading(draft, settings, default="torchtitan's default", defaults=defaults))


def write(job: Job) -> ConfigText:
    """Write a job as TOML; if the model is none of torchtitan's flavors, its sizes are listed as not expressed."""
    view, notes = JobView(job), []
    if found := flavor_of(job.model):
        view.put("model.", name=found[0], flavor=found[1])
        view.expressed(*(f"model.{key}" for table in flavors().values() for each in table.values() for key in each))
    else:
        notes.append("no flavor of torchtitan has these sizes: add one to its models, and name it in [model]")
    view.write(ROWS)
    if view.settings.get("activation_checkpoint.selective_ac_option") == "2":
        notes.append("a job takes selective_ac_option op as every second layer too: write op if that is meant")
    notes.append(f"torchrun --nnodes {job.cluster.nodes} --nproc_per_node {job.cluster.devices_per_node}")
    return view.text(toml_text(view.tables()), ".toml", *notes)


def _in(key: str) -> tuple[str, ...]:
    """A key of [parallelism], and where early releases have it."""
    return f"parallelism.{key}", f"training.{key}", f"experimental.{key}"


def _read_flavor(reading: Reading) -> None:
    name, flavor = reading.word("model.name") or "llama3", reading.word("model.flavor") or "debugmodel"
    sizes = flavor_sizes(name, flavor)
    if sizes is None:
        what, known = ("flavor", flavors()[name]) if name in flavors() else ("name", flavors())
        raise JobError(f"model.{what} must be one of {', '.join(known)}, got {name} {flavor}")
    for key, value in sizes.items():
        reading.map(f"model.{key}", value, words=f"{name} {flavor}")


def _read_degrees(reading: Reading) -> None:
    replicate = reading.positive(*_in("data_parallel_replicate_degree")) or 1
    names = (*_in("data_parallel_shard_degree"), "training.data_parallel_degree")
    shard = reading.positive(*names, auto=-1) or -1
    reading.map("parallel.zero_stage", 0 if shard == 1 else 3, *names)
    if shard > 0:
        reading.map("parallel.dp", replicate * shard)
        if replicate > 1 and shard > 1:
            reading.map("parallel.dp_shard", shard, *names)
    elif replicate > 1:
        reading.map("run.replicas_of_shards", replicate)
    again = reading.word("parallelism.fsdp_reshard_after_forward") or "default"
    if shard != 1:
        value = again == "always" or (again == "default" and reading.degree("pp") == 1)
        reading.map("parallel.reshard_after_forward", value, "parallelism.fsdp_reshard_after_forward")


def _write_degrees(view: JobView) -> None:
    parallel, stage = view.job.parallel, view["parallel.zero_stage"]
    shard = view["parallel.dp_shard"] or view["parallel.dp"]
    replicate = parallel.dp // shard if stage else parallel.dp
    view.put("parallelism.data_parallel_", replicate_degree=replicate, shard_degree=parallel.dp // replicate)
    view.refuse("parallel.zero_stage", stage in (1, 2))
    if parallel.dp // replicate > 1:
        again = view["parallel.reshard_after_forward"] and stage == 3  # earlier stages keep whole parameters
        words = "default" if again == (parallel.pp == 1) else "always" if again else "never"
        view.put("parallelism.", fsdp_reshard_after_forward=words)
    view.refuse("parallel.overlap_grad_reduce", not view["parallel.overlap_grad_reduce"])


def _read_expert_tp(reading: Reading) -> None:
    if (reading.positive(*_in("expert_tensor_parallel_degree")) or 1) == 1:
        reading.map("parallel.expert_tp", 1)


def _read_pipeline(reading: Reading) -> None:
    pp, layers = reading.degree("pp"), reading.get("model.layers")
    word = reading.word(*_in("pipeline_parallel_schedule")) or "1F1B"
    known = {name.lower(): schedule for name, schedule in _SCHEDULES.items()}
    schedule, chunks = known.get(word.lower().replace(" ", ""), ("", 1))
    if not schedule:
        raise JobError(f"pipeline_parallel_schedule must be one of {', '.join(known)}, got {word!r:.80}")
    reading.map("parallel.schedule", schedule)
    if not layers:
        return
    ends = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    weights = [1 if (weight := reading.number(end)) is None else weight for end in ends]
    each = reading.positive("parallelism.pipeline_parallel_layers_per_stage")
    splits = reading.take(*_in("pipeline_parallel_split_points"))
    parts = reading.take("parallelism.module_fqns_per_model_part")
    if isinstance(splits, list) and splits:
        places = [str(split).rpartition(".")[2] for split in splits]
        if not all(map(WHOLE, places)):
            raise JobError(f"pipeline_parallel_split_points must name layers, as layers.4, got {splits!r:.80}")
        counts = [after - before for before, after in pairwise([0, *map(int, places), layers])]
    elif isinstance(parts, list) and parts:
        counts = [str(part).count("layers.") for part in parts]
    else:
        stages = math.ceil((layers + sum(weights)) / each) if each else pp * chunks
        counts = even_stages(stages, layers, *weights) if 0 < stages <= MOST_LAYERS else []
    if len(counts) % pp or sum(counts) != layers or min(counts, default=0) < 0:
        reading.ignore(f"{layers} layers in stages of {counts}, with pp {pp}")
        counts = []
    chunks = len(counts) // pp or chunks
    if chunks > 1:
        reading.map("parallel.virtual_stages", chunks, words=f"{pp * chunks} stages on {pp} ranks")
    if len(set(counts)) > 1:
        reading.map("parallel.stage_layers", counts, words="first and last stage have fewer layers")


def _write_pipeline(view: JobView) -> None:
    parallel, layers = view.job.parallel, view.job.model.layers
    wanted = (view["parallel.schedule"], view["parallel.virtual_stages"] > 1)
    name = next((name for name, (schedule, chunks) in _SCHEDULES.items() if (schedule, chunks > 1) == wanted), "")
    view.refuse("parallel.schedule", not name)
    named = {"pipeline_parallel_schedule": name} if name else {}
    view.put("parallelism.", **named, pipeline_parallel_microbatch_size=view["batch.micro_batch"])
    stages, counts = parallel.pp * parallel.virtual_stages, view.stage_layers()
    weight = 0 if len(set(counts)) == 1 else 1
    if counts == even_stages(stages, layers, weight, weight):
        view.put("parallelism.pipeline_parallel_", first_stage_less_layers=weight, last_stage_less_layers=weight)
        if parallel.virtual_stages > 2:
            view.put("parallelism.", pipeline_parallel_layers_per_stage=-(-(layers + 2 * weight) // stages))
        return
    ends = [sum(counts[:stage]) for stage in range(stages + 1)]
    parts = [[f"layers.{layer}" for layer in range(start, end)] for start, end in pairwise(ends)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    view.put("parallelism.", module_fqns_per_model_part=parts)


def _read_batch(reading: Reading) -> None:
    pp, length = reading.degree("pp"), reading.get("model.seq_len")
    if tokens := reading.positive("training.num_tokens_per_microbatch_per_dp_rank"):
        reading.map("batch.micro_batch", max(1, tokens // length))
        if total := reading.positive("training.num_tokens_per_train_step", auto=-1):
            reading.map("batch.global_batch", total // length)
        pieces = reading.positive("parallelism.num_pp_microbatches") or 1
        reading.map("run.accumulation", pieces if pp > 1 else 1, "parallelism.num_pp_microbatches")
        return
    names, one = ("training.local_batch_size", "training.batch_size"), "parallelism.pipeline_parallel_microbatch_size"
    local = reading.positive(*names) or 8
    if pp == 1:
        reading.map("batch.micro_batch", local, *names)
    elif count := reading.positive(*_in("pipeline_parallel_microbatches")):
        reading.map("batch.micro_batch", max(1, local // count), words=f"{local} sequences over {count} micro-batches")
    elif one not in reading and "training.batch_size" in reading:
        reading.assume("batch.micro_batch", max(1, local // pp), f"{local} sequences over {pp} micro-batches")
    else:
        reading.map("batch.micro_batch", reading.positive(one) or 1, one)
    if total := reading.positive("training.global_batch_size", auto=-1):
        reading.map("batch.global_batch", total, "training.global_batch_size")
    for key in ("run.local_batch", "run.flush_batch"):
        reading.map(key, local, *names)


def _write_batch(view: JobView) -> None:
    batch, pp = view.job.batch, view.job.parallel.pp
    local = batch.micro_batch * (view.job.num_micro_batches // view["batch.flushes"] if pp > 1 else 1)
    view.put("training.", local_batch_size=local, global_batch_size=view["batch.global_batch"])
    view.expressed("batch.micro_batch")


def _read_precision(reading: Reading) -> None:
    converters, old = reading.take("model.converters"), reading.flag("float8.enable_float8_linear")
    names = [str(name) for name in (converters if isinstance(converters, list) else [converters])]
    if old or any("float8" in name for name in names):
        reading.map("batch.precision", "fp8")
        reading.assume("batch.fp8_scaling", "dynamic", "torchao scales by what tensors hold")
    elif any(name.startswith(("mx", "quantize.linear.mx")) for name in names):
        reading.assume("batch.precision", "fp8", "MXFP8 is taken as fp8")


def _read_recompute(reading: Reading) -> None:
    option = reading.word("activation_checkpoint.selective_ac_option") or "2"
    if WHOLE(option):
        reading.map("parallel.recompute", "full")
        reading.map("parallel.recompute_every", int(option), "activation_checkpoint.selective_ac_option")
    elif option == "op":
        kept = "attention and every second product are kept; torchtitan's profile takes it as half"
        reading.map("parallel.recompute", "selective", words=f"selective_ac_option op: {kept}")
    else:
        raise JobError(f"activation_checkpoint.selective_ac_option must be op or a whole number, got {option!r:.80}")


def _read_compile(reading: Reading) -> None:
    compiled, components = reading.flag("compile.enable", "training.compile"), reading.take("compile.components")
    if compiled is not None:
        reading.map("model.eager_kernels", not (compiled and (components is None or "model" in str(components))))


_TEXT = (int, str)
ROWS = rows_of("torchtitan", globals())
