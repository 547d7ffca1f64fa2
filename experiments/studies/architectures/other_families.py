"""Families of models of tables, graphs, points and fields; as in ``convolutional_families``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsight.experiments.studies.architectures.blocks import mlp
from stepsight.experiments.studies.architectures.convolutional_families import Made


def perceptron(size: int) -> Made:
    """Linear layers with batch norm and dropout."""
    width, depth, batch = [(512, 4, 64), (384, 6, 128), (768, 3, 32)][size]
    body = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth)
    ]
    model = nn.Sequential(nn.Linear(64, width), *body, nn.Linear(width, 10))
    x, y = torch.randn(batch, 64), torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


class _Dlrm(nn.Module):
    pairs: Tensor

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = mlp(16, 256, 64, width)
        pairs = (tables + 1) * tables // 2
        self.top = mlp(width + pairs, 256, 64, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.dense(dense)
        parts = [first, *(table(ids[i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(parts, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        y: Tensor = self.top(torch.cat([first, products], 1))
        return y


def dlrm(size: int) -> Made:
    """Bags of embeddings and their products."""
    tables, rows, width, batch = [(8, 4000, 32, 256), (12, 2000, 16, 512), (6, 8000, 64, 128)][size]
    model, dense = _Dlrm(tables, rows, width), torch.randn(batch, 16)
    ids, y = torch.randint(rows, (tables, batch, 4)), torch.rand(batch, 1)
    return model, lambda: F.binary_cross_entropy_with_logits(model(dense, ids), y)


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


def deepfm(size: int) -> Made:
    """Factorisation machines with a deep part."""
    fields, rows, width, batch = [(20, 5000, 16, 256), (12, 10000, 32, 128), (30, 2000, 8, 512)][size]
    model, ids, y = _Factors(fields, rows, width), torch.randint(rows, (batch, fields)), torch.rand(batch, 1)
    return model, lambda: F.binary_cross_entropy(model(ids), y)


class _Towers(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.left, self.right = mlp(width, 256, 128), mlp(width, 256, 128)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        left = F.normalize(self.left(self.users(users).mean(1)), dim=-1)
        right = F.normalize(self.right(self.items(items)), dim=-1)
        return left @ right.t() / 0.07


def two_towers(size: int) -> Made:
    """Users and items, each scored against all others of the batch."""
    rows, width, batch = [(5000, 64, 256), (2000, 128, 384), (8000, 32, 512)][size]
    model, same = _Towers(rows, width), torch.arange(batch)
    users, items = torch.randint(rows, (batch, 10)), torch.randint(rows, (batch,))
    return model, lambda: F.cross_entropy(model(users, items), same)


class _GraphLayer(nn.Module):
    def __init__(self, width: int, *, attends: bool) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1) if attends else None

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.linear(x)
        sent = x[source]
        if self.score is not None:
            weight = F.leaky_relu(self.score(torch.cat([sent, x[target]], -1))).exp()
            total = torch.zeros(len(x), 1).index_add(0, target, weight)
            sent = sent * (weight / (total[target] + 1e-6))
        return F.relu(torch.zeros_like(x).index_add(0, target, sent))


class _Graph(nn.Module):
    def __init__(self, width: int, depth: int, *, attends: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(_GraphLayer(width, attends=attends) for _ in range(depth))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, source, target)
        y: Tensor = self.last(x)
        return y


def _on_graph(model: nn.Module, nodes: int, edges: int) -> Made:
    x, y = torch.randn(nodes, 32), torch.randint(10, (nodes,))
    source, target = torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))
    return model, lambda: F.cross_entropy(model(x, source, target), y)


def graph_network(size: int) -> Made:
    """Messages along the edges of a graph."""
    width, depth, nodes, edges = [(64, 3, 1000, 5000), (128, 2, 800, 4000), (32, 4, 2000, 10000)][size]
    return _on_graph(_Graph(width, depth, attends=False), nodes, edges)


def graph_attention(size: int) -> Made:
    """Messages weighted by attention."""
    width, depth, nodes, edges = [(64, 2, 800, 4000), (96, 2, 500, 3000), (32, 3, 1500, 6000)][size]
    return _on_graph(_Graph(width, depth, attends=True), nodes, edges)


class _PointNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 8 * width)
        self.points = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(ins, outs, 1), nn.BatchNorm1d(outs), nn.ReLU()) for ins, outs in pairwise(widths))
        )
        self.head = mlp(8 * width, 128, 40)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.points(x).amax(-1))
        return y


def pointnet(size: int) -> Made:
    """A network on each point, and the maximum over points."""
    width, batch, points = [(32, 4, 512), (48, 2, 512), (64, 4, 192)][size]
    model, x, y = _PointNet(width), torch.randn(batch, 3, points), torch.randint(40, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


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


def variational(size: int) -> Made:
    """A variational autoencoder."""
    width, latent, batch = [(400, 20, 128), (800, 32, 64), (256, 64, 256)][size]
    model, x = _Vae(width, latent), torch.rand(batch, 784)
    return model, lambda: model(x)


class _Field(nn.Module):
    waves: Tensor

    """Colours along rays, from coordinates in waves."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 ** torch.arange(8))
        self.body = mlp(48, *[width] * depth, 4)

    def forward(self, points: Tensor, steps: Tensor) -> Tensor:
        angles = (points[..., None] * self.waves).flatten(-2)
        found = self.body(torch.cat([angles.sin(), angles.cos()], -1))
        opaque = 1 - torch.exp(-F.relu(found[..., 3]) * steps)
        passed = torch.cumprod(1 - opaque + 1e-6, -1)
        seen: Tensor = ((opaque * passed)[..., None] * found[..., :3].sigmoid()).sum(-2)
        return seen


