"""A training script: ``family_script.py FAMILY CONFIGURATION`` trains a small model of a family until it is stopped."""

from __future__ import annotations

import sys

import torch
from torch import nn

from stepsight.experiments.studies.architectures import (
    convolutional_families,
    other_families,
    sequence_families,
)

FAMILIES = {**convolutional_families.FAMILIES, **sequence_families.FAMILIES, **other_families.FAMILIES}
STEPS = 100_000


def optimizer_of(family: str, model: nn.Module) -> torch.optim.Optimizer:
    """Adam for every other family, AdamW for recurrent ones and transformers, momentum for convolutions."""
    if family in convolutional_families.FAMILIES and family not in ("diffusion", "convnext", "autoencoder", "unet"):
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    if family in sequence_families.FAMILIES:
        return torch.optim.AdamW(model.parameters(), 1e-4)
    return torch.optim.Adam(model.parameters(), 1e-4)


def main(family: str, configuration: int) -> None:
    """Train."""
    torch.manual_seed(0)
    model, loss_of = FAMILIES[family](configuration)
    optimizer = optimizer_of(family, model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
