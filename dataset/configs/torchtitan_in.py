"""torchtitan's settings to a job: TOML of its releases of 2024 to early 2026, and what its Python registry builds.

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
from stepsight.dataset.configs.documents import flat
from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.configs.torchtitan_flavors import FLAVORS, flavor_sizes
from stepsight.dataset.job.rules import MOST_LAYERS

# Torch's names of schedules, lower case without spaces: schedule, and virtual stages where none are stated.
SCHEDULES = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("1f1b", 2),
    "loopedbfs": ("looped-bfs", 2),
    "interleavedzerobubble": ("interleaved-zb", 2),
    "zbvzerobubble": ("zbv", 2),
    "dualpipev": ("dualpipev", 2),
}
_PRESET = re.compile(r"preset for (\d+) (\w+) GPUs?")  # a comment in the published files
_DEVICES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb", "b200": "b200-sxm-180gb"}
_OLD = ("training", "experimental")  # tables of early releases that hold what [parallelism] holds now
_DEFAULT = "torchtitan's default"
_IGNORED = ("job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "comm.", "validation.", "debug.")


def is_torchtitan(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of torchtitan's TOML."""
    model = tables.get("model")
    if model is None:  # how a model is trained, without the model
        return all(isinstance(tables.get(name), Mapping) for name in ("training", "parallelism"))
    return isinstance(model, Mapping) and "flavor" in model


def read_torchtitan(tables: Mapping[str, Any], draft: Draft, text: str = "") -> None:
    """Fill a draft from the tables of a configuration; ``text`` is the file's, whose comments may name the devices."""
    settings = Settings(flat(tables))
    draft.framework = "torchtitan"
    preset = _PRESET.search(text)
    if preset:
        draft.facts["devices"] = int(preset[1])
        hardware = _DEVICES.get(preset[2].lower())
        if hardware:
            draft.map("cluster.hardware", hardware, f"comment: {preset[0]}")
    name, flavor = settings.word("model.name") or "llama3", settings.word("model.flavor") or "debugmodel"
    if "model" not in tables:
        read_settings(settings, draft)
        return
    sizes = flavor_sizes(name, flavor)
    if sizes is None:
        flavors = FLAVORS.get(name)
        what, known = ("flavor", flavors) if flavors else ("name", FLAVORS)
        raise JobError(f"model.{what} must be one of {', '.join(known)}, got {name} {flavor}")
    for key, value in sizes.items():
        draft.map(f"model.{key}", value, f"{name} {flavor}")
    read_settings(settings, draft)


def read_settings(settings: Settings, draft: Draft) -> None:
    """Fill a draft from all but the model's sizes."""
    length = settings.positive("training.seq_len", "training.max_context_length") or 2048
    draft.settle("model.seq_len", length, settings.stated("training.seq_len", "training.max_context_length"), _DEFAULT)
    _degrees(settings, draft)
    _pipeline(settings, draft)
    _batch(settings, draft)
    _precision(settings, draft)
    _recompute(settings, draft)
    _rest(settings, draft)
    for text in settings.left():
        if not text.startswith(_IGNORED):
            draft.ignore(text)


def _of(key: str) -> tuple[str, ...]:
    """The names of a key of [parallelism], in current and early releases."""
    return f"parallelism.{key}", *(f"{table}.{key}" for table in _OLD)


def _degrees(settings: Settings, draft: Draft) -> None:
    names = {"tensor_parallel_degree": "tp", "context_parallel_degree": "cp", "pipeline_parallel_degree": "pp"}
    for key, name in {**names, "expert_parallel_degree": "ep"}.items():
        value = settings.number(*_of(key))
        if value is not None and (name != "ep" or draft.get("model.experts")):
            draft.map(f"parallel.{name}", value, settings.source(*_of(key)))
    replicate = settings.positive(*_of("data_parallel_replicate_degree")) or 1
    shard = settings.positive(*_of("data_parallel_shard_degree"), "training.data_parallel_degree", auto=-1) or -1
    source = settings.source(*_of("data_parallel_shard_degree"), "training.data_parallel_degree")
    if shard == 1:
        draft.map("parallel.zero_stage", 0, f"{source} 1")
    else:
        keys = (*_of("data_parallel_shard_degree"), "training.data_parallel_degree")
        stated = settings.stated(*keys)
        draft.settle("parallel.zero_stage", 3, stated and f"{stated} {shard} (FSDP2)", f"{_DEFAULT} (FSDP2)")
    if shard > 0:
        draft.map("parallel.dp", replicate * shard, f"{source} {shard}, replicated {replicate} times")
        if replicate > 1 and shard > 1:
            draft.map("parallel.dp_shard", shard, source)
    elif replicate > 1:
        draft.facts["replicas_of_shards"] = replicate
    etp = settings.positive(*_of("expert_tensor_parallel_degree"))
    tp, ep = draft.degree("tp"), draft.degree("ep")
    if draft.get("model.experts") and tp > 1 and ep > 1 and (etp or 1) == 1:
        source = settings.source(*_of("expert_tensor_parallel_degree"))
        draft.map("parallel.expert_tp", 1, source if etp else "experts share out the tensor-parallel ranks")
    sequence = settings.flag("parallelism.enable_sequence_parallel")
    if tp > 1:
        value = sequence is not False
        draft.assume("parallel.sequence_parallel", value, "torchtitan's tensor parallelism shares out norms")
    reshard = settings.word("parallelism.fsdp_reshard_after_forward") or "default"
    if shard != 1:
        value = reshard == "always" or (reshard == "default" and draft.degree("pp") == 1)
        stated = settings.stated("parallelism.fsdp_reshard_after_forward")
        words = stated and f"{stated} {reshard}"
        draft.settle("parallel.reshard_after_forward", value, words, f"{_DEFAULT}: fsdp_reshard_after_forward default")
    if draft.degree("cp") > 1:
        name = "parallelism.context_parallel_rotate_method"
        rotate, stated = settings.word(name) or "allgather", settings.stated(name)
        way = "all_gather" if rotate == "allgather" else "ring"
        draft.settle("parallel.context_parallel", way, stated and f"{stated} {rotate}", _DEFAULT)


