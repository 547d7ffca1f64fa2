"""A job's transformer, hand-sharded over a tensor-parallel group (see ``torch_parts``), in pipeline stages."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops import composite
from . import torch_families
from .torch_parts import Group, Norm, Positions, Shape

DTYPES = MappingProxyType(  # by precision: of activations, and of parameters
    {
        "fp32": (torch.float32, torch.float32),
        "bf16": (torch.bfloat16, torch.float32),
        "pure-bf16": (torch.bfloat16, torch.bfloat16),
        "pure-fp16": (torch.float16, torch.float16),
    }
)


class Stage(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(self, shape: Shape, stage: int, num_stages: int) -> None:
        super().__init__()
        self.shape = shape
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.embedding: Any = torch_families.EMBEDDINGS[shape.family](shape) if self.first else None
        if shape.family == "t5":  # never in a pipeline
            layers = torch_families.encoder_and_decoder(shape)
        else:
            layers = [
                torch_families.Layer(shape, f"layer{index}") for index in stage_layers(shape.layers, stage, num_stages)
            ]
        self.layers = nn.ModuleList(layers)
        self.head: Any = torch_families.HEADS[shape.family](shape) if self.last else None
        if shape.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.logits.weight = self.embedding.weight
        self.beside: tuple[Any, ...] = ()  # what every layer takes; no buffer: DDP and FSDP have no business with it
        if shape.family == "llama":
            self.beside = (composite.rope_tables(shape.seq_len, shape.head_dim, shape.device, shape.dtype),)

    def forward(self, x: Tensor) -> Tensor:
        """``tokens`` (see ``Training``) or ``activation[rows, hidden]`` to the same or ``logits[rows, vocab]``."""
        if self.shape.family == "t5":
            x = self._encode_and_decode(x)
        else:
            x = x if self.embedding is None else self.embedding(x)
            for layer in self.layers:
                x = self._run(layer, x, *self.beside)
        y: Tensor = x if self.head is None else self.head(x)
        return y

    def _encode_and_decode(self, tokens: Tensor) -> Tensor:
        far: Tensor
        x: Tensor
        far, x, far_bias, bias = self.embedding(tokens)
        for layer in self.layers[: self.shape.encoder_layers]:
            far = self._run(layer, far, far_bias)
        for layer in self.layers[self.shape.encoder_layers :]:
            x = self._run(layer, x, bias, far)
        return x

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if self.shape.recompute:
            again: Tensor = checkpoint(layer, *inputs, use_reentrant=False)
            return again
        y: Tensor = layer(*inputs)
        return y

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters that all tensor-parallel ranks hold; with sequence parallelism each has part of their gradient."""
        held = [module for module in self.modules() if isinstance(module, Norm | Positions)]
        parameters: list[nn.Parameter] = [p for module in held for p in module.parameters()]
        if isinstance(self.embedding, torch_families.BertEmbedding):
            parameters.append(self.embedding.types)
        if isinstance(self.head, torch_families.BertHead):
            parameters += [self.head.transform, self.head.transform_bias]
        return parameters


def stage_layers(layers: int, stage: int, num_stages: int) -> range:
    """Layers of a stage: split evenly, earlier stages take the remainder."""
    each, more = divmod(layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def token_rows(shape: Shape, tokens: Tensor) -> Tensor:
    """``tokens[sequences, length]`` so that each micro-batch's, once chunked, are in the order of its rows."""
    if shape.family != "t5":
        return tokens
    length = tokens.shape[1]
    return tokens.view(-1, shape.micro_batch, length).transpose(1, 2).reshape(-1, shape.micro_batch)


def shape_of(job: dict[str, Any], device: torch.device, group: Group | None) -> Shape:
    """Shape of a (checked) job's model on this rank."""
    model, parallel, batch = job["model"], job["parallel"], job["batch"]
    dtype, main_dtype = DTYPES[batch["precision"]]
    names = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gated_mlp")
    return Shape(
        **{name: model[name] for name in names},
        tied_embeddings=model["tied_embeddings"],
        encoder_layers=model.get("encoder_layers", 0),
        encoder_seq_len=model.get("encoder_seq_len", 0),
        micro_batch=batch["micro_batch"],
        recompute=parallel["recompute"] == "full",
        sequence_parallel=parallel["sequence_parallel"] and group is not None,
        dtype=dtype,
        main_dtype=main_dtype,
        device=device,
        group=group,
    )
