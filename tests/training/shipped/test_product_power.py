"""Power of a chip's products: what sources say together, without one of them, and when too few do."""

import math
from dataclasses import replace

import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.training.shipped.catalogue import (
    MOST_POWER_LOG,
    TABLED,
    ChipPower,
    chip_of,
    chip_powers,
    learn_chip,
    product_power_w,
    shipped_predictor,
    tabled_power_w,
)


def _told(*slowdowns: float) -> ChipPower:
    return learn_chip(700.0, {f"source {at}": [math.log(value)] * 30 for at, value in enumerate(slowdowns)})


def test_sources_that_agree_are_believed_nearly_in_full() -> None:
    found = _told(*[1.1] * 6)
    assert 1.08 < math.exp(found.slowdown_log()) < 1.1
    assert found.power_w() == pytest.approx(700.0 * math.exp(3 * found.slowdown_log()))


def test_one_source_among_many_moves_little() -> None:
    """Of Huber's mean: software that is slow for reasons of its own."""
    plain, odd = _told(*[1.05] * 5), _told(*[1.05] * 5, 1.5)
    assert 0 < odd.slowdown_log() - plain.slowdown_log() < 0.012


def test_a_source_does_not_teach_what_judges_it() -> None:
    told = _told(1.02, 1.02, 1.02, 1.2)
    assert told.power_w("source 3") == _told(1.02, 1.02, 1.02).power_w()
    assert told.power_w("source 3") < told.power_w() < told.power_w("source 0")


def test_what_does_not_follow_the_clock_is_added_to_the_rest() -> None:
    """The power beyond 100 W is the cube of the slowdown times what the limit leaves for it."""
    runs = {f"source {at}": [math.log(1.1)] * 30 for at in range(3)}
    plain, idle = learn_chip(700.0, runs), learn_chip(700.0, runs, 100.0)
    assert idle.power_w() == pytest.approx(100.0 + 600.0 / 700.0 * plain.power_w())


def test_one_source_is_shrunk_towards_no_reduction() -> None:
    """Two that agree say more; without any, nothing is known."""
    one, two = _told(1.1), _told(1.1, 1.1)
    assert 0 < one.slowdown_log() < two.slowdown_log() < math.log(1.1)
    assert two.power_w("source 0") == one.power_w() > 700.0
    assert one.power_w("source 0") == 0.0


def test_a_table_stands_for_sources_and_draws_them_towards_it() -> None:
    alone, runs = learn_chip(700.0, {}, 100.0, math.log(1.1)), {"one source": [math.log(1.2)] * 30}
    assert alone.power_w() == pytest.approx(100.0 + 600.0 * 1.1**3)
    assert alone.power_w() < learn_chip(700.0, runs, 100.0, math.log(1.1)).power_w() < 100.0 + 600.0 * 1.2**3
    h100 = find_hardware("h100-sxm-80gb")
    assert h100 is not None and tabled_power_w("B200", h100) == {}
    limited = replace(h100, product_power_w=tabled_power_w("H100", h100))
    assert limited.power_slowdown("bf16") == pytest.approx(TABLED["H100"]["bf16"])


def test_power_is_bounded_and_kept_when_written() -> None:
    wild = _told(*[3.0] * 5)
    assert wild.power_w() == 700.0 * math.exp(MOST_POWER_LOG)
    assert ChipPower.from_dict(wild.to_dict()).power_w() == wild.power_w()


def test_shipped_predictors_have_the_power_of_their_chip() -> None:
    """A device of the same chip with a lower limit slows down further."""
    large, small = shipped_predictor("h100-sxm-80gb"), shipped_predictor("h100-sxm-96gb")
    assert large is not None and small is not None
    assert large.hardware.product_power_w == small.hardware.product_power_w == product_power_w("H100")
    slower = small.hardware.power_slowdown("bf16") / large.hardware.power_slowdown("bf16")
    assert slower == pytest.approx(((700 - 120) / (500 - 120)) ** (1 / 3))
    assert chip_of("h100-sxm-96gb") == "H100" and chip_of("mi250x-gcd-64gb") == ""


@pytest.mark.parametrize("chip", chip_powers())
def test_what_is_shipped_is_within_physics(chip: str) -> None:
    for power in chip_powers()[chip].values():
        for name in power.sources:
            assert power.power_w(name) <= power.reference_w * math.exp(MOST_POWER_LOG)
