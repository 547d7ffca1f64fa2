"""Parts that several families of models share; plain PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class SelfAttention(nn.Module):
    """Multi-head attention of ``x[batch, length, width]``; ``keys``: from another sequence."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.pair, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = (
            part.view(batch, -1, self.heads, width // self.heads).transpose(1, 2)
            for part in self.pair(x if keys is None else keys).chunk(2, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Transpose(nn.Module):
    """Exchange two dims."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.dims = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.dims)


def conv(ins: int, outs: int, window: int = 3, **more: Any) -> nn.Conv2d:
    """A convolution that keeps the size of its input, unless a stride says otherwise."""
    return nn.Conv2d(ins, outs, window, padding=more.pop("padding", window // 2), **more)


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations between."""
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layers += [nn.Linear(ins, outs), act()]
    return nn.Sequential(*layers[:-1])


def pre_norm(width: int, heads: int, *, causal: bool = False, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """A transformer layer with norms before."""
    return nn.Sequential(
        Residual(nn.LayerNorm(width), SelfAttention(width, heads, causal=causal)),
        Residual(nn.LayerNorm(width), mlp(width, 4 * width, width, act=act)),
    )
