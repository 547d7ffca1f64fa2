import numpy as np
import pytest

from stepsight.training.regression.regressor import Array, Bounds, Physics, fit_physics, minimise, robust_loss

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


BOUNDS = Bounds(prior=np.array([1e-5, 1e-9]), low=np.array([1e-7, 1e-11]), high=np.array([1e-3, 1e-7]))


def test_constants_are_found_from_a_few_noisy_points() -> None:
    rng = np.random.default_rng(0)
    terms = np.stack([np.ones(12), 10 ** rng.uniform(2, 7, 12)], axis=1)
    seconds = (terms @ [3e-5, 4e-10]) * np.exp(rng.normal(0, 0.03, 12))
    fitted = fit_physics(terms, np.ones(12), seconds, BOUNDS)
    assert np.exp(fitted.log_constants) == pytest.approx([3e-5, 4e-10], rel=0.15)


def test_one_wild_point_does_not_pull_the_fit() -> None:
    terms = np.stack([np.ones(12), np.logspace(2, 7, 12)], axis=1)
    seconds = terms @ [3e-5, 4e-10]
    seconds[5] *= 20
    fitted = fit_physics(terms, np.ones(12), seconds, BOUNDS)
    assert fitted.seconds(terms, np.ones(12))[11] == pytest.approx((terms @ [3e-5, 4e-10])[11], rel=0.1)


def test_constants_stay_within_their_bounds() -> None:
    terms = np.stack([np.ones(6), np.logspace(4, 8, 6)], axis=1)
    fitted = fit_physics(terms, np.ones(6), terms @ [1e-5, 1e-13], BOUNDS)
    assert np.exp(fitted.log_constants[1]) >= BOUNDS.low[1] * 0.999


def test_a_prior_beyond_the_bounds_begins_at_the_bound() -> None:
    """The latency of an overloaded machine is measured longer than any op may take."""
    terms = np.ones((2, 2))
    bounds = Bounds(prior=np.array([1e-2, 1e-9]), low=BOUNDS.low, high=BOUNDS.high)
    fitted = fit_physics(terms, np.ones(2), np.full(2, 1e-2), bounds)
    assert fitted.log_constants[0] <= np.log(BOUNDS.high[0])


def test_sharing_among_busy_devices_is_learned() -> None:
    terms = np.stack([np.ones(20), np.tile(np.logspace(5, 8, 10), 2)], axis=1)
    busy = np.repeat([1.0, 2.0], 10)
    seconds = 1e-5 + 1e-9 * busy * terms[:, 1]
    fitted = fit_physics(terms, busy, seconds, BOUNDS)
    assert fitted.busy_exponents[1] == pytest.approx(1.0, abs=0.1)
    assert fitted.busy_exponents[0] < 0.4


def test_of_overlapping_terms_the_longest_counts() -> None:
    """A smooth maximum: never below the longest, and close to it where one is much longer."""
    physics = Physics(np.zeros(3), np.zeros(3), overlapping=(1, 2))
    far, near = physics.seconds(np.array([[1.0, 5.0, 1.0], [1.0, 5.0, 5.0]]), np.ones(2))
    assert far == pytest.approx(6.0, rel=1e-3)
    assert 6.0 < near < 1.0 + 5.0 * 1.15
    assert Physics(np.zeros(3), np.zeros(3)).seconds(np.array([[1.0, 5.0, 5.0]]), np.ones(1)) == pytest.approx(11.0)


def test_an_overlapping_term_that_is_nothing_adds_nothing() -> None:
    physics = Physics(np.zeros(3), np.zeros(3), overlapping=(1, 2))
    assert physics.seconds(np.array([[1.0, 0.0, 0.0]]), np.ones(1)) == pytest.approx(1.0)
    assert physics.seconds(np.array([[1.0, 0.0, 4.0]]), np.ones(1)) == pytest.approx(5.0)


def test_the_gradient_of_a_robust_loss_is_its_slope() -> None:
    """Residuals within and beyond Huber's limit, and the prior."""
    rng = np.random.default_rng(1)
    slopes, start, prior, stds = rng.normal(0, 2, (9, 3)), rng.normal(0, 3, 9), rng.normal(0, 1, 3), np.full(3, 0.5)
    loss_at = robust_loss(lambda theta: (slopes @ np.sin(theta) + start, slopes * np.cos(theta)), prior, stds)
    theta, step = rng.normal(0, 0.3, 3), 1e-6
    numeric = [(loss_at(theta + step * axis)[0] - loss_at(theta - step * axis)[0]) / (2 * step) for axis in np.eye(3)]
    assert loss_at(theta)[1] == pytest.approx(np.array(numeric), rel=1e-4, abs=1e-3)


def test_constants_of_overlapping_terms_are_found_where_each_is_the_longest() -> None:
    terms = np.stack([np.ones(24), np.tile(np.logspace(3, 6, 12), 2), np.repeat([1.0, 1e5], 12)], axis=1)
    seconds = 1e-5 + np.maximum(2e-9 * terms[:, 1], 3e-9 * terms[:, 2])
    bounds = Bounds(np.array([1e-5, 1e-9, 1e-9]), np.full(3, 1e-12), np.full(3, 1e-2), overlapping=(1, 2))
    fitted = fit_physics(terms, np.ones(24), seconds, bounds)
    assert np.exp(fitted.log_constants) == pytest.approx([1e-5, 2e-9, 3e-9], rel=0.1)
    assert Physics.from_dict(fitted.to_dict()).overlapping == (1, 2)
