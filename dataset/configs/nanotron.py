"""Nanotron's YAML.

Source: nanotron ``config/config.py``, ``config/parallelism_config.py``, ``config/models_config.py``, 2024 to 2026.
"""

from __future__ import annotations

from stepsight.dataset.configs.documents import flat, yaml_text
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import ConfigText, JobView, read_rows, rows_of
from stepsight.dataset.job.job import Job

_MODEL = "model.model_config."
_LEFT_OUT = {f"{_MODEL}moe_config.shared_expert_intermediate_size": 5632}


def read(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from a configuration."""
    read_rows(ROWS, Reading(draft, flat(file.tables), default="Nanotron's default", defaults=_LEFT_OUT))


def write(job: Job) -> ConfigText:
    """Write a job as Nanotron's YAML."""
    view = JobView(job)
    view.write(ROWS)
    return view.text(yaml_text(view.tables()), ".yaml")


def _read_family(reading: Reading) -> None:
    flags = [reading.flag(f"{_MODEL}is_{kind}_config") for kind in ("llama", "qwen2", "llamoe", "starcoder2")]
    reading.map("model.family", "gpt" if flags[-1] else "llama")


def _read_vocab(reading: Reading) -> None:
    size = reading.copy("model.vocab", f"{_MODEL}vocab_size")
    multiple = reading.positive("model.make_vocab_size_divisible_by") or 1
    step = multiple * (reading.positive("parallelism.tp") or 1)
    if size is not None and size % step:
        reading.map("model.vocab", -(-size // step) * step, words=f"vocab_size {size}, made divisible by {step}")


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
