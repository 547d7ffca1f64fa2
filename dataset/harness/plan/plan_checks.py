"""The rules of plans: what to run and what to measure, checked before anything starts; standard library only.

A plan is a JSON object::

    {"schema": 1,
     "runs": [{"name", "role", "job": {model, parallel, batch, cluster}, "rounds": 3, "steps": 4, "warmup": 2,
               "profile_steps": 4, "stand_in": {"rank", "collectives"},        # optional: see plan_checks
               "table": CSV}],                     # of a schedule that torch has no class for
     "events": [{"name", "world_size", "ops": [{kind, dims, dtype}], "collectives": [{kind, num_bytes, group_size,
                 ranks_per_node}], "seconds": 20}],
     "device": "auto",                                  # optional: cpu, cuda
     "compile": false,                                  # optional: composite ops by torch.compile
     "box": {"nodes", "ranks_per_node", "mbits_per_s": [rate of each node's link], "latency_ms": [...]}}   # optional

A plan with ``box`` is for a cluster in a box (``latency_ms`` is optional).  Each of its runs also has ``sleeps`` (see
``models.sleeping``), because its ranks sleep instead of computing.

A job is what ``stepsight.dataset.job.job.Job.to_dict`` writes, with every key filled in.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..base import parallel_rules
from ..base.errors import HarnessError
from ..base.parallel_rules import Rules

SCHEMA = 1
MOST_CPU = 0.25  # of all cores' time that the ranks of a run in a box may compute; beyond, its times mean nothing
OPTIONS = {"rounds": 3, "steps": 4, "warmup": 2, "profile_steps": 4}


def check_plan(plan: Any) -> dict[str, Any]:
    """A copy of the plan with its options filled in; a ``HarnessError`` names every broken rule and the values."""
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA:
        got = plan.get("schema") if isinstance(plan, dict) else type(plan).__name__
        raise HarnessError(f"a plan is a JSON object with schema = {SCHEMA}, got {got!r:.80}")
    known = ("schema", "runs", "events", "device", "compile", "box", "extra_seconds")
    if unknown := sorted(set(plan) - set(known)):
        raise HarnessError(f"a plan has the keys {', '.join(known)}, got also {', '.join(unknown)}")
    boxed = "box" in plan
    if boxed and (problems := box_problems(plan["box"])):
        raise HarnessError("; ".join(problems))
    ranks = plan["box"]["nodes"] * plan["box"]["ranks_per_node"] if boxed else 0
    device, compiled, extra = plan.get("device", "auto"), plan.get("compile", False), plan.get("extra_seconds", 0.0)
    problems = [] if device in ("auto", "cpu", "cuda") else [f"device must be auto, cpu or cuda, got {device!r:.80}"]
    if not isinstance(compiled, bool) or (compiled and boxed):
        problems.append(f"compile must be true or false, and false in a box, got {compiled!r:.80}")
    if not is_of(extra, float) or extra < 0 or (extra and boxed):
        problems.append(f"extra_seconds must be a number >= 0, and 0 in a box, got {extra!r:.80}")
    for key in ("runs", "events"):
        items = plan.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise HarnessError(f"{key} of a plan must be a list of tables, got {items!r:.80}")
    runs, events = ([dict(item) for item in plan.get(key, [])] for key in ("runs", "events"))
    for run in runs:
        problems += [f"run {run.get('name')!r:.80}: {text}" for text in _run_problems(run, ranks)]
    for event in events:
        problems += [f"events {event.get('name')!r:.80}: {text}" for text in _event_problems(event)]
        if boxed and event.get("world_size") != ranks:
            problems.append(f"a box holds events of {ranks} ranks, got world_size {event.get('world_size')!r:.80}")
    for items in (runs, events):
        names = Counter(str(item.get("name")) for item in items)
        problems += [f"names must be unique, got {name!r:.80} twice" for name in sorted(names) if names[name] > 1]
    if problems:
        raise HarnessError("; ".join(problems))
    checked = {"schema": SCHEMA, "runs": [{**OPTIONS, **run} for run in runs], "events": events, "device": device}
    checked |= {"extra_seconds": float(extra)} if extra else {}
    return checked | ({"compile": True} if compiled else {}) | ({"box": plan["box"]} if boxed else {})


def _run_problems(run: dict[str, Any], ranks: int) -> list[str]:
    """Check a run; ``ranks`` is the number of ranks of the box, or 0 without a box."""
    problems = item_problems(run, "role", "job", *(("sleeps",) if ranks else ("stand_in", "table")), *OPTIONS)
    for key, default in OPTIONS.items():
        value, least = run.get(key, default), {"warmup": 1 if ranks else 2, "profile_steps": 0}.get(key, 1)
        problems += number_problems(key, value, least)
    role = run.get("role")
    if not isinstance(role, str) or not role.strip() or not role.isprintable():
        problems.append(f"role must be a word, got {role!r:.80}")
    problems += sleeping_run_problems(run, ranks) if ranks else job_problems(run.get("job"))
    if problems or ranks:
        return problems
    parallel = run["job"]["parallel"]
    if parallel["schedule"] in WRITTEN and parallel["pp"] > 1 and not is_of(run.get("table"), str):
        problems.append(f"a run with schedule {parallel['schedule']} has its table as CSV text")
    return problems + (_stand_in_problems(run["stand_in"], world_size(run["job"])) if "stand_in" in run else [])


def _event_problems(event: dict[str, Any]) -> list[str]:
    """Check what an event file measures."""
    problems, size = item_problems(event, "world_size", "ops", "collectives", "seconds"), event.get("world_size")
    problems += number_problems("world_size", size, 1)
    if not is_of(event.get("seconds"), float) or not event["seconds"] > 0:
        problems.append(f"seconds must be > 0, got {event.get('seconds')!r:.80}")
    for key in ("ops", "collectives"):
        if not isinstance(event.get(key, []), list):
            return [*problems, f"{key} must be a list, got {event[key]!r:.80}"]
    for item in event.get("ops", []):
        good = has_keys(item, "kind", "dims", "dtype", optional="call") and are_sizes(item["dims"])
        if not good or not is_of(item["kind"], str) or not is_of(item["dtype"], str):
            problems.append(f"an op has kind, dims (whole numbers >= 0) and dtype, got {item!r:.80}")
        elif not isinstance(item.get("call", []), list) or len(item.get("call", range(6))) != 6:
            problems.append(f"a call has name, dims, types, strides, literals and result, got {item['call']!r:.80}")
    for item in event.get("collectives", []):
        good = has_keys(item, "kind", *_SIZES) and is_of(item["kind"], str)
        if not good or not are_sizes([item[key] for key in _SIZES]):
            problems.append(f"a collective has kind, num_bytes, group_size and ranks_per_node, got {item!r:.80}")
        elif is_of(size, int) and item["group_size"] > size:
            problems.append(f"group_size must be at most world_size, got {item['group_size']} > {size}")
    return problems


def box_problems(box: Any) -> list[str]:
    """Return everything that is wrong with ``box`` of a plan; ``latency_ms`` is optional."""
    if not has_keys(box, "nodes", "ranks_per_node", "mbits_per_s", optional="latency_ms"):
        return [f"a box has nodes, ranks_per_node, mbits_per_s and maybe latency_ms, got {box!r:.80}"]
    problems = number_problems("nodes of a box", box["nodes"], 1, 250)  # addresses of one subnet
    problems += number_problems("ranks_per_node of a box", box["ranks_per_node"], 1, 1024)
    count = 0 if problems else box["nodes"]
    for key, least, most in (("mbits_per_s", 1, 100_000), ("latency_ms", 0, 1000)):
        numbers = box.get(key, [0.0] * count)
        if not isinstance(numbers, list) or not all(is_of(each, float) and least <= each <= most for each in numbers):
            problems.append(f"{key} of a box must hold numbers from {least} to {most:,}, got {numbers!r:.80}")
        elif count and len(numbers) != count:
            problems.append(f"{key} of a box must hold one number per node, got {len(numbers)} for {count}")
    return problems


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_SIZES = ("num_bytes", "group_size", "ranks_per_node")
_MOST_S = 3600.0  # a longer delay, or sleep for one op, is a typing mistake


def _stand_in_problems(stand_in: Any, ranks: int) -> list[str]:
    """Return every problem of ``stand_in`` of a run, given the number of ranks of its job."""
    if not has_keys(stand_in, "rank", "collectives"):
        got = sorted(stand_in) if isinstance(stand_in, dict) else stand_in
        return [f"stand_in is a table of rank and collectives, got {got!r:.80}"]
    rank, rows, rules, of = stand_in["rank"], stand_in["collectives"], Rules(), "of a stand-in's collective"
    is_rank = is_of(rank, int) and 0 <= rank < ranks
    rules.require(is_rank, f"stand_in.rank must be one of the job's {ranks} ranks, got {rank!r:.80}")
    rules.require(ranks >= 2, f"a stand-in is for a job of at least 2 ranks, got {ranks}")
    if not isinstance(rows, list):
        return [*rules, f"stand_in.collectives must be a list, got {rows!r:.80}"]
    for row in rows:
        if not has_keys(row, "kind", *_SIZES, "seconds"):
            rules.append(f"a collective of a stand-in has kind, {', '.join(_SIZES)} and seconds, got {row!r:.120}")
            continue
        kind, seconds = row["kind"], row["seconds"]
        rules.require(kind in _KINDS, f"kind {of} must be one of {', '.join(_KINDS)}, got {kind!r:.80}")
        for name in _SIZES:
            rules += number_problems(f"{name} {of}", row[name], 1, MOST)
        timed, rule = is_of(seconds, float) and 0 < seconds <= _MOST_S, f"must be a number > 0 and at most {_MOST_S:g}"
        rules.require(timed, f"seconds {of} {rule}, got {seconds!r:.80}")
    return rules


MOST = 2**48  # a larger number is a typing mistake
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_LIMITS = tomllib.loads(Path(__file__).with_name("limits.toml").read_text("utf-8"))
_JOB: dict[str, dict[str, type]] = {  # the keys that a job must have, and their types
    table: {key: kind for kind in _WORDS for key in keys.get(kind.__name__, "").split()}
    for table, keys in _LIMITS["types"].items()
}
_TABLES = (*_JOB, "optimizer", "execution")


def is_of(value: Any, kind: type) -> bool:
    """Whether a value has a type: a truth value is not a number, and a number is finite and not absurd."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= MOST
    return isinstance(value, kind) and (not isinstance(value, int) or abs(value) <= MOST)


