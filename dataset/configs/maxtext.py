"""MaxText's YAML: a run's file, with the model's file that it names where that lies near it.

Source: MaxText ``configs/base.yml`` (names and defaults), ``configs/models/*.yml``, 2024 to 2026.
"""

from __future__ import annotations

import math
from pathlib import Path

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, flat, nearest, read_tables, yaml_text
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.key_table import ConfigText, JobView, read_rows, rows_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import MODELS

# Axes of the mesh within and between slices, and the degree of a job.
_AXES = {"tensor": "tp", "tensor_sequence": "tp", "context": "cp", "sequence": "cp", "pipeline": "pp", "expert": "ep"}
_FOLDERS = (
    ".",
    "models",
    *(f"{'../' * up}{place}" for up in range(1, 5) for place in ("models", "", "configs/models")),
)


def read(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from a run's or a model's file.

    Raises:
        JobError: If the file names a model whose own file is not near it, and which the catalogue does not have.
    """
    path, stated, defaults = file.path, flat(file.tables), dict(facts()["maxtext"]["base"])
    base = nearest(path.parent, _places(str(stated.get("base_config") or "")))
    if base is not None and base != path:
        defaults |= {key: value for key, value in flat(read_tables(base)).items() if value is not None}
    name = str(stated.get("model_name") or "default")
    if name != "default" and "base_emb_dim" not in stated:
        own = nearest(path.parent, _places(f"{name}.yml"))
        found = MODELS.get(name.replace("llama3.1-", "llama3-").replace("llama3.3-", "llama3-"))
        if own is not None:
            stated = {**flat(read_tables(own)), **stated}
        elif found is None:
            raise JobError(f"model_name {name}: its file {name}.yml must lie beside the configuration, or in models/")
        else:
            derived = {"kv_heads": found["heads"], "gated_mlp": found["family"] == "llama", "tied_embeddings": False}
            for key, value in {**derived, "ffn": 4 * found["hidden"], **found}.items():
                if key != "seq_len":
                    draft.map(f"model.{key}", value, f"model_name {name}, by the catalogue")
    draft.framework = draft.framework or "maxtext"
    read_rows(ROWS, Reading(draft, stated, default="MaxText's base.yml", defaults=defaults))


def _places(name: str) -> list[str]:
    return [f"{folder}/{Path(name).name}" for folder in _FOLDERS if name]


def write(job: Job) -> ConfigText:
    """Write a job as MaxText's YAML, the model's sizes in the same file."""
    view = JobView(job)
    view.write(ROWS)
    return view.text(yaml_text(view.settings), ".yml")


def _read_layers(reading: Reading) -> None:
    if reading.copy("model.layers", "base_num_decoder_layers") and reading.word("decoder_block") == "gemma2":
        words = "base_num_decoder_layers, of two layers each"
        reading.draft.map("model.layers", 2 * reading.get("model.layers"), words)


def _read_degrees(reading: Reading) -> None:
    for degree in ("tp", "cp", "pp", "ep"):
        axes = [f"{mesh}_{axis}" for axis, name in _AXES.items() if name == degree for mesh in ("ici", "dcn")]
        value = math.prod(max(1, _size(reading, axis)) for axis in axes)
        if value > 1:
            reading.map(f"parallel.{degree}", value)
    if _size(reading, "ici_tensor_sequence") > 1:
        reading.map("parallel.sequence_parallel", True, "ici_tensor_sequence_parallelism")
    both = {  # sizes over both meshes; 0: what remains
        axis: math.prod(max(0, _size(reading, f"{mesh}_{axis}")) for mesh in ("ici", "dcn"))
        for axis in ("fsdp", "fsdp_transpose", "data")
    }
    shard, data, ep = both["fsdp"] * both["fsdp_transpose"], both["data"], reading.degree("ep")
    sharded = shard not in (0, 1) or ep > 1 or reading.number("ici_fsdp_parallelism") == -1
    axes = [f"{mesh}_{axis}_parallelism" for mesh in ("ici", "dcn") for axis in ("fsdp", "fsdp_transpose", "expert")]
    reading.map("parallel.zero_stage", 3 if sharded else 0, *axes)
    if shard and data and shard * data > 1:
        reading.map("parallel.dp", shard * data * ep, words="axes data, fsdp, expert")
        if data > 1 and shard * ep > 1:
            reading.map("parallel.dp_shard", shard * ep, words="axes fsdp, expert")


def _size(reading: Reading, axis: str) -> int:
    """Size of an axis in one mesh; -1: what remains."""
    name = f"{axis}_parallelism"
    return int(reading.positive(name, auto=-1) or (-1 if reading.find(name) else 1))


def _write_degrees(view: JobView) -> None:
    """Sizes of the mesh's axes; expert parallelism takes a part of the data-parallel ranks."""
    parallel = view.job.parallel
    ep, shard = view["parallel.ep"], view["parallel.dp_shard"] or view["parallel.dp"]
    view.refuse("parallel.ep", shard % ep)  # expert parallelism also divides the tensor-parallel ranks
    ep = 1 if shard % ep else ep
    stage = view["parallel.zero_stage"]
    view.refuse("parallel.zero_stage", stage in (1, 2) or (ep > 1 and stage == 0))  # ep also shards all other weights
    fsdp = shard if stage == 3 else 1
    spread = "tensor_sequence" if view["parallel.sequence_parallel"] else "tensor"
    sizes = {"ici_fsdp": max(1, fsdp // ep), "ici_data": 1, "dcn_data": max(1, parallel.dp // max(fsdp, ep))}
    sizes |= {"dcn_fsdp": 1, f"ici_{spread}": view["parallel.tp"], "ici_context": view["parallel.cp"]}
    sizes |= {"ici_pipeline": view["parallel.pp"], "ici_expert": ep}
    view.put(**{f"{axis}_parallelism": size for axis, size in sizes.items()})


def _read_batch(reading: Reading) -> None:
    size = reading.positive("per_device_batch_size", whole=False)
    steps = reading.positive("gradient_accumulation_steps") or 1
    # Sequences of one replica, which has as many devices.
    sequences = size * math.prod(reading.get(f"parallel.{degree}", 1) for degree in ("tp", "cp", "pp"))
    words = f"per_device_batch_size {size:g}"
    if sequences < 1:
        reading.assume("batch.micro_batch", 1, f"{words} is less than a sequence")
        return
    pieces = reading.positive("num_pipeline_microbatches", auto=-1) or reading.degree("pp")
    reading.map("batch.micro_batch", max(1, int(sequences) // pieces), "per_device_batch_size")
    reading.map("run.local_batch", int(sequences) * steps, "per_device_batch_size", "gradient_accumulation_steps")
    reading.map("run.flush_batch", int(sequences), "per_device_batch_size")


def _write_batch(view: JobView) -> None:
    parallel, count = view.job.parallel, view.job.num_micro_batches
    pieces = 1 if parallel.pp == 1 else count // view["batch.flushes"]
    size = view["batch.micro_batch"] * pieces / (parallel.tp * parallel.cp * parallel.pp)
    view.put(per_device_batch_size=size, gradient_accumulation_steps=count // pieces)
    if parallel.pp > 1:
        view.put(num_pipeline_microbatches=pieces, num_pipeline_repeats=view["parallel.virtual_stages"])
        view.refuse("parallel.schedule", view["parallel.schedule"] not in ("gpipe", "looped-bfs"))


_CAPACITY = (lambda factor: float(factor) if factor > 0 else None, lambda factor: factor or -1.0)
_EXPERT_FFN = (lambda size: size if size > 0 else None, lambda size: size)
ROWS = rows_of("maxtext", globals())
