"""Rows as jobs: stated values are kept, and open ones are filled by rules or left open.

Rules for unknown cells: heads of 128 values; as many key-value heads as heads; ``ffn`` four times ``hidden`` without a
gate; what ``published_rows.toml`` has of a name; no tied tables for Llama, tied ones for others; one virtual stage; no
context or expert parallelism; ``dp`` what the devices leave; ZeRO 0 for a single replica; sequence parallelism and
recomputation as the framework has them; experts cut by tensor parallelism where that leaves room for their own.  Where
embedding and loss count as a layer each when a pipeline is cut (Llama 3 405B, BLOOM), the first and last part have one
layer less.  What else a row leaves open is answered for the values that it may have (``open_cells``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.frameworks import LIBRARIES, Framework, plain_version
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.rules import MOST_LAYERS
from stepsight.dataset.job.specs import MIXED, RECOMPUTE
from stepsight.experiments.evaluation.row_facts import by_model, cluster_of, framework_of, plain_name, told
from stepsight.experiments.evaluation.runs_table import Row, RowError, number_in
from stepsight.simulator.memory import estimate_memory

HEAD = 128
ROW_FAMILIES = ("gpt", "llama", "bert", "moe")
_UNSTATED = "of a row that states none"
VOCABULARIES = (32000, 256000)  # Llama 2's, and the largest usual one (Gemma, Nemotron)
MICRO_BATCHES = (1, 2, 4, 8)
MOST_OPEN = 2  # cells: with more, the run is unknown


@dataclass(frozen=True, slots=True)
class PublishedJob:
    """The job of a row, its framework's profile with the settings that the row states, and the open cells in words."""

    job: Job
    framework: Framework
    open: str = ""


def job_of(row: Row) -> PublishedJob:
    """The first of a row's jobs: the only one where the row leaves nothing open."""
    return jobs_of(row)[0]


def jobs_of(row: Row) -> list[PublishedJob]:
    """The jobs of a row: one for each combination of values of the cells that it leaves open.

    Those that break a rule are left out and, where some fit the devices' memory, those that do not.

    Raises:
        JobError: If the row leaves out what matters (``RowError``), or no job says what ran.
    """
    if "optimizer step NOT included" in row.text("iter_time_derivation"):
        raise RowError("the time is not that of a training iteration")
    framework = framework_of(row)
    stages, batch = row.whole("pp") or 1, row.whole("global_batch")
    if framework.stage_micro_batches and stages > 1 and row.whole("micro_batch") is None and batch is not None:
        size, rest = divmod(batch, stages * _degrees(row)["dp"])  # as the framework cuts where nothing is said
        chunks = row.text("vp") or ("2" if "interleaved" in row.notes.lower() else "1")
        row = row if rest else Row({**row.cells, "micro_batch": str(size), "vp": chunks})
    cells = open_cells(row, framework)
    if len(cells) > MOST_OPEN:
        raise RowError(f"{len(cells)} of its columns are unknown: {', '.join(cells)}")
    words = ", ".join(f"{name} ({' or '.join(map(str, values))})" for name, values in cells.items())
    built, errors = list[PublishedJob](), list[JobError]()
    for values in itertools.product(*cells.values()):
        filled = Row({**row.cells, **dict(zip(cells, map(str, values), strict=True))})
        try:
            built.append(PublishedJob(_job(filled, framework), framework, words))
        except JobError as error:
            errors.append(error)
    if not built:
        raise errors[0]
    if len(built) == 1:
        return built
    devices = {one.job.cluster.hardware: find_hardware(one.job.cluster.hardware) for one in built}
    facts = ((one, devices[one.job.cluster.hardware]) for one in built)
    return [one for one, hardware in facts if hardware is None or estimate_memory(one.job, hardware).fits] or built


