"""Check what the ranks of a box sleep: every op, collective and size that a plan states for a run."""

from __future__ import annotations

from typing import Any

from .form import are_sizes, is_of

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
