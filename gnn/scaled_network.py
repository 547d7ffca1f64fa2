"""Features of nodes and edges, scaled by mean and spread of those that a network learned from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class ScaledNetwork(nn.Module):
    """A network that scales its features, by the name of their type of nodes or edges."""

    def _add_scale(self, name: str, count: int) -> None:
        """Constants of ``count`` features, which change nothing yet."""
        for part, value in (("mean", 0.0), ("scale", 1.0), ("low", -torch.inf), ("high", torch.inf)):
            self.register_buffer(f"{name}_{part}", torch.full((count,), value))

    def _set_scales(self, features: Mapping[str, Tensor]) -> None:
        """Store mean, spread and range of features ``(n, count)``, by name; types without any keep theirs."""
        for name, values in features.items():
            if len(values):
                spread = values.std(dim=0, unbiased=False)
                constants = values.mean(dim=0), torch.where(spread > 1e-6, spread, 1.0), values.amin(0), values.amax(0)
                for part, value in zip(("mean", "scale", "low", "high"), constants, strict=True):
                    setattr(self, f"{name}_{part}", value)

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        """Features ``(n, count)``, clipped to the range that was stored and scaled."""
        values = values.clamp(getattr(self, f"{name}_low"), getattr(self, f"{name}_high"))
        scaled: Tensor = (values - getattr(self, f"{name}_mean")) / getattr(self, f"{name}_scale")
        return scaled
