"""All ranks of a process group together: wait for them, and gather what they have.

A process that stands in for one rank of a larger job (see ``emulation.stand_in``) has nobody to wait for.
"""

from __future__ import annotations

import json
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
    """Return every rank's value, on every rank; it travels as JSON, so that tuples of other ranks are lists.

    torch's own ``all_gather_object`` unpickles what arrives: whoever reaches a rank's socket could run code.
    """
    if alone():
        return [value]
    size, device = dist.get_world_size(), torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    text = json.dumps(value).encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device))
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded)
    return [json.loads(each.cpu().numpy().tobytes()) for each in texts]
