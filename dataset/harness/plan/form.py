"""Types and ranges of the values of a plan, and of a job in it."""

from __future__ import annotations

import re
from typing import Any

MOST = 2**48  # a larger number is a typing mistake
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_JOB: dict[str, dict[str, type]] = {  # the keys that a job must have, and their types
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
_TABLES = (*_JOB, "optimizer", "execution")


def is_of(value: Any, kind: type) -> bool:
    """Return whether a value has a type: a truth value is not a number, and a number is finite and not absurd."""
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


def name_problems(item: dict[str, Any]) -> list[str]:
    """Check the name of a run or an event file, which becomes a file's name."""
    name = item.get("name")
    good = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name)
    return [] if good else [f"name must be letters, digits, '_', '.', '+' and '-', got {name!r:.80}"]


def form_problems(job: Any) -> list[str]:
    """Check that a job is a table of tables with the keys and types that the rules read."""
    if not isinstance(job, dict):
        return [f"job must be a table, got {job!r:.80}"]
    wrong = [name for name in _TABLES if not isinstance(job.get(name, {}), dict)]
    if wrong:
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
    return int(parallel["tp"] * parallel["pp"] * parallel["dp"])


def ranks_needed(run: dict[str, Any]) -> int:
    """Return the number of processes that a run needs: the ranks of its job, or 1 for a stand-in."""
    return 1 if "stand_in" in run else world_size(run["job"])


def num_micro_batches(job: dict[str, Any]) -> int:
    """Return the number of micro-batches that each replica runs in a step."""
    batch = job["batch"]
    return int(batch["global_batch"] // (batch["micro_batch"] * job["parallel"]["dp"]))


def world_sizes(plan: dict[str, Any]) -> list[int]:
    """Return every world size that a plan needs, smallest first."""
    return sorted({ranks_needed(run) for run in plan["runs"]} | {e["world_size"] for e in plan["events"]})
