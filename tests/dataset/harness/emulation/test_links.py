"""How long a spin is: the part that needs no GPU."""

import pytest

from stepsight.dataset.harness.emulation.links import TELLING_S, Pace


def test_spins_follow_the_clock_that_the_device_has_under_load() -> None:
    pace = Pace(2.0e9)
    assert pace.cycles(1e-3) == 2_000_000
    for _ in range(30):
        cycles = pace.cycles(5e-4)
        pace.learn(cycles, cycles / 1.5e9)  # it computes beside them, and its clock is lower
    assert pace.cycles(1e-3) == pytest.approx(1.5e6, rel=0.01)


def test_short_spins_tell_of_their_launches_rather_than_of_the_clock() -> None:
    pace = Pace(2.0e9)
    pace.learn(1000, 0.9 * TELLING_S)
    assert pace.cycles_per_s == 2.0e9
