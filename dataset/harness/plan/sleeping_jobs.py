"""What a cluster in a box can run: jobs whose ranks sleep instead of computing."""

from __future__ import annotations

from typing import Any

from .form import are_sizes, form_problems, is_of, world_size
from .parallel_rules import Rules
from .runnable_jobs import ENGINES, ONLY, OPTIMIZER, check_1f1b, check_fixed, check_job

SLEEPS = {"parts", "blocks", "root", "boundary_numel", "optimizer", "paces", "table"}  # the keys of ``sleeps``
_FREE = ("vocab_parallel", "stage_layers", "recompute_every")  # keys of ``parallel`` that a box runs with any value
_ONLY: dict[str, dict[str, Any]] = {  # optional keys of a job, and their only value in a box
    "model": {"experts": 0},
    "parallel": {key: value for key, value in ONLY["parallel"].items() if key not in _FREE},
    "optimizer": OPTIMIZER,
    "cluster": {"mixed": []},
}


def sleeping_problems(job: Any) -> list[str]:
    """Return every reason why a box cannot run a job."""
    if problems := form_problems(job):
        return problems
    rules = Rules()
    check_job(rules, job)
    _check_asleep(rules, job)
    return rules


def sleeping_run_problems(run: dict[str, Any], ranks: int) -> list[str]:
    """Check the job and the ``sleeps`` of a run for a box with a number of ranks."""
    job: Any = run.get("job")
    sleeps: Any = run.get("sleeps")
    if problems := form_problems(job):
        return problems
    if not isinstance(sleeps, dict) or set(sleeps) != SLEEPS:
        got = sorted(sleeps) if isinstance(sleeps, dict) else sleeps
        return [f"a run in a box has sleeps with {', '.join(sorted(SLEEPS))}, got {got!r:.80}"]
    rules = Rules(sleeping_problems(job))
    size, parallel = world_size(job), job["parallel"]
    rules.require(size == ranks, f"a run must have as many ranks as its box, got {size} != {ranks}")
    parts = parallel["pp"] * parallel["virtual_stages"]
    counts = {"parts": parts, "boundary_numel": parts - 1, "optimizer": parallel["pp"], "paces": ranks}
    for key, count in counts.items():
        good = isinstance(sleeps[key], list) and len(sleeps[key]) == count
        rules.require(good, f"sleeps.{key} must be a list of {count}, got {sleeps[key]!r:.60}")
    return rules or _value_problems(sleeps, parallel["tp"])


def _value_problems(sleeps: dict[str, Any], tp: int) -> list[str]:
    """Check every value of ``sleeps``, whose lists are as long as they must be."""
    rules = Rules()
    blocks = sleeps["blocks"] if isinstance(sleeps["blocks"], list) else [sleeps["blocks"]]
    rules += [f"sleeps.blocks must be lists of steps, got {block!r:.80}" for block in blocks if not is_block(block, tp)]
    for key, good, words in (
        ("parts", all(are_indices(part, len(blocks)) for part in sleeps["parts"]), "lists of numbers of blocks"),
        ("root", are_indices(sleeps["root"], len(blocks)), "a list of numbers of blocks"),
        ("boundary_numel", are_sizes(sleeps["boundary_numel"]), "whole numbers >= 0"),
        ("optimizer", all(map(is_sleep, sleeps["optimizer"])), "ops with their seconds"),
        ("paces", all(is_of(pace, float) and pace > 0 for pace in sleeps["paces"]), "numbers > 0"),
        ("table", isinstance(sleeps["table"], str), "text"),
    ):
        rules.require(good, f"sleeps.{key} must be {words}, got {sleeps[key]!r:.80}")
    return rules


def _check_asleep(rules: Rules, job: dict[str, Any]) -> None:
    parallel, pp, precision = job["parallel"], job["parallel"]["pp"], job["batch"]["precision"]
    zero, recompute = parallel["zero_stage"], parallel["recompute"]
    rules.require(zero in (0, 3), f"in a box zero_stage is 0 (DDP) or 3 (FSDP2), got {zero}")
    rules.require(zero == 0 or pp == 1, f"in a box zero_stage 3 runs without a pipeline, got pp = {pp}")
    rules.require(precision == "fp32", f"in a box precision is fp32, got {precision!r:.80}")
    engine = job.get("execution", {}).get("engine", "")
    rules.require(engine in ENGINES, f"in a box the engine is eager-pytorch, got {engine!r:.80}")
    rules.require(recompute == "none", f"in a box recompute is none, got {recompute!r:.80}")
    rules.require(
        not (job["model"]["tied_embeddings"] and pp > 1),
        f"a box ties embeddings only within one stage, got tied_embeddings and pp = {pp}",
    )
    check_1f1b(rules, job)
    for key, allowed, words in (
        ("dp_shard", (0, parallel["dp"]), "zero_stage over all replicas (dp_shard)"),
        ("runtime", ("", "torch"), "PyTorch's own pipeline runtime"),
    ):
        value = parallel.get(key, allowed[0])
        rules.require(value in allowed, f"a box runs {words}, got {value!r:.80}")
    check_fixed(rules, job, _ONLY, "a box runs")


LONGEST_SLEEP_S = 3600  # of one op; a longer one is a typing mistake
DTYPES = ("fp32", "bf16", "fp16")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_STEP = {"forward", "backward", "weight", "parameters", "weight_first"}


def is_sleep(item: Any) -> bool:
    """Return whether an item is ``["op", kind, dims, dtype, seconds]``."""
    return (
        isinstance(item, list)
        and len(item) == 5
        and item[0] == "op"
        and is_of(item[1], str)
        and are_sizes(item[2])
        and item[3] in DTYPES
        and is_of(item[4], float)
        and 0 <= item[4] <= LONGEST_SLEEP_S
    )


def is_block(block: Any, tp: int) -> bool:
    """Return whether a block is a list of steps of ops, and of collectives if ``tp`` > 1."""
    return isinstance(block, list) and all(_is_step(step, tp) for step in block)


def are_indices(values: Any, count: int) -> bool:
    """Return whether the value is a list of whole numbers from 0 to below ``count``."""
    return are_sizes(values) and all(value < count for value in values)


def _is_step(step: Any, tp: int) -> bool:
    return (
        isinstance(step, dict)
        and set(step) == _STEP
        and all(isinstance(step[key], list) for key in ("forward", "backward", "weight"))
        and all(
            is_sleep(item) or (tp > 1 and _is_collective(item))
            for key in ("forward", "backward", "weight")
            for item in step[key]
        )
        and are_sizes(step["parameters"])
        and isinstance(step["weight_first"], bool)
    )


def _is_collective(item: Any) -> bool:
    """``["tp", kind, bytes]``."""
    return (
        isinstance(item, list)
        and len(item) == 3
        and item[0] == "tp"
        and item[1] in COLLECTIVES
        and are_sizes([item[2]])
    )
