"""More families of random regions, and the table of all families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepsight.experiments.studies.context import region_families as first
from stepsight.experiments.studies.context.chained_families import CHAINED
from stepsight.experiments.studies.context.probe_families import PROBES
from stepsight.experiments.studies.context.region_families import ACTIVATIONS, Dice, Draw

_KINDS = ("u", "b", "b", "row", "col", "turn", "soft")  # of the ops of a random graph: one or two inputs, ...


def pooling(dice: Dice) -> Draw:
    """Pooling and interpolation, joined by channels or added."""
    channels, side = dice.width(8, 128), dice.pick(16, 32, 64)
    batch, kind = max(1, dice.rows(channels * side * side) // 2), dice.pick("avg", "max", "nearest", "bilinear")
    joined, act = dice.flag(), dice.pick(*ACTIVATIONS)

    def run(x: Tensor, skip: Tensor) -> Any:
        if kind in ("nearest", "bilinear"):
            y = F.interpolate(x, scale_factor=2.0, mode=kind)
        else:
            y = F.avg_pool2d(x, 2) if kind == "avg" else F.max_pool2d(x, 2)
        return act(torch.cat((y, skip), 1)) if joined else act(y) + skip

    out = side * 2 if kind in ("nearest", "bilinear") else side // 2
    images = min(batch, 8), channels
    dice.training = dice.training and kind == "nearest"  # the others' gradients are calls of a library
    return dice.draw(run, dice.tensor(*images, side, side), dice.tensor(*images, out, out))


def router(dice: Dice) -> Draw:
    """Gates of experts: softmax or sigmoid over few columns, a balance loss, weights spread over tokens."""
    experts, width = dice.pick(4, 8, 16, 64), dice.width(64, 1024)
    tokens, gate, balanced, jitter = dice.rows(width, 2**21), dice.pick("softmax", "sigmoid"), dice.flag(), dice.flag()

    def run(logits: Tensor, y: Tensor, choice: Tensor, noise: Tensor) -> Any:
        logits = logits + 0.01 * noise if jitter else logits
        p = torch.softmax(logits.float(), -1) if gate == "softmax" else torch.sigmoid(logits.float())
        chosen = F.one_hot(choice, experts).to(p.dtype)
        weight = (p * chosen).sum(-1, keepdim=True)
        out = y * weight.to(y.dtype)
        return (out, (p.mean(0) * chosen.mean(0)).sum() * experts) if balanced else out

    small = dice.tensor(tokens, experts), dice.tensor(tokens, experts, grad=False)
    return dice.draw(run, small[0], dice.tensor(tokens, width), dice.indices(experts, tokens), small[1])


def state_space(dice: Dice) -> Draw:
    """Gates and a few steps of a diagonal recurrence."""
    width, steps = dice.width(32, 512), dice.pick(2, 4, 8)
    rows, silu = dice.rows(width * steps, 2**21), dice.flag()

    def run(x: Tensor, dt: Tensor, a: Tensor, z: Tensor) -> Any:
        delta = F.softplus(dt)
        decay = torch.exp(-delta * a.exp())
        h = torch.zeros_like(x[:, 0])
        outs = []
        for step in range(steps):
            h = h * decay[:, step] + delta[:, step] * x[:, step]
            outs.append(h)
        y = torch.stack(outs, 1)
        return y * (F.silu(z) if silu else torch.sigmoid(z))

    shape = rows, steps, width
    return dice.draw(run, *(dice.tensor(*shape) for _ in range(2)), dice.tensor(width), dice.tensor(*shape))


def quantising(dice: Dice) -> Draw:
    """Values rounded with a scale of the row or the tensor, and back."""
    width = dice.width()
    rows, whole, symmetric, back, act = dice.rows(width), dice.flag(0.3), dice.flag(), dice.flag(), dice.flag()
    dice.training = False

    def run(x: Tensor, r: Tensor) -> Any:
        x = F.silu(x) * r if act else x
        if symmetric:
            scale = (x.abs().amax() if whole else x.abs().amax(-1, keepdim=True)).clamp(min=1e-5) / 127.0
            q = torch.round(x / scale).clamp(-128, 127)
        else:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            scale = (high - low).clamp(min=1e-5) / 255.0
            q = torch.round((x - low) / scale)
        return q * scale if back else (q.to(torch.int8 if symmetric else torch.uint8), scale)

    return dice.draw(run, dice.tensor(rows, width), dice.tensor(rows, width))


def modulation(dice: Dice) -> Draw:
    """Adaptive norm of a diffusion transformer: scale, shift and gate of each image."""
    width, batch = dice.width(), dice.pick(1, 2, 4, 8)
    tokens, gated, again = max(4, dice.rows(width * batch)), dice.flag(), dice.flag()

    def run(x: Tensor, y: Tensor, mod: Tensor) -> Any:
        shift, scale, gate = mod.chunk(3, -1)
        x = x + gate[:, None] * y if gated else x
        h = F.layer_norm(x, (width,)) * (1 + scale[:, None]) + shift[:, None]
        return (F.layer_norm(F.gelu(h) + x, (width,)), x) if again else (h, x)

    shape = batch, tokens, width
    return dice.draw(run, dice.tensor(*shape), dice.tensor(*shape), dice.tensor(batch, 3 * width))


def recurrent(dice: Dice) -> Draw:
    """The gates of an LSTM or GRU cell."""
    width = dice.width(32, 1024)
    rows, lstm, normed = dice.rows(width * 4), dice.flag(), dice.flag(0.3)

    def run(x: Tensor, h: Tensor, c: Tensor) -> Any:
        if lstm:
            i, f, g, o = (x + h).chunk(4, -1)
            new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            new = F.layer_norm(new, (width,)) if normed else new
            return torch.sigmoid(o) * torch.tanh(new), new
        (r, z, n, _), (hr, hz, hn, _) = x.chunk(4, -1), h.chunk(4, -1)
        reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        return (1 - update) * torch.tanh(n + reset * hn) + update * c

    return dice.draw(run, dice.tensor(rows, 4 * width), dice.tensor(rows, 4 * width), dice.tensor(rows, width))


def random_graph(dice: Dice) -> Draw:
    """A random graph of pointwise ops, broadcasts, reductions and layouts."""
    width = dice.width(32, 1024)
    rows = dice.rows(width)
    unary = (*ACTIVATIONS, torch.exp, torch.sin, lambda x: torch.log1p(x.abs()), lambda x: x.abs().sqrt(), torch.square)
    binary = (torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: a / (b.abs() + 1))
    plan = [
        (dice.pick(*_KINDS), dice.pick(*unary), dice.pick(*binary), dice.random.random())
        for _ in range(dice.pick(3, 6, 10, 16))
    ]  # fmt: skip

    def run(*tensors: Tensor) -> Any:
        values = list(tensors)
        for kind, one, two, where in plan:
            x, y = values[-1], values[int(where * len(values))]
            if kind == "u":
                made = one(x.clamp(-4, 4))
            elif kind == "row":
                made = x - y.mean(-1, keepdim=True)
            elif kind == "col":
                made = x * torch.rsqrt(y.square().mean(0, keepdim=True) + 1e-3)
            elif kind == "turn":
                made = two(x, y.reshape(width, rows).t())
            elif kind == "soft":
                made = torch.softmax(x, -1) + y
            else:
                made = two(x, y)
            values.append(made.to(tensors[0].dtype))
        return values[-1], values[-2]

    return dice.draw(run, *(dice.tensor(rows, width) for _ in range(3)))


def segmentation(dice: Dice) -> Draw:
    """Losses of images: focal, dice, smooth L1, charbonnier."""
    batch, side = dice.pick(1, 2, 4, 8), dice.pick(32, 64, 128, 256)
    classes, kind = dice.pick(1, 2, 4, 8), dice.pick("focal", "dice", "huber", "charbonnier", "both")

    def run(x: Tensor, y: Tensor) -> Any:
        p = torch.sigmoid(x.float())
        if kind == "huber":
            return F.smooth_l1_loss(x.float(), y.float())
        if kind == "charbonnier":
            return torch.sqrt((x - y).square() + 1e-6).mean((1, 2, 3))
        focal = (F.binary_cross_entropy_with_logits(x.float(), y.float(), reduction="none") * (1 - p) ** 2).mean()
        overlap = 1 - (2 * (p * y).sum((2, 3)) / (p.sum((2, 3)) + y.float().sum((2, 3)) + 1)).mean()
        return focal if kind == "focal" else overlap if kind == "dice" else focal + overlap

    shape = batch, classes, side, side
    return dice.draw(run, dice.tensor(*shape), torch.rand(shape, generator=dice.generator).to(dice.dtype))


def kernel_features(dice: Dice) -> Draw:
    """Features of linear attention: positive maps, normalisers, decays."""
    heads, dim = dice.pick(2, 4, 8), dice.pick(32, 64, 128)
    seq, kind, normed = dice.rows(heads * dim, 2**21), dice.pick("elu", "exp", "relu"), dice.flag()

    def feature(x: Tensor) -> Tensor:
        if kind == "elu":
            return F.elu(x) + 1
        return torch.exp(x - x.amax(-1, keepdim=True)) if kind == "exp" else F.relu(x) + 1e-3

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k = feature(q), feature(k)
        total = k.sum(1, keepdim=True)
        z = 1 / ((q * total).sum(-1, keepdim=True) + 1e-6)
        out = v * z
        return F.normalize(out, dim=-1) if normed else (out, k)

    return dice.draw(run, *(dice.tensor(heads, seq, dim) for _ in range(3)))


def relative_bias(dice: Dice) -> Draw:
    """Biases of relative positions: slopes or looked up, added to scores, masked."""
    heads, keys = dice.pick(2, 4, 8), dice.width(32, 512)
    queries, slopes, looked = min(2048, dice.rows(heads * keys, 2**21)), dice.flag(), dice.flag(0.3)
    dice.training = dice.training and not looked

    def run(s: Tensor, table: Tensor) -> Any:
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        if looked:
            bias = table[:, distance.clamp(-31, 31) + 31]
        elif slopes:
            bias = -distance.abs() * table[:, :1, None].exp()
        else:
            bias = torch.log1p(distance.abs().float()) * table[:, 1:2, None]
        return s + bias.to(s.dtype)

    return dice.draw(run, dice.tensor(heads, queries, keys), dice.tensor(heads, 63))


def distilling(dice: Dice) -> Draw:
    """Distances between two distributions: divergence, entropy, cosine."""
    classes, kind = dice.pick(16, 128, 1000, 8000), dice.pick("kl", "js", "cosine", "entropy", "contrast")
    rows = dice.rows(classes)

    def run(a: Tensor, b: Tensor) -> Any:
        if kind == "cosine":
            return 1 - F.cosine_similarity(a.float(), b.float(), dim=-1).mean()
        p, q = F.log_softmax(a.float() / 2, -1), F.log_softmax(b.float() / 2, -1)
        if kind == "kl":
            return (q.exp() * (q - p)).sum(-1).mean()
        if kind == "js":
            m = torch.log(0.5 * (p.exp() + q.exp()) + 1e-9)
            return 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1))
        entropy = -(p.exp() * p).sum(-1)
        return entropy.mean() if kind == "entropy" else (entropy + torch.logsumexp(a.float() - b.float(), -1)).mean()

    return dice.draw(run, dice.tensor(rows, classes), dice.tensor(rows, classes))


def layouts(dice: Dice) -> Draw:
    """Heads split and merged, tensors joined, padded, flipped and cut into patches."""
    heads, dim, kind = dice.pick(2, 4, 8, 12), dice.pick(32, 64), dice.pick("split", "merge", "patch", "pad", "shuffle")
    seq, act = max(16, dice.rows(heads * dim) // 16 * 16), dice.pick(*ACTIVATIONS)

    def run(x: Tensor, b: Tensor) -> Any:
        if kind == "split":
            return [each.view(seq, heads, dim).transpose(0, 1).contiguous() for each in (x + b, act(x), x * b)]
        if kind == "merge":
            return act(x.view(heads, seq, dim).transpose(0, 1).reshape(seq, heads * dim)) + b
        if kind == "patch":
            return act(x.view(seq // 16, 4, 4, heads, dim).permute(0, 2, 4, 1, 3).reshape(seq // 16, -1))
        if kind == "pad":
            return F.pad(act(x) * b, (1, 1, 1, 1)) + 1
        return torch.cat((x.flip(0), act(x) + b), -1).view(seq, 2, heads * dim).transpose(1, 2).contiguous()

    return dice.draw(run, dice.tensor(seq, heads * dim), dice.tensor(heads * dim))


FAMILIES: dict[str, Callable[[Dice], Draw]] = {
    made.__name__: made
    for made in (
        first.norm_activation, first.gated, first.scores, first.rotary, first.loss, first.batch_norm, first.group_norm,
        first.embedding, first.optimizer, first.image_norm, first.windows, pooling, router, state_space, quantising,
        modulation, recurrent, random_graph, segmentation, kernel_features, relative_bias, distilling, layouts,
        *CHAINED,
    )
} | PROBES  # fmt: skip