def number_problems(name: str, value: Any, least: int, most: int | None = None) -> list[str]:
    """Check that a value is a whole number from ``least`` to ``most`` (None: any that is not absurd)."""
    if is_of(value, int) and least <= value <= (MOST if most is None else most):
        return []
    allowed = f">= {least}" if most is None else f"from {least} to {most}"
    return [f"{name} must be a whole number {allowed}, got {value!r:.80}"]


def has_keys(value: Any, *keys: str, optional: str = "") -> bool:
    """Return whether a value is a table with exactly these keys, and perhaps an optional one."""
    return isinstance(value, dict) and set(value) - {optional} == set(keys)


def are_sizes(values: Any) -> bool:
    """Return whether the value is a list of whole numbers >= 0."""
    return isinstance(values, list) and all(is_of(value, int) and value >= 0 for value in values)


def item_problems(item: dict[str, Any], *keys: str) -> list[str]:
    """Check the name of a run or an event file, which becomes a file's name, and that all other keys are known."""
    name = item.get("name")
    good = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name)
    named = [] if good else [f"name must be letters, digits, '_', '.', '+' and '-', got {name!r:.80}"]
    return named + [f"unknown key {key!r:.80}" for key in sorted(set(item) - {"name", *keys})]


def form_problems(job: Any) -> list[str]:
    """Check that a job is a table of tables with the keys and types that the rules read."""
    if not isinstance(job, dict):
        return [f"job must be a table, got {job!r:.80}"]
    if wrong := [name for name in _TABLES if not isinstance(job.get(name, {}), dict)]:
        return [f"{name} of a job must be a table, got {job[name]!r:.80}" for name in wrong]
    missing = [f"{t}.{key}" for t, keys in _JOB.items() for key in sorted(set(keys) - set(job.get(t, {})))]
    if missing:
        return [f"a job needs {', '.join(missing)}"]
    problems = []
    for table, keys in _JOB.items():
        for key, kind in keys.items():
            value = job[table][key]
            if not is_of(value, kind):
                problems.append(f"{table}.{key} must be {_WORDS[kind]}, got {value!r:.80}")
            elif kind in (int, float) and value < (0 if key == "zero_stage" else 1e-9):
                problems.append(f"{table}.{key} must be > 0, got {value}")
    return problems


