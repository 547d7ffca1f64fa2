"""The minimum of a sum of squares, within bounds."""

import numpy as np
import pytest

from stepsight.training.regression.levenberg_marquardt import Array, minimise

AT, SCALE = np.array([3.0, -2.0]), np.array([1.0, 100.0])


def bowl(point: Array) -> tuple[float, Array, Array]:
    """Least at ``AT``, and a hundred times as steep in the second number."""
    away = point - AT
    return 1.0 + float((SCALE * away**2).sum()), 2 * SCALE * away, np.diag(2 * SCALE)


@pytest.mark.parametrize(
    ("low", "high", "least"),
    [
        ([-10.0, -10.0], [10.0, 10.0], [3.0, -2.0]),
        ([-10.0, -1.0], [1.0, 10.0], [1.0, -1.0]),
        ([4.0, 5.0], [6.0, 6.0], [4.0, 5.0]),
    ],
)
def test_the_minimum_within_bounds(low: list[float], high: list[float], least: list[float]) -> None:
    found = minimise(bowl, np.zeros(2), np.array(low), np.array(high), longest=1.5, steps=80)
    assert found == pytest.approx(least, abs=1e-4)


def test_no_step_is_longer_than_allowed() -> None:
    seen: list[Array] = []

    def watched(point: Array) -> tuple[float, Array, Array]:
        seen.append(point)
        return bowl(point)

    minimise(watched, np.zeros(2), np.full(2, -10.0), np.full(2, 10.0), longest=0.25, steps=3)
    assert len(seen) == 4 and np.abs(np.diff(seen, axis=0)).max() == 0.25


def test_what_never_improves_ends() -> None:
    """A gradient that points up: damping grows until no step is worth taking."""
    calls = []

    def uphill(point: Array) -> tuple[float, Array, Array]:
        calls.append(1)
        loss, gradient, hessian = bowl(point)
        return loss, -gradient, hessian

    start, bounds = AT + 1e-3, (np.full(2, -10.0), np.full(2, 10.0))
    assert minimise(uphill, start, *bounds, longest=1.0, steps=1000).tolist() == start.tolist()
    assert len(calls) < 30
