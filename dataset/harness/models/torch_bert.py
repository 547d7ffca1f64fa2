"""BERT (Devlin et al. 2018, arXiv:1810.04805): an encoder with norms after the residuals.

The loss is of every token; there is no pooler and no next-sentence loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import composite
from .torch_parts import (
    ColumnLinear,
    Logits,
    Norm,
    Positions,
    RowLinear,
    Shape,
    Tokens,
    enter_region,
    full_weight,
    leave_region,
    linear,
    parameter,
    self_attention,
)

TOKEN_TYPES = 2


class Layer(nn.Module):
    """One encoder layer: attention and MLP, each with its residual and then its norm."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden
        kv = shape.kv_heads * shape.head_dim
        self.qkv = ColumnLinear(shape, f"{name}.qkv", [h, kv, kv])
        self.out = RowLinear(shape, f"{name}.out", h)
        self.attention_norm = Norm(shape)
        self.up = ColumnLinear(shape, f"{name}.up", [shape.ffn] * (2 if shape.gated_mlp else 1))
        self.down = RowLinear(shape, f"{name}.down", shape.ffn)
        self.mlp_norm = Norm(shape)

    def forward(self, x: Tensor) -> Tensor:
        found = self_attention(self.shape, self.qkv(enter_region(self.shape, x)), causal=False)
        x = self.attention_norm(x + leave_region(self.shape, self.out(found)))
        up = self.up(enter_region(self.shape, x))
        active = composite.SwiGLU.apply(up) if self.shape.gated_mlp else F.gelu(up, approximate="tanh")
        y: Tensor = self.mlp_norm(x + leave_region(self.shape, self.down(active)))
        return y


class Embedding(nn.Module):
    """Tokens, positions and token types, and their norm; a sequence's second half is of the second type."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens, self.positions = Tokens(shape), Positions(shape)
        self.types = parameter(full_weight(shape, "types", TOKEN_TYPES, shape.hidden))
        self.norm = Norm(shape)
        first = shape.rank * shape.rows if shape.sequence_parallel else 0
        place = torch.arange(first, first + shape.rows, device=shape.device).remainder_(shape.seq_len)
        self.type_of_row = (place >= shape.seq_len // 2).long()  # no buffer: DDP and FSDP have no business with it

    @property
    def weight(self) -> nn.Parameter:
        """Weight of the token embedding."""
        return self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        (x,) = self.tokens(tokens)
        x = self.positions(x) + F.embedding(self.type_of_row, composite.cast(self.types, self.shape.dtype))
        y: Tensor = self.norm(x)
        return y


class Head(nn.Module):
    """A transform that every tensor-parallel rank holds whole, its norm, and logits with a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.transform = parameter(full_weight(shape, "transform", shape.hidden, shape.hidden))
        self.transform_bias = parameter(self.transform.new_zeros(shape.hidden))
        self.norm = Norm(shape)
        self.logits = Logits(shape, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(linear(self.shape, x, self.transform, self.transform_bias), approximate="tanh")
        y: Tensor = self.logits(self.norm(x))
        return y
