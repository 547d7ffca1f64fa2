"""Small models of several families, and the training script of each: ``families.py FAMILY`` trains until it is stopped.

On several ranks the model is replicated (DDP).  A family is a function of a model that takes inputs and targets to its
loss, and of a batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]
VOCAB, CLASSES, STEPS = 1000, 100, 100_000


class Classified(nn.Module):
    """A model and its cross-entropy."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x).flatten(0, -2), y.flatten())


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class Attention(nn.Module):
    """Attention of ``x[batch, length, width]`` to itself."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.triple, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.triple(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Recurrent(nn.Module):
    """The outputs of a recurrent network."""

    def __init__(self, cells: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cells(x)[0]
        return y


class Graph(nn.Module):
    """Messages along the edges of a graph."""

    def __init__(self, width: int, nodes: int, edges: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.source, self.target = torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = F.relu(torch.zeros_like(x).index_add(0, self.target, x[self.source]))
        return x


class Variational(nn.Module):
    """A variational autoencoder and its loss."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Sequential(*mlp(784, width, 2 * latent)), nn.Sequential(*mlp(latent, width, 784))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        off = F.binary_cross_entropy_with_logits(self.decode(drawn), x, reduction="sum") / len(x)
        loss: Tensor = off - 0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        return loss


def mlp(*widths: int) -> list[nn.Module]:
    """Linear layers with activations between."""
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layers += [nn.Linear(ins, outs), nn.ReLU()]
    return layers[:-1]


def conv(ins: int, outs: int, window: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size of its input, its norm and its activation."""
    product = nn.Conv2d(ins, outs, window, stride, window // 2, groups=groups, bias=False)
    return [product, nn.BatchNorm2d(outs), nn.ReLU()]


def _image(width: int, batch: int, pixels: int, *layers: nn.Module) -> Made:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(CLASSES, (batch,))
    return Classified(*layers, *head), (x, y)


def _words(width: int, batch: int, length: int, *layers: nn.Module) -> Made:
    x, y = torch.randint(VOCAB, (2, batch, length))
    return Classified(nn.Embedding(VOCAB, width), *layers, nn.Linear(width, VOCAB)), (x, y)


def _layer(width: int, heads: int, norm: type[nn.Module], *, causal: bool = False) -> nn.Module:
    """A transformer layer with norms before."""
    attention = Residual(norm(width), Attention(width, heads, causal=causal))
    return nn.Sequential(attention, Residual(norm(width), *mlp(width, 4 * width, width)))


def _mobile(width: int) -> nn.Module:
    inner = 4 * width
    return Residual(*conv(width, inner, 1), *conv(inner, inner, groups=inner), *conv(inner, width, 1)[:-1])


def _encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)


FAMILIES: dict[str, Callable[[], Made]] = {
    "convnet": lambda: _image(64, 8, 32, *conv(3, 16), nn.MaxPool2d(2), *conv(16, 32), nn.MaxPool2d(2), *conv(32, 64)),
    "resnet": lambda: _image(32, 4, 64, *conv(3, 32, 7, stride=2), *(Residual(*conv(32, 32)) for _ in range(6))),
    "mobilenet": lambda: _image(16, 4, 64, *conv(3, 16, stride=2), *(_mobile(16) for _ in range(4))),
    "dilated": lambda: _image(24, 2, 64, *conv(3, 24), nn.Conv2d(24, 24, 3, padding=2, dilation=2), nn.SiLU()),
    "gpt": lambda: _words(128, 2, 128, *(_layer(128, 4, nn.LayerNorm, causal=True) for _ in range(4))),
    "llama": lambda: _words(192, 2, 96, *(_layer(192, 6, nn.RMSNorm, causal=True) for _ in range(3))),
    "bert": lambda: _words(128, 4, 64, *(_encoder(128) for _ in range(3))),
    "lstm": lambda: _words(128, 8, 32, Recurrent(nn.LSTM(128, 128, 2, batch_first=True))),
    "gru": lambda: _words(128, 8, 24, Recurrent(nn.GRU(128, 128, 2, batch_first=True))),
    "perceptron": lambda: (
        Classified(*mlp(64, 512, 512, 512, 512, CLASSES)),
        (torch.randn(64, 64), torch.randint(CLASSES, (64,))),
    ),
    "embeddings": lambda: (
        Classified(nn.EmbeddingBag(20_000, 64), *mlp(64, 256, CLASSES)),
        (torch.randint(20_000, (512, 8)), torch.randint(CLASSES, (512,))),
    ),
    "graph": lambda: (
        Classified(Graph(64, 1000, 5000), nn.Linear(64, CLASSES)),
        (torch.randn(1000, 64), torch.randint(CLASSES, (1000,))),
    ),
    "variational": lambda: (Variational(400, 20), (torch.rand(128, 784),)),
}


def main(family: str) -> None:
    """Train: convolutions with momentum, all others with Adam."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
