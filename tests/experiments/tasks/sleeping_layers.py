"""Layers that sleep: computation takes a known time, communication is real or emulated.

``sleeping_layers.py ddp|fsdp2 LAYERS FORWARD_S BACKWARD_S VALUES`` trains without end; ``VALUES`` are parameters of a
layer.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Sleep(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class Layer(nn.Module):
    """Parameters whose gradient is ready after the layer's backward has slept."""

    def __init__(self, forward_s: float, backward_s: float, values: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(values))
        self._seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x * (1 + self.weight[:1]), *self._seconds)  # type: ignore[no-untyped-call]
        return slept


def train_sleeping(mode: str, layers: int, forward_s: float, backward_s: float, values: int) -> None:
    """Train in an endless loop."""
    model: nn.Module = nn.Sequential(*(Layer(forward_s, backward_s, values) for _ in range(layers)))
    if mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mode, *words = sys.argv[1:]
    train_sleeping(mode, int(words[0]), float(words[1]), float(words[2]), int(words[3]))
