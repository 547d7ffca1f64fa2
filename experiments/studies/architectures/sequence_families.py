"""Families of models of sequences: attention, mixers, recurrence; as in ``convolutional_families``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsight.experiments.studies.architectures.blocks import Residual, SelfAttention, Transpose, mlp, pre_norm
from stepsight.experiments.studies.architectures.convolutional_families import Made

_VOCAB = 1000


class _Words(nn.Module):
    """Token and position embeddings, a body and logits."""

    def __init__(self, width: int, length: int, *body: nn.Module) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCAB, width), nn.Parameter(torch.randn(length, width))
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, _VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.tokens(ids) + self.places))
        return y


def _language(model: nn.Module, batch: int, length: int) -> Made:
    ids = torch.randint(_VOCAB, (batch, length))
    targets = torch.randint(_VOCAB, (batch * length,))
    return model, lambda: F.cross_entropy(model(ids).flatten(0, -2), targets)


def gpt(size: int) -> Made:
    """A decoder."""
    width, heads, depth, batch, length = [(128, 4, 4, 2, 128), (192, 6, 2, 4, 64), (256, 4, 2, 1, 192)][size]
    body = [pre_norm(width, heads, causal=True) for _ in range(depth)]
    return _language(_Words(width, length, *body, nn.LayerNorm(width)), batch, length)


def bert(size: int) -> Made:
    """An encoder of ``nn.TransformerEncoderLayer``."""
    width, heads, depth, batch, length = [(128, 4, 3, 4, 64), (192, 4, 2, 2, 128), (256, 8, 2, 4, 48)][size]
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


def llama(size: int) -> Made:
    """A decoder with rotary positions, RMS norm and gates."""
    width, heads, depth, batch, length = [(128, 4, 3, 2, 128), (192, 6, 2, 2, 96), (256, 8, 2, 4, 48)][size]
    body = [_LlamaLayer(width, heads, length) for _ in range(depth)]
    return _language(_Words(width, length, *body, nn.RMSNorm(width)), batch, length)


class _RelativeLayer(nn.Module):
    """Attention with explicit scores and a bias for each distance."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.triple, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.bias = nn.Embedding(2 * length, heads)
        self.norm, self.mix = nn.LayerNorm(width), Residual(nn.LayerNorm(width), mlp(width, 2 * width, width))
        self.register_buffer("far", torch.arange(length)[:, None] - torch.arange(length) + length)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.triple(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) + self.bias(self.far).permute(2, 0, 1)
        mixed = F.dropout(scores.softmax(-1), 0.1) @ value
        y: Tensor = self.mix(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return y


def relative_attention(size: int) -> Made:
    """An encoder with relative position biases, as in T5."""
    width, heads, depth, batch, length = [(128, 4, 3, 2, 128), (160, 5, 2, 4, 64), (256, 8, 2, 1, 128)][size]
    return _language(
        _Words(width, length, *(_RelativeLayer(width, heads, length) for _ in range(depth))), batch, length
    )


def _image(model: nn.Module, batch: int, pixels: int) -> Made:
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(100, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


class _Patches(nn.Module):
    """Patches of an image as a sequence, a body, and the mean."""

    def __init__(self, width: int, patch: int, *body: nn.Module) -> None:
        super().__init__()
        self.cut, self.body, self.head = nn.Conv2d(3, width, patch, patch), nn.Sequential(*body), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.cut(x).flatten(2).transpose(1, 2)).mean(1))
        return y


def vit(size: int) -> Made:
    """Attention over patches."""
    width, heads, depth, batch, pixels = [(128, 4, 4, 4, 64), (192, 6, 2, 2, 96), (256, 4, 2, 4, 56)][size]
    return _image(_Patches(width, 8, *(pre_norm(width, heads) for _ in range(depth))), batch, pixels)


