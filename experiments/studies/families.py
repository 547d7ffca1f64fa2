"""Small models of many families, and the training script of each: ``families.py FAMILY`` trains until it is stopped.

On several ranks the model is replicated (DDP).  Every family is a function of a model and its loss on a batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[], Tensor]]
VOCAB = 1000
STEPS = 100_000


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


def _classify(model: nn.Module, *shape: int, classes: int = 100) -> Made:
    x, y = torch.randn(*shape), torch.randint(classes, (shape[0],))
    return model, lambda: F.cross_entropy(model(x), y)


def convnet() -> Made:
    """Convolutions with batch norm and pooling, then linear layers."""
    width, batch, pixels = 16, 8, 32
    layers: list[nn.Module] = []
    for ins, outs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [conv(ins, outs), nn.BatchNorm2d(outs), nn.ReLU(), nn.MaxPool2d(2)]
    head = mlp(4 * width * (pixels // 8) ** 2, 256, 100)
    return _classify(nn.Sequential(*layers, nn.Flatten(), head), batch, 3, pixels, pixels)


def resnet() -> Made:
    """Residual blocks of three convolutions in three stages."""
    width, batch, pixels = 16, 4, 64
    layers: list[nn.Module] = [conv(3, width, 7, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for now in (width, 2 * width, 4 * width):
        for _ in range(2):
            inner = [conv(now, now, 3, bias=False), nn.BatchNorm2d(now), nn.ReLU()]
            layers += [Residual(*inner, conv(now, now, 3, bias=False), nn.BatchNorm2d(now)), nn.ReLU()]
        layers += [conv(now, 2 * now, 3, stride=2, bias=False), nn.BatchNorm2d(2 * now), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 100)]
    return _classify(nn.Sequential(*layers, *head), batch, 3, pixels, pixels)


def mobilenet() -> Made:
    """Depthwise separable convolutions."""
    width, depth, batch, pixels = 16, 4, 4, 64

    def block(now: int) -> nn.Module:
        inner = 4 * now
        return Residual(
            conv(now, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            conv(inner, inner, 3, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            conv(inner, now, 1, bias=False), nn.BatchNorm2d(now),
        )  # fmt: skip

    body = [block(width) for _ in range(depth)]
    return _classify(
        nn.Sequential(conv(3, width, stride=2), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)),
        batch, 3, pixels, pixels,
    )  # fmt: skip


def autoencoder() -> Made:
    """Strided convolutions and transposed ones."""
    width, batch, pixels = 32, 8, 32
    down = [nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()]
    model, x = nn.Sequential(*down, *up), torch.randn(batch, 3, pixels, pixels)
    return model, lambda: F.mse_loss(model(x), x)


class _Words(nn.Module):
    """Token and position embeddings, a body and logits."""

    def __init__(self, width: int, length: int, *body: nn.Module) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Parameter(torch.randn(length, width))
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.tokens(ids) + self.places))
        return y


def _language(model: nn.Module, batch: int, length: int) -> Made:
    ids = torch.randint(VOCAB, (batch, length))
    targets = torch.randint(VOCAB, (batch * length,))
    return model, lambda: F.cross_entropy(model(ids).flatten(0, -2), targets)


def gpt() -> Made:
    """A decoder."""
    width, heads, depth, batch, length = 128, 4, 4, 2, 128
    body = [pre_norm(width, heads, causal=True) for _ in range(depth)]
    return _language(_Words(width, length, *body, nn.LayerNorm(width)), batch, length)


def bert() -> Made:
    """An encoder of ``nn.TransformerEncoderLayer``."""
    width, heads, depth, batch, length = 128, 4, 3, 4, 64
    body = [nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(depth)]
    return _language(_Words(width, length, *body), batch, length)


class _LlamaLayer(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, part = heads, heads // 2, width // heads
        self.norm, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.pair = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, part, 2) / part)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _turn(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        turned: Tensor = x * self.cos + torch.cat([-right, left], -1) * self.sin
        return turned

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        query = self.query(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.pair(normed).view(batch, length, 2, self.groups, -1).permute(2, 0, 3, 1, 4)
        key, value = (each.repeat_interleave(2, 1) for each in (self._turn(key), value))
        mixed = F.scaled_dot_product_attention(self._turn(query), key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.second(x)
        y: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


def llama() -> Made:
    """A decoder with rotary positions, RMS norm and gates."""
    width, heads, depth, batch, length = 128, 4, 3, 2, 128
    body = [_LlamaLayer(width, heads, length) for _ in range(depth)]
    return _language(_Words(width, length, *body, nn.RMSNorm(width)), batch, length)


class _Patches(nn.Module):
    """Patches of an image as a sequence, a body, and the mean."""

    def __init__(self, width: int, patch: int, *body: nn.Module) -> None:
        super().__init__()
        self.cut, self.body, self.head = nn.Conv2d(3, width, patch, patch), nn.Sequential(*body), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.cut(x).flatten(2).transpose(1, 2)).mean(1))
        return y


def vit() -> Made:
    """Attention over patches."""
    width, heads, depth, batch, pixels = 128, 4, 4, 4, 64
    body = [pre_norm(width, heads) for _ in range(depth)]
    return _classify(_Patches(width, 8, *body), batch, 3, pixels, pixels)


class _Experts(nn.Module):
    """Every token goes to all experts, weighted by a gate: the dense form."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.into = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.back = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        inner = F.silu(torch.einsum("blw,ewf->eblf", x, self.into))
        return torch.einsum("eblf,efw,ble->blw", inner, self.back, weight)


