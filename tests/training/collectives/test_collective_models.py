from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import Fabric, alpha_beta_seconds, find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.features.collective_features import nccl_terms
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.predictor.predictor import Predictor

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
    assert "no all_reduce across nodes was measured" in predictor.unsupported(across, FABRIC)
    assert "groups of 2 to 2 ranks" in predictor.unsupported(Collective("all_reduce", 1 << 20, 4, 4), FABRIC)


def test_nccl_learns_relative_to_its_links_and_says_what_it_carries() -> None:
    """Fitted on small groups at 0.8 of the links' facts, asked about another fabric and thousands of ranks."""
    slow, fast = find_fabric("dgx-a100"), find_fabric("dgx-h100")
    works = [
        Collective(kind, 2**power, size, near)
        for kind in ("all_reduce", "all_gather")
        for power in range(18, 32)
        for size, near in ((8, 8), (16, 8), (32, 8))
    ]
    seconds = np.array([_nccl_truth(work, fast) for work in works])
    fitted = fit_collectives(works, [fast] * len(works), seconds, nccl=True)
    model = replace(fitted, carried=("all_gather/inter",))
    for kind in ("all_reduce", "all_gather"):
        work = Collective(kind, 3 << 28, 32, 8)
        assert model.seconds([work], slow)[0] == pytest.approx(_nccl_truth(work, slow), rel=0.15)
    ring = _nccl_truth(Collective("all_reduce", 1 << 20, 4096, 8), fast)
    assert model.seconds([Collective("all_reduce", 1 << 20, 4096, 8)], fast)[0] < ring / 4
    assert "other devices' links alone" in model.unsupported(Collective("all_gather", 2**24, 16, 8), fast)
    assert not model.unsupported(Collective("all_reduce", 2**24, 16, 8), fast)
    assert not model.unsupported(Collective("all_reduce", 2**24, 64, 8), fast)  # twice the ranks
    assert "for groups of 16 to 32 ranks" in model.unsupported(Collective("all_reduce", 2**24, 128, 8), fast)


def test_equal_signatures_with_contradictory_times_make_a_predictor_that_loads(
    predictor: Predictor, tmp_path: Path
) -> None:
    """Buckets of limited links, full or empty, make a message take 0.4 or 40 ms: the mean of both holds."""
    slow, other = (replace(FABRIC, name=name) for name in ("2x1", "2x2"))
    works = [Collective("all_gather", 2**power, 2, 1) for power in range(6, 18)]
    seconds = np.array([4e-4] * len(works) + [4e-2] * len(works))
    model = fit_collectives(works * 2, [slow] * len(works) + [other] * len(works), seconds)
    assert max(np.abs(near.weights).max() for near in model.regressor.neighbours.values()) > 1e3
    replace(predictor, collective=model).save(tmp_path / "p")
    found = Predictor.load(tmp_path / "p").collective.seconds(works, FABRIC)
    assert found == pytest.approx(4e-3, rel=0.3)


def _nccl_truth(work: Collective, fabric: Fabric) -> float:
    calls, steps, _, between, within = nccl_terms(work, fabric)
    return 1e-5 * calls + 3e-6 * steps + max(between, within) / 0.8
