"""Families of models, and the folds in which they are held out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stepsight.experiments.studies.architectures.family_script import FAMILIES, optimizer_of
from stepsight.experiments.studies.architectures.held_out import FOLDS, folds_of


@pytest.mark.parametrize("name", ["video", "deepfm", "experts"])
def test_a_family_trains(name: str) -> None:
    """A step changes every parameter that has a gradient."""
    torch.manual_seed(0)
    model, loss_of = FAMILIES[name](0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of().backward()
    optimizer_of(name, model).step()
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(changed)


def test_at_least_twelve_families_are_held_out_at_once() -> None:
    folds = folds_of(list(FAMILIES))
    assert set(folds) == set(FAMILIES)
    assert len(set(folds.values())) == FOLDS
    assert min(Counter(folds.values()).values()) >= 12