class _WindowLayer(nn.Module):
    def __init__(self, width: int, heads: int, side: int, shift: int) -> None:
        super().__init__()
        self.side, self.shift, self.layer = side, shift, pre_norm(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, high, wide, width = x.shape
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = x.view(batch, high // self.side, self.side, wide // self.side, self.side, width)
        x = self.layer(x.transpose(2, 3).reshape(-1, self.side**2, width))
        x = x.view(batch, high // self.side, wide // self.side, self.side, self.side, width).transpose(2, 3)
        x = x.reshape(batch, high, wide, width)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class _Swin(nn.Module):
    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 100)
        self.body = nn.Sequential(*(_WindowLayer(width, heads, 4, 2 * (i % 2)) for i in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.cut(x).permute(0, 2, 3, 1)).mean((1, 2)))
        return y


def swin(size: int) -> Made:
    """Attention within shifted windows."""
    width, heads, depth, batch, pixels = [(96, 3, 4, 2, 64), (128, 4, 2, 4, 64), (64, 2, 4, 4, 80)][size]
    return _image(_Swin(width, heads, depth), batch, pixels)


def mixer(size: int) -> Made:
    """Linear layers over patches and over channels, alternating."""
    width, depth, batch, pixels = [(128, 4, 4, 64), (192, 3, 4, 48), (256, 2, 2, 96)][size]
    places = (pixels // 8) ** 2
    body = [
        nn.Sequential(
            Residual(
                nn.LayerNorm(width), Transpose(1, 2), mlp(places, 2 * places, places, act=nn.GELU), Transpose(1, 2)
            ),
            Residual(nn.LayerNorm(width), mlp(width, 4 * width, width, act=nn.GELU)),
        ) for _ in range(depth)
    ]  # fmt: skip
    return _image(_Patches(width, 8, *body), batch, pixels)


class _GateLayer(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.inner, self.split = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.LayerNorm(2 * width)
        self.places, self.out = nn.Conv1d(length, length, 1), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.gelu(self.inner(self.norm(x))).chunk(2, -1)
        y: Tensor = x + self.out(left * self.places(self.split(right)))
        return y


def gmlp(size: int) -> Made:
    """Linear layers and gates over positions."""
    width, depth, batch, length = [(96, 4, 4, 64), (128, 3, 2, 128), (160, 3, 4, 48)][size]
    return _language(_Words(width, length, *(_GateLayer(width, length) for _ in range(depth))), batch, length)


class _Perceiver(nn.Module):
    def __init__(self, width: int, latents: int, depth: int) -> None:
        super().__init__()
        self.first, self.latents = nn.Linear(32, width), nn.Parameter(torch.randn(latents, width))
        self.read, self.head = SelfAttention(width, 4), nn.Linear(width, 100)
        self.body = nn.Sequential(*(pre_norm(width, 4) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        y: Tensor = self.head(self.body(latents + self.read(latents, self.first(x))).mean(1))
        return y


def perceiver(size: int) -> Made:
    """A few latents that attend to a long input."""
    width, latents, depth, batch, length = [(128, 32, 3, 4, 512), (192, 48, 2, 2, 400), (96, 64, 4, 4, 256)][size]
    model, x, y = _Perceiver(width, latents, depth), torch.randn(batch, length, 32), torch.randint(100, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


class _LinearAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.triple, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.triple(x).view(batch, length, 3, self.heads, -1).unbind(2)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        state = torch.einsum("blhd,blhe->bhde", key, value)
        weight = 1 / torch.einsum("blhd,bhd->blh", query, key.sum(1))
        mixed = torch.einsum("blhd,bhde,blh->blhe", query, state, weight)
        y: Tensor = self.out(mixed.reshape(batch, length, width))
        return y


def linear_attention(size: int) -> Made:
    """Attention by sums of products, without scores."""
    width, heads, depth, batch, length = [(128, 4, 3, 2, 192), (192, 6, 2, 2, 128), (96, 3, 4, 4, 96)][size]
    body = [
        nn.Sequential(
            Residual(nn.LayerNorm(width), _LinearAttention(width, heads)),
            Residual(nn.LayerNorm(width), mlp(width, 2 * width, width, act=nn.GELU)),
        ) for _ in range(depth)
    ]  # fmt: skip
    return _language(_Words(width, length, *body), batch, length)


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


def experts(size: int) -> Made:
    """A decoder with a soft mixture of experts."""
    width, heads, count, batch, length = [(96, 4, 4, 2, 64), (128, 4, 3, 2, 64), (64, 2, 8, 2, 64)][size]
    body = [
        nn.Sequential(
            Residual(nn.LayerNorm(width), SelfAttention(width, heads, causal=True)),
            Residual(nn.LayerNorm(width), _Experts(width, count)),
        ) for _ in range(2)
    ]  # fmt: skip
    return _language(_Words(width, length, *body), batch, length)


class _StateSpace(nn.Module):
    """A short convolution, a gate, and decaying sums over time."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.rate, self.into, self.back = nn.Linear(width, width), nn.Linear(width, states), nn.Linear(width, states)
        self.decay = nn.Parameter(torch.rand(width, states))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        left, gate = self.inner(self.norm(x)).chunk(2, -1)
        left = F.silu(self.short(left.transpose(1, 2))[..., :length].transpose(1, 2))
        rate = F.softplus(self.rate(left))[..., None]
        kept = torch.exp(-rate * self.decay.exp())
        added = rate * self.into(left)[:, :, None] * left[..., None]
        state, found = added[:, 0], []
        for step in range(length):
            state = kept[:, step] * state + added[:, step]
            found.append((state * self.back(left[:, step])[:, None]).sum(-1))
        y: Tensor = x + self.out(torch.stack(found, 1) * F.silu(gate))
        return y


def state_space(size: int) -> Made:
    """A selective state-space model, step by step."""
    width, states, batch, length = [(64, 8, 4, 32), (96, 4, 4, 24), (48, 16, 2, 48)][size]
    return _language(_Words(width, length, _StateSpace(width, states), _StateSpace(width, states)), batch, length)


class _Recurrent(nn.Module):
    def __init__(self, width: int, depth: int, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(width, width, depth, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cells(x)[0]
        return y


def lstm(size: int) -> Made:
    """A language model of LSTMs."""
    width, depth, batch, length = [(128, 2, 8, 32), (192, 1, 16, 24), (96, 3, 4, 48)][size]
    return _language(_Words(width, length, _Recurrent(width, depth, nn.LSTM)), batch, length)


def gru(size: int) -> Made:
    """A language model of GRUs."""
    width, depth, batch, length = [(128, 2, 8, 24), (160, 1, 16, 32), (96, 2, 4, 48)][size]
    return _language(_Words(width, length, _Recurrent(width, depth, nn.GRU)), batch, length)


class _Translator(nn.Module):
    """LSTM cells that attend to the source in every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(_VOCAB, width), nn.Embedding(_VOCAB, width)
        self.read, self.cell = nn.GRU(width, width, batch_first=True), nn.LSTMCell(2 * width, width)
        self.out = nn.Linear(2 * width, _VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        keys = self.read(self.source(ids))[0]
        words, state, found = self.target(ids), (keys[:, -1], keys[:, -1]), []
        for step in range(ids.shape[1]):
            weight = torch.bmm(keys, state[0][:, :, None]).softmax(1)
            seen = (weight * keys).sum(1)
            state = self.cell(torch.cat([words[:, step], seen], -1), state)
            found.append(torch.cat([state[0], seen], -1))
        y: Tensor = self.out(torch.stack(found, 1))
        return y


def translator(size: int) -> Made:
    """A recurrent encoder, and a decoder of cells with attention."""
    width, batch, length = [(128, 8, 20), (192, 4, 24), (96, 16, 16)][size]
    return _language(_Translator(width), batch, length)


FAMILIES: dict[str, Callable[[int], Made]] = {
    each.__name__: each
    for each in (
        gpt, bert, llama, relative_attention, vit, swin, mixer, gmlp, perceiver, linear_attention, experts, state_space,
        lstm, gru, translator,
    )
}  # fmt: skip
