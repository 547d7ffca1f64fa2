"""Families of random regions whose kernels pass whole buffers on, which the next kernel may find in a cache.

Statistics of columns or of whole tensors lie between the kernels, so that Inductor cannot fuse them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepsight.experiments.studies.context.region_families import ACTIVATIONS, Dice, Draw

FEWEST, MOST = 2**14, 2**23  # elements of the buffers that are passed on: 64 KiB to 32 MiB


def _shape(dice: Dice, low: int = 64, high: int = 2048) -> tuple[int, int]:
    width = dice.width(low, high)
    numel = FEWEST * (MOST / FEWEST) ** dice.random.random()
    return max(8, int(numel / width)), width


def _columns(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-3)


def sinkhorn(dice: Dice) -> Draw:
    """Rows and columns of a matrix normalised in turn."""
    rows, width = _shape(dice)
    rounds, logs = dice.pick(1, 2, 3), dice.flag(0.4)

    def run(x: Tensor) -> Tensor:
        y = x if logs else x.abs() + 0.1
        for _ in range(rounds):
            if logs:
                y = y - torch.logsumexp(y, 1, keepdim=True)
                y = y - torch.logsumexp(y, 0, keepdim=True)
            else:
                y = y / y.sum(1, keepdim=True)
                y = y / y.sum(0, keepdim=True)
        return y

    return dice.draw(run, dice.tensor(rows, width, dtype=torch.float32))


def column_norms(dice: Dice) -> Draw:
    """Layers of norms by column with activations and residuals."""
    rows, width = _shape(dice, 32, 1024)
    acts, residual = [dice.pick(*ACTIVATIONS) for _ in range(dice.pick(2, 3, 4))], dice.flag()

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for act in acts:
            y = act((x - x.mean(0)) * torch.rsqrt(x.var(0, correction=0) + 1e-5) * w + b)
            x = x + y if residual else y
        return x

    return dice.draw(run, dice.tensor(rows, width), dice.tensor(width), dice.tensor(width))


def branches(dice: Dice) -> Draw:
    """One buffer that several readers take in different ways."""
    rows, width = _shape(dice)
    act, kinds = dice.pick(*ACTIVATIONS), dice.random.sample(("turn", "columns", "soft", "gate", "shift"), 3)

    def run(x: Tensor, w: Tensor) -> Any:
        h = _columns(act(x * w))
        made: dict[str, Any] = {
            "turn": lambda: h.t().contiguous(),
            "columns": lambda: h - h.amax(0, keepdim=True),
            "soft": lambda: torch.softmax(h, -1),
            "gate": lambda: h[:, ::2] * torch.sigmoid(h[:, 1::2]),
            "shift": lambda: torch.roll(h, 1, 0) + h,
        }
        return [made[kind]() for kind in kinds]

    return dice.draw(run, dice.tensor(rows, width), dice.tensor(width))


def long_reuse(dice: Dice) -> Draw:
    """A buffer that is read again after others passed by."""
    rows, width = _shape(dice, 64, 1024)
    count, first, last = dice.pick(1, 2, 3, 5), dice.pick(*ACTIVATIONS), dice.pick(*ACTIVATIONS)

    def run(x: Tensor, *others: Tensor) -> Tensor:
        kept = _columns(first(x))
        y = kept
        for other in others:
            y = _columns(y + other)
        made: Tensor = last(y) * kept
        return made

    return dice.draw(run, *(dice.tensor(rows, width) for _ in range(count + 1)))


def layerwise_optimizer(dice: Dice) -> Draw:
    """LAMB or LARS: a step of every tensor scaled by norms of the tensor and of its step."""
    count, lamb, clipped = dice.pick(1, 2, 3), dice.flag(), dice.flag(0.4)
    dice.training = False
    shapes = [_shape(dice) for _ in range(count)]
    shapes = [(max(8, rows // count), width) for rows, width in shapes]

    def run(*tensors: Tensor) -> Any:
        made = []
        for place in range(count):
            p, g, m, v = tensors[4 * place : 4 * place + 4]
            g = g / torch.clamp(g.square().sum().sqrt(), min=1.0) if clipped else g
            m = m.lerp(g, 0.1)
            v = v * 0.999 + g * g * 0.001 if lamb else v
            step = m / (v.sqrt() + 1e-6) + 0.01 * p if lamb else m + 1e-4 * p
            trust = p.square().sum().sqrt() / (step.square().sum().sqrt() + 1e-6)
            made += [p - 1e-3 * trust * step, m, v] if lamb else [p - 1e-3 * trust * step, m]
        return made

    tensors = [dice.tensor(*shape, grad=False, dtype=torch.float32) for shape in shapes for _ in range(4)]
    return dice.draw(run, *[each.abs() if number % 4 == 3 else each for number, each in enumerate(tensors)])


def axial(dice: Dice) -> Draw:
    """Softmax and norms along one axis of an image after the other."""
    side, batch = dice.pick(16, 32, 64, 128), dice.pick(1, 4, 16)
    channels = max(4, _shape(dice)[0] * 16 // (side * side * batch) * 4)
    act, normed = dice.pick(*ACTIVATIONS), dice.flag()
    channels = min(channels, MOST // (side * side * batch))

    def run(x: Tensor, gate: Tensor) -> Tensor:
        y = torch.softmax(x, 3) * gate
        y = torch.softmax(act(y), 2) + x
        return F.normalize(y, dim=1) if normed else y - y.mean(1, keepdim=True)

    return dice.draw(run, *(dice.tensor(batch, channels, side, side) for _ in range(2)))


def pyramid(dice: Dice) -> Draw:
    """Images pooled, normed and joined again with what came before, as a U-Net without convolutions."""
    channels, side, depth = dice.pick(8, 16, 32, 64), dice.pick(16, 32, 64, 128), dice.pick(1, 2, 3)
    batch = max(1, min(MOST // (channels * side * side), dice.pick(1, 2, 4, 8)))
    act = dice.pick(*ACTIVATIONS)

    def run(x: Tensor) -> Tensor:
        kept = []
        for _ in range(depth):
            x = act(F.instance_norm(x))
            kept.append(x)
            x = x[..., ::2, ::2] + x[..., 1::2, 1::2]
        for skip in reversed(kept):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest") + skip
        return x

    return dice.draw(run, dice.tensor(batch, channels, side, side))


def whitening(dice: Dice) -> Draw:
    """Features centred by column, scaled by row and by the whole tensor, compared with a second view."""
    rows, width = _shape(dice)
    whole, kind = dice.flag(), dice.pick("cosine", "huber", "variance")

    def run(a: Tensor, b: Tensor) -> Any:
        a, b = a - a.mean(0), b - b.mean(0)
        if whole:
            a, b = a / a.abs().amax(), b / b.abs().amax()
        if kind == "cosine":
            return (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(-1).mean()
        if kind == "huber":
            return F.smooth_l1_loss(_columns(a), _columns(b))
        return (F.relu(1 - a.std(0)).mean() + F.relu(1 - b.std(0)).mean(), a * b)

    return dice.draw(run, dice.tensor(rows, width), dice.tensor(rows, width))


CHAINED = (sinkhorn, column_norms, branches, long_reuse, layerwise_optimizer, axial, pyramid, whitening)
