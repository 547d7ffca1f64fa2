"""Decoder-only transformers, GPT or Llama style."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import composite
from .torch_parts import (
    ColumnLinear,
    Norm,
    Positions,
    RowLinear,
    Shape,
    Tokens,
    enter_region,
    leave_region,
    self_attention,
)
from .torch_parts import Head as Head  # of this family too


class Layer(nn.Module):
    """One transformer layer: pre-norm attention and MLP, each with its residual."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.head_dim
        self.attention_norm = Norm(shape)
        self.qkv = ColumnLinear(shape, f"{name}.qkv", [shape.heads * d, shape.kv_heads * d, shape.kv_heads * d])
        self.out = RowLinear(shape, f"{name}.out", h)
        self.mlp_norm = Norm(shape)
        self.up = ColumnLinear(shape, f"{name}.up", [shape.ffn] * (2 if shape.gated_mlp else 1))
        self.down = RowLinear(shape, f"{name}.down", shape.ffn)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + leave_region(
            self.shape, self.out(self._attend(self.qkv(enter_region(self.shape, self.attention_norm(x))), rope))
        )
        up = self.up(enter_region(self.shape, self.mlp_norm(x)))
        active = composite.SwiGLU.apply(up) if self.shape.gated_mlp else F.gelu(up, approximate="tanh")
        return x + leave_region(self.shape, self.down(active))

    def _attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        if rope is not None:
            heads = (self.shape.heads + self.shape.kv_heads) // self.shape.size
            qkv = composite.Rope.apply(qkv, *rope, heads)
        return self_attention(self.shape, qkv, causal=True)


class Embedding(nn.Module):
    """Tokens, plus learned positions (gpt)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = Tokens(shape)
        self.positions = Positions(shape) if shape.family == "gpt" else None

    @property
    def weight(self) -> nn.Parameter:
        """Weight of the token embedding."""
        return self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)[0]
        return x if self.positions is None else self.positions(x)
