"""Parts that all families of models share, hand-sharded over a tensor-parallel group.

Activations between modules are ``[rows, hidden]``, ``rows = micro_batch * seq_len`` (with sequence parallel, that over
the group's size outside the tensor-parallel regions).  Sequence parallel shards these rows: every op between the
regions is row-wise, so any equal partition of the rows will do and none is copied.  Communication is the f/g pairs of
Megatron-LM (arXiv:1909.08053, arXiv:2205.05198).

Initial weights depend on their names alone, so every parallel strategy starts from the same model.  Parameters of
another type than activations are cast where they are used, as autocast does; FSDP hands over what it has cast.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import annotate
from ..base.collective_calls import all_gather, reduce_scatter
from ..ops import composite

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ``[model]`` table of a job; ``dtype`` is of activations, ``main_dtype`` of parameters and gradients."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    encoder_layers: int
    encoder_seq_len: int
    ffn: int
    vocab: int
    seq_len: int
    micro_batch: int
    gated_mlp: bool
    recompute: bool
    tied_embeddings: bool
    sequence_parallel: bool
    dtype: torch.dtype
    main_dtype: torch.dtype
    device: torch.device
    group: Group | None  # tensor-parallel group, None for one rank
    # cp_group, ep_group: ranks that share each sequence, that share the experts; None for one
    cp_group: Group | None
    ep_group: Group | None
    ring: bool  # whether keys and values go round the former
    experts: int  # of a layer; 0: none
    experts_per_token: int
    expert_ffn: int
    dense_layers: int
    moe_every: int
    loss_share: float  # of a micro-batch

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
    def ep_size(self) -> int:
        return 1 if self.ep_group is None else self.ep_group.size()

    def is_mixture(self, layer: int) -> bool:
        """Whether this layer of the model has experts."""
        return self.experts > 0 and layer >= self.dense_layers and (layer - self.dense_layers + 1) % self.moe_every == 0

    def own_places(self, whole: Tensor) -> Tensor:
        """Rows of this rank's tokens in a table of all places of a sequence, without a copy.

        With context parallelism they are two blocks, ``[2, seq_len / 2, ...]``, from the front and from the back.
        """
        if self.cp_group is None:
            return whole
        size, rank = self.cp_group.size(), self.cp_group.rank()
        return whole.unflatten(0, (2 * size, -1))[rank :: 2 * size - 1 - 2 * rank][:2]

    @property
    def whole_len(self) -> int:
        """Tokens of a whole sequence, of which this rank has ``seq_len``."""
        return self.seq_len * (1 if self.cp_group is None else self.cp_group.size())

    @property
    def places(self) -> Tensor:
        """Place in its sequence of each of this rank's tokens, ``[seq_len]``."""
        return self.own_places(torch.arange(self.whole_len, device=self.device)).flatten()

    @property
    def has_bias(self) -> bool:
        return self.family in ("gpt", "bert")

    @property
    def rows(self) -> int:
        """Rows of an activation outside the tensor-parallel regions."""
        return self.micro_batch * self.seq_len // (self.size if self.sequence_parallel else 1)


def full_weight(shape: Shape, name: str, rows: int, columns: int) -> Tensor:
    """The whole weight ``[rows, columns]``, the same on every rank."""
    generator = torch.Generator(shape.device).manual_seed(zlib.crc32(name.encode()))
    full = torch.empty(rows, columns, device=shape.device)
    return full.normal_(0.0, 0.02, generator=generator).to(shape.main_dtype)


def parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone(memory_format=torch.contiguous_format))


