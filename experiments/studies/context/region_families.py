"""Families of random regions without products: what `torch.compile` makes kernels of between products."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.gelu, F.silu, F.relu, F.mish, F.elu, F.hardswish, torch.tanh, torch.sigmoid,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: F.relu(x).square(), lambda x: F.leaky_relu(x, 0.1),
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A random region: what to compile, and its arguments.

    Attributes:
        function: What runs.
        inputs: Its arguments.
        training: Whether its backward region is wanted too.
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    training: bool


class Dice:
    """Random choices of one draw."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        self.dtype = torch.bfloat16 if self.random.random() < 0.2 else torch.float32
        self.training = self.random.random() < 0.6

    def pick(self, *values: Any) -> Any:
        """One of the values."""
        return self.random.choice(values)

    def flag(self, share: float = 0.5) -> bool:
        """True with that probability."""
        return self.random.random() < share

    def width(self, low: int = 64, high: int = 2048) -> int:
        """A width, a multiple of 16."""
        return max(16, int(low * (high / low) ** self.random.random()) // 16 * 16)

    def rows(self, width: int, most: int = 2**22) -> int:
        """Rows of that width, so that a tensor has 2^12 elements to ``most``."""
        numel = 2**12 * (most / 2**12) ** self.random.random()
        return max(4, int(numel / width))

    def tensor(self, *shape: int, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers."""
        made = torch.randn(shape, generator=self.generator).to(dtype or self.dtype)
        return made.requires_grad_(grad and self.training)

    def indices(self, high: int, *shape: int) -> Tensor:
        """Random whole numbers below ``high``."""
        return torch.randint(high, shape, generator=self.generator)

    def draw(self, function: Callable[..., Any], *inputs: Any) -> Draw:
        """What was drawn."""
        return Draw(function, inputs, self.training and any(i.requires_grad for i in inputs if isinstance(i, Tensor)))


def _norm(dice: Dice) -> Callable[[Tensor, Tensor], Tensor]:
    if dice.flag():
        return lambda x, w: F.layer_norm(x, (x.shape[-1],), w, None)
    return lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def norm_activation(dice: Dice) -> Draw:
    """A residual, a norm, activations."""
    width = dice.width()
    rows, norm, first, second = dice.rows(width), _norm(dice), dice.pick(*ACTIVATIONS), dice.pick(*ACTIVATIONS)
    again, keep = dice.flag(0.4), dice.flag()

    def run(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Any:
        h = x + r if keep else x * 0.5
        y = first(norm(h, w) + b)
        if again:
            y = second(norm(y + h, w))
        return (y, h) if keep else y

    return dice.draw(run, dice.tensor(rows, width), dice.tensor(rows, width), dice.tensor(width), dice.tensor(width))


def gated(dice: Dice) -> Draw:
    """The gate of an MLP: one half activates the other; perhaps a residual, a scale, a norm."""
    width = dice.width()
    rows, act, split, scaled, normed = dice.rows(width), dice.pick(*ACTIVATIONS), dice.flag(), dice.flag(), dice.flag()
    norm = _norm(dice)

    def run(x: Tensor, w: Tensor) -> Any:
        a, b = x.chunk(2, -1) if split else (x[..., ::2], x[..., 1::2])
        y = act(a) * b
        y = y * w if scaled else y
        return norm(y, w) if normed else y

    return dice.draw(run, dice.tensor(rows, 2 * width), dice.tensor(width))


def scores(dice: Dice) -> Draw:
    """Softmax of attention scores with scale, mask, bias or soft cap."""
    heads, keys = dice.pick(2, 4, 8, 16), dice.width(32, 1024)
    queries = dice.rows(heads * keys)
    cap, biased, causal = dice.flag(0.4), dice.flag(), dice.flag()

    def run(s: Tensor, bias: Tensor) -> Any:
        s = s * 0.125
        s = 30.0 * torch.tanh(s / 30.0) if cap else s
        s = s + bias if biased else s
        if causal:
            seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys // 2
            s = s.masked_fill(~seen, -1e4)
        return torch.softmax(s, -1, dtype=torch.float32).to(s.dtype)

    return dice.draw(run, dice.tensor(heads, queries, keys), dice.tensor(heads, 1, keys))


def rotary(dice: Dice) -> Draw:
    """Rotary embedding of queries and keys, heads moved."""
    heads, dim = dice.pick(2, 4, 8, 16), dice.pick(32, 64, 96, 128)
    seq, halves, moved, made = dice.rows(heads * dim, 2**21), dice.flag(), dice.flag(), dice.flag()

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if halves:
            a, b = x.chunk(2, -1)
            rotated = torch.cat((-b, a), -1)
            return x * torch.cat((cos, cos), -1) + rotated * torch.cat((sin, sin), -1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def run(q: Tensor, k: Tensor, angle: Tensor) -> Any:
        cos, sin = (angle.cos(), angle.sin()) if made else (angle, 1 - angle)
        q, k = (turn(each, cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)) for each in (q, k))
        return (q.transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous()) if moved else (q, k)

    angle = dice.tensor(seq, dim // 2, grad=False, dtype=torch.float32)
    return dice.draw(run, dice.tensor(seq, heads, dim), dice.tensor(seq, heads, dim), angle)


def loss(dice: Dice) -> Draw:
    """Cross entropy with smoothing, a z-loss or a mask."""
    classes = dice.pick(10, 100, 1000, 4000, 16000)
    rows, smooth, z, masked = dice.rows(classes), dice.pick(0.0, 0.1), dice.flag(0.4), dice.flag(0.4)

    def run(logits: Tensor, target: Tensor, mask: Tensor) -> Any:
        each = F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=smooth)
        each = each + 1e-4 * torch.logsumexp(logits.float(), -1).square() if z else each
        return (each * mask).sum() / mask.sum() if masked else each.mean()

    mask = torch.ones(rows)
    return dice.draw(run, dice.tensor(rows, classes), dice.indices(classes, rows), mask)


def batch_norm(dice: Dice) -> Draw:
    """Batch norm of images in training or inference, residual, activation."""
    channels, side = dice.width(16, 256), dice.pick(7, 14, 16, 28, 32, 56)
    batch, act = min(64, max(1, dice.rows(channels * side * side) // 2)), dice.pick(*ACTIVATIONS)
    learns, residual, last = dice.flag(), dice.flag(), dice.flag(0.3)

    def run(x: Tensor, r: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Any:
        y = F.batch_norm(x, mean, var, w, b, training=learns)
        y = act(y + r if residual else y)
        return y.mean((2, 3)) if last else y

    images = [dice.tensor(batch, channels, side, side) for _ in range(2)]
    if dice.flag(0.3):
        images = [each.detach().to(memory_format=torch.channels_last).requires_grad_(dice.training) for each in images]
    stats = torch.zeros(channels), torch.ones(channels)
    return dice.draw(run, *images, *stats, *(dice.tensor(channels, dtype=torch.float32) for _ in range(2)))


def group_norm(dice: Dice) -> Draw:
    """Group norm of a diffusion U-Net with scale and shift of the time."""
    channels, side, groups = dice.pick(32, 64, 128, 256), dice.pick(8, 16, 32, 64), dice.pick(4, 8, 32)
    batch, modulated, residual = max(1, dice.rows(channels * side * side) // 4), dice.flag(), dice.flag()
    act = dice.pick(F.silu, F.gelu, F.relu)

    def run(x: Tensor, r: Tensor, w: Tensor, t: Tensor) -> Any:
        y = F.group_norm(x, groups, w, None)
        if modulated:
            scale, shift = t.chunk(2, 1)
            y = y * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        y = act(y)
        return y + r if residual else y

    shape = min(batch, 16), channels, side, side
    return dice.draw(
        run, dice.tensor(*shape), dice.tensor(*shape), dice.tensor(channels), dice.tensor(shape[0], 2 * channels)
    )


def embedding(dice: Dice) -> Draw:
    """Tokens and positions looked up, added and normed."""
    width = dice.width()
    vocab = min(dice.pick(512, 4096, 16384), 2**22 // width)
    rows, normed, typed, scaled = dice.rows(width, 2**21), dice.flag(), dice.flag(), dice.flag()

    def run(tokens: Tensor, table: Tensor, positions: Tensor, kinds: Tensor, w: Tensor) -> Any:
        y = F.embedding(tokens, table)
        y = y * width**0.5 if scaled else y
        y = y + positions
        y = y + F.embedding(tokens % 2, kinds) if typed else y
        return F.layer_norm(y, (width,), w) if normed else y

    dice.training = False  # the gradient of a table is a call of a library
    tables = dice.tensor(vocab, width), dice.tensor(rows, width), dice.tensor(2, width)
    return dice.draw(run, dice.indices(vocab, rows), *tables, dice.tensor(width))


def optimizer(dice: Dice) -> Draw:
    """A step of an optimizer over several tensors."""
    kind, count = dice.pick("adam", "momentum", "lion", "rms", "adagrad"), dice.pick(1, 2, 4, 8)
    width, clipped = dice.width(32, 1024), dice.flag(0.4)
    rows = dice.rows(width * count, 2**21)
    dice.training = False

    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Any:
        if kind == "adam":
            m, v = m.lerp(g, 0.1), v * 0.999 + g * g * 0.001
            return p * 0.999 - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v
        if kind == "momentum":
            m = m * 0.9 + g + 1e-4 * p
            return p - 1e-3 * (g + 0.9 * m), m
        if kind == "lion":
            return p - 1e-3 * torch.sign(m * 0.9 + g * 0.1), m * 0.99 + g * 0.01
        v = v * 0.99 + g * g * 0.01 if kind == "rms" else v + g * g
        return p - 1e-3 * g / (v.sqrt() + 1e-8), v

    def run(*tensors: Tensor) -> Any:
        parts = [tensors[4 * i : 4 * i + 4] for i in range(count)]
        scale: Any = 1.0
        if clipped:
            norm = torch.stack([g.float().square().sum() for _, g, _, _ in parts]).sum().sqrt()
            scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        return [step(p, g * scale, m, v) for p, g, m, v in parts]

    shapes = [(max(4, rows // dice.pick(1, 2)), width) for _ in range(count)]
    tensors = [dice.tensor(*s, grad=False, dtype=torch.float32) for s in shapes for _ in range(4)]
    return dice.draw(run, *[each.abs() if number % 4 == 3 else each for number, each in enumerate(tensors)])


def image_norm(dice: Dice) -> Draw:
    """ConvNeXt's block between products: channels moved last, normed, scaled, moved back, added."""
    channels, side = dice.width(32, 384), dice.pick(7, 14, 28, 56)
    batch, back, residual, act = (
        max(1, dice.rows(channels * side * side) // 4), dice.flag(), dice.flag(), dice.pick(*ACTIVATIONS)
    )  # fmt: skip

    def run(x: Tensor, w: Tensor, gamma: Tensor) -> Any:
        y = F.layer_norm(x.permute(0, 2, 3, 1), (channels,), w)
        y = act(y) * gamma
        if back:
            y = y.permute(0, 3, 1, 2)
            return (x + y).contiguous() if residual else y.contiguous()
        return y

    shape = min(batch, 32), channels, side, side
    return dice.draw(run, dice.tensor(*shape), dice.tensor(channels), dice.tensor(channels))


def windows(dice: Dice) -> Draw:
    """Swin's windows: roll, cut into windows, and back."""
    width, window, count = dice.width(32, 384), dice.pick(4, 7, 8), dice.pick(2, 4, 8)
    side = window * count
    batch, rolled, normed, back = max(1, dice.rows(width * side * side) // 4), dice.flag(), dice.flag(), dice.flag()

    def run(x: Tensor, w: Tensor, r: Tensor) -> Any:
        x = F.layer_norm(x, (width,), w) if normed else x * w
        x = torch.roll(x, (-(window // 2), -(window // 2)), (1, 2)) if rolled else x
        cut = x.view(-1, count, window, count, window, width).permute(0, 1, 3, 2, 4, 5)
        if not back:
            return cut.reshape(-1, window * window, width)
        cut = F.gelu(cut.reshape(-1, count, count, window, window, width))
        return cut.permute(0, 1, 3, 2, 4, 5).reshape(x.shape) + r

    shape = min(batch, 16), side, side, width
    return dice.draw(run, dice.tensor(*shape), dice.tensor(width), dice.tensor(*shape))
