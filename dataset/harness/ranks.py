"""All ranks of a process group together: wait for them, and gather what they have.

A process that stands in for one rank of a larger job (see ``emulation.stand_in``) has nobody to wait for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

STAND_IN = "stand_in"  # the backend of a process that stands in for a rank


def alone() -> bool:
    """Return whether no other process measures: there is one rank, or this process stands in for a rank of many."""
    return not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == STAND_IN


def barrier() -> None:
    """Wait for all ranks, and for this rank's device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if not alone():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    if alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