def linear(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ w.T + b`` in the type of activations; the bias is cast first, as autocast does."""
    bias = None if bias is None else composite.cast(bias, shape.dtype)
    return F.linear(x, composite.cast(weight, shape.dtype), bias)


class ColumnLinear(nn.Module):
    """``x @ w.T + b`` where each rank holds some rows of ``w``; blocks (q, k, v; gate, up) are sharded one by one."""

    def __init__(self, shape: Shape, name: str, blocks: list[int], *, bias: bool | None = None) -> None:
        super().__init__()
        self.shape = shape
        full = full_weight(shape, name, sum(blocks), shape.hidden).split(blocks)
        self.weight = parameter(torch.cat([block.chunk(shape.size)[shape.rank] for block in full]))
        has_bias = shape.has_bias if bias is None else bias
        self.bias = parameter(self.weight.new_zeros(self.weight.shape[0])) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.shape, x, self.weight, self.bias)


class RowLinear(nn.Module):
    """``x @ w.T + b`` where each rank holds some columns of ``w``; the results are yet to be summed."""

    def __init__(self, shape: Shape, name: str, columns: int) -> None:
        super().__init__()
        self.shape = shape
        self.weight = parameter(full_weight(shape, name, shape.hidden, columns).chunk(shape.size, 1)[shape.rank])
        self.bias = parameter(self.weight.new_zeros(shape.hidden)) if shape.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        if shape.size == 1 or self.bias is None:
            return linear(shape, x, self.weight, self.bias)
        bias, weight = composite.cast(self.bias, shape.dtype), composite.cast(self.weight, shape.dtype)
        return BiasedRowLinear.apply(x, weight, bias, shape.size)


class Norm(nn.Module):
    """LayerNorm (gpt, bert) or RMSNorm (llama, t5)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dtype = shape.dtype
        self.weight = parameter(torch.ones(shape.hidden, device=shape.device, dtype=shape.main_dtype))
        self.bias = parameter(torch.zeros_like(self.weight)) if shape.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = composite.cast(self.weight, self.dtype)
        if self.bias is None:
            return composite.RMSNorm.apply(x, weight)
        return F.layer_norm(x, weight.shape, weight, composite.cast(self.bias, self.dtype), composite.EPSILON)


def enter_region(shape: Shape, x: Tensor) -> Tensor:
    """Into a tensor-parallel region: every rank gets all rows."""
    region = GatherRows if shape.sequence_parallel else CopyToRegion
    return x if shape.group is None else region.apply(x, shape.group)


def leave_region(shape: Shape, x: Tensor) -> Tensor:
    """Out of a tensor-parallel region: the ranks' partial results are summed."""
    region = ScatterRows if shape.sequence_parallel else ReduceFromRegion
    return x if shape.group is None else region.apply(x, shape.group)


class Tokens(nn.Module):
    """Embedding of tokens, sharded over the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        full = full_weight(shape, "embedding", shape.vocab, shape.hidden)
        self.weight = parameter(full.chunk(shape.size)[shape.rank])

    def forward(self, *tokens: Tensor) -> list[Tensor]:
        """Tensors of tokens, any shape, each to ``[rows, hidden]``."""
        shape, table = self.shape, composite.cast(self.weight, self.shape.dtype)
        flat = [each.reshape(-1) for each in tokens]
        if shape.group is None:
            return [F.embedding(each, table) for each in flat]
        return [leave_region(shape, VocabEmbedding.apply(each, table, shape.rank * len(table))) for each in flat]


class Positions(nn.Module):
    """Learned positions, added; every tensor-parallel rank holds them all."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = parameter(full_weight(shape, "positions", shape.whole_len, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        rows, seq_len = x.shape[0], self.shape.seq_len
        weight = self.shape.own_places(composite.cast(self.weight, self.shape.dtype))
        first = self.shape.rank * rows if self.shape.sequence_parallel else 0
        if rows % seq_len == 0:  # whole sequences
            return (x.view(-1, *weight.shape) + weight).view(rows, -1)
        weight = weight.flatten(0, -2)
        if seq_len % rows == 0:  # a part of one sequence
            return x + weight.narrow(0, first % seq_len, rows)
        index = torch.arange(first, first + rows, device=x.device).remainder_(seq_len)
        return x + F.embedding(index, weight)


def _gather_rows(x: Tensor, group: Group) -> Tensor:
    output = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    all_gather(output, x.contiguous(), group)
    return output


def _scatter_rows(x: Tensor, group: Group) -> Tensor:
    output = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    reduce_scatter(output, x.contiguous(), group)
    return output


def _reduce(x: Tensor, group: Group) -> Tensor:
    """In place: what is reduced comes fresh from a linear."""
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


CopyToRegion = composite.conjugate("CopyToRegion", lambda x, _: x.view_as(x), _reduce)  # f
ReduceFromRegion = composite.conjugate("ReduceFromRegion", _reduce, lambda grad, _: grad)  # g
GatherRows = composite.conjugate("GatherRows", _gather_rows, _scatter_rows)  # sequence parallel's f
ScatterRows = composite.conjugate("ScatterRows", _scatter_rows, _gather_rows)  # sequence parallel's g


# A row-parallel linear whose bias, held by every rank, is added once over the group: each rank adds ``bias / size``,
# the sum over ranks adds it whole, and its gradient is the whole one everywhere.
BiasedRowLinear = composite.function(
    "BiasedRowLinear",
    lambda x, weight, bias, size: (torch.addmm(bias, x, weight.t(), beta=1.0 / size), (x, weight), ()),
    lambda grad, x, weight: (grad @ weight, grad.t() @ x, grad.sum(0)),
)


def _embed(tokens: Tensor, weight: Tensor, first: int) -> tuple[Tensor, Any, Any]:
    with annotate.op("embedding", (tokens.numel(), weight.shape[1], weight.shape[0]), weight.dtype):
        local = tokens - first
        outside = ((local < 0) | (local >= weight.shape[0]))[:, None]
        local.clamp_(0, weight.shape[0] - 1)
        return F.embedding(local, weight).masked_fill_(outside, 0.0), (local, outside), weight.shape[:1]


def _embed_backward(grad: Tensor, local: Tensor, outside: Tensor, rows: int) -> tuple[None, Tensor]:
    with annotate.op("embedding_backward", (local.numel(), grad.shape[1], rows), grad.dtype):
        grad = grad.masked_fill(outside, 0.0)
        return None, torch.ops.aten.embedding_dense_backward(grad, local, rows, -1, False)


# Rows of the embedding that this rank holds; zero where another rank holds the token.
VocabEmbedding = composite.function("VocabEmbedding", _embed, _embed_backward)


def _loss(logits: Tensor, targets: Tensor, group: Group | None, scale: float) -> tuple[Tensor, Any, Any]:
    rows, vocab = logits.shape
    first = 0 if group is None else group.rank() * vocab
    with annotate.op("cross_entropy", (rows, vocab), logits.dtype):
        exponent, total, top, picked = composite.cross_entropy(logits, targets, first)
        if group is None:
            inverse = total.reciprocal()
            loss = (total.log() + top - picked).mean() * scale
    if group is not None:
        highest = top.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        with annotate.op("elementwise", (rows,), logits.dtype):
            shrink = (top - highest).exp_()
            total.mul_(shrink)
        dist.all_reduce(total, group=group)
        dist.all_reduce(picked, group=group)
        with annotate.op("elementwise", (rows,), logits.dtype):
            inverse = shrink.div_(total)
            loss = (total.log() + highest - picked).mean() * scale
    return loss, (exponent, inverse, targets), (first, scale)


def _loss_backward(
    grad: Tensor, exponent: Tensor, inverse: Tensor, targets: Tensor, first: int, scale: float
) -> Tensor:
    with annotate.op("cross_entropy_backward", exponent.shape, exponent.dtype):
        weight = grad * (scale / exponent.shape[0])
        return composite.cross_entropy_backward(exponent, inverse * weight, weight, targets, first)


# Mean cross-entropy of ``logits[rows, vocab / size]`` against ``targets[rows]``, times ``scale``.  With a group, three
# all-reduces of ``rows`` numbers (maximum, sum, target's logit) join the shards; the arithmetic between them is
# annotated as element-wise.
CrossEntropy = composite.function("CrossEntropy", _loss, _loss_backward)
