"""Jobs of two ranks for the task *pairs*: a family of models, how it is replicated or sharded, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsight.experiments.studies.architectures.blocks import Residual, mlp
from stepsight.experiments.studies.architectures.convolutional_families import Made
from stepsight.experiments.studies.architectures.family_script import FAMILIES, optimizer_of

DDP, FSDP = "ddp", "fsdp"


@dataclass(frozen=True)
class PairJob:
    """A job of two ranks.

    Attributes:
        family: Of the model: one of ``FAMILIES`` or of ``LARGE``.
        wrap: ``ddp`` or ``fsdp``.
        bucket_mb: Of DDP's buckets.
        bf16: Whether products run in bf16: under autocast (DDP), or with parameters that are cast (FSDP2).
        size: Configuration of the family.
    """

    family: str
    wrap: str
    bucket_mb: float = 25.0
    bf16: bool = False
    size: int = 0

    def make(self) -> Made:
        """The model and its loss."""
        return (LARGE if self.family in LARGE else FAMILIES)[self.family](self.size)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Of the model's parameters."""
        if self.family in ("embedding", "stream"):
            return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        return optimizer_of(self.family, model)


def wide(_: int) -> Made:
    """A few wide layers and a small batch: the optimizer takes as long as the products."""
    model = mlp(512, 2048, 2048, 2048, 256)
    x, y = torch.randn(96, 512), torch.randint(256, (96,))
    return model, lambda: F.cross_entropy(model(x), y)


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.top = nn.Embedding(120_000, 64), mlp(64 * 8, 512, 1)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.top(self.rows(ids).flatten(1))
        return y


def embedding(_: int) -> Made:
    """A large table with dense gradients: its gradient and its step are bound by memory."""
    model, ids, y = _Embedding(), torch.randint(120_000, (1024, 8)), torch.rand(1024, 1)
    return model, lambda: F.binary_cross_entropy_with_logits(model(ids), y)


def norms(_: int) -> Made:
    """Layer norms and activations on large tensors."""
    width = 256
    layers = [Residual(nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.LayerNorm(width))
    x = torch.randn(32, 256, width)
    return model, lambda: model(x).square().mean()


class _Gates(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(x) + self.shift * torch.sigmoid(x)


def stream(_: int) -> Made:
    """Elementwise work on tensors that no cache holds."""
    model, x = nn.Sequential(*(_Gates(1024) for _ in range(3))), torch.randn(4096, 1024)
    return model, lambda: model(x).square().mean()


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.pairs(x).chunk(3, -1)
        )
        weights = F.softmax(query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        y: Tensor = self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return y


def attention(_: int) -> Made:
    """Unfused attention of long sequences: softmax on large tensors."""
    width = 192
    model = nn.Sequential(*(Residual(nn.LayerNorm(width), _Attention(width, 6)) for _ in range(3)))
    x = torch.randn(2, 512, width)
    return model, lambda: model(x).square().mean()


def deep(_: int) -> Made:
    """Many small layers: many collectives, and much work of the host."""
    model = nn.Sequential(*(Residual(nn.LayerNorm(192), nn.Linear(192, 192), nn.ReLU()) for _ in range(24)))
    x = torch.randn(512, 192)
    return model, lambda: model(x).square().mean()


LARGE: Mapping[str, Callable[[int], Made]] = MappingProxyType(
    {"wide": wide, "embedding": embedding, "norms": norms, "stream": stream, "attention": attention, "deep": deep}
)
JOBS: Mapping[str, PairJob] = MappingProxyType(
    {
        "wide-ddp": PairJob("wide", DDP, 8.0),
        "gpt-ddp": PairJob("gpt", DDP, 2.0),
        "embedding-ddp": PairJob("embedding", DDP),
        "bert-fsdp": PairJob("bert", FSDP),
        "resnet-ddp": PairJob("resnet", DDP, 1.0),
        "llama-fsdp": PairJob("llama", FSDP),
        "norms-ddp": PairJob("norms", DDP, 0.5),
        "experts-fsdp": PairJob("experts", FSDP),
        "mobilenet-ddp": PairJob("mobilenet", DDP, 2.0),
        "stream-fsdp": PairJob("stream", FSDP),
        "vit-ddp-bf16": PairJob("vit", DDP, 4.0, bf16=True),
        "dlrm-ddp": PairJob("dlrm", DDP, 25.0, size=2),
        "attention-fsdp": PairJob("attention", FSDP),
        "unet-ddp": PairJob("unet", DDP, 1.0),
        "mixer-fsdp-bf16": PairJob("mixer", FSDP, bf16=True),
        "deep-ddp": PairJob("deep", DDP, 0.3),
        "convnext-ddp": PairJob("convnext", DDP, 25.0),
        "autoencoder-fsdp": PairJob("autoencoder", FSDP),
    }
)
