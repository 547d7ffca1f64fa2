"""The posterior against its definition."""

import numpy as np
import pytest

from stepsight.training.corrections.gaussian_process import GaussianProcess

RNG = np.random.default_rng(0)
FACTOR = RNG.normal(size=(5, 5))
PROCESS = GaussianProcess(FACTOR @ FACTOR.T + np.eye(5), RNG.normal(size=5))


def test_rows_left_out_are_predicted_from_the_others() -> None:
    """The closed form of a block left out equals solving without it."""
    covariance, values = PROCESS.covariance, PROCESS.values
    off, stds = PROCESS.left_out([0, 0, 1, 1, 1])
    kept, gone = [2, 3, 4], [0, 1]
    without = GaussianProcess(covariance[np.ix_(kept, kept)], values[kept])
    shared = covariance[np.ix_(gone, kept)]
    assert off[gone] == pytest.approx(values[gone] - without.mean(shared))
    explained = [without.explained(row) for row in shared]
    own = covariance[np.ix_(gone, gone)] - shared @ without.inverse @ shared.T
    assert np.diag(own) == pytest.approx(covariance[gone, gone] - explained)
    assert stds[gone] == pytest.approx(np.sqrt(np.diag(own)))


def test_far_from_every_observation_it_knows_nothing() -> None:
    assert PROCESS.mean(np.zeros(5)) == 0.0 and PROCESS.explained(np.zeros(5)) == 0.0


def test_an_observation_without_noise_is_known() -> None:
    """Its mean is its value, and all of its variance is explained."""
    shared = PROCESS.covariance[2]
    assert PROCESS.mean(shared) == pytest.approx(PROCESS.values[2])
    assert PROCESS.explained(shared) == pytest.approx(PROCESS.covariance[2, 2])


def test_cost_is_that_of_a_normal_density() -> None:
    """The likelihood of independent values is the product of their densities."""
    variances, values = np.array([0.5, 2.0]), np.array([1.0, -1.0])
    density = np.exp(-(values**2) / (2 * variances)) / np.sqrt(variances)
    assert GaussianProcess(np.diag(variances), values).cost() == pytest.approx(-2 * np.log(density).sum())
