"""Transformers of the families GPT, Llama, BERT and T5, hand-sharded (see ``torch_parts``), in pipeline stages.

GPT and Llama are decoders with norms before each part of a layer.  BERT (Devlin et al. 2018, arXiv:1810.04805) is an
encoder with norms after the residuals; its loss is of every token, and there is no pooler and no next-sentence loss.

T5 (Raffel et al. 2019, arXiv:1910.10683) has an encoder, and a decoder that also looks at what the encoder found:
RMSNorm before each part of a layer, no biases, ReLU or gated GELU.  Relative positions are a learned bias of the
scores, one table for the encoder and one for the decoder, that every layer reads.  Scores are not fused: no fused
kernel of the CPU gives a gradient of the bias.  Rows are tokens of all sequences, then the next tokens: heads of all
sequences are then one batch of matrices without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from ..ops import composite
from ..ops.context_attention import ContextAttention
from ..plan.plan_checks import num_micro_batches
from . import torch_parts as parts
from .mixture import Mixture
from .torch_parts import Group, Norm, Shape, full_weight, parameter

DTYPES = {  # by precision: of activations, and of parameters
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "pure-bf16": (torch.bfloat16, torch.bfloat16),
    "pure-fp16": (torch.float16, torch.float16),
}


class Stage(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(self, shape: Shape, stage: int, num_stages: int) -> None:
        super().__init__()
        self.shape = shape
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.embedding: Any = EMBEDDINGS[shape.family](shape) if self.first else None
        if shape.family == "t5":  # never in a pipeline
            count = shape.encoder_layers
            layers: list[nn.Module] = [Layer(shape, f"encoder{at}", last=at == count - 1) for at in range(count)]
            layers += [Layer(shape, f"decoder{at}", crosses=True) for at in range(shape.layers)]
        else:  # split evenly, earlier stages take the remainder
            each, more = divmod(shape.layers, num_stages)
            first = stage * each + min(stage, more)
            numbers = range(first, first + each + (stage < more))
            layers = [Layer(shape, f"layer{number}", mixture=shape.is_mixture(number)) for number in numbers]
        self.layers = nn.ModuleList(layers)
        self.head: Any = Head(shape) if self.last else None
        if shape.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.logits.weight = self.embedding.tokens.weight
        self.wrapped = list(self.layers)  # what FSDP shards by itself
        self.precision = MixedPrecisionPolicy(shape.dtype, shape.main_dtype)
        self.beside: tuple[Any, ...] = ()  # what every layer takes; no buffer: DDP and FSDP have no business with it
        if shape.family == "llama":
            tables = composite.rope_tables(shape.whole_len, shape.head_dim, shape.device, shape.dtype)
            self.beside = (tuple(shape.own_places(table).flatten(0, -3).contiguous() for table in tables),)

    def forward(self, x: Tensor) -> Tensor:
        """``tokens`` (see ``Training``) or ``activation[rows, hidden]`` to the same or ``logits[rows, vocab]``."""
        layers, beside = list(self.layers), self.beside
        x = x if self.embedding is None else self.embedding(x)
        if self.shape.family == "t5":
            far, x, far_bias, bias = x
            for _ in range(self.shape.encoder_layers):
                far = self._run(layers.pop(0), far, far_bias)
            beside = bias, far
        for layer in layers:
            x = self._run(layer, x, *beside)
        return x if self.head is None else self.head(x)

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if self.shape.recompute:
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters that all tensor-parallel ranks hold; with sequence parallelism each has part of their gradient."""
        held = [module for module in self.modules() if isinstance(module, Norm | parts.Positions)]
        parameters: list[nn.Parameter] = [p for module in held for p in module.parameters()]
        if isinstance(self.embedding, BertEmbedding):
            parameters.append(self.embedding.types)
        if self.head is not None and self.head.transforms:
            parameters += [self.head.transform, self.head.transform_bias]
        return parameters


def token_rows(shape: Shape, tokens: Tensor) -> Tensor:
    """``tokens[sequences, length]`` so that each micro-batch's, once chunked, are in the order of its rows."""
    if shape.family != "t5":
        return tokens
    return tokens.unflatten(0, (-1, shape.micro_batch)).transpose(1, 2).reshape(-1, shape.micro_batch)