def _job(row: Row, framework: Framework) -> Job:
    parallel, model = _parallel(row, framework), _model(row)
    start, recipes, dropout = told()["dropout"]
    if framework.name == "nemo" and plain_name(row).startswith(start) and re.search(recipes, row.software):
        model["dropout"] = dropout
    if model.get("experts"):
        parallel["expert_tp"] = 0 if parallel["dp"] * parallel["cp"] % parallel["ep"] == 0 else 1
    batch = {key: row.known(key) for key in ("micro_batch", "global_batch")}
    execution = {name: row.text(name) for name in ("kernels", "container") if row.text(name)}
    execution |= {name: plain_version(row.text(name)) for name in LIBRARIES if row.text(name)}
    tables = {
        "model": model,
        "parallel": parallel,
        "batch": {**batch, "precision": precision_of(row.text("precision"))},
        "cluster": cluster_of(row),
        "execution": execution,
    }
    return Job.from_dict(tables, habits=framework)


def run_digest(job: Job, measured_s: float) -> str:
    """Identity of a measured run, independent of the words of its table.

    A predictor's manifest lists it of what it was fitted on.  What a framework's profile fills in does not count, nor
    who tells of the run, nor more than three digits of its time.
    """
    return _run_digest(job, f"{measured_s:.2e}")


def is_copy(job: Job, measured_s: float, digests: Collection[str]) -> bool:
    """Whether a run, its time rounded either way, is among some digests of runs."""
    mantissa, exponent = f"{measured_s:.2e}".split("e")
    times = (float(f"{round(100 * float(mantissa)) + step}e{int(exponent) - 2}") for step in (0, -1, 1))
    return any(_run_digest(job, f"{seconds:.2e}") in digests for seconds in times)


def _run_digest(job: Job, seconds: str) -> str:
    m, p, b, cluster = job.model, job.parallel, job.batch, job.cluster
    sizes = (m.layers, m.hidden, m.heads, m.seq_len, m.experts, b.micro_batch, b.global_batch)
    degrees = (p.tp, p.cp, p.pp, p.virtual_stages, p.ep, p.dp)
    return digest(cluster.hardware, b.precision, *map(str, (*sizes, *degrees)), seconds)


def precision_of(text: str) -> str:
    """The job's word for a row's precision: the type of the large products."""
    found = re.match(r"(?:amp_)?(?:mx)?(nvfp4|fp16|bf16|tf32|fp8|float8|fp32)(?![a-z0-9/+])", text.lower())
    if found is None:
        raise RowError(f"no job has the precision {text[:40] or _UNSTATED} (known: {', '.join(MIXED)})")
    return "fp8" if found[1] == "float8" else found[1]


