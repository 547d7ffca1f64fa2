"""Nanotron's YAML.

Source: nanotron ``config/config.py``, ``config/parallelism_config.py``, ``config/models_config.py``, 2024 to 2026.
"""

from __future__ import annotations

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat, yaml_text
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import ConfigText, JobView, read_rows, rows_of
from stepsight.dataset.job.job import Job

_MODEL = "model.model_config."
_EXPERTS = f"{_MODEL}moe_config."
_OPTIMIZER = "optimizer.optimizer_factory."


def read(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from a configuration."""
    read_rows(ROWS, Reading(draft, flat(file.tables), default="Nanotron's default"))


def write(job: Job) -> ConfigText:
    """Write a job as Nanotron's YAML."""
    view = JobView(job)
    view.write(ROWS)
    return view.text(yaml_text(view.tables()), ".yaml")


def _read_family(reading: Reading) -> None:
    if reading.flag(f"{_MODEL}is_mamba_config"):
        raise JobError("a job has no layers with state spaces (Mamba), got is_mamba_config")
    starcoder = reading.flag(f"{_MODEL}is_starcoder2_config")
    kinds = ("is_llama_config", "is_qwen2_config", "is_llamoe_config")
    kind = next((kind for kind in kinds if reading.flag(_MODEL + kind)), "")
    words = kind or "is_starcoder2_config" if starcoder else kind
    reading.draft.map("model.family", "gpt" if starcoder else "llama", words)


def _read_vocab(reading: Reading) -> None:
    size = reading.copy("model.vocab", f"{_MODEL}vocab_size")
    multiple = reading.positive("model.make_vocab_size_divisible_by") or 1
    step = multiple * (reading.positive("parallelism.tp") or 1)
    if size is not None and size % step:
        reading.map("model.vocab", -(-size // step) * step, words=f"vocab_size {size}, made divisible by {step}")


def _read_experts(reading: Reading) -> None:
    names = (f"{_EXPERTS}num_experts", f"{_MODEL}moe_num_experts")  # the second of the example with the older model
    if (reading.number(*names) or 0) <= 1:
        return
    reading.copy("model.experts", *names)
    if reading.copy("model.expert_ffn", f"{_EXPERTS}moe_intermediate_size") is None and names[0] in reading:
        reading.assume("model.expert_ffn", 1408)
    name = "shared_expert_intermediate_size"
    shared = reading.positive(_EXPERTS + name)
    if reading.flag(f"{_EXPERTS}enable_shared_expert"):
        size, inner = shared or 5632, reading.get("model.expert_ffn")
        reading.share("model.shared_experts", size, inner, f"{name} {size} / {inner}")


def _read_expert_degree(reading: Reading) -> None:
    reading.copy("parallel.ep", "parallelism.expert_parallel_size")
    ep, group = reading.degree("ep"), reading.degree("dp") * reading.degree("cp")
    if group % ep:
        reading.draft.drop("parallel.ep")
        reading.ignore(f"parallelism.expert_parallel_size {ep}: a job's lies within dp * cp, which is {group}")


def _write_expert_degree(view: JobView) -> None:
    parallel, ep = view.job.parallel, view["parallel.ep"]
    lost = parallel.dp * parallel.cp % ep > 0
    view.put("parallelism.", expert_parallel_size=1 if lost else ep)
    view.refuse("parallel.ep", lost)


def _read_batch(reading: Reading) -> None:
    steps, replicas = reading.positive("tokens.batch_accumulation_per_replica"), reading.get("parallel.dp")
    micro = reading.get("batch.micro_batch")
    if steps and not (replicas and micro):
        reading.map("run.accumulation", steps)
    elif replicas and micro:
        steps = steps or 1
        words = f"micro_batch_size {micro} * batch_accumulation_per_replica {steps} * dp {replicas}"
        reading.map("batch.global_batch", micro * steps * replicas, words=words)


_CLIP = (lambda norm: norm > 0, lambda clips: 1.0 if clips else None)
_ZERO = (int, lambda stage: min(stage, 1))
ROWS = rows_of("nanotron", globals())
