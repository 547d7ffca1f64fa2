from collections.abc import Callable

import pytest

from stepsight.dataset.hardware import find_fabric
from stepsight.dataset.op import Collective
from stepsight.dataset.physics import alpha_beta_seconds
from stepsight.training.predictor import Predictor

FABRIC = find_fabric("loopback")


def test_sizes_between_and_beyond_the_measured(
    predictor: Predictor, collective_truth: Callable[[Collective], float]
) -> None:
    for num_bytes, error in ((3_000_000, 0.03), (1_000_000_000, 0.1)):
        collective = Collective("all_reduce", num_bytes, 2, 2)
        seconds = predictor.collective.seconds([collective], FABRIC)[0]
        assert seconds == pytest.approx(collective_truth(collective), rel=error)


def test_layouts_never_measured_follow_the_fabric_and_are_reported(predictor: Predictor) -> None:
    across = Collective("all_reduce", 1 << 20, 4, 2)
    assert predictor.collective.seconds([across], FABRIC)[0] == alpha_beta_seconds(across, FABRIC)
    assert "no all_reduce across nodes was measured" in predictor.unsupported([across], FABRIC)[0]
    assert "groups of 2 to 2 ranks" in predictor.unsupported([Collective("all_reduce", 1 << 20, 4, 4)], FABRIC)[0]
