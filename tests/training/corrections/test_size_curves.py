"""Curves over sizes."""

from __future__ import annotations

import numpy as np
import pytest

from stepsight.training.corrections.size_curves import KNOTS, never_falling, read_curve


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