def radiance_field(size: int) -> Made:
    """A radiance field, rendered along rays."""
    width, depth, rays, samples = [(128, 4, 64, 32), (192, 3, 48, 32), (96, 6, 64, 24)][size]
    model, y = _Field(width, depth), torch.rand(rays, 3)
    points, steps = torch.randn(rays, samples, 3), torch.rand(rays, samples)
    return model, lambda: F.mse_loss(model(points, steps), y)


class _Flow(nn.Module):
    def __init__(self, width: int, inner: int, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(width // 2, inner, inner, width, act=nn.Tanh) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for part in self.parts:
            left, right = x.chunk(2, -1)
            scale, shift = part(left).chunk(2, -1)
            scale = torch.tanh(scale)
            x, total = torch.cat([right * scale.exp() + shift, left], -1), total + scale.sum(-1)
        return (0.5 * x.square().sum(-1) - total).mean()


def flow(size: int) -> Made:
    """A normalizing flow of coupled layers."""
    width, inner, depth, batch = [(64, 128, 8, 128), (128, 256, 4, 64), (32, 96, 12, 256)][size]
    model, x = _Flow(width, inner, depth), torch.randn(batch, width)
    return model, lambda: model(x)


class _Dynamics(nn.Module):
    def __init__(self, width: int, inner: int, steps: int) -> None:
        super().__init__()
        self.steps, self.rate = steps, mlp(width, inner, inner, width, act=nn.Softplus)

    def forward(self, x: Tensor) -> Tensor:
        size = 1.0 / self.steps
        for _ in range(self.steps):
            first = self.rate(x)
            second = self.rate(x + 0.5 * size * first)
            third = self.rate(x + 0.5 * size * second)
            x = x + size / 6 * (first + 2 * second + 2 * third + self.rate(x + size * third))
        return x


def neural_ode(size: int) -> Made:
    """A neural ordinary differential equation, solved with a Runge-Kutta method."""
    width, inner, steps, batch = [(32, 128, 6, 64), (64, 192, 4, 64), (16, 96, 8, 128)][size]
    model, x, y = _Dynamics(width, inner, steps), torch.randn(batch, width), torch.randn(batch, width)
    return model, lambda: F.smooth_l1_loss(model(x), y)


FAMILIES: dict[str, Callable[[int], Made]] = {
    each.__name__: each
    for each in (
        perceptron, dlrm, deepfm, two_towers, graph_network, graph_attention, pointnet, variational, radiance_field,
        flow, neural_ode,
    )
}  # fmt: skip
