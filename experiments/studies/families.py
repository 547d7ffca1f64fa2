"""Small models of several families, and the training script of each: ``families.py FAMILY`` trains until it is stopped.

A family is a function of a model that takes inputs and targets to its
loss, and of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import torch
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


class Causal(nn.Module):
    """A transformer layer in which a token attends to those before it."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y: Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return y


class Recurrent(nn.Module):
    """The outputs of a recurrent network."""

    def __init__(self, cells: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cells(x)[0]
        return y


def mlp(*widths: int) -> list[nn.Module]:
    """Linear layers with activations between."""
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layers += [nn.Linear(ins, outs), nn.ReLU()]
    return layers[:-1]


def conv(ins: int, outs: int, window: int = 3, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size of its input, its norm and its activation."""
    return [nn.Conv2d(ins, outs, window, stride, window // 2, bias=False), nn.BatchNorm2d(outs), nn.ReLU()]


def _image(width: int, batch: int, pixels: int, *layers: nn.Module) -> Made:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(CLASSES, (batch,))
    return Classified(*layers, *head), (x, y)


def _words(width: int, batch: int, length: int, *layers: nn.Module) -> Made:
    x, y = torch.randint(VOCAB, (2, batch, length))
    return Classified(nn.Embedding(VOCAB, width), *layers, nn.Linear(width, VOCAB)), (x, y)


def _encoder(width: int, *, first: bool = False) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=first)


FAMILIES: dict[str, Callable[[], Made]] = {
    "convnet": lambda: _image(64, 8, 32, *conv(3, 16), nn.MaxPool2d(2), *conv(16, 32), nn.MaxPool2d(2), *conv(32, 64)),
    "resnet": lambda: _image(32, 4, 64, *conv(3, 32, 7, stride=2), *(Residual(*conv(32, 32)) for _ in range(6))),
    "gpt": lambda: _words(128, 2, 128, *(Causal(_encoder(128, first=True)) for _ in range(4))),
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
}


def main(family: str) -> None:
    """Train: convolutions with momentum, all others with Adam."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
