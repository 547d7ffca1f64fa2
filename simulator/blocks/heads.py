"""Sizes of an attention on one rank, and its fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.shape import RankShape

_GENERATIONS = {"flash-1": "flash1_", "flash-2": "flash2_"}  # plain ``attention`` means the last one


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one micro-batch on one rank.

    Attributes:
        heads, kv_heads: Of this rank.
        head_dim: Values of a query and a key.
        v_dim: Values of a value; another kernel does it where that is not ``head_dim``.
        q_len, kv_len: Tokens of a sequence on this rank, before any are fetched from others.
        causal: Whether tokens look back alone.
        joined: Elements per token and sequence of the tensors that hold several of queries, keys and values side by
            side: backward joins their gradients.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    q_len: int
    kv_len: int
    causal: bool
    joined: int = 0

    def kernel(self, shape: RankShape, kind: str, q_len: int, kv_len: int, *, causal: bool) -> Op:
        """Fused ``attention`` or ``attention_backward`` of a number of queries and keys."""
        batch, flag = shape.micro_batch, int(causal)
        if self.v_dim == self.head_dim:
            kind = _GENERATIONS.get(shape.model.attention_kernels, "") + kind
            return shape.op(kind, batch, self.heads, self.kv_heads, q_len, kv_len, self.head_dim, flag)
        return shape.op(f"mla_{kind}", batch, self.heads, q_len, kv_len, self.head_dim, self.v_dim, flag)

    def q_numel(self, shape: RankShape) -> int:
        return shape.micro_batch * self.q_len * self.heads * self.head_dim

    def kv_numel(self, shape: RankShape) -> int:
        """Elements of the keys and values of this rank."""
        return shape.micro_batch * self.kv_len * self.kv_heads * (self.head_dim + self.v_dim)

    def out_numel(self, shape: RankShape) -> int:
        return shape.micro_batch * self.q_len * self.heads * self.v_dim

    def rows(self, shape: RankShape) -> int:
        """Rows of scores: one per query and head."""
        return shape.micro_batch * self.q_len * self.heads
