"""A decoder-only transformer, GPT or Llama style, hand-sharded over a tensor-parallel group and cut into stages.

Activations between modules are ``[rows, hidden]``, ``rows = micro_batch * seq_len`` (with sequence parallel, that
over the group's size outside the tensor-parallel regions).  Initial weights depend on their names alone, so every
parallel strategy starts from the same model.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import comm, kernels


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ``[model]`` table of a job, as the harness needs it, with what one rank holds of it."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    micro_batch: int
    gated_mlp: bool
    recompute: bool
    tied_embeddings: bool
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    group: comm.Group | None  # tensor-parallel group, None for one rank

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def has_bias(self) -> bool:
        return self.family == "gpt"

    @property
    def rows(self) -> int:
        """Rows of an activation outside the tensor-parallel regions."""
        return self.micro_batch * self.seq_len // (self.size if self.sequence_parallel else 1)


def _weight(shape: Shape, name: str, rows: int, columns: int) -> Tensor:
    """The whole weight ``[rows, columns]``, the same on every rank."""
    generator = torch.Generator(shape.device).manual_seed(zlib.crc32(name.encode()))
    full = torch.empty(rows, columns, device=shape.device)
    return full.normal_(0.0, 0.02, generator=generator).to(shape.dtype)


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone(memory_format=torch.contiguous_format))


class ColumnLinear(nn.Module):
    """``x @ w.T + b`` where each rank holds some rows of ``w``; blocks (q, k, v; gate, up) are sharded one by one."""

    def __init__(self, shape: Shape, name: str, blocks: list[int]) -> None:
        super().__init__()
        full = _weight(shape, name, sum(blocks), shape.hidden).split(blocks)
        shards = [block.chunk(shape.size)[shape.rank] for block in full]
        self.weight = _parameter(torch.cat(shards) if len(shards) > 1 else shards[0])
        self.bias: nn.Parameter | None = None
        if shape.has_bias:
            self.bias = _parameter(self.weight.new_zeros(self.weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """``x @ w.T + b`` where each rank holds some columns of ``w``; the results are yet to be summed."""

    def __init__(self, shape: Shape, name: str, columns: int) -> None:
        super().__init__()
        self.size = shape.size
        self.weight = _parameter(_weight(shape, name, shape.hidden, columns).chunk(shape.size, 1)[shape.rank])
        self.bias: nn.Parameter | None = None
        if shape.has_bias:
            self.bias = _parameter(self.weight.new_zeros(shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.size > 1 and self.bias is not None:
            y: Tensor = comm.BiasedRowLinear.apply(x, self.weight, self.bias, self.size)
            return y
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm (gpt) or RMSNorm (llama)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden, device=shape.device, dtype=shape.dtype))
        self.bias: nn.Parameter | None = None
        if shape.has_bias:
            self.bias = nn.Parameter(torch.zeros(shape.hidden, device=shape.device, dtype=shape.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            y: Tensor = kernels.RMSNorm.apply(x, self.weight)
            return y
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, kernels.EPSILON)


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
        active = kernels.SwiGLU.apply(up) if self.shape.gated_mlp else F.gelu(up, approximate="tanh")
        return x + leave_region(self.shape, self.down(active))

    def _attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        shape = self.shape
        heads, kv_heads = shape.heads // shape.size, shape.kv_heads // shape.size
        if rope is not None:
            qkv = kernels.Rope.apply(qkv, *rope, heads + kv_heads)
        fused = qkv.view(-1, shape.seq_len, heads + 2 * kv_heads, shape.head_dim)
        return attention(fused, heads, kv_heads)


def attention(fused: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Causal attention of ``fused[batch, seq_len, heads + 2 * kv_heads, head_dim]``; ``[rows, heads * head_dim]``."""
    return attend(*fused.split([heads, kv_heads, kv_heads], dim=2), causal=True)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Of queries to keys and values, each ``[batch, length, heads, dim]``; ``[rows, heads * v_dim]``."""
    heads, v_dim = q.shape[2], v.shape[3]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != k.shape[1])
    return y.transpose(1, 2).reshape(-1, heads * v_dim)


def enter_region(shape: Shape, x: Tensor) -> Tensor:
    """Into a tensor-parallel region: every rank gets all rows."""
    if shape.group is None:
        return x
    y: Tensor = (comm.GatherRows if shape.sequence_parallel else comm.CopyToRegion).apply(x, shape.group)
    return y


def leave_region(shape: Shape, x: Tensor) -> Tensor:
    """Out of a tensor-parallel region: the ranks' partial results are summed."""
    if shape.group is None:
        return x
    y: Tensor = (comm.ScatterRows if shape.sequence_parallel else comm.ReduceFromRegion).apply(x, shape.group)
    return y


