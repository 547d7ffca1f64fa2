"""Collectives as ``torch.distributed`` has them: how one is run on its own, and which calls of a script are one.

Buffers are fp32.  PyTorch's own functions are looked up when they are called, as annotations replace them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import HarnessError

Group = dist.ProcessGroup


def all_gather(output: Tensor, shard: Tensor, group: Group | None) -> None:
    """Fill ``output[size * n]`` with every rank's ``shard[n]`` (of the group, or of all)."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, shard, group=group)


def reduce_scatter(shard: Tensor, full: Tensor, group: Group, *, async_op: bool = False) -> Any:
    """Sum every rank's ``full[size * n]`` and keep this rank's ``shard[n]``; ``async_op``: return the work."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, full, group=group, async_op=async_op)


class Buffers(NamedTuple):
    """What a collective works on: ``full``, ``other`` ``(numel,)``, ``shard`` ``(numel / size,)``; global ``ranks``."""

    full: Tensor
    other: Tensor
    shard: Tensor
    ranks: list[int]
    group: Any


class CollectiveCall(NamedTuple):
    """One kind of collective."""

    run: Callable[[Buffers], object]  # runs it once
    # c10d functions that are one: of each the parameter with the full buffer, and the direction of a message, or ""
    wrapped: Mapping[str, tuple[str, str]]
    messages: int = 0  # between two ranks, that follow each other in one run. 0: it is no message


def _there_and_back(b: Buffers) -> None:
    """A sender alone is done as soon as its kernel has taken the message, so the message comes back."""
    if dist.get_rank() == b.ranks[0]:
        dist.send(b.full, b.ranks[1], group=b.group)
        dist.recv(b.full, b.ranks[1], group=b.group)
    else:
        dist.recv(b.full, b.ranks[0], group=b.group)
        dist.send(b.full, b.ranks[0], group=b.group)


CALLS: Mapping[str, CollectiveCall] = MappingProxyType(
    {
        "all_reduce": CollectiveCall(lambda b: dist.all_reduce(b.full, group=b.group), {"all_reduce": ("tensor", "")}),
        "all_gather": CollectiveCall(
            lambda b: all_gather(b.full, b.shard, b.group),
            {"all_gather_into_tensor": ("output_tensor", ""), "all_gather_single": ("output_tensor", "")},
        ),
        "reduce_scatter": CollectiveCall(
            lambda b: reduce_scatter(b.shard, b.full, b.group),
            {"reduce_scatter_tensor": ("input", ""), "reduce_scatter_single": ("input", "")},
        ),
        "all_to_all": CollectiveCall(
            lambda b: dist.all_to_all_single(b.other, b.full, group=b.group), {"all_to_all_single": ("input", "")}
        ),
        "broadcast": CollectiveCall(
            lambda b: dist.broadcast(b.full, b.ranks[0], group=b.group), {"broadcast": ("tensor", "")}
        ),
        "send_recv": CollectiveCall(_there_and_back, {"isend": ("tensor", "send"), "irecv": ("tensor", "recv")}, 2),
    }
)

# c10d function -> kind of collective, parameter that holds the full buffer, direction of a message
WRAPPED = {name: (kind, *how) for kind, call in CALLS.items() for name, how in call.wrapped.items()}


def collective_call(kind: str, group_size: int) -> CollectiveCall:
    """How a kind is run in a group; refused if the harness has no such collective, or not in a group of that size."""
    if kind not in CALLS:
        raise HarnessError(f"collective kind must be one of {', '.join(CALLS)}, got {kind!r}")
    if CALLS[kind].messages and group_size != 2:
        raise HarnessError(f"a {kind} has group_size 2, got {group_size}")
    return CALLS[kind]


def buffers(num_bytes: int, ranks: list[int], group: Any, size: int, device: torch.device) -> Buffers:
    """Make buffers for a collective of ``num_bytes`` among ``size`` ranks."""
    numel = -(-max(1, num_bytes // 4) // size) * size
    full, other, shard = (torch.zeros(count, device=device) for count in (numel, numel, numel // size))
    if device.type == "cuda":  # numbers, as zeros take less power; small ones, as they are summed again and again
        for tensor in (full, shard):
            tensor.uniform_(-1e-18, 1e-18)
    return Buffers(full, other, shard, ranks, group)


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
