"""Families of convolutional models; every function takes 0, 1 or 2 and returns a model and its loss on one batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsight.experiments.studies.architectures.blocks import Residual, conv, mlp, pre_norm

Made = tuple[nn.Module, Callable[[], Tensor]]


def _classify(model: nn.Module, *shape: int, classes: int = 100) -> Made:
    x, y = torch.randn(*shape), torch.randint(classes, (shape[0],))
    return model, lambda: F.cross_entropy(model(x), y)


def _restore(model: nn.Module, *shape: int) -> Made:
    x = torch.randn(*shape)
    return model, lambda: F.mse_loss(model(x), x)


def convnet(size: int) -> Made:
    """Convolutions with batch norm and pooling, then linear layers."""
    width, batch, pixels = [(16, 8, 32), (32, 4, 48), (24, 16, 24)][size]
    layers: list[nn.Module] = []
    for ins, outs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [conv(ins, outs), nn.BatchNorm2d(outs), nn.ReLU(), nn.MaxPool2d(2)]
    head = mlp(4 * width * (pixels // 8) ** 2, 256, 100)
    return _classify(nn.Sequential(*layers, nn.Flatten(), head), batch, 3, pixels, pixels)


def _basic(width: int, groups: int = 1, inner: int = 0) -> nn.Module:
    inner = inner or width
    return nn.Sequential(
        Residual(
            conv(width, inner, 1 if groups > 1 else 3, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            conv(inner, inner, 3, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            conv(inner, width, 1, bias=False),
        ),
        nn.ReLU(),
    )


def _staged(width: int, depth: int, block: Callable[[int], nn.Module]) -> nn.Sequential:
    stages: list[nn.Module] = [conv(3, width, 7, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(3):
        now = width * 2**stage
        stages += [*(block(now) for _ in range(depth)), conv(now, 2 * now, 3, stride=2, bias=False)]
        stages += [nn.BatchNorm2d(2 * now), nn.ReLU()]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 100))


def resnet(size: int) -> Made:
    """Residual blocks of three convolutions."""
    width, depth, batch, pixels = [(16, 2, 4, 64), (24, 1, 4, 80), (32, 2, 2, 48)][size]
    return _classify(_staged(width, depth, _basic), batch, 3, pixels, pixels)


def resnext(size: int) -> Made:
    """Residual blocks with grouped convolutions."""
    width, groups, batch, pixels = [(16, 4, 4, 64), (32, 8, 2, 64), (32, 4, 8, 32)][size]
    return _classify(_staged(width, 1, lambda now: _basic(now, groups, 2 * now)), batch, 3, pixels, pixels)


class _Dense(nn.Module):
    def __init__(self, ins: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(ins + i * growth), nn.ReLU(), conv(ins + i * growth, growth))
            for i in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet(size: int) -> Made:
    """Every layer reads the outputs of all layers before it."""
    growth, depth, batch, pixels = [(12, 6, 4, 32), (16, 4, 8, 32), (8, 8, 4, 40)][size]
    ins = 2 * growth
    outs = ins + growth * depth
    return _classify(
        nn.Sequential(
            conv(3, ins), _Dense(ins, growth, depth), conv(outs, ins, 1), nn.AvgPool2d(2), _Dense(ins, growth, depth),
            nn.BatchNorm2d(outs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outs, 100),
        ), batch, 3, pixels, pixels,
    )  # fmt: skip


def mobilenet(size: int) -> Made:
    """Depthwise separable convolutions."""
    width, depth, batch, pixels = [(16, 4, 4, 64), (24, 3, 8, 48), (32, 5, 2, 56)][size]

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


class _Excite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), conv(width, width // 4, 1), nn.SiLU(), conv(width // 4, width, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.gate(x)
        return y


def efficientnet(size: int) -> Made:
    """Depthwise convolutions, with a gate for each channel."""
    width, depth, batch, pixels = [(16, 3, 4, 64), (24, 4, 4, 40), (16, 5, 8, 40)][size]
    body = [
        Residual(
            conv(width, 3 * width, 1), nn.BatchNorm2d(3 * width), nn.SiLU(),
            conv(3 * width, 3 * width, 5, groups=3 * width), nn.SiLU(), _Excite(3 * width), conv(3 * width, width, 1),
        ) for _ in range(depth)
    ]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, 100)]
    return _classify(nn.Sequential(conv(3, width, stride=2), nn.SiLU(), *body, *head), batch, 3, pixels, pixels)


class _ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = conv(width, width, 7, groups=width)
        self.norm, self.mix = nn.LayerNorm(width), mlp(width, 4 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(self.norm(self.spread(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


def convnext(size: int) -> Made:
    """Wide depthwise convolutions, layer norm and linear layers over channels."""
    width, depth, batch, pixels = [(48, 4, 4, 64), (64, 3, 2, 80), (96, 2, 4, 48)][size]
    body = [_ConvNextBlock(width) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)]
    return _classify(nn.Sequential(nn.Conv2d(3, width, 4, 4), *body, *head), batch, 3, pixels, pixels)


class _Shuffle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            conv(half, half, 1), nn.BatchNorm2d(half), nn.ReLU(), conv(half, half, 3, groups=half), conv(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        joined = torch.cat([kept, self.branch(changed)], 1)
        batch, channels, high, wide = joined.shape
        return joined.view(batch, 2, channels // 2, high, wide).transpose(1, 2).reshape(x.shape)


def shufflenet(size: int) -> Made:
    """Channels that are split, computed in part, and shuffled."""
    width, depth, batch, pixels = [(64, 4, 4, 56), (96, 3, 4, 48), (48, 6, 8, 40)][size]
    body = [_Shuffle(width) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)]
    return _classify(nn.Sequential(conv(3, width, stride=2), *body, *head), batch, 3, pixels, pixels)


class _Inception(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 4
        self.branches = nn.ModuleList(
            [
                conv(width, part, 1),
                nn.Sequential(conv(width, part, 1), nn.ReLU(), conv(part, part)),
                nn.Sequential(conv(width, part, 1), nn.ReLU(), conv(part, part, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(width, part, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([branch(x) for branch in self.branches], 1))


def inception(size: int) -> Made:
    """Parallel branches with different windows."""
    width, depth, batch, pixels = [(64, 3, 4, 48), (96, 2, 4, 40), (48, 4, 8, 32)][size]
    body = [_Inception(width) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)]
    return _classify(nn.Sequential(conv(3, width, stride=2), *body, *head), batch, 3, pixels, pixels)


class _UNet(nn.Module):
    """An encoder and a decoder; the decoder reads the encoder's outputs."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module], *, attends: bool = False) -> None:
        super().__init__()

        def pair(ins: int, outs: int) -> nn.Sequential:
            return nn.Sequential(conv(ins, outs), norm(outs), nn.SiLU(), conv(outs, outs), norm(outs), nn.SiLU())

        self.first, self.down, self.low = pair(3, width), pair(width, 2 * width), pair(2 * width, 2 * width)
        self.time = mlp(width, 4 * width, 2 * width, act=nn.SiLU) if attends else None
        self.mix = pre_norm(2 * width, 4) if attends else None
        self.up, self.last, self.out = pair(4 * width, width), pair(2 * width, width), conv(width, 3, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        high = self.first(x)
        middle = self.down(F.max_pool2d(high, 2))
        low = self.low(F.max_pool2d(middle, 2))
        if self.mix is not None and self.time is not None:
            low = low + self.time(time)[:, :, None, None]
            low = self.mix(low.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(low.shape)
        middle = self.up(torch.cat([middle, F.interpolate(low, scale_factor=2.0)], 1))
        y: Tensor = self.out(self.last(torch.cat([high, F.interpolate(middle, scale_factor=2.0)], 1)))
        return y


def unet(size: int) -> Made:
    """A U-Net with batch norm."""
    width, batch, pixels = [(16, 2, 64), (24, 2, 48), (12, 4, 64)][size]
    return _restore(_UNet(width, nn.BatchNorm2d), batch, 3, pixels, pixels)


def diffusion(size: int) -> Made:
    """A U-Net with group norm, attention and a time step, which removes noise from images."""
    width, batch, pixels = [(16, 2, 48), (24, 4, 32), (32, 1, 48)][size]
    model = _UNet(width, lambda channels: nn.GroupNorm(4, channels), attends=True)
    x, time = torch.randn(batch, 3, pixels, pixels), torch.rand(batch, 1)
    steps = torch.arange(width // 2)

    def loss() -> Tensor:
        angles = time * torch.exp(-steps * 0.3)
        noise = torch.randn_like(x)
        told = torch.cat([angles.sin(), angles.cos()], 1)
        return F.mse_loss(model(x + time[:, :, None, None] * noise, told), noise)

    return model, loss


def autoencoder(size: int) -> Made:
    """Strided convolutions and transposed ones."""
    width, batch, pixels = [(32, 8, 32), (48, 4, 48), (24, 8, 48)][size]
    down = [nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()]
    return _restore(nn.Sequential(*down, *up), batch, 3, pixels, pixels)


class _Gated(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation, self.both = dilation, nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y: Tensor = x + self.out(torch.tanh(left) * torch.sigmoid(right))
        return y


def wavenet(size: int) -> Made:
    """Dilated causal convolutions over audio, with gates."""
    width, depth, batch, length = [(32, 8, 2, 1024), (48, 6, 4, 512), (64, 6, 1, 800)][size]
    body = [_Gated(width, 2**i) for i in range(depth)]
    model = nn.Sequential(nn.Conv1d(1, width, 1), *body, nn.ReLU(), nn.Conv1d(width, 64, 1))
    x, y = torch.randn(batch, 1, length), torch.randint(64, (batch, length))
    return model, lambda: F.cross_entropy(model(x), y)


def video(size: int) -> Made:
    """Convolutions over time and space."""
    width, batch, frames, pixels = [(12, 2, 8, 24), (16, 1, 8, 32), (8, 2, 12, 28)][size]
    model = nn.Sequential(
        nn.Conv3d(3, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(width, 2 * width, 3, padding=1), nn.BatchNorm3d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2 * width, 100),
    )  # fmt: skip
    return _classify(model, batch, 3, frames, pixels, pixels)


class _Segmenter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, stride=2), nn.BatchNorm2d(width), nn.ReLU(), conv(width, width))
        self.rates = nn.ModuleList(conv(width, width, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))
        self.out = conv(3 * width, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.stem(x)
        found = self.out(torch.cat([F.relu(rate(found)) for rate in self.rates], 1))
        return F.interpolate(found, size=x.shape[-2:], mode="bilinear", align_corners=False)


def segmentation(size: int) -> Made:
    """Dilated convolutions, and a class for every pixel."""
    width, batch, pixels = [(24, 2, 64), (32, 2, 48), (16, 4, 64)][size]
    model = _Segmenter(width)
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randint(21, (batch, pixels, pixels))
    return model, lambda: F.cross_entropy(model(x), y)


def super_resolution(size: int) -> Made:
    """Residual convolutions, then pixels from channels."""
    width, depth, batch, pixels = [(32, 4, 2, 32), (48, 3, 2, 28), (24, 6, 4, 24)][size]
    body = [Residual(conv(width, width), nn.ReLU(), conv(width, width)) for _ in range(depth)]
    model = nn.Sequential(conv(3, width), *body, conv(width, 12), nn.PixelShuffle(2))
    x, y = torch.randn(batch, 3, pixels, pixels), torch.randn(batch, 3, 2 * pixels, 2 * pixels)
    return model, lambda: F.l1_loss(model(x), y)


FAMILIES: dict[str, Callable[[int], Made]] = {
    each.__name__: each
    for each in (
        convnet, resnet, resnext, densenet, mobilenet, efficientnet, convnext, shufflenet, inception, unet, diffusion,
        autoencoder, wavenet, video, segmentation, super_resolution,
    )
}  # fmt: skip
