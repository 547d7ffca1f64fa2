"""Plans: what to run and what to measure.  Checked whole before anything starts; standard library only.

A plan is a JSON object::

    {"schema": 1,
     "runs": [{"name", "role", "job": {model, parallel, batch, cluster}, "rounds": 3, "steps": 4, "warmup": 2,
               "profile_steps": 2}],
     "events": [{"name", "world_size", "ops": [{kind, dims, dtype}], "collectives": [{kind, num_bytes, group_size,
                 ranks_per_node}], "seconds": 20}],
     "device": "auto"}                                  # optional: cpu, cuda

A job is what ``stepsight.dataset.job.Job.to_dict`` writes, with every key filled in.
"""

from __future__ import annotations

import re
from typing import Any

from .errors import HarnessError

SCHEMA = 1
OPTIONS = {"rounds": 3, "steps": 4, "warmup": 2, "profile_steps": 2}
_TABLES = {
    "model": {
        "family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gated_mlp", "tied_embeddings",
    },
    "parallel": {
        "tp", "pp", "dp", "sequence_parallel", "zero_stage", "schedule", "virtual_stages", "recompute", "bucket_mbytes",
    },
    "batch": {"micro_batch", "global_batch", "precision"},
}  # fmt: skip


def world_size(job: dict[str, Any]) -> int:
    """Ranks of a job."""
    parallel = job["parallel"]
    return int(parallel["tp"] * parallel["pp"] * parallel["dp"])


def num_micro_batches(job: dict[str, Any]) -> int:
    """Micro-batches that each replica runs in a step."""
    batch = job["batch"]
    return int(batch["global_batch"] // (batch["micro_batch"] * job["parallel"]["dp"]))


def world_sizes(plan: dict[str, Any]) -> list[int]:
    """Every world size that a plan needs, smallest first."""
    return sorted({world_size(run["job"]) for run in plan["runs"]} | {e["world_size"] for e in plan["events"]})


def check_plan(plan: Any) -> dict[str, Any]:
    """A copy of the plan with its options filled in.

    Raises:
        HarnessError: With every broken rule and the values.
    """
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA:
        got = plan.get("schema") if isinstance(plan, dict) else type(plan).__name__
        raise HarnessError(f"a plan is a JSON object with schema = {SCHEMA}, got {got!r}")
    unknown = sorted(set(plan) - {"schema", "runs", "events", "device"})
    if unknown:
        raise HarnessError(f"a plan has the keys schema, runs, events and device, got also {', '.join(unknown)}")
    device = plan.get("device", "auto")
    problems = [] if device in ("auto", "cpu", "cuda") else [f"device must be auto, cpu or cuda, got {device!r}"]
    runs, events = ([dict(item) for item in plan.get(key, [])] for key in ("runs", "events"))
    for run in runs:
        problems += [f"run {run.get('name')!r}: {text}" for text in _run_problems(run)]
    for event in events:
        problems += [f"events {event.get('name')!r}: {text}" for text in _event_problems(event)]
    for names in ([run.get("name") for run in runs], [event.get("name") for event in events]):
        problems += [
            f"names must be unique, got {name!r} twice"
            for name in sorted({str(n) for n in names if names.count(n) > 1})
        ]
    if problems:
        raise HarnessError("; ".join(problems))
    return {"schema": SCHEMA, "runs": [{**OPTIONS, **run} for run in runs], "events": events, "device": device}


def _run_problems(run: dict[str, Any]) -> list[str]:
    problems = _name_problems(run)
    unknown = sorted(set(run) - {"name", "role", "job", *OPTIONS})
    problems += [f"unknown key {key!r}" for key in unknown]
    for key, default in OPTIONS.items():
        value, least = run.get(key, default), 2 if key == "warmup" else 0 if key == "profile_steps" else 1
        if not isinstance(value, int) or value < least:
            problems.append(f"{key} must be a whole number >= {least}, got {value!r}")
    if not isinstance(run.get("role"), str):
        problems.append(f"role must be a string, got {run.get('role')!r}")
    job = run.get("job")
    if not isinstance(job, dict):
        return [*problems, f"job must be a table, got {job!r}"]
    missing = [f"{t}.{key}" for t, keys in _TABLES.items() for key in sorted(keys - set(job.get(t) or {}))]
    if missing:
        return [*problems, f"a job needs {', '.join(missing)}"]
    return problems + _job_problems(job)


def _job_problems(job: dict[str, Any]) -> list[str]:
    """Rules beyond those of ``Job`` itself: what this harness can run."""
    model, parallel, batch = job["model"], job["parallel"], job["batch"]
    tp, pp, dp = parallel["tp"], parallel["pp"], parallel["dp"]
    rows = batch["micro_batch"] * model["seq_len"]
    rules = [
        (
            parallel["zero_stage"] in (0, 3),
            f"the harness runs zero_stage 0 (DDP) and 3 (FSDP2), got {parallel['zero_stage']}",
        ),
        (
            parallel["recompute"] in ("none", "full"),
            f"the harness runs recompute none and full, got {parallel['recompute']!r}",
        ),
        (
            parallel["schedule"] in ("gpipe", "1f1b"),
            f"the harness runs schedules gpipe and 1f1b, got {parallel['schedule']!r}",
        ),
        (parallel["virtual_stages"] == 1, f"the harness runs virtual_stages = 1, got {parallel['virtual_stages']}"),
        (
            not (model["tied_embeddings"] and pp > 1),
            f"the harness ties embeddings only within one stage, got tied_embeddings and pp = {pp}",
        ),
        (
            batch["global_batch"] % (batch["micro_batch"] * dp) == 0,
            f"micro_batch * dp must divide global_batch, got {batch['global_batch']} % ({batch['micro_batch']} * {dp})",
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
            model["family"] == "gpt" or (model["hidden"] // model["heads"]) % 2 == 0,
            f"rotary positions need an even head_dim, got {model['hidden']} / {model['heads']}",
        ),
    ]
    for key in ("heads", "kv_heads", "ffn", "vocab"):
        rules.append((model[key] % tp == 0, f"tp must divide {key}, got {model[key]} % {tp}"))
    return [text for kept, text in rules if not kept]


def _event_problems(event: dict[str, Any]) -> list[str]:
    problems = _name_problems(event)
    size, seconds = event.get("world_size"), event.get("seconds")
    if not isinstance(size, int) or size < 1:
        problems.append(f"world_size must be a whole number >= 1, got {size!r}")
    if not isinstance(seconds, int | float) or not seconds > 0:
        problems.append(f"seconds must be > 0, got {seconds!r}")
    for item in event.get("ops", []):
        if not isinstance(item, dict) or not {"kind", "dims", "dtype"} <= set(item):
            problems.append(f"an op has kind, dims and dtype, got {item!r}")
    for item in event.get("collectives", []):
        if not isinstance(item, dict) or not {"kind", "num_bytes", "group_size", "ranks_per_node"} <= set(item):
            problems.append(f"a collective has kind, num_bytes, group_size and ranks_per_node, got {item!r}")
        elif isinstance(size, int) and item["group_size"] > size:
            problems.append(f"group_size must be at most world_size, got {item['group_size']} > {size}")
    return problems


def _name_problems(item: dict[str, Any]) -> list[str]:
    name = item.get("name")
    good = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name)
    return [] if good else [f"name must be letters, digits, '_', '.', '+' and '-', got {name!r}"]
