"""ZeRO-1 and ZeRO-2: each replica updates its shard of the parameters, and all gather what the others have updated.

Gradients are summed in buckets, each to the rank that owns that part (Rajbhandari et al. 2020, arXiv:1910.02054): with
ZeRO-1 once a step, with ZeRO-2 after the backward pass of every micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.collective_calls import Group, all_gather, reduce_scatter


class Bucket:
    """Parameters whose gradients travel together once each has got ``passes`` of them; 0: when all are there."""

    def __init__(self, parameters: list[nn.Parameter], group: Group, passes: int) -> None:
        self._parameters, self._group, self._size = parameters, group, group.size()
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        self._padding = flat.new_zeros(-len(flat) % self._size)
        self._whole = torch.cat([flat, self._padding])
        sizes = [*map(Tensor.numel, parameters), len(self._padding)]
        for p, part in zip(parameters, self._whole.split(sizes)[:-1], strict=True):
            p.data = part.view_as(p)
            if passes:
                p.register_post_accumulate_grad_hook(self._count)
        self.shard = nn.Parameter(self._whole.chunk(self._size)[group.rank()].clone())
        self._received: Any = None  # the work, and the shard of the gradients
        self._wanted = self._missing = passes * len(parameters)

    def _count(self, _: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._missing = self._wanted
            self._send()

    def _send(self) -> None:
        """Begin to sum the gradients so far."""
        self._settle()
        flat = torch.cat([*(p.grad.reshape(-1) for p in self._parameters if p.grad is not None), self._padding])
        for p in self._parameters:
            p.grad = None
        part = torch.empty_like(self.shard, requires_grad=False)
        self._received = reduce_scatter(part, flat, self._group, async_op=True), part

    def finish(self) -> None:
        """Have this rank's shard of the gradients ready."""
        if not self._wanted:
            self._send()
        self._settle()

    def _settle(self) -> None:
        """Wait for the sum, and add it to those of earlier micro-batches."""
        if self._received is None:
            return
        work, part = self._received
        work.wait()
        self._received, gradient = None, part.div_(self._size)
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad.add_(gradient)

    def gather(self) -> None:
        """Get what the other ranks have updated."""
        all_gather(self._whole, self.shard.detach(), self._group)


def buckets_of(parameters: list[nn.Parameter], group: Group, bucket_bytes: float, passes: int) -> list[Bucket]:
    """Buckets of at least so many bytes, in the order in which their gradients come."""
    held: list[list[nn.Parameter]] = [[]]
    for p in reversed(parameters):
        held[-1].append(p)
        if sum(each.numel() * each.element_size() for each in held[-1]) >= bucket_bytes:
            held.append([])
    return [Bucket(each, group, passes) for each in held if each]
