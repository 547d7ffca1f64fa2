"""Every corrector keeps one contract: near what taught it a factor is known, far away nothing is left of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.training.corrections.calibration import JobFeatures, Residual
from stepsight.training.corrections.corrector import Corrector, Support, doubt
from stepsight.training.corrections.gaussian_process import fit_neighbours
from stepsight.training.corrections.size_residuals import KNOTS, SizeResidual
from stepsight.training.corrections.traced import TracedKind

PLACES = np.array([[0.0, 0.0], [3.0, 3.0]])
NEAR = fit_neighbours(PLACES, np.array([0.2, 0.2]), 0.5)
TABLES = {
    "model": {"name": "gpt3-1.3b"},
    "batch": {"micro_batch": 1, "global_batch": 8},
    "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
}
JOB = JobFeatures.of(Job.of(TABLES))
SIZES = SizeResidual(np.full(len(KNOTS), 0.2), Support(np.log([8.0, 16.0, 8.0]), np.log([2.0**30, 64.0, 8.0])))
CASES: dict[str, tuple[Corrector[Any], Any, Any]] = {
    "neighbours": (NEAR, PLACES, PLACES + 50.0),
    "traced": (TracedKind(0.2, NEAR, Support.of(PLACES)), PLACES, PLACES + 50.0),
    "sizes": (SIZES, [Collective("all_reduce", 64, 32, 8)], [Collective("all_reduce", 64, 2**14, 8)]),
    "whole iterations": (
        Residual((JOB,), (0.2,), 0.1, 0.01), [JOB], [replace(JOB, place=tuple(p + 50.0 for p in JOB.place))]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_factor_is_known_near_what_taught_it_and_the_prior_is_left_far_away(name: str) -> None:
    corrector, near, far = CASES[name]
    assert (corrector.known(near) > 0.95).all() and (corrector.log_factor(near) > 0.1).all()
    assert corrector.known(far) == pytest.approx(0.0, abs=1e-6)
    assert corrector.log_factor(far) == pytest.approx(0.0, abs=1e-6)
    assert doubt(corrector, far) == pytest.approx(corrector.prior_std_log)
    assert (doubt(corrector, near) < 0.5 * corrector.prior_std_log).all()
