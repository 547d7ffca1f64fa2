"""The rules of a whole plan; its options are filled in."""

from __future__ import annotations

from typing import Any

from ..base.errors import HarnessError
from .job_checks import (
    MOST,
    WRITTEN,
    are_sizes,
    has_keys,
    is_of,
    job_problems,
    name_problems,
    number_problems,
    sleeping_run_problems,
    world_size,
)

SCHEMA = 1
MOST_CPU = 0.25  # of all cores' time that the ranks of a run in a box may compute; beyond, its times mean nothing
OPTIONS = {"rounds": 3, "steps": 4, "warmup": 2, "profile_steps": 2}


def check_plan(plan: Any) -> dict[str, Any]:
    """A copy of the plan with its options filled in; a ``HarnessError`` names every broken rule and the values."""
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA:
        got = plan.get("schema") if isinstance(plan, dict) else type(plan).__name__
        raise HarnessError(f"a plan is a JSON object with schema = {SCHEMA}, got {got!r:.80}")
    if unknown := sorted(set(plan) - {"schema", "runs", "events", "device", "compile", "box", "extra_seconds"}):
        known = "schema, runs, events, device, compile, box and extra_seconds"
        raise HarnessError(f"a plan has the keys {known}, got also {', '.join(unknown)}")
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
    checked |= {"extra_seconds": float(extra)} if extra else {}
    return checked | ({"compile": True} if compiled else {}) | ({"box": plan["box"]} if boxed else {})


def _items(plan: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = plan.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise HarnessError(f"{key} of a plan must be a list of tables, got {items!r:.80}")
    return [dict(item) for item in items]


def _run_problems(run: dict[str, Any], ranks: int) -> list[str]:
    """Check a run; ``ranks`` is the number of ranks of the box, or 0 without a box."""
    unknown = sorted(set(run) - {"name", "role", "job", *(("sleeps",) if ranks else ("stand_in", "table")), *OPTIONS})
    problems = name_problems(run) + [f"unknown key {key!r:.80}" for key in unknown]
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
    unknown = sorted(set(event) - {"name", "world_size", "ops", "collectives", "seconds"})
    size: Any = event.get("world_size")
    seconds: Any = event.get("seconds")
    problems = name_problems(event) + [f"unknown key {key!r:.80}" for key in unknown]
    problems += number_problems("world_size", size, 1)
    if not is_of(seconds, float) or not seconds > 0:
        problems.append(f"seconds must be > 0, got {seconds!r:.80}")
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
    if problems:
        return problems
    for key, least, most in (("mbits_per_s", 1, 100_000), ("latency_ms", 0, 1000)):
        numbers = box.get(key, [0.0] * box["nodes"])
        if not isinstance(numbers, list) or not all(is_of(each, float) and least <= each <= most for each in numbers):
            problems.append(f"{key} of a box must hold numbers from {least} to {most:,}, got {numbers!r:.80}")
        elif len(numbers) != box["nodes"]:
            problems.append(f"{key} of a box must hold one number per node, got {len(numbers)} for {box['nodes']}")
    return problems


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
_SIZES = ("num_bytes", "group_size", "ranks_per_node")
_MOST_S = 3600.0  # a longer delay is a typing mistake


def _stand_in_problems(stand_in: Any, ranks: int) -> list[str]:
    """Return every problem of ``stand_in`` of a run, given the number of ranks of its job."""
    if not has_keys(stand_in, "rank", "collectives"):
        got = sorted(stand_in) if isinstance(stand_in, dict) else stand_in
        return [f"stand_in is a table of rank and collectives, got {got!r:.80}"]
    rank, rows = stand_in["rank"], stand_in["collectives"]
    problems, of = [], "of a stand-in's collective"
    if not is_of(rank, int) or not 0 <= rank < ranks:
        problems.append(f"stand_in.rank must be one of the job's {ranks} ranks, got {rank!r:.80}")
    if ranks < 2:
        problems.append(f"a stand-in is for a job of at least 2 ranks, got {ranks}")
    if not isinstance(rows, list):
        return [*problems, f"stand_in.collectives must be a list, got {rows!r:.80}"]
    for row in rows:
        if not has_keys(row, "kind", *_SIZES, "seconds"):
            problems.append(f"a collective of a stand-in has kind, {', '.join(_SIZES)} and seconds, got {row!r:.120}")
            continue
        if row["kind"] not in _KINDS:
            problems.append(f"kind {of} must be one of {', '.join(_KINDS)}, got {row['kind']!r:.80}")
        for name in _SIZES:
            problems += number_problems(f"{name} {of}", row[name], 1, MOST)
        if not is_of(row["seconds"], float) or not 0 < row["seconds"] <= _MOST_S:
            rule = f"must be a number > 0 and at most {_MOST_S:g}"
            problems.append(f"seconds {of} {rule}, got {row['seconds']!r:.80}")
    return problems
