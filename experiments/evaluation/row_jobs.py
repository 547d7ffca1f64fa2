"""Rows as jobs: what ran, stated values as they are, and open ones filled by rules or left open.

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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import digest, preset
from stepsight.dataset.hardware import hardware as presets
from stepsight.dataset.job import frameworks
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.rules import MOST_LAYERS
from stepsight.dataset.job.sharding_plans import TABLE_MODELS
from stepsight.dataset.job.specs import MIXED, RECOMPUTE
from stepsight.experiments.evaluation.runs_table import Row, RowError, find_recipe, number_in, plain_name, recipe_habits
from stepsight.simulator.memory import estimate_memory

# Words that may stand beside a device's without making it another one.
_REMARKS = re.compile(r"\b(?:gpus?|tensor|core|hgx|dgx|superchip|amd|instinct|hbm3e?|dlc)\b")
_MEMORY = re.compile(r"([0-9]{1,4}) ?gb\b")
_PORTS = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?g(?:b/s|bps|bit/s|b)\b")
T = TypeVar("T")
TOLD = preset("published_rows.toml")  # what rows say in words, and what they leave out


def preset_of_device(row: Row) -> str:
    """The preset of a row's devices: by their name without remarks, and the memory that the row states."""
    text, memory = row.text("hardware"), row.whole("gpu_mem_gb")
    if presets.find_hardware(text) is not None:
        return text
    lower = text.lower()
    inside = re.search(r"nvidia blackwell (?:ultra )?gpu \((.*?)\)", lower)  # which one is in the brackets
    main = inside[1] if inside else re.sub(r"\(.*?\)", " ", lower).split(",")[0]  # the rest are remarks
    stated = _MEMORY.search(main)
    if stated is not None and memory not in (None, int(stated[1])):
        raise RowError(f"hardware and gpu_mem_gb state different memories, got {text!r:.60} and {memory}")
    memory = memory or (int(stated[1]) if stated else None)
    words = presets.device_words(_REMARKS.sub(" ", _MEMORY.sub(" ", main)))
    usual = presets.canonical_hardware(words if "pcie" in words or "pcie" not in lower else f"{words}-pcie")
    kind = usual.rpartition("-")[0] if usual in presets.HARDWARE else ""
    if kind and (name := f"{kind}-{memory}gb" if memory else usual) in presets.HARDWARE:
        return name
    known = [other for other in presets.HARDWARE.names() if other.startswith(f"{kind}-") or not kind]
    named = repr(text[:60]) if text else "an unnamed device"
    raise RowError(f"no hardware preset for {named}{f' of {memory} GB' if memory else ''} (known: {', '.join(known)})")


def fabric_of(row: Row, hardware: str, gpus_per_node: int) -> Any:
    """A preset's name, or links from the ports that the row states; otherwise the usual fabric of the devices."""
    text, usual = row.text("inter_interconnect"), presets.usual_fabric(hardware)
    if text in presets.FABRICS:
        return text
    lower, machine, notes = (row.text(name).lower() for name in ("inter_interconnect", "hardware", "notes"))
    named = [f for words, device, f in TOLD["networks"] if re.search(words, f"{lower} {notes}") and device in hardware]
    named += [fabric for word, fabric in TOLD["machines"] if word in machine]
    named += presets.read_fabric_words(text, hardware)[0]
    if named:
        return named[0]
    ports = _PORTS.search(lower)
    if ports is None:
        return usual
    gbits = number_in(ports[2], "inter_interconnect") * number_in(ports[1] or "1", "inter_interconnect")
    per_device = gbits / 8 / (1 if "per gpu" in lower else gpus_per_node)
    within, between = presets.find_fabric(usual).intra_node, presets.find_fabric(usual).inter_node
    if per_device * 1e9 == between.bandwidth_bytes_per_s:
        return usual
    slower = 1.5 if "roce" in lower or "rdma" in lower else 1.0  # Ethernet's latency over InfiniBand's
    keys, near = ("bandwidth_gbytes_per_s", "latency_us"), (within.bandwidth_bytes_per_s / 1e9, within.latency_s * 1e6)
    far = per_device, between.latency_s * slower * 1e6
    return {"intra_node": dict(zip(keys, near, strict=True)), "inter_node": dict(zip(keys, far, strict=True))}


