"""Families of random regions that judge once: they were measured after all rules and models were fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepsight.experiments.studies.context.region_families import ACTIVATIONS, Dice, Draw


def frames(dice: Dice) -> Draw:
    """Overlapping frames of a signal: window, power, logarithm, means of bands."""
    length, hop = dice.pick(64, 128, 256, 512), dice.pick(2, 4)
    batch, step, banded = dice.pick(1, 4, 8), length // hop, dice.flag()
    count = max(4, dice.rows(length * batch, 2**20))

    def run(x: Tensor, window: Tensor) -> Tensor:
        cut = x.unfold(-1, length, step) * window
        power = (cut.float() - cut.float().mean(-1, keepdim=True)).square()
        power = power.unflatten(-1, (-1, 16)).mean(-1) if banded else power
        return torch.log(power + 1e-6).to(x.dtype)

    dice.training = False  # the gradient of overlapping frames is a call of a library
    return dice.draw(run, dice.tensor(batch, step * (count - 1) + length), dice.tensor(length))


def augmenting(dice: Dice) -> Draw:
    """Images normalised, mirrored, shifted in colour, mixed and cut."""
    batch, side = dice.pick(2, 4, 8, 16), dice.pick(32, 64, 128, 224)
    turned, mixed, cut, last = dice.flag(), dice.flag(), dice.flag(), dice.flag(0.3)

    def run(x: Tensor, mean: Tensor, std: Tensor, share: Tensor) -> Tensor:
        y = (x - mean[:, None, None]) / std[:, None, None]
        y = y.flip(-1) if turned else y
        grey = 0.3 * y[:, :1] + 0.59 * y[:, 1:2] + 0.11 * y[:, 2:]
        y = grey + 1.2 * (y - grey)
        y = share[:, None, None, None] * y + (1 - share[:, None, None, None]) * y.roll(1, 0) if mixed else y
        y = y[..., side // 8 : -side // 8, side // 8 : -side // 8] if cut else y
        return y.permute(0, 2, 3, 1).contiguous() if last else y.contiguous()

    dice.training = False
    colours = dice.tensor(3, dtype=torch.float32), dice.tensor(3, dtype=torch.float32).abs() + 0.5
    return dice.draw(run, dice.tensor(batch, 3, side, side, dtype=torch.float32), *colours, torch.rand(batch))


def contrasting(dice: Dice) -> Draw:
    """Two views normalised, compared with moved ones, a margin or a logistic loss."""
    width = dice.width(32, 1024)
    rows, many, margin = dice.rows(width, 2**21), dice.pick(1, 2, 4), dice.flag()

    def run(a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(each.float(), dim=-1) for each in (a, b))
        near = (a * b).sum(-1)
        total: Any = 0.0
        for number in range(many):
            far = (a * b.roll(number + 1, 0)).sum(-1)
            total = total + (F.relu(far - near + 0.2) if margin else F.softplus(10 * (far - near)))
        mean: Tensor = total.mean()
        return mean

    return dice.draw(run, dice.tensor(rows, width), dice.tensor(rows, width))


def denoising(dice: Dice) -> Draw:
    """A step of a sampler: the image from its noise, clamped, the mean of the next, guidance."""
    batch, side, channels = dice.pick(1, 2, 4), dice.pick(16, 32, 64, 128), dice.pick(3, 4, 8)
    guided, clamped, embeds = dice.flag(), dice.flag(), dice.flag()

    def run(x: Tensor, noise: Tensor, free: Tensor, time: Tensor) -> Any:
        alpha = torch.cos(time * 1.5).square()[:, None, None, None]
        noise = free + 3.0 * (noise - free) if guided else noise
        first = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
        first = first.clamp(-1, 1) if clamped else first
        after = (alpha * 0.9).sqrt() * first + (1 - alpha * 0.9).sqrt() * noise
        if not embeds:
            return after
        angle = time[:, None] * torch.exp(-torch.arange(256, dtype=torch.float32) / 25.0)
        return after, torch.cat((angle.sin(), angle.cos()), -1)

    dice.training = False
    shape = batch, channels, side, side
    images = [dice.tensor(*shape, dtype=torch.float32) for _ in range(3)]
    return dice.draw(run, *images, torch.rand(batch) * 0.9)


def mixtures(dice: Dice) -> Draw:
    """Negative log likelihood of a mixture: Gaussian or logistic."""
    parts, width = dice.pick(4, 8, 16, 32), dice.width(16, 512)
    rows, logistic = dice.rows(parts * width, 2**21), dice.flag()

    def run(x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        z = (x[:, None] - mean) * torch.exp(-scale)
        each = -z - scale - 2 * F.softplus(-z) if logistic else -0.5 * z * z - scale
        each = each.sum(-1) + torch.log_softmax(weight, -1)
        return -torch.logsumexp(each, -1).mean()

    tensors = dice.tensor(rows, width), dice.tensor(rows, parts, width), dice.tensor(rows, parts, width)
    return dice.draw(run, *tensors, dice.tensor(rows, parts))


def wavelets(dice: Dice) -> Draw:
    """Sums and differences of neighbours on several scales, small ones cut off."""
    length = dice.pick(64, 128, 256, 512, 1024)
    rows, levels, soft, back = dice.rows(length), dice.pick(1, 2, 3), dice.flag(), dice.flag()

    def run(x: Tensor) -> Any:
        details = []
        for _ in range(levels):
            even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
            x, detail = (even + odd) * 0.7071, (even - odd) * 0.7071
            details.append(torch.sign(detail) * F.relu(detail.abs() - 0.1) if soft else detail)
        if back:
            for detail in reversed(details):
                x = torch.stack((x + detail, x - detail), -1).flatten(-2) * 0.7071
        return (x, *details)

    return dice.draw(run, dice.tensor(rows, length))


def aggregating(dice: Dice) -> Draw:
    """Messages of a graph with equal degrees: neighbours gathered, weighted by softmax, summed, activated."""
    width, degree = dice.width(16, 256), dice.pick(4, 8, 16)
    count, act, weighted = max(16, dice.rows(width * degree, 2**20)), dice.pick(*ACTIVATIONS), dice.flag()

    def run(x: Tensor, neighbours: Tensor, score: Tensor, w: Tensor) -> Any:
        near = F.embedding(neighbours, x)
        share = torch.softmax(F.leaky_relu(score, 0.2), -1)[..., None] if weighted else 1.0 / degree
        return act((near * share).sum(1) + x * w)

    dice.training = False
    inputs = dice.tensor(count, width), dice.indices(count, count, degree), dice.tensor(count, degree)
    return dice.draw(run, *inputs, dice.tensor(width))


def physics_steps(dice: Dice) -> Draw:
    """A grid of a simulation: differences of neighbours, a source, a limit."""
    side, batch, steps = dice.pick(32, 64, 128, 256), dice.pick(1, 4, 16), dice.pick(1, 2, 3)
    curved, damped = dice.flag(), dice.flag()

    def run(u: Tensor, v: Tensor, source: Tensor) -> Any:
        for _ in range(steps):
            around = u.roll(1, -1) + u.roll(-1, -1) + u.roll(1, -2) + u.roll(-1, -2) - 4 * u
            force = torch.sin(u) + source if curved else u * (1 - u * u) + source
            v = (v + 0.1 * (around + force)) * (0.99 if damped else 1.0)
            u = torch.clamp(u + 0.1 * v, -3, 3)
        return u, v

    dice.training = False
    return dice.draw(run, *(dice.tensor(batch, side, side, dtype=torch.float32) for _ in range(3)))


UNSEEN: dict[str, Callable[[Dice], Draw]] = {
    each.__name__: each
    for each in (
        frames, augmenting, contrasting, denoising, mixtures, wavelets, aggregating, physics_steps,
    )
}  # fmt: skip