def _pipeline(settings: Settings, draft: Draft) -> None:
    pp, layers = draft.degree("pp"), draft.get("model.layers")
    word = settings.word(*_of("pipeline_parallel_schedule")) or "1F1B"
    first = settings.number("parallelism.pipeline_parallel_first_stage_less_layers")
    last = settings.number("parallelism.pipeline_parallel_last_stage_less_layers")
    each = settings.positive("parallelism.pipeline_parallel_layers_per_stage")
    splits = settings.take(*_of("pipeline_parallel_split_points"))
    parts = settings.take("parallelism.module_fqns_per_model_part")
    if pp == 1:
        return
    schedule, chunks = SCHEDULES.get(word.lower().replace(" ", ""), ("", 1))
    if not schedule:
        raise JobError(f"pipeline_parallel_schedule must be one of {', '.join(SCHEDULES)}, got {word!r:.80}")
    stated = settings.stated(*_of("pipeline_parallel_schedule"))
    draft.settle("parallel.schedule", schedule, stated and f"{stated} {word}", _DEFAULT)
    if not layers:
        return
    weights = 1 if first is None else first, 1 if last is None else last
    counts: list[int] = []
    if isinstance(splits, list) and splits:
        names = [str(split).rpartition(".")[2] for split in splits]
        if not all(name.isdecimal() for name in names):
            raise JobError(f"pipeline_parallel_split_points must name layers, as layers.4, got {splits!r:.80}")
        places = [0, *map(int, names), layers]
        counts = [after - before for before, after in pairwise(places)]
    elif isinstance(parts, list) and parts:
        counts = [str(part).count("layers.") for part in parts]
    else:
        stages = math.ceil((layers + sum(weights)) / each) if each else pp * chunks
        counts = even_stages(stages, layers, *weights) if 0 < stages <= MOST_LAYERS else []
    if len(counts) % pp or sum(counts) != layers or min(counts, default=0) < 0:
        draft.ignore(f"{layers} layers in stages of {counts}, with pp {pp}")
        counts = []
    chunks = len(counts) // pp or chunks
    if chunks > 1:
        draft.map("parallel.virtual_stages", chunks, f"{pp * chunks} stages on {pp} ranks")
    if counts and len(set(counts)) > 1:
        draft.map("parallel.stage_layers", counts, "first and last stage have fewer layers")


