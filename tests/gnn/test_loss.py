"""Losses with numbers worked out by hand."""

import pytest
import torch

from stepsight.gnn.loss import ITERATION_DELTA, NODE_DELTA, iteration_loss, node_loss


def test_nodes_count_by_their_weight() -> None:
    """Within delta half of the square, beyond it linear, both over delta: 0.05 / 0.15 and 0.3 with weights 3 and 1."""
    assert (NODE_DELTA, ITERATION_DELTA) == (0.15, 0.1)
    correction, target = torch.tensor([0.15, 0.5]), torch.tensor([0.05, 0.2])
    small, large = 0.5 * 0.1**2 / 0.15, 0.3 - 0.5 * 0.15
    loss = node_loss(correction, target, torch.tensor([3.0, 1.0]))
    assert loss.item() == pytest.approx((3 * small + large) / 4, rel=1e-5)
    twice = node_loss(correction, target, torch.tensor([6.0, 2.0]))
    assert twice.item() == pytest.approx(loss.item())


def test_iterations_count_by_the_log_of_their_ratio() -> None:
    measured = torch.tensor([1.0, 2.0])
    off = torch.tensor([0.05, 0.4]).exp() * measured
    expected = (0.5 * 0.05**2 / 0.1 + 0.4 - 0.5 * 0.1) / 2
    assert iteration_loss(off, measured).item() == pytest.approx(expected, rel=1e-4)
    assert iteration_loss(measured, measured).item() == 0.0
