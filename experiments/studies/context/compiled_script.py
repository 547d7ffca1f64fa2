"""A training script: ``compiled_script.py FAMILY SIZE`` trains a small model, its forward and backward compiled."""

from __future__ import annotations

import sys

import torch

from stepsight.experiments.studies.architectures.family_script import FAMILIES, STEPS, optimizer_of


def main(family: str, size: int) -> None:
    """Train."""
    torch.manual_seed(0)
    model, loss_of = FAMILIES[family](size)
    optimizer = optimizer_of(family, model)
    compiled = torch.compile(loss_of)
    for _ in range(STEPS):
        optimizer.zero_grad()
        compiled().backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
