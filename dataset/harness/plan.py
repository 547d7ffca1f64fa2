"""Plans: what to run and what to measure.  Checked whole before anything starts; standard library only.

A plan is a JSON object::

    {"schema": 1,
     "runs": [{"name", "role", "job": {model, parallel, batch, cluster}, "rounds": 3, "steps": 4, "warmup": 2,
               "profile_steps": 2, "stand_in": {"rank", "collectives"}}],       # stand_in is optional, see delays
     "events": [{"name", "world_size", "ops": [{kind, dims, dtype}], "collectives": [{kind, num_bytes, group_size,
                 ranks_per_node}], "seconds": 20}],
     "device": "auto",                                  # optional: cpu, cuda
     "compile": false,                                  # optional: composite ops by torch.compile
     "box": {"nodes", "ranks_per_node", "mbits_per_s": [rate of each node's link], "latency_ms": [...]}}   # optional

A plan with ``box`` is for a cluster in a box (see ``box``; ``latency_ms`` may be left out).  Every run then has
``sleeps`` (see ``sleeping``): its computation is slept.

A job is what ``stepsight.dataset.job.Job.to_dict`` writes, with every key filled in.
"""

from __future__ import annotations

import re
from typing import Any

from .box.namespaces import box_problems
from .emulation.delays import stand_in_problems
from .plan_error import HarnessError

SCHEMA = 1
MOST_CPU = 0.25  # of all cores' time that a run in a box may compute, for its times to mean anything
_MOST = 2**48  # beyond, a number is a slip of the pen
FAMILIES = ("gpt", "llama", "bert", "t5")
OPTIONS = {"rounds": 3, "steps": 4, "warmup": 2, "profile_steps": 2}
_JOB: dict[str, dict[str, type]] = {  # what a job must say, and of what kind
    "model": {
        "family": str, "layers": int, "hidden": int, "heads": int, "kv_heads": int, "ffn": int, "vocab": int,
        "seq_len": int, "gated_mlp": bool, "tied_embeddings": bool,
    },
    "parallel": {
        "tp": int, "pp": int, "dp": int, "sequence_parallel": bool, "zero_stage": int, "schedule": str,
        "virtual_stages": int, "recompute": str, "bucket_mbytes": float,
    },
    "batch": {"micro_batch": int, "global_batch": int, "precision": str},
    "cluster": {"hardware": str, "nodes": int, "devices_per_node": int},
}  # fmt: skip
_PLAIN = {"eager_kernels": False, "norms_again": False, "token_metrics": False}
_ONLY: dict[str, dict[str, Any]] = {  # what a job may say beside, where this harness does one thing alone
    "model": {"attention": "mha", "experts": 0, "attention_kernels": "", "dropout": 0, **_PLAIN},
    "batch": {"fp8_scaling": "delayed"},
    "parallel": {
        "cp": 1, "ep": 1, "order": "tp-cp-dp-pp", "vocab_parallel": True, "overlap_grad_reduce": True,
        "overlap_tp": "", "overlap_param_gather": False, "reshard_after_forward": True, "prefetch": 1,
        "stage_layers": [], "recompute_every": 1, "offload_activations": False, "gradient_dtype": "",
        "scatter_p2p": False, "reduce_scatter": True,
    },
    "optimizer": {"kind": "adamw", "fused": True, "clip_grad_norm": False, "offload": False},
    "cluster": {"stragglers": [], "slow_links": [], "mixed": []},
}  # fmt: skip
_ONLY_ASLEEP: dict[str, dict[str, Any]] = {  # likewise, in a box
    "model": {"experts": 0},
    "parallel": {
        "cp": 1, "ep": 1, "order": "tp-cp-dp-pp", "overlap_grad_reduce": True, "overlap_tp": "",
        "overlap_param_gather": False, "reshard_after_forward": True, "prefetch": 1, "offload_activations": False,
        "gradient_dtype": "", "scatter_p2p": False, "reduce_scatter": True,
    },
    "optimizer": _ONLY["optimizer"],
    "cluster": {"mixed": []},
}  # fmt: skip
SLEEPS = {"parts", "blocks", "root", "boundary_numel", "optimizer", "paces", "table"}  # what a run in a box must say
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def world_size(job: dict[str, Any]) -> int:
    """Ranks of a job."""
    parallel = job["parallel"]
    return int(parallel["tp"] * parallel["pp"] * parallel["dp"])