def cluster_of(row: Row) -> dict[str, Any]:
    """The ``[cluster]`` table of a row's job: nodes of 8 if it says nothing; a partly used node is one node."""
    gpus, hardware = row.gpus, preset_of_device(row)
    nodes, per_node = row.whole("nodes"), row.whole("gpus_per_node")
    if nodes is None:
        per_node = 8 if per_node is None else per_node
    else:
        per_node = gpus // max(nodes, 1) if per_node is None else per_node
        if nodes * per_node != gpus and not (nodes == 1 and gpus < per_node):
            raise RowError(f"nodes * gpus_per_node must be gpus, got {nodes} * {per_node} != {gpus}")
    per_node = min(gpus, per_node)
    fabric = fabric_of(row, hardware, per_node)
    domain = TOLD["nvlink_domains"].get(fabric) if isinstance(fabric, str) else None
    if domain is not None:
        per_node = max(size for size in range(1, domain + 1) if gpus % size == 0)
    if per_node < 1 or gpus % per_node:
        raise RowError(f"gpus_per_node must divide gpus, got {per_node} and {gpus}")
    return {"hardware": hardware, "nodes": gpus // per_node, "devices_per_node": per_node, "fabric": fabric}


def framework_of(row: Row) -> frameworks.Framework:
    """The profile of a row's framework; flags and precisions that the row states go before."""
    # The date of a run, or of a paper: it tells generations of a framework apart.
    source = re.sub(r"\bSC'?(\d\d)\b", r"20\1", row.text("source"))
    container = row.text("container")
    dates = row.text("date"), frameworks.release_month(container), *re.findall(r"\b20\d\d\b", source)
    dated = " ".join(filter(None, dates))
    if tables_named(row) and "torchrec" not in row.software.lower():  # MLPerf's runs of DLRM, whatever words they have
        return frameworks.framework_in(row.software if "hugectr" in row.software.lower() else "hugectr")
    framework = frameworks.framework_in(row.text("framework"), container, dated)
    changes: dict[str, Any] = {"attention": frameworks.attention_of(text)} if (text := row.text("attention")) else {}
    for columns, words, fields in TOLD["stated"]:
        if re.search(words, " ".join(map(row.text, columns.split())).lower()):
            changes |= fields
    bucket = re.search(r"\bbucket_cap_mb=([0-9.]+)", row.text("notes"))
    if bucket and number_in(bucket[1], "bucket_cap_mb") > 0:
        changes["bucket_mbytes"] = float(bucket[1])
    if "nemo container" in row.software.lower() or "nemo:" in container.lower():  # what recipes do with a mixture
        eager, recipe = frameworks.FRAMEWORKS["nemo"], find_recipe(row)
        host = {"dispatch_calls": eager.dispatch_calls, "op_calls": eager.op_calls}
        if framework.overlap_ep and "mxfp8" not in row.text("precision").lower():
            changes |= {"overlap_ep": False, "fused_experts": False, **host}
        if recipe is not None:
            changes |= {**host, **recipe_habits(recipe)}
        elif row.text("hardware").lower().startswith("gb"):  # CUDA graphs of the router and what precedes the dispatch
            changes["dispatch_calls"] = 0.0
    return replace(framework, **changes) if changes else framework


def by_model(row: Row, values: Mapping[str, T], default: T) -> T:
    """The value for a row's model, by the start of its name without marks."""
    return next((value for start, value in values.items() if plain_name(row).startswith(start)), default)


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
    framework: frameworks.Framework
    open: str = ""


def jobs_of(row: Row) -> list[PublishedJob]:
    """The jobs of a row: one for each combination of its open cells' values that breaks no rule and fits the memory."""
    if "optimizer step NOT included" in row.text("iter_time_derivation"):
        raise RowError("the time is not that of a training iteration")
    framework = framework_of(row)
    if tables_named(row):
        return [PublishedJob(_table_job(row, framework), framework)]
    stages, batch = row.whole("pp") or 1, row.whole("global_batch")
    if framework.stage_micro_batches and stages > 1 and row.whole("micro_batch") is None and batch is not None:
        size, rest = divmod(batch, stages * _degrees(row)["dp"])  # as the framework cuts where nothing is said
        chunks = row.text("vp") or ("2" if "interleaved" in row.text("notes").lower() else "1")
        row = row if rest else Row({**row.cells, "micro_batch": str(size), "vp": chunks})
    cells = open_cells(row, framework)
    if len(cells) > MOST_OPEN:
        raise RowError(f"{len(cells)} of its columns are unknown: {', '.join(cells)}")
    words = ", ".join(f"{name} ({' or '.join(map(str, values))})" for name, values in cells.items())
    built, wrong = list[PublishedJob](), list[JobError]()
    for values in itertools.product(*cells.values()):
        filled = Row({**row.cells, **dict(zip(cells, map(str, values), strict=True))})
        try:
            job = _job(filled, framework)
            usual = [f"virtual stages (usually {job.parallel.virtual_stages})"] if job.uninterleaved else []
            built.append(PublishedJob(job, framework, ", ".join(filter(None, (words, *usual)))))
        except JobError as error:
            wrong.append(error)
    if not built:
        raise wrong[0]
    hardware = presets.find_hardware(built[0].job.cluster.hardware)
    if hardware is None or len(built) == 1:
        return built
    return [one for one in built if estimate_memory(one.job, hardware).fits] or built


def _job(row: Row, framework: frameworks.Framework) -> Job:
    parallel, model = _parallel(row, framework), _model(row)
    if (layers := row.whole("offload_layers")) and parallel["recompute"] == "none":
        parallel |= {"offload_activations": True, "offload_layers": layers}
    if model.get("experts"):
        parallel["expert_tp"] = 0 if parallel["dp"] * parallel["cp"] % parallel["ep"] == 0 else 1
    batch: dict[str, Any] = {key: row.known(key) for key in ("micro_batch", "global_batch")}
    execution = {name: row.text(name) for name in ("kernels", "container") if row.text(name)}
    dates = row.text("date")[:7], *map(frameworks.release_month, (row.text("container"), row.text("framework")))
    execution |= {"date": date} if (date := next(filter(None, dates), "")) else {}
    execution |= {name: frameworks.plain_version(row.text(name)) for name in frameworks.LIBRARIES if row.text(name)}
    batch["precision"] = precision_of(row.text("precision"))
    tables = {"framework": framework.name, "model": model, "parallel": parallel, "batch": batch}
    return Job.from_dict({**tables, "cluster": cluster_of(row), "execution": execution}, habits=framework)


def tables_named(row: Row) -> str:
    """The embedding tables of a row's model, by name or as a file; empty: it has none."""
    return "" if row.text("family") not in ("", "dlrm") else row.text("tables")


def _table_job(row: Row, framework: frameworks.Framework) -> Job:
    """The job of a recommendation model: a replica of the dense part on each device."""
    tables, known = tables_named(row), ", ".join(TABLE_MODELS)
    if tables not in TABLE_MODELS and not tables.endswith((".csv", ".toml", ".json")):
        if row.text("family"):
            raise RowError(f"tables must be one of {known} or a file, got {tables[:60]!r}")
        raise RowError(f"no model is known for the benchmark {tables[:60]!r} (known: {known}, or a file of tables)")
    model = {"family": "dlrm", "name" if tables in TABLE_MODELS else "tables": tables}
    cluster = cluster_of(row)
    if not row.text("inter_interconnect"):
        cluster["fabric"] = TOLD["staged"].get(cluster["hardware"], cluster["fabric"])
    whole = row.known("global_batch")
    batch, precision = row.whole("micro_batch") or -(-whole // row.gpus), precision_of(row.text("precision") or "fp16")
    steps = max(1, round(whole / (batch * row.gpus)))
    replicated = TOLD["replicated_mbytes"][cluster["nodes"] > 1]
    sharding = {"rule": row.text("sharding") or "auto", "replicate_mbytes": replicated}
    found = {
        "model": {**model, **({"interaction": row.text("interaction")} if row.text("interaction") else {})},
        "batch": {"micro_batch": batch, "global_batch": batch * row.gpus * steps, "precision": precision},
        "optimizer": {"kind": "adagrad"},
        "sharding": {**sharding, "optimizer": "adagrad"},
        "cluster": cluster,
    }
    return Job.from_dict(found, habits=framework)


def run_digest(job: Job, measured_s: float) -> str:
    """Identity of a measured run, with three digits of its time, whoever tells of it in whatever words."""
    m, p, b, cluster = job.model, job.parallel, job.batch, job.cluster
    sizes = (m.layers, m.hidden, m.heads, m.seq_len, m.experts, b.micro_batch, b.global_batch)
    degrees = (p.tp, p.cp, p.pp, p.virtual_stages, p.ep, p.dp)
    return digest(cluster.hardware, b.precision, *map(str, (*sizes, *degrees)), f"{measured_s:.2e}")


def is_copy(job: Job, measured_s: float, digests: Collection[str]) -> bool:
    """Whether a run, its time rounded either way, is among some digests of runs."""
    mantissa, exponent = f"{measured_s:.2e}".split("e")
    times = (float(f"{round(100 * float(mantissa)) + step}e{int(exponent) - 2}") for step in (0, -1, 1))
    return bool(digests) and any(run_digest(job, seconds) in digests for seconds in times)


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
    if rank := row.whole("lora_rank"):
        targets = re.split(r"[ ,]+", row.text("lora_targets"))
        model |= {"lora_rank": rank, "lora_targets": targets, "lora_dropout": row.real("lora_dropout") or 0.0}
    model |= {"dropout": dropout} if (dropout := row.real("dropout")) else {}
    return {**model, **by_model(row, TOLD["models"], {}), "vocab": _vocab(row)}


def _vocab(row: Row) -> int:
    """The vocabulary, 0 if it is unknown."""
    return row.whole("vocab") or int(by_model(row, TOLD["models"], {}).get("vocab", 0))


def _degrees(row: Row) -> dict[str, int]:
    degrees = {key: row.whole(key) or 1 for key in ("tp", "pp", "cp", "ep")}
    others = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = row.whole("dp") or max(1, row.gpus // others)
    if dp * others != row.gpus:
        raise RowError(f"tp * pp * cp * dp must be gpus, got {others} * {dp} != {row.gpus}")
    return {**degrees, "dp": dp}


def _parallel(row: Row, framework: frameworks.Framework) -> dict[str, Any]:
    degrees, layers = _degrees(row), row.known("layers")
    stated = row.whole("vp") or 1  # which must be a number, also where it has no effect
    chunks = stated if degrees["pp"] > 1 else 1
    is_open = framework.interleaves and not row.text("vp")  # the job then takes the usual number
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
        **({} if is_open else {"virtual_stages": chunks}),
        **({"schedule": schedule} if (schedule := row.text("schedule")) else {}),
        "stage_layers": stage_layers,
        **({} if shared is None else {"sequence_parallel": degrees["tp"] > 1 and shared}),
        **sharding,
        "recompute": found[1],
    }


def _sharding(row: Row, framework: frameworks.Framework, dp: int) -> dict[str, Any]:
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
        shard = of_node * by_model(row, TOLD["paxml"]["shared_nodes"], 0)
    kept = {"reshard_after_forward": False} if keeps else {}
    return {"zero_stage": stage, "dp_shard": shard if 0 < shard < dp else 0, **kept}


def open_cells(row: Row, framework: frameworks.Framework) -> dict[str, tuple[Any, ...]]:
    """Cells that a row leaves open although they matter, by column the values that they may have: a row without a word
    about recomputation may have run any way where the framework's policy decides. Virtual stages that a row leaves open
    are as usual in the framework's recipes (``Job.open_stages``).
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
    return found