def shape_of(job: dict[str, Any], device: torch.device, groups: Mapping[str, Group | None]) -> Shape:
    """Shape of a (checked) job's model on this rank, which is in these groups."""
    model, parallel, batch = job["model"], job["parallel"], job["batch"]
    dtype, main_dtype = DTYPES[batch["precision"]]
    own = {each.name: model.get(each.name, 0) for each in fields(Shape)}  # an encoder is optional
    own |= {"micro_batch": batch["micro_batch"], "recompute": parallel["recompute"] == "full"}
    own |= {"sequence_parallel": parallel["sequence_parallel"] and groups["tp"] is not None}
    own |= {"dtype": dtype, "main_dtype": main_dtype, "device": device, "group": groups["tp"]}
    own |= {"cp_group": groups["cp"], "ep_group": groups["ep"], "seq_len": model["seq_len"] // parallel.get("cp", 1)}
    own |= {"ring": parallel.get("context_parallel", "ring") == "ring", "moe_every": model.get("moe_every", 1)}
    own |= {"expert_ffn": own["expert_ffn"] or own["ffn"], "loss_share": 1.0 / num_micro_batches(job)}
    return Shape(**own)


BUCKETS = 32  # of relative positions
FARTHEST = 128  # tokens; those farther away share the last bucket
TOKEN_TYPES = 2  # of BERT


class Attention(nn.Module):
    """Self-attention of ``[rows, hidden]`` within a tensor-parallel region."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        blocks = [3 * shape.hidden] if shape.family == "t5" else [shape.hidden, kv, kv]
        self.qkv = parts.ColumnLinear(shape, f"{name}.qkv", blocks)
        self.out = parts.RowLinear(shape, f"{name}.out", shape.hidden)

    def forward(self, x: Tensor, positions: Any = None) -> Tensor:
        """``positions``: the bias of scores (t5), or cosines and sines (llama)."""
        shape, qkv = self.shape, self.qkv(x)
        if shape.family == "t5":
            found: Tensor = composite.SelfAttention.apply(qkv, positions, shape.micro_batch)
        else:
            heads, kv_heads = shape.heads // shape.size, shape.kv_heads // shape.size
            if positions is not None:
                qkv = composite.Rope.apply(qkv, *positions, heads + kv_heads)
            fused, causal = qkv.view(-1, shape.seq_len, heads + 2 * kv_heads, shape.head_dim), shape.family != "bert"
            if shape.cp_group is not None:
                found = ContextAttention.apply(fused, heads, shape.cp_group, causal, shape.ring).reshape(len(qkv), -1)
            else:
                found = composite.attend(*fused.split([heads, kv_heads, kv_heads], dim=2), causal=causal)
        return self.out(found)


class CrossAttention(nn.Module):
    """Attention of the decoder to the encoder's output, within a tensor-parallel region."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.shape = shape
        self.q = parts.ColumnLinear(shape, f"{name}.cross_q", [shape.hidden])
        self.kv = parts.ColumnLinear(shape, f"{name}.cross_kv", [2 * shape.hidden])
        self.out = parts.RowLinear(shape, f"{name}.cross_out", shape.hidden)

    def forward(self, x: Tensor, far: Tensor) -> Tensor:
        q, kv = self.q(x), self.kv(parts.enter_region(self.shape, far))
        heads = self.shape.heads // self.shape.size
        return self.out(composite.CrossAttention.apply(q, kv, heads, self.shape.micro_batch))


class MLP(nn.Module):
    """Two linears and what is between them, within a tensor-parallel region."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.up = parts.ColumnLinear(shape, f"{name}.up", [shape.ffn] * (2 if shape.gated_mlp else 1))
        self.down = parts.RowLinear(shape, f"{name}.down", shape.ffn)
        if shape.family == "t5":
            self.activate: Any = (composite.GeGLU if shape.gated_mlp else composite.ReLU).apply
        else:
            self.activate = composite.SwiGLU.apply if shape.gated_mlp else composite.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))


class Residual(nn.Module):
    """A part of a layer with its residual and its norm, which comes first, or last (bert)."""

    def __init__(self, shape: Shape, part: type[nn.Module], name: str) -> None:
        super().__init__()
        self.shape, self.norm_last = shape, shape.family == "bert"
        norm = Norm(shape)
        if not self.norm_last:  # parameters in the order in which they are used: buckets of gradients follow it
            self.norm = norm
        self.part = part(shape, name)
        if self.norm_last:
            self.norm = norm

    def forward(self, x: Tensor, *beside: Any) -> Tensor:
        given = parts.enter_region(self.shape, x if self.norm_last else self.norm(x))
        y: Tensor = x + parts.leave_region(self.shape, self.part(given, *beside))
        return self.norm(y) if self.norm_last else y


class Layer(nn.Module):
    """Attention and MLP or experts; the last layer of an encoder (t5) ends with the encoder's norm.

    A layer of t5's decoder has a look at the encoder's output in between.
    """

    def __init__(
        self, shape: Shape, name: str, *, last: bool = False, crosses: bool = False, mixture: bool = False
    ) -> None:
        super().__init__()
        self.attention = Residual(shape, Attention, name)
        self.mlp = Residual(shape, Mixture if mixture else MLP, name)
        self.end_norm = Norm(shape) if last else None
        self.cross = Residual(shape, CrossAttention, name) if crosses else None

    def forward(self, x: Tensor, positions: Any = None, far: Tensor | None = None) -> Tensor:
        x = self.attention(x, positions)
        y: Tensor = self.mlp(x if self.cross is None else self.cross(x, far))
        return y if self.end_norm is None else self.end_norm(y)


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
        return composite.RelativeBias.apply(weight, self.buckets, self.causal)


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
    """Tokens, plus learned positions (gpt)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = parts.Tokens(shape)
        self.positions = parts.Positions(shape) if shape.family in ("gpt", "bert") else None

    def forward(self, tokens: Tensor) -> Any:
        """``tokens`` (see ``Training``) to ``activation[rows, hidden]``."""
        x: Tensor = self.tokens(tokens)[0]
        return x if self.positions is None else self.positions(x)


class BertEmbedding(Embedding):
    """Tokens, positions and token types, and their norm; a sequence's second half is of the second type."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.types = parameter(full_weight(shape, "types", TOKEN_TYPES, shape.hidden))
        self.norm = Norm(shape)
        first = shape.rank * shape.rows if shape.sequence_parallel else 0
        place = torch.arange(first, first + shape.rows, device=shape.device).remainder_(shape.seq_len)
        # No buffer: DDP and FSDP have no business with it.
        self.type_of_row = (shape.places[place] >= shape.whole_len // 2).long()

    def forward(self, tokens: Tensor) -> Any:
        x = super().forward(tokens)
        return self.norm(x + F.embedding(self.type_of_row, composite.cast(self.types, self.shape.dtype)))


class T5Embedding(Embedding):
    """One table for the tokens of the encoder and of the decoder, and the tables of relative positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.encoder_positions = RelativePositions(shape, "encoder_positions", shape.encoder_seq_len, causal=False)
        self.decoder_positions = RelativePositions(shape, "decoder_positions", shape.seq_len, causal=True)

    def forward(self, tokens: Tensor) -> Any:
        """``tokens[encoder_seq_len + seq_len, micro_batch]`` to both activations and both biases."""
        far, near = self.tokens(*tokens.split([self.shape.encoder_seq_len, self.shape.seq_len]))
        return far, near, self.encoder_positions(), self.decoder_positions()


class Head(nn.Module):
    """Final norm and logits; BERT has a transform before, that every tensor-parallel rank holds whole, and a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.transforms = shape, shape.family == "bert"
        if self.transforms:
            self.transform = parameter(full_weight(shape, "transform", shape.hidden, shape.hidden))
            self.transform_bias = parameter(self.transform.new_zeros(shape.hidden))
        self.norm = Norm(shape)
        self.logits = parts.ColumnLinear(shape, "head", [shape.vocab], bias=self.transforms)

    def forward(self, x: Tensor) -> Tensor:
        if self.transforms:
            x = composite.gelu(parts.linear(self.shape, x, self.transform, self.transform_bias))
        return self.logits(parts.enter_region(self.shape, self.norm(x)))


EMBEDDINGS: dict[str, Any] = {"gpt": Embedding, "llama": Embedding, "bert": BertEmbedding, "t5": T5Embedding}