def experts() -> Made:
    """A decoder with a soft mixture of experts."""
    width, heads, count, batch, length = 96, 4, 4, 2, 64
    body = [
        nn.Sequential(
            Residual(nn.LayerNorm(width), SelfAttention(width, heads, causal=True)),
            Residual(nn.LayerNorm(width), _Experts(width, count)),
        ) for _ in range(2)
    ]  # fmt: skip
    return _language(_Words(width, length, *body), batch, length)


class _Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(x)[0]
        return y


def gru() -> Made:
    """A language model of GRUs."""
    return _language(_Words(128, 24, _Recurrent(128, 128, 2, batch_first=True)), 8, 24)


def perceptron() -> Made:
    """Linear layers with batch norm and dropout."""
    width, depth, batch = 512, 4, 64
    body = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth)
    ]
    model = nn.Sequential(nn.Linear(64, width), *body, nn.Linear(width, 10))
    x, y = torch.randn(batch, 64), torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


class _Factors(nn.Module):
    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.wide, self.deep = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.top = mlp(fields * width, 256, 128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.deep(ids)
        crossed = 0.5 * (found.sum(1).square() - found.square().sum(1)).sum(1, keepdim=True)
        y: Tensor = self.wide(ids).sum(1) + crossed + self.top(found.flatten(1))
        return torch.sigmoid(y)


def deepfm() -> Made:
    """Factorisation machines with a deep part."""
    fields, rows, width, batch = 20, 5000, 16, 256
    model, ids, y = _Factors(fields, rows, width), torch.randint(rows, (batch, fields)), torch.rand(batch, 1)
    return model, lambda: F.binary_cross_entropy(model(ids), y)


class _Graph(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x = F.relu(torch.zeros_like(x).index_add(0, target, x[source]))
        y: Tensor = self.last(x)
        return y


def graph_network() -> Made:
    """Messages along the edges of a graph."""
    width, depth, nodes, edges = 64, 3, 1000, 5000
    model, x, y = _Graph(width, depth), torch.randn(nodes, 32), torch.randint(10, (nodes,))
    source, target = torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))
    return model, lambda: F.cross_entropy(model(x, source, target), y)


class _Vae(nn.Module):
    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encode, self.decode = mlp(784, width, 2 * latent), mlp(latent, width, 784)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        off = F.binary_cross_entropy_with_logits(self.decode(drawn), x, reduction="sum") / len(x)
        loss: Tensor = off - 0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        return loss


def variational() -> Made:
    """A variational autoencoder."""
    width, latent, batch = 400, 20, 128
    model, x = _Vae(width, latent), torch.rand(batch, 784)
    return model, lambda: model(x)


CONVOLUTIONAL = (convnet, resnet, mobilenet)  # trained with momentum, all others with Adam
FAMILIES: dict[str, Callable[[], Made]] = {
    each.__name__: each
    for each in (
        *CONVOLUTIONAL, autoencoder, gpt, bert, llama, vit, experts, gru, perceptron, deepfm, graph_network,
        variational,
    )
}  # fmt: skip


class _Whole(nn.Module):
    """A model whose forward is its loss, as DDP needs it."""

    def __init__(self, model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self) -> Tensor:
        return self.loss_of()


def main(family: str) -> None:
    """Train."""
    torch.manual_seed(0)
    model, loss_of = FAMILIES[family]()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    if FAMILIES[family] in CONVOLUTIONAL:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        loss_of = nn.parallel.DistributedDataParallel(_Whole(model, loss_of))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