def ranks_needed(run: dict[str, Any]) -> int:
    """Processes that a run needs: the ranks of its job, or one that stands in for one of them."""
    return 1 if "stand_in" in run else world_size(run["job"])


def num_micro_batches(job: dict[str, Any]) -> int:
    """Micro-batches that each replica runs in a step."""
    batch = job["batch"]
    return int(batch["global_batch"] // (batch["micro_batch"] * job["parallel"]["dp"]))


def world_sizes(plan: dict[str, Any]) -> list[int]:
    """Every world size that a plan needs, smallest first."""
    return sorted({ranks_needed(run) for run in plan["runs"]} | {e["world_size"] for e in plan["events"]})


def check_plan(plan: Any) -> dict[str, Any]:
    """A copy of the plan with its options filled in.

    Raises:
        HarnessError: With every broken rule and the values.
    """
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA:
        got = plan.get("schema") if isinstance(plan, dict) else type(plan).__name__
        raise HarnessError(f"a plan is a JSON object with schema = {SCHEMA}, got {got!r:.80}")
    if unknown := sorted(set(plan) - {"schema", "runs", "events", "device", "compile", "box"}):
        known = "schema, runs, events, device, compile and box"
        raise HarnessError(f"a plan has the keys {known}, got also {', '.join(unknown)}")
    boxed = "box" in plan
    if boxed and (wrong := box_problems(plan["box"])):
        raise HarnessError("; ".join(wrong))
    ranks = plan["box"]["nodes"] * plan["box"]["ranks_per_node"] if boxed else 0
    device = plan.get("device", "auto")
    problems = [] if device in ("auto", "cpu", "cuda") else [f"device must be auto, cpu or cuda, got {device!r:.80}"]
    compiled = plan.get("compile", False)
    if not isinstance(compiled, bool) or (compiled and boxed):
        problems.append(f"compile must be true or false, and false in a box, got {compiled!r:.80}")
    runs, events = (_items(plan, key) for key in ("runs", "events"))
    for run in runs:
        problems += [f"run {run.get('name')!r:.80}: {text}" for text in _run_problems(run, ranks)]
    for event in events:
        problems += [f"events {event.get('name')!r:.80}: {text}" for text in _event_problems(event)]
        if boxed and event.get("world_size") != ranks:
            problems.append(f"a box holds events of {ranks} ranks, got world_size {event.get('world_size')!r:.80}")
    for names in ([run.get("name") for run in runs], [event.get("name") for event in events]):
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        problems += [f"names must be unique, got {name!r:.80} twice" for name in twice]
    if problems:
        raise HarnessError("; ".join(problems))
    checked = {"schema": SCHEMA, "runs": [{**OPTIONS, **run} for run in runs], "events": events, "device": device}
    return checked | ({"compile": True} if compiled else {}) | ({"box": plan["box"]} if boxed else {})


def _items(plan: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = plan.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise HarnessError(f"{key} of a plan must be a list of tables, got {items!r:.80}")
    return [dict(item) for item in items]


def _is(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; a truth value is no number, and no number is infinite."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= _MOST
    return isinstance(value, kind) and (not isinstance(value, int) or abs(value) <= _MOST)


def _run_problems(run: dict[str, Any], ranks: int) -> list[str]:
    """What is wrong with a run; ``ranks`` of the box that it is for, 0 where there is none."""
    unknown = sorted(set(run) - {"name", "role", "job", "sleeps" if ranks else "stand_in", *OPTIONS})
    problems = _name_problems(run) + [f"unknown key {key!r:.80}" for key in unknown]
    for key, default in OPTIONS.items():
        value, least = run.get(key, default), {"warmup": 1 if ranks else 2, "profile_steps": 0}.get(key, 1)
        if not _is(value, int) or value < least:
            problems.append(f"{key} must be a whole number >= {least}, got {value!r:.80}")
    role = run.get("role")
    if not isinstance(role, str) or not role.strip() or not role.isprintable():
        problems.append(f"role must be a word, got {role!r:.80}")
    problems += _sleeping_problems(run, ranks) if ranks else job_problems(run.get("job"))
    return problems or (stand_in_problems(run["stand_in"], world_size(run["job"])) if "stand_in" in run else [])


def _sleeping_problems(run: dict[str, Any], ranks: int) -> list[str]:
    job: Any = run.get("job")
    sleeps: Any = run.get("sleeps")
    if problems := _form_problems(job):
        return problems
    if not isinstance(sleeps, dict) or set(sleeps) != SLEEPS:
        got = sorted(sleeps) if isinstance(sleeps, dict) else sleeps
        return [f"a run in a box has sleeps with {', '.join(sorted(SLEEPS))}, got {got!r:.80}"]
    return [text for kept, text in [*_job_rules(job), *_sleeping_rules(job, sleeps, ranks)] if not kept]


def sleeping_problems(job: Any) -> list[str]:
    """Everything that keeps this harness from running a job asleep."""
    problems = _form_problems(job)
    return problems or [text for kept, text in [*_job_rules(job), *_asleep_rules(job)] if not kept]


def _sleeping_rules(job: dict[str, Any], sleeps: dict[str, Any], ranks: int) -> list[tuple[bool, str]]:
    parallel = job["parallel"]
    parts = parallel["pp"] * parallel["virtual_stages"]
    counts = {"parts": parts, "boundary_numel": parts - 1, "optimizer": parallel["pp"], "paces": ranks}
    return [
        *_asleep_rules(job),
        (world_size(job) == ranks, f"a run must have as many ranks as its box, got {world_size(job)} != {ranks}"),
        *(
            (
                isinstance(sleeps[key], list) and len(sleeps[key]) == count,
                f"sleeps.{key} must be a list of {count}, got {sleeps[key]!r:.60}",
            )
            for key, count in counts.items()
        ),
    ]


def _asleep_rules(job: dict[str, Any]) -> list[tuple[bool, str]]:
    """What this harness can run asleep."""
    parallel = job["parallel"]
    zero, pp, precision = parallel["zero_stage"], parallel["pp"], job["batch"]["precision"]
    return [
        (zero in (0, 3), f"in a box zero_stage is 0 (DDP) or 3 (FSDP2), got {zero}"),
        (zero == 0 or pp == 1, f"in a box zero_stage 3 runs without a pipeline, got pp = {pp}"),
        (precision == "fp32", f"in a box precision is fp32, got {precision!r:.80}"),
        (parallel["recompute"] == "none", f"in a box recompute is none, got {parallel['recompute']!r:.80}"),
        (
            not (job["model"]["tied_embeddings"] and pp > 1),
            f"a box ties embeddings only within one stage, got tied_embeddings and pp = {pp}",
        ),
        (
            pp == 1 or parallel["schedule"] != "1f1b" or num_micro_batches(job) >= pp,
            f"schedule 1f1b needs as many micro-batches as stages, got {num_micro_batches(job)} < {pp}",
        ),
        *(
            (parallel.get(key, allowed[0]) in allowed, f"a box runs {words}, got {parallel.get(key)!r:.80}")
            for key, allowed, words in (
                ("dp_shard", (0, parallel["dp"]), "zero_stage over all replicas (dp_shard)"),
                ("runtime", ("", "torch"), "PyTorch's own pipeline runtime"),
            )
        ),
        *_fixed_rules(job, _ONLY_ASLEEP, "a box runs"),
    ]


def _form_problems(job: Any) -> list[str]:
    """Whether a job is a table of tables with what is needed in them."""
    if not isinstance(job, dict):
        return [f"job must be a table, got {job!r:.80}"]
    wrong = [name for name in (*_JOB, *_ONLY) if not isinstance(job.get(name, {}), dict)]
    if wrong:
        return [f"{name} of a job must be a table, got {job[name]!r:.80}" for name in dict.fromkeys(wrong)]
    missing = [f"{t}.{key}" for t, keys in _JOB.items() for key in sorted(set(keys) - set(job.get(t, {})))]
    if missing:
        return [f"a job needs {', '.join(missing)}"]
    problems = []
    for table, keys in _JOB.items():
        for key, kind in keys.items():
            value = job[table][key]
            if not _is(value, kind):
                problems.append(f"{table}.{key} must be {_WORDS[kind]}, got {value!r:.80}")
            elif kind in (int, float) and value < (0 if key == "zero_stage" else 1e-9):
                problems.append(f"{table}.{key} must be > 0, got {value}")
    return problems


def job_problems(job: Any) -> list[str]:
    """Everything that keeps this harness from running a job."""
    problems = _form_problems(job)
    if problems:
        return problems
    rules = [*_job_rules(job), *_harness_rules(job), *_fixed_rules(job, _ONLY, "the harness runs")]
    return [text for kept, text in rules if not kept]


def _fixed_rules(job: dict[str, Any], fixed: dict[str, dict[str, Any]], who: str) -> list[tuple[bool, str]]:
    """Keys of a job that may be left out, but say nothing else."""
    rules = []
    for table, only in fixed.items():
        for key, wanted in only.items():
            value = job.get(table, {}).get(key, wanted)
            value = list(value) if isinstance(value, tuple) else value  # of a job that was never written
            rules.append((value == wanted, f"{who} {table}.{key} = {wanted!r}, got {value!r:.80}"))
    return rules


def _job_rules(job: dict[str, Any]) -> list[tuple[bool, str]]:
    """What every job must keep, here where ``Job`` is not at hand."""
    model, parallel, batch, cluster = (job[name] for name in _JOB)
    tp, pp, dp = parallel["tp"], parallel["pp"], parallel["dp"]
    devices, sequences = cluster["nodes"] * cluster["devices_per_node"], batch["global_batch"]
    micro_batch, heads = batch["micro_batch"], model["heads"]
    layers = model["layers"] + model.get("encoder_layers", 0)
    return [
        (
            tp * pp * dp == devices,
            f"tp * pp * dp must equal the number of devices, got {tp} * {pp} * {dp} != {devices}",
        ),
        (layers >= pp, f"every pipeline stage needs a layer, got {layers} < {pp}"),
        (model["hidden"] % heads == 0, f"heads must divide hidden, got {model['hidden']} % {heads}"),
        (heads % model["kv_heads"] == 0, f"kv_heads must divide heads, got {heads} % {model['kv_heads']}"),
        (
            sequences % (micro_batch * dp) == 0,
            f"micro_batch * dp must divide global_batch, got {sequences} % ({micro_batch} * {dp})",
        ),
        *(
            (model[key] % tp == 0, f"tp must divide {key}, got {model[key]} % {tp}")
            for key in ("heads", "kv_heads", "ffn", "vocab")
        ),
    ]


def _harness_rules(job: dict[str, Any]) -> list[tuple[bool, str]]:
    """What this harness can run."""
    model, parallel, batch = job["model"], job["parallel"], job["batch"]
    tp, pp, dp = parallel["tp"], parallel["pp"], parallel["dp"]
    rows, head_dim = batch["micro_batch"] * model["seq_len"], model["hidden"] // model["heads"]
    choices = [
        (model, "family", FAMILIES, "families gpt, llama, bert and t5"),
        (model, "head_dim", (0, head_dim), f"head_dim = hidden / heads = {head_dim}"),
        (batch, "precision", ("fp32", "pure-bf16", "pure-fp16"), "precisions fp32, pure-bf16 and pure-fp16"),
        (parallel, "zero_stage", (0, 3), "zero_stage 0 (DDP) and 3 (FSDP2)"),
        (parallel, "dp_shard", (0, dp), f"zero_stage over all {dp} replicas (dp_shard)"),
        (parallel, "recompute", ("none", "full"), "recompute none and full"),
        (parallel, "schedule", ("gpipe", "1f1b"), "schedules gpipe and 1f1b"),
        (parallel, "virtual_stages", (1,), "virtual_stages = 1"),
        (parallel, "runtime", ("", "torch"), "PyTorch's own pipeline runtime"),
    ]
    return [
        *(
            (table.get(key, allowed[0]) in allowed, f"the harness runs {words}, got {table.get(key)!r:.80}")
            for table, key, allowed, words in choices
        ),
        (
            not (model["tied_embeddings"] and pp > 1),
            f"the harness ties embeddings only within one stage, got tied_embeddings and pp = {pp}",
        ),
        (
            pp == 1 or parallel["schedule"] == "gpipe" or num_micro_batches(job) >= pp,
            f"schedule 1f1b needs as many micro-batches as stages, got {num_micro_batches(job)} < {pp}",
        ),
        (
            not parallel["sequence_parallel"] or rows % tp == 0,
            f"tp must divide micro_batch * seq_len, got {rows} % {tp}",
        ),
        (
            model["family"] != "llama" or head_dim % 2 == 0,
            f"rotary positions need an even head_dim, got {model['hidden']} / {model['heads']}",
        ),
        *_encoder_rules(job),
    ]


def _encoder_rules(job: dict[str, Any]) -> list[tuple[bool, str]]:
    """T5 has an encoder and a bias of its scores; the others have neither."""
    model, tp, pp = job["model"], job["parallel"]["tp"], job["parallel"]["pp"]
    layers, length, fused = (model.get(key, 0) for key in ("encoder_layers", "encoder_seq_len", "fused_attention"))
    if model["family"] != "t5":
        fused = model.get("fused_attention", True)
        return [
            (fused is True, f"the harness runs model.fused_attention = True, got {fused!r:.80}"),
            (layers == 0, f"the harness runs model.encoder_layers = 0 but for t5, got {layers!r:.80}"),
        ]
    rows = job["batch"]["micro_batch"] * length if _is(length, int) else 0
    heads, kv_heads = model["heads"], model["kv_heads"]
    return [
        (
            fused is False,
            "no fused kernel of the CPU gives the gradient of t5's learned bias: the harness runs "
            f"model.fused_attention = False, got {fused!r:.80}",
        ),
        *(
            (_is(value, int) and value > 0, f"model.{key} of t5 must be a whole number > 0, got {value!r:.80}")
            for key, value in (("encoder_layers", layers), ("encoder_seq_len", length))
        ),
        (kv_heads == heads, f"the harness runs t5 with kv_heads = heads, got {kv_heads} and {heads}"),
        (
            not job["parallel"]["sequence_parallel"] or rows % tp == 0,
            f"tp must divide micro_batch * encoder_seq_len, got {rows} % {tp}",
        ),
        (
            pp == 1,
            "stages of t5 would have to share its tables of relative positions: the harness runs t5 with pp = 1, "
            f"got {pp}",
        ),
    ]


def _event_problems(event: dict[str, Any]) -> list[str]:
    problems = _name_problems(event)
    unknown = sorted(set(event) - {"name", "world_size", "ops", "collectives", "seconds"})
    problems += [f"unknown key {key!r:.80}" for key in unknown]
    size: Any = event.get("world_size")
    seconds: Any = event.get("seconds")
    if not _is(size, int) or size < 1:
        problems.append(f"world_size must be a whole number >= 1, got {size!r:.80}")
    if not _is(seconds, float) or not seconds > 0:
        problems.append(f"seconds must be > 0, got {seconds!r:.80}")
    for key in ("ops", "collectives"):
        if not isinstance(event.get(key, []), list):
            return [*problems, f"{key} must be a list, got {event[key]!r:.80}"]
    for item in event.get("ops", []):
        if not isinstance(item, dict) or not {"kind", "dims", "dtype"} <= set(item) or not _sizes(item["dims"]):
            problems.append(f"an op has kind, dims (whole numbers >= 0) and dtype, got {item!r:.80}")
    for item in event.get("collectives", []):
        numbers = ("num_bytes", "group_size", "ranks_per_node")
        if not isinstance(item, dict) or not {"kind", *numbers} <= set(item) or not _sizes([item[n] for n in numbers]):
            problems.append(f"a collective has kind, num_bytes, group_size and ranks_per_node, got {item!r:.80}")
        elif _is(size, int) and item["group_size"] > size:
            problems.append(f"group_size must be at most world_size, got {item['group_size']} > {size}")
    return problems


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(_is(value, int) and value >= 0 for value in values)


def _name_problems(item: dict[str, Any]) -> list[str]:
    name = item.get("name")
    good = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name)
    return [] if good else [f"name must be letters, digits, '_', '.', '+' and '-', got {name!r:.80}"]
