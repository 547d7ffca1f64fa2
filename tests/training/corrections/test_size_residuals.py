"""Corrections by size of one cluster: what they learn, and where they fade."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.training.collectives.between_nodes import UNFITTED, BetweenNodes, fit_site
from stepsight.training.corrections.corrector import Support
from stepsight.training.corrections.size_residuals import (
    FADE,
    KNOTS,
    SizeResidual,
    never_falling,
    read_curve,
    size_residual,
)


def test_violators_are_pooled() -> None:
    assert never_falling(np.array([1.0, 3.0, 2.0, 4.0, 0.0])) == pytest.approx([1, 2.25, 2.25, 2.25, 2.25])
    rising = np.arange(5.0)
    assert (never_falling(rising) == rising).all()


def test_the_order_of_two_curves_stays() -> None:
    generator = np.random.default_rng(0)
    low = generator.normal(size=50)
    high = low + generator.random(50)
    assert (never_falling(low) <= never_falling(high)).all()


def test_between_knots_it_is_a_power_of_the_size_and_beyond_them_proportional() -> None:
    curve = np.log(KNOTS.astype(float) ** 0.5)
    sizes = np.array([0.0, 1.0, 300.0, float(KNOTS[-1]), 4.0 * KNOTS[-1]])
    assert read_curve(curve, sizes) == pytest.approx([1, 1, 300**0.5, 2**17, 2**19], rel=1e-3)


FABRIC = find_fabric("dgx-h100")
WORKS = [Collective("all_reduce", 1 << power, 8 * nodes, 8) for power in range(3, 34) for nodes in (2, 4)]


def test_sizes_learn_from_their_neighbours_and_nothing_is_left_far_away() -> None:
    off = size_residual(np.array([2.0**20] * 4), np.full(4, 0.5))
    known = KNOTS == 1 << 20
    assert off[known] == pytest.approx(0.4)  # 4 of 5 rows
    assert off[KNOTS == 1 << 21][0] < 0.4 and (off[(KNOTS < 1 << 15) | (KNOTS > 1 << 25)] < 1e-4).all()


def test_a_correction_fades_within_four_doublings_of_ranks() -> None:
    support = Support(np.log([8.0, 16.0, 8.0]), np.log([2.0**30, 64.0, 8.0]))
    residual = SizeResidual(np.full(len(KNOTS), 0.5), support)
    asked = [Collective("all_reduce", 8, ranks, min(ranks, 8)) for ranks in (16, 57, 64, 128, 256, 1024, 4096)]
    assert residual.known(asked) == pytest.approx([1, 1, 1, 0.75, 0.5, 0, 0])
    assert residual.known([Collective("all_reduce", 8, 16, 4)]) == pytest.approx(1 - np.log(2) / FADE)


def test_a_bump_in_the_measured_sizes_is_learned_and_time_never_falls_with_size() -> None:
    """Sums of 1 to 4 MiB take 1.6 times what the choices say: the factors cannot say so, the correction can."""
    bump = np.array([1.6 if 1 << 20 <= work.num_bytes <= 1 << 22 else 1.0 for work in WORKS])
    measured = bump * UNFITTED.seconds(WORKS, FABRIC)
    fitted = fit_site(UNFITTED, WORKS, FABRIC, measured)
    off = np.abs(np.log(fitted.seconds(WORKS, FABRIC) / measured))
    plain = np.abs(np.log(replace(fitted, residuals={}).seconds(WORKS, FABRIC) / measured))
    assert off.mean() < 0.6 * plain.mean()
    sizes = [int(2 ** (power / 4)) for power in range(137)]
    for ranks in (16, 32, 64, 512, 4096):
        seconds = fitted.seconds([Collective("all_reduce", size, ranks, 8) for size in sizes], FABRIC)
        assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()


def test_it_is_saved_read_and_checked() -> None:
    fitted = fit_site(UNFITTED, WORKS, FABRIC, 1.3 * UNFITTED.seconds(WORKS, FABRIC))
    again = BetweenNodes.from_dict(fitted.to_dict())
    assert (again.seconds(WORKS, FABRIC) == fitted.seconds(WORKS, FABRIC)).all()
    wrong = fitted.to_dict() | {"residuals": {"all_reduce": [0.0, 5.0]}}
    with pytest.raises(ValueError, match="the correction of all_reduce must be"):
        BetweenNodes.from_dict(wrong)