class Embedding(nn.Module):
    """Token embedding, sharded over the vocabulary, plus learned positions (gpt)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = _parameter(_weight(shape, "embedding", shape.vocab, shape.hidden).chunk(shape.size)[shape.rank])
        self.positions: nn.Parameter | None = None
        if shape.family == "gpt":
            self.positions = _parameter(_weight(shape, "positions", shape.seq_len, shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        shape, tokens = self.shape, tokens.reshape(-1)
        if shape.group is None:
            x = F.embedding(tokens, self.weight)
        else:
            x = comm.VocabEmbedding.apply(tokens, self.weight, shape.rank * self.weight.shape[0])
            x = leave_region(shape, x)
        return x if self.positions is None else self._add_positions(x, self.positions)

    def _add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        rows, seq_len = x.shape[0], self.shape.seq_len
        first = self.shape.rank * rows if self.shape.sequence_parallel else 0
        if rows % seq_len == 0:  # whole sequences
            return (x.view(-1, seq_len, x.shape[1]) + positions).view(rows, -1)
        if seq_len % rows == 0:  # a part of one sequence
            return x + positions.narrow(0, first % seq_len, rows)
        index = torch.arange(first, first + rows, device=x.device).remainder_(seq_len)
        return x + F.embedding(index, positions)


class Head(nn.Module):
    """Final norm and logits, sharded over the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm = Norm(shape)
        self.weight = _parameter(_weight(shape, "head", shape.vocab, shape.hidden).chunk(shape.size)[shape.rank])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(enter_region(self.shape, self.norm(x)), self.weight)


class Stage(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(self, shape: Shape, stage: int, num_stages: int) -> None:
        super().__init__()
        self.shape = shape
        self.first, self.last = stage == 0, stage == num_stages - 1
        layers = stage_layers(shape.layers, stage, num_stages)
        self.embedding = Embedding(shape) if self.first else None
        self.layers = nn.ModuleList(Layer(shape, f"layer{index}") for index in layers)
        self.head = Head(shape) if self.last else None
        if shape.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight
        self.rope: tuple[Tensor, Tensor] | None = None  # no buffer: DDP and FSDP have no business with constants
        if shape.family == "llama":
            self.rope = kernels.rope_tables(shape.seq_len, shape.head_dim, shape.device, shape.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``tokens[micro_batch, seq_len]`` or ``activation[rows, hidden]`` to the same or ``logits[rows, vocab]``."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, self.rope, use_reentrant=False) if self.shape.recompute else layer(x, self.rope)
        return x if self.head is None else self.head(x)

    def replicated_parameters(self) -> list[nn.Parameter]:
        """What every tensor-parallel rank holds alike, and under sequence parallel knows a part of the gradient of."""
        held = [module for module in self.modules() if isinstance(module, Norm)]
        parameters: list[nn.Parameter] = [p for norm in held for p in norm.parameters()]
        if self.embedding is not None and self.embedding.positions is not None:
            parameters.append(self.embedding.positions)
        return parameters


def stage_layers(layers: int, stage: int, num_stages: int) -> range:
    """Layers of a stage: split evenly, earlier stages take the remainder."""
    each, more = divmod(layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def shape_of(job: dict[str, Any], device: torch.device, group: comm.Group | None) -> Shape:
    """Shape of a (checked) job's model on this rank."""
    model, parallel, batch = job["model"], job["parallel"], job["batch"]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    names = (
        "family",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "seq_len",
        "gated_mlp",
        "tied_embeddings",
    )
    return Shape(
        **{name: model[name] for name in names},
        micro_batch=batch["micro_batch"],
        recompute=parallel["recompute"] == "full",
        sequence_parallel=parallel["sequence_parallel"] and group is not None,
        dtype=dtypes[batch["precision"]],
        device=device,
        group=group,
    )
