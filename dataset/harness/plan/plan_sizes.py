"""Ranks and micro-batches of the runs of a checked plan."""

from __future__ import annotations

from typing import Any


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
