"""T5 (Raffel et al. 2019, arXiv:1910.10683): an encoder, and a decoder that also looks at what the encoder found.

RMSNorm before each part of a layer, no biases, ReLU or gated GELU.  Relative positions are a learned bias of the
scores, one table for the encoder and one for the decoder, that every layer reads.  Scores are not fused: no fused
kernel of the CPU gives a gradient of the bias.  Rows are tokens of all sequences, then the next tokens: heads of all
sequences are then one batch of matrices without a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..ops import composite
from .torch_parts import (
    ColumnLinear,
    Norm,
    RowLinear,
    Shape,
    Tokens,
    enter_region,
    full_weight,
    leave_region,
    parameter,
)
from .torch_parts import Head as Head  # of this family too

BUCKETS = 32  # of relative positions
FARTHEST = 128  # tokens; those farther away share the last bucket


class Encoder(nn.Module):
    """One layer of the encoder; the last ends with the encoder's norm."""

    def __init__(self, shape: Shape, name: str, last: bool = False) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden
        self.attention_norm = Norm(shape)
        self.qkv = ColumnLinear(shape, f"{name}.qkv", [3 * h])
        self.out = RowLinear(shape, f"{name}.out", h)
        self.mlp_norm = Norm(shape)
        self.up = ColumnLinear(shape, f"{name}.up", [shape.ffn] * (2 if shape.gated_mlp else 1))
        self.down = RowLinear(shape, f"{name}.down", shape.ffn)
        self.end_norm = Norm(shape) if last else None

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self._think(self._look(x, bias))
        return x if self.end_norm is None else self.end_norm(x)

    def _look(self, x: Tensor, bias: Tensor) -> Tensor:
        """Self-attention and its residual."""
        qkv = self.qkv(enter_region(self.shape, self.attention_norm(x)))
        found = composite.SelfAttention.apply(qkv, bias, self.shape.micro_batch)
        return x + leave_region(self.shape, self.out(found))

    def _think(self, x: Tensor) -> Tensor:
        """The MLP and its residual."""
        up = self.up(enter_region(self.shape, self.mlp_norm(x)))
        active = (composite.GeGLU if self.shape.gated_mlp else composite.ReLU).apply(up)
        return x + leave_region(self.shape, self.down(active))


class Decoder(Encoder):
    """One layer of the decoder, with a look at the encoder's output in between."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__(shape, name)
        h = shape.hidden
        self.cross_norm = Norm(shape)
        self.cross_q = ColumnLinear(shape, f"{name}.cross_q", [h])
        self.cross_kv = ColumnLinear(shape, f"{name}.cross_kv", [2 * h])
        self.cross_out = RowLinear(shape, f"{name}.cross_out", h)

    def forward(self, x: Tensor, bias: Tensor, far: Tensor) -> Tensor:  # type: ignore[override]
        x = self._look(x, bias)
        q = self.cross_q(enter_region(self.shape, self.cross_norm(x)))
        kv = self.cross_kv(enter_region(self.shape, far))
        heads = self.shape.heads // self.shape.size
        found = composite.CrossAttention.apply(q, kv, heads, self.shape.micro_batch)
        x = x + leave_region(self.shape, self.cross_out(found))
        return self._think(x)


class RelativePositions(nn.Module):
    """The bias of scores, ``[heads, length, length]``: of this rank's heads, -infinity where a mask hides a key."""

    def __init__(self, shape: Shape, name: str, length: int, *, causal: bool) -> None:
        super().__init__()
        table = full_weight(shape, name, shape.heads, BUCKETS).chunk(shape.size)[shape.rank]
        self.weight = parameter(table.t())
        self.causal, self.dtype = causal, shape.dtype
        self.buckets = relative_buckets(length, causal=causal).to(shape.device)

    def forward(self) -> Tensor:
        weight = composite.cast(self.weight, self.dtype)
        y: Tensor = composite.RelativeBias.apply(weight, self.buckets, self.causal)
        return y


def relative_buckets(length: int, *, causal: bool) -> Tensor:
    """Bucket of every query and key, ``[length, length]``: one for each near distance, then logarithmically wider."""
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    count = BUCKETS if causal else BUCKETS // 2
    beyond = torch.zeros_like(distance) if causal else (distance < 0) * count
    distance = distance.clamp_min(0) if causal else distance.abs()
    near = count // 2
    ratio = (distance.clamp_min(1).float() / near).log() / math.log(FARTHEST / near)
    far = (near + (ratio * (count - near)).long()).clamp_max(count - 1)
    return beyond + torch.where(distance < near, distance, far)


class Embedding(nn.Module):
    """One table for the tokens of the encoder and of the decoder, and the tables of relative positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = Tokens(shape)
        self.encoder_positions = RelativePositions(shape, "encoder_positions", shape.encoder_seq_len, causal=False)
        self.decoder_positions = RelativePositions(shape, "decoder_positions", shape.seq_len, causal=True)

    @property
    def weight(self) -> nn.Parameter:
        """Weight of the token embedding."""
        return self.tokens.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``tokens[encoder_seq_len + seq_len, micro_batch]`` to both activations and both biases."""
        far, near = self.tokens(*tokens.split([self.shape.encoder_seq_len, self.shape.seq_len]))
        return far, near, self.encoder_positions(), self.decoder_positions()


def layers(shape: Shape) -> list[nn.Module]:
    """The encoder's layers, then the decoder's."""
    count = shape.encoder_layers
    encoder = [Encoder(shape, f"encoder{index}", last=index == count - 1) for index in range(count)]
    return [*encoder, *(Decoder(shape, f"decoder{index}") for index in range(shape.layers))]