def _model(row: Row) -> dict[str, Any]:
    family, name = row.text("family"), row.text("model_name")
    if family not in ROW_FAMILIES:
        raise RowError(f"no job has the family {family[:40] or _UNSTATED} (known: {', '.join(ROW_FAMILIES)})")
    hidden, experts = row.known("hidden"), row.whole("experts") or 0
    if family == "moe" and not experts:
        raise RowError("experts is unknown")
    gated = row.flag("gated_mlp")
    gated = family in ("llama", "moe") if gated is None else gated
    ffn = row.whole("ffn") or (0 if gated else 4 * hidden)
    if not ffn:
        raise RowError("ffn is unknown")
    heads, tied = row.whole("heads") or hidden // HEAD, row.flag("tied_embeddings")
    model: dict[str, Any] = {
        "name": name if name.isprintable() else "",
        "family": "llama" if family == "moe" else family,
        "layers": row.known("layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.whole("kv_heads") or heads,
        "ffn": ffn,
        "seq_len": row.known("seq_len"),
        "gated_mlp": gated,
        "tied_embeddings": family in ("gpt", "bert") if tied is None else tied,
    }
    if experts:
        model |= {"expert_ffn": ffn, "experts": experts, "experts_per_token": row.known("top_k")}
        model |= {"capacity_factor": 1.0} if "tokendrop" in plain_name(row) else {}
    return {**model, **by_model(row, told()["models"], {}), "vocab": _vocab(row)}


def _vocab(row: Row) -> int:
    """The vocabulary, 0 if it is unknown."""
    model, recipes, tokens = told()["tokens"]
    if plain_name(row).startswith(model) and re.search(recipes, row.software):
        return int(tokens)
    known: int = by_model(row, told()["models"], {}).get("vocab", 0)
    return row.whole("vocab") or known


def _degrees(row: Row) -> dict[str, int]:
    degrees = {key: row.whole(key) or 1 for key in ("tp", "pp", "cp", "ep")}
    others = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = row.whole("dp") or max(1, row.gpus // others)
    if dp * others != row.gpus:
        raise RowError("tp * pp * cp * dp is not the number of devices")
    return {**degrees, "dp": dp}


def _parallel(row: Row, framework: Framework) -> dict[str, Any]:
    degrees, layers = _degrees(row), row.known("layers")
    chunks = (row.whole("vp") or 1) if degrees["pp"] > 1 else 1
    parts, shared, stage_layers = degrees["pp"] * chunks, row.flag("sequence_parallel"), list[int]()
    # Uneven where embedding and loss count as a layer each.
    if 1 < parts <= MOST_LAYERS and layers % parts and (layers + 2) % parts == 0:
        each = (layers + 2) // parts
        stage_layers = [each - 1, *[each] * (parts - 2), each - 1]
    text = (row.text("recompute") or framework.recompute).lower()
    found = re.match(rf"({'|'.join(RECOMPUTE)})(?![a-z0-9/])", text)  # with any remark after it
    sharding = _sharding(row, framework, degrees["dp"])
    if found is None:
        raise RowError(f"recompute is {text!r:.40}: it must be {', '.join(RECOMPUTE)}, with any remark in brackets")
    return {
        **degrees,
        "virtual_stages": chunks,
        "stage_layers": stage_layers,
        **({} if shared is None else {"sequence_parallel": degrees["tp"] > 1 and shared}),
        **sharding,
        "recompute": found[1],
    }


def _sharding(row: Row, framework: Framework, dp: int) -> dict[str, Any]:
    """ZeRO stage, group and resharding from words such as ``distopt(zero1)`` or ``zero1 within groups of 8``."""
    text = row.text("zero_stage").lower()
    group = re.search(r"groups of (\d+)|fsdp[=(](\d+)", text)
    shard = int(number_in(group[1] or group[2], "a sharding group of zero_stage")) if group else 0
    keeps = "zero2-like" in text or "no reshard" in text
    number = re.fullmatch(r"([0-3])(?:\.0*)?", text) or re.search(r"zero[-_ ]?([0-3])(?![0-9])", text)
    stage = 3 if re.search(r"(?<![a-z])(?:fsdp[12]?|hsdp)(?![a-z0-9])", text) else int(number[1]) if number else 0
    if text not in ("", "none", "ddp") and not stage and not number:
        raise RowError(f"zero_stage is {text!r:.40}: it must be 0 to 3, as zero1 or distopt(zero1), fsdp or hsdp")
    of_node = row.whole("gpus_per_node") or 8
    if "hsdp" in text and not shard:
        shard = of_node
    if framework.name == "paxml" and stage == 3 and not shard:
        shard = of_node * by_model(row, told()["paxml"]["shared_nodes"], 0)
    return {
        "zero_stage": stage,
        "dp_shard": shard if 0 < shard < dp else 0,
        **({"reshard_after_forward": False} if keeps else {}),
    }


def open_cells(row: Row, framework: Framework) -> dict[str, tuple[Any, ...]]:
    """Cells that a row leaves open although they matter: by column the values that they may have.

    A row with pipeline stages whose framework usually interleaves may have run either way, so may one without a word
    about recomputation where the framework's policy decides.
    """
    dp = _degrees(row)["dp"]
    found: dict[str, tuple[Any, ...]] = {}
    if not _vocab(row):
        found["vocab"] = VOCABULARIES
    if not row.text("recompute") and not framework.recompute:
        found["recompute"] = ("none", "selective", "full")
    if row.whole("micro_batch") is None and (batch := row.whole("global_batch")):
        found["micro_batch"] = tuple(size for size in MICRO_BATCHES if batch % (size * dp) == 0) or (1,)
    if not row.text("zero_stage") and dp > 1:
        found["zero_stage"] = ("0", "1")
    stages, layers = row.whole("pp") or 1, row.whole("layers") or 0
    finest = layers // stages
    if stages > 1 and not row.text("vp") and framework.interleaves and finest > 1 and layers % stages == 0:
        found["vp"] = (1, finest)
    return found