def even_stages(stages: int, layers: int, first: int, last: int) -> list[int]:
    """Layers of each stage as torchtitan divides them; embedding and output count as some layers each."""
    even, rest = divmod(layers + first + last, max(1, stages))
    counts = [even + (stage < rest) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def _batch(settings: Settings, draft: Draft) -> None:
    pp, length = draft.degree("pp"), draft.get("model.seq_len")
    tokens = settings.positive("training.num_tokens_per_microbatch_per_dp_rank")
    pieces = settings.positive("parallelism.num_pp_microbatches") or 1
    if tokens is not None:
        draft.map("batch.micro_batch", max(1, tokens // length), f"{tokens} tokens of {length}")
        total = settings.positive("training.num_tokens_per_train_step", auto=-1)
        if total is not None:
            draft.map("batch.global_batch", total // length, f"num_tokens_per_train_step {total}")
        draft.facts["accumulation"] = pieces if pp > 1 else 1
        return
    local = settings.positive("training.local_batch_size", "training.batch_size") or 8
    source = settings.source("training.local_batch_size", "training.batch_size")
    stated = settings.stated("training.local_batch_size", "training.batch_size")
    micro = settings.positive("parallelism.pipeline_parallel_microbatch_size")
    count = settings.positive(*_of("pipeline_parallel_microbatches"))
    if pp == 1:
        draft.settle("batch.micro_batch", local, stated, _DEFAULT)
    elif count:
        words = stated and f"{stated} over {count} micro-batches"
        draft.settle("batch.micro_batch", max(1, local // count), words, f"{_DEFAULT} over {count} micro-batches")
    elif micro is None and "training.batch_size" in settings:
        draft.assume("batch.micro_batch", max(1, local // pp), f"{source} over {pp} micro-batches, {_DEFAULT}")
    else:
        draft.settle(
            "batch.micro_batch", micro or 1, settings.stated("parallelism.pipeline_parallel_microbatch_size"), _DEFAULT
        )
    total = settings.positive("training.global_batch_size", auto=-1)
    if total is not None:
        draft.map("batch.global_batch", total, settings.source("training.global_batch_size"))
    else:
        draft.facts["local_batch"] = local


def _precision(settings: Settings, draft: Draft) -> None:
    converters = settings.take("model.converters")
    names = converters if isinstance(converters, list) else [converters] if converters else []
    old = settings.flag("float8.enable_float8_linear")
    if any("float8" in str(name) for name in names) or old:
        draft.map("batch.precision", "fp8", "float8.enable_float8_linear" if old else "model.converters float8")
        draft.assume("batch.fp8_scaling", "dynamic", "torchao scales by what tensors hold")
    elif any(str(name).startswith(("mx", "quantize.linear.mx")) for name in names):
        draft.assume("batch.precision", "fp8", "MXFP8 is taken as fp8")
    elif settings.word("training.dtype") == "bfloat16":
        draft.map("batch.precision", "pure-bf16", "training.dtype bfloat16")
    elif settings.word("training.mixed_precision_param") == "float32":
        draft.map("batch.precision", "fp32", "training.mixed_precision_param float32")
    else:
        draft.assume("batch.precision", "bf16", f"{_DEFAULT}: mixed_precision_param bfloat16")
    draft.assume("parallel.gradient_dtype", "fp32", f"{_DEFAULT}: mixed_precision_reduce float32")
    settings.find("training.mixed_precision_param", "training.mixed_precision_reduce", "training.dtype")


def _recompute(settings: Settings, draft: Draft) -> None:
    mode = settings.word("activation_checkpoint.mode") or "selective"
    stated = settings.word("activation_checkpoint.selective_ac_option")
    option, source = stated or "2", settings.source("activation_checkpoint.mode")
    if mode == "selective" and option.isdecimal():
        reason = f"{_DEFAULT}: mode selective, selective_ac_option {option}"
        words = f"{source} selective, every {option} layers"
        says = settings.stated("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
        draft.settle("parallel.recompute", "full", says and words, reason)
        draft.settle("parallel.recompute_every", int(option), stated and f"selective_ac_option {option}", reason)
    elif mode == "selective" and option == "op":
        words = "attention and every second product are kept; a job of torchtitan takes it as recompute_every 2"
        draft.map("parallel.recompute", "selective", f"{source} selective, selective_ac_option op: {words}")
    elif mode == "selective":
        raise JobError(f"activation_checkpoint.selective_ac_option must be op or a whole number, got {option!r:.80}")
    elif mode in ("none", "full"):
        draft.map("parallel.recompute", mode, f"{source} {mode}")
    else:
        draft.assume("parallel.recompute", "selective", f"a job has no {source} {mode}")


def _rest(settings: Settings, draft: Draft) -> None:
    if settings.flag(*_of("enable_async_tensor_parallel"), "compile.enable_async_tensor_parallel"):
        draft.map("parallel.overlap_tp", "torch-async", "enable_async_tensor_parallel")
    components = settings.take("compile.components")
    compiled = settings.flag("compile.enable", "training.compile")
    if compiled is not None:
        of_model = compiled and (components is None or "model" in str(components))
        source = settings.source("compile.enable", "training.compile")
        draft.map("model.eager_kernels", not of_model, f"{source} {str(compiled).lower()}")
    if settings.flag("training.enable_cpu_offload"):
        draft.map("optimizer.offload", True, "training.enable_cpu_offload")
    implementation, fused = settings.word("optimizer.implementation"), settings.flag("optimizer.fused")
    if implementation or fused is not None:
        value = implementation == "fused" if implementation else bool(fused)
        draft.map("optimizer.fused", value, settings.source("optimizer.implementation", "optimizer.fused"))
    kind = settings.word("optimizer.name").lower()
    if kind in ("adam", "adamw"):
        draft.map("optimizer.kind", kind, "optimizer.name")
    elif kind:
        draft.assume("optimizer.kind", "adamw", f"a job has no optimizer {kind}")
    norm = settings.number("training.max_norm", whole=False)
    draft.settle("optimizer.clip_grad_norm", norm is None or norm > 0, settings.stated("training.max_norm"), _DEFAULT)