def world_size(job: dict[str, Any]) -> int:
    """Return the number of ranks of a job."""
    parallel = job["parallel"]
    return int(parallel["tp"] * parallel["pp"] * parallel["dp"] * parallel.get("cp", 1))


def ranks_needed(run: dict[str, Any]) -> int:
    """Return the number of processes that a run needs: the ranks of its job, or 1 for a stand-in."""
    return 1 if "stand_in" in run else world_size(run["job"])


def num_micro_batches(job: dict[str, Any]) -> int:
    """Return the number of micro-batches that each replica runs in a step."""
    batch = job["batch"]
    return int(batch["global_batch"] // (batch["micro_batch"] * job["parallel"]["dp"]))


SCHEDULES: dict[str, dict[str, str]] = _LIMITS["schedules"]
_SPLIT = tuple(SCHEDULES["split"])
WRITTEN = ("zb-h1",)  # schedules that torch has no class for: a run of a plan has their table
_WHOLE = (*SCHEDULES["whole"], *WRITTEN)
_PARALLEL = ("dp", "zero_stage", "schedule", "virtual_stages", "pp", "sequence_parallel")


def job_problems(job: Any, *, boxed: bool = False) -> list[str]:
    """Every reason why the harness, or a box whose ranks sleep instead of computing, cannot run a job."""
    if problems := form_problems(job):
        return problems
    rules, who, limits = Rules(), "a box" if boxed else "the harness", _LIMITS["box" if boxed else "harness"]
    model, parallel, batch, cluster = (job[name] for name in ("model", "parallel", "batch", "cluster"))
    tp, pp, dp, cp = parallel["tp"], parallel["pp"], parallel["dp"], parallel.get("cp", 1)
    devices, encoder = cluster["nodes"] * cluster["devices_per_node"], model.get("encoder_layers", 0)
    parallel_rules.check_degrees(rules, tp=tp, cp=cp if is_of(cp, int) else 1, pp=pp, dp=dp, devices=devices)
    parallel_rules.check_batch(rules, micro_batch=batch["micro_batch"], dp=dp, global_batch=batch["global_batch"])
    parallel_rules.check_stages(rules, layers=model["layers"] + (encoder if is_of(encoder, int) else 0), pp=pp)
    rules.divides(model["heads"], "model.heads", model["hidden"], "hidden")
    rules.divides(model["kv_heads"], "model.kv_heads", model["heads"], "heads")
    for key in ("heads", "kv_heads", "ffn", "vocab"):
        rules.divides(tp, "parallel.tp", model[key], f"model.{key}")
    for table, key, allowed, words in limits["some_of"]:
        value = job.get(table, {}).get(key, allowed[0])
        rules.require(value in allowed, f"{who} runs {words}, got {value!r:.80}")
    shard, count = parallel.get("dp_shard", 0), num_micro_batches(job)
    rules.require(shard in (0, dp), f"{who} runs zero_stage over all {dp} replicas (dp_shard), got {shard!r:.80}")
    tied = f"embeddings only within one stage, got tied_embeddings and pp = {pp}"
    rules.require(pp == 1 or not model["tied_embeddings"], f"{who} ties {tied}")
    enough = pp == 1 or parallel["schedule"] != "1f1b" or count >= pp
    rules.require(enough, f"schedule 1f1b needs as many micro-batches as stages, got {count} < {pp}")
    degrees = ("cp", cp), ("ep", parallel.get("ep", 1))
    if wrong := [text for key, value in degrees for text in number_problems(f"parallel.{key}", value, 1)]:
        return [*rules, *wrong]
    _check_experts(rules, job, boxed)
    how, known = parallel.get("context_parallel", "ring"), ["all_gather"] if boxed else ["all_gather", "ring"]
    rules.require(cp == 1 or how in known, f"{who} has context_parallel = {' or '.join(known)}, got {how!r:.80}")
    if not boxed:
        _check_computed(rules, job, count)
    for table, only in limits["only"].items():
        for key, wanted in only.items():
            value = job.get(table, {}).get(key, wanted)
            value = list(value) if isinstance(value, tuple) else value  # a tuple becomes a list in JSON
            rules.require(value == wanted, f"{who} runs {table}.{key} = {wanted!r}, got {value!r:.80}")
    return rules


def _check_computed(rules: Rules, job: dict[str, Any], count: int) -> None:
    """Check what ranks that compute need, with that many micro-batches."""
    model, parallel, precision = job["model"], job["parallel"], job["batch"]["precision"]
    head_dim, wanted, runs = model["hidden"] // model["heads"], model.get("head_dim", 0), "the harness runs"
    dp, zero, name, chunks, pp, sequence = (parallel[key] for key in _PARALLEL)
    overlaps, engine = parallel.get("overlap_grad_reduce", True), job.get("execution", {}).get("engine")
    rules.require(wanted in (0, head_dim), f"{runs} head_dim = hidden / heads = {head_dim}, got {wanted!r:.80}")
    rule = 'mixed precision runs as in PyTorch: execution.engine = "eager-pytorch" must say so'
    rules.require(precision != "bf16" or engine == "eager-pytorch", rule)
    known = dict.fromkeys((*_WHOLE, *_SPLIT))
    rules.require(name in known, f"schedules are {', '.join(known)}, got {name!r:.80}")
    if pp > 1:
        rule = f"{runs} virtual_stages > 1 with {', '.join(_SPLIT)}, got {chunks} with {name!r:.80}"
        rules.require(name in (_WHOLE if chunks == 1 else _SPLIT), rule)
        rule = "virtual stages need as many micro-batches as stages, or a multiple"
        rules.require(chunks == 1 or count % pp == 0, f"{rule}, got {count} % {pp} = {count % pp}")
    rule = f"{runs} zero_stage 1 and 2 without sequence_parallel, whose gradients are in no single shard"
    rules.require(zero not in (1, 2) or not sequence or 1 in (parallel["tp"], dp), rule)
    rule = f"{runs} zero_stage {zero} with parallel.overlap_grad_reduce = True, got False"
    rules.require(dp == 1 or zero < 2 or overlaps is True, rule)
    if model["family"] == "llama":
        rules.require(head_dim % 2 == 0, f"rotary positions need an even model.head_dim, got {head_dim}")
    if (cp := parallel.get("cp", 1)) > 1:
        rules.divides(
            2 * cp, "2 * parallel.cp (a part from the front and one from the back)", model["seq_len"], "seq_len"
        )
    if sequence:
        parallel_rules.check_sequence(rules, "seq_len", model["seq_len"], tp=parallel["tp"], cp=cp)
    layers, length = model.get("encoder_layers", 0), model.get("encoder_seq_len", 0)
    if model["family"] != "t5":
        fused = model.get("fused_attention", True)
        rules.require(fused is True, f"{runs} model.fused_attention = True, got {fused!r:.80}")
        rules.require(layers == 0, f"{runs} model.encoder_layers = 0 but for t5, got {layers!r:.80}")
        return
    heads, kv_heads, fused = model["heads"], model["kv_heads"], model.get("fused_attention", 0)
    rule = "no fused CPU kernel computes the gradient of t5's learned bias"
    rules.require(fused is False, f"{rule}: {runs} model.fused_attention = False, got {fused!r:.80}")
    for key, value in (("encoder_layers", layers), ("encoder_seq_len", length)):
        good = is_of(value, int) and value > 0
        rules.require(good, f"model.{key} of t5 must be a whole number > 0, got {value!r:.80}")
    rules.require(kv_heads == heads, f"{runs} t5 with kv_heads = heads, got {kv_heads} and {heads}")
    rule = "stages of t5 would have to share its tables of relative positions"
    rules.require(pp == 1, f"{rule}: {runs} t5 with pp = 1, got {pp}")
    rules.require(cp == 1, f"{runs} context parallelism with fused attention, so t5 with cp = 1, got {cp}")
    if sequence and is_of(length, int):
        parallel_rules.check_sequence(rules, "encoder_seq_len", length, tp=parallel["tp"])


def _check_experts(rules: Rules, job: dict[str, Any], boxed: bool) -> None:
    """Check a mixture of experts, which computes unless it is ``boxed``."""
    model, parallel, runs = job["model"], job["parallel"], "the harness runs mixtures of experts"
    experts, each, ep, dp = model.get("experts", 0), model.get("experts_per_token", 1), parallel.get("ep", 1), "dp * cp"
    if not experts:
        rules.require(ep == 1, f"parallel.ep > 1 needs model.experts, got ep = {ep}")
        return
    sizes = ("experts", "experts_per_token", "moe_every", "expert_ffn")
    if wrong := [text for key in sizes for text in number_problems(f"model.{key} of a mixture", model.get(key, 1), 1)]:
        rules += wrong
        return
    capacity, replicas, rows = model.get("capacity_factor", 0), parallel["dp"] * parallel.get("cp", 1), num_rows(job)
    rule = f"{runs} with parallel.tp = 1, whose experts are whole on a rank"
    rules.require(parallel["tp"] == 1, f"{rule}, got {parallel['tp']}")
    rules.require(ep in (1, replicas), f"{runs} with ep = 1 or {dp}, got ep = {ep} and {dp} = {replicas}")
    rules.divides(ep, "parallel.ep", experts, "model.experts")
    if boxed:
        return
    plain = model["family"] == "llama" and model["gated_mlp"]
    rules.require(plain, f"{runs} that are gated and without biases (family llama), got family {model['family']!r:.80}")
    rule = f"{runs} whose copies are equally many for each expert: model.capacity_factor = 1"
    rules.require(capacity == 1, f"{rule}, got {capacity!r:.80}")
    rules.divides(experts, "model.experts", rows * each, "a micro-batch's rows * experts_per_token")


def num_rows(job: dict[str, Any]) -> int:
    """Return the number of tokens of a micro-batch on a rank."""
    return int(job["batch"]["micro_batch"] * job["model"]["seq_len"] // job["parallel"].get("cp", 1))


_SLEEPS = {"parts", "blocks", "root", "boundary_numel", "optimizer", "paces", "table"}  # the keys of ``sleeps``
_DTYPES = ("fp32", "bf16", "fp16")
_ITEMS = ("forward", "backward", "weight")  # of a step


def sleeping_run_problems(run: dict[str, Any], ranks: int) -> list[str]:
    """Check the job and the ``sleeps`` of a run for a box with a number of ranks."""
    job, sleeps = run.get("job"), run.get("sleeps")
    rules = Rules(job_problems(job, boxed=True))
    if not isinstance(job, dict) or form_problems(job):
        return rules
    if not isinstance(sleeps, dict) or set(sleeps) != _SLEEPS:
        got = sorted(sleeps) if isinstance(sleeps, dict) else sleeps
        return [f"a run in a box has sleeps with {', '.join(sorted(_SLEEPS))}, got {got!r:.80}"]
    size, parallel = world_size(job), job["parallel"]
    rules.require(size == ranks, f"a run must have as many ranks as its box, got {size} != {ranks}")
    parts = parallel["pp"] * parallel["virtual_stages"]
    counts = {"parts": parts, "boundary_numel": parts - 1, "optimizer": parallel["pp"], "paces": ranks}
    for key, count in counts.items():
        good = isinstance(sleeps[key], list) and len(sleeps[key]) == count
        rules.require(good, f"sleeps.{key} must be a list of {count}, got {sleeps[key]!r:.60}")
    if rules:
        return rules
    blocks = sleeps["blocks"] if isinstance(sleeps["blocks"], list) else [sleeps["blocks"]]
    for block in blocks:
        good = isinstance(block, list) and all(
            has_keys(step, *_ITEMS, "parameters", "weight_first", optional="expert")
            and all(isinstance(step[key], list) for key in _ITEMS)
            and all(_is_item(item, parallel) for key in _ITEMS for item in step[key])
            and are_sizes(step["parameters"])
            and isinstance(step["weight_first"], bool)
            for step in block
        )
        rules.require(good, f"sleeps.blocks must be lists of steps, got {block!r:.80}")

    def are_blocks(values: Any) -> bool:
        return are_sizes(values) and all(value < len(blocks) for value in values)

    for key, good, words in (
        ("parts", all(map(are_blocks, sleeps["parts"])), "lists of numbers of blocks"),
        ("root", are_blocks(sleeps["root"]), "a list of numbers of blocks"),
        ("boundary_numel", are_sizes(sleeps["boundary_numel"]), "whole numbers >= 0"),
        ("optimizer", all(map(_is_item, sleeps["optimizer"])), "ops with their seconds"),
        ("paces", all(is_of(pace, float) and pace > 0 for pace in sleeps["paces"]), "numbers > 0"),
        ("table", isinstance(sleeps["table"], str), "text"),
    ):
        rules.require(good, f"sleeps.{key} must be {words}, got {sleeps[key]!r:.80}")
    return rules


def _is_item(item: Any, degrees: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether an item is ``["op", kind, dims, dtype, seconds]``, or a collective ``[axis, kind, bytes]`` of an axis
    whose degree is > 1.
    """
    match item:
        case ["op", kind, dims, dtype, seconds]:
            timed = is_of(seconds, float) and 0 <= seconds <= _MOST_S
            return timed and is_of(kind, str) and are_sizes(dims) and dtype in _DTYPES
        case ["tp" | "cp" | "ep" as axis, kind, num_bytes]:
            return degrees.get(axis, 1) > 1 and kind in _KINDS[:-1] and are_sizes([num_bytes])
    return False
