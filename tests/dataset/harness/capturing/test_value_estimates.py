"""Counts and masks of choices that nobody made: each choice is made as often as the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from stepsight.dataset.harness.capturing.fake_tensors import FakeWorld  # noqa: E402
from stepsight.dataset.harness.capturing.recorder import Recorder  # noqa: E402
from stepsight.dataset.harness.capturing.value_estimates import selects_unknown  # noqa: E402

ROWS, EXPERTS, TOP = 96, 16, 2
EACH = ROWS * TOP // EXPERTS


@pytest.fixture
def chosen() -> Iterator[torch.Tensor]:
    """Experts of each row, as a router's top-k gives them."""
    world = FakeWorld(Recorder(), Path("train.py"))
    with world.fake, world:
        yield torch.randn(ROWS, EXPERTS).softmax(-1).topk(TOP, -1)[1]


def test_counts_are_real_and_add_up(chosen: torch.Tensor) -> None:
    for counts in (
        torch.bincount(chosen.flatten(), minlength=EXPERTS),
        torch.histc(chosen.flatten(), bins=EXPERTS, min=0, max=EXPERTS),
        F.one_hot(chosen, EXPERTS).sum((0, 1)),
        torch.zeros(ROWS, EXPERTS, dtype=torch.int64).scatter(1, chosen, 1).bool().sum(0),
    ):
        assert counts.tolist() == [EACH] * EXPERTS
    assert torch.bincount(chosen.flatten(), minlength=EXPERTS - 1).sum().item() == ROWS * TOP


def test_a_mask_selects_its_part(chosen: torch.Tensor) -> None:
    x, mask = torch.randn(ROWS, 8), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    slot, row = torch.where(mask[3])
    assert slot.shape == row.shape == (EACH,) and x[row].shape == (EACH, 8)
    assert x[chosen[:, 0] == 5].shape == (ROWS // EXPERTS, 8)
    assert x[torch.randn(ROWS) > 0].shape == (ROWS, 8)  # of which nothing is known


def test_a_mask_of_which_nothing_is_known_is_told(chosen: torch.Tensor) -> None:
    select = torch.ops.aten.masked_select.default
    assert selects_unknown(select, [torch.randn(ROWS), torch.randn(ROWS) > 0])
    assert not selects_unknown(select, [torch.randn(ROWS), chosen[:, 0] == 5])
    assert not selects_unknown(torch.ops.aten.add.Tensor, [torch.randn(ROWS) > 0])


def test_an_uneven_division_gives_the_first_more(chosen: torch.Tensor) -> None:
    assert torch.bincount(chosen[:1].flatten(), minlength=EXPERTS).tolist() == [1] * TOP + [0] * (EXPERTS - TOP)


def test_numbers_are_finite(chosen: torch.Tensor) -> None:
    loss = torch.randn(8, 8).square().mean()
    assert torch.isfinite(loss) and torch.isfinite(torch.randn(8)).all()
    assert not torch.isnan(loss) and not torch.isnan(torch.randn(8)).any() and not torch.isinf(loss)
