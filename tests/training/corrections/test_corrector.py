"""Every corrector keeps one contract: near what taught it a factor is known, far away nothing is left of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.node_features import op_position
from stepsight.training.collectives.between_nodes import KNOTS, WIDTHS, SiteResidual, place
from stepsight.training.corrections.calibration import NAMES, Constants
from stepsight.training.corrections.corrector import (
    MOST_LOG,
    Corrector,
    GaussianProcess,
    Neighbours,
    Support,
    TracedKind,
    corrected,
    doubt,
    fit_neighbours,
    fit_traced,
)
from stepsight.training.corrections.residual import JobFeatures, Residual
from stepsight.training.kernels.host_calls import Contention
from stepsight.training.kernels.kernel_models import Ratio

PLACES = np.array([[0.0, 0.0], [3.0, 3.0]])
NEAR = fit_neighbours(PLACES, np.array([0.2, 0.2]), 0.5)
TABLES = {
    "model": {"name": "gpt3-1.3b"},
    "batch": {"micro_batch": 1, "global_batch": 8},
    "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
}
JOB = JobFeatures.of(Job.of(TABLES))
SUM = Collective("all_reduce", 64, 32, 8)
SIZES = SiteResidual(Neighbours(1.0, place(SUM)[None] / WIDTHS, np.array([0.2])), np.ones(5), np.ones(len(KNOTS)))
CASES: dict[str, tuple[Corrector[Any], Any, Any]] = {
    "neighbours": (NEAR, PLACES, PLACES + 50.0),
    "traced": (TracedKind(0.2, NEAR, Support.of(PLACES)), PLACES, PLACES + 50.0),
    "sizes": (SIZES, [SUM], [Collective("all_reduce", 2**40, 2**20, 8)]),
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


LONGER = np.log(1.2)


@pytest.mark.parametrize(
    "corrector",
    [Ratio(LONGER, "a paper"), Contention({"": 1.2}), Constants((LONGER,) * len(NAMES))],
    ids=lambda corrector: type(corrector).__name__,
)
def test_what_was_learned_of_a_whole_kind_is_known_of_all_its_work(corrector: Corrector[Any]) -> None:
    works = [Op("linear", (64, 64, 64), "bf16"), Op("add", (2**30,), "bf16")]
    assert corrected(np.ones(2), works, corrector) == pytest.approx(1.2)
    assert doubt(corrector, works, 0.01) == pytest.approx(0.01)


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


def test_neighbours_without_a_weight_each_are_refused() -> None:
    with pytest.raises(ValueError, match="a weight for each position and a length > 0, got 3 positions, 2 weights"):
        Neighbours(1.0, np.zeros((3, 5)), np.zeros(2))


OPS = [Op("add", (2**power,), "bf16") for power in range(16, 28)]
LABELS = [op.kind for op in OPS]


def test_a_factor_of_a_kind_is_learned_and_fades_outside_its_sizes() -> None:
    predicted = np.array([op.num_bytes / 1e12 for op in OPS])
    kinds, left_out = fit_traced(OPS, predicted, 1.5 * predicted, LABELS)
    assert left_out[1:-1] == pytest.approx(np.log(1.5), rel=0.2)
    inside, far = (
        kinds["add"].log_factor(op_position(Op("add", (size,), "bf16"))[None]) for size in (3 * 2**20, 2**40)
    )
    assert inside == pytest.approx(np.log(1.5), rel=0.2) and abs(float(far[0])) < 0.01


def test_what_helps_nothing_and_what_is_beyond_belief_teach_nothing() -> None:
    predicted = np.array([op.num_bytes / 1e12 for op in OPS])
    noise = np.exp(np.resize([0.2, -0.2], len(OPS)))
    assert fit_traced(OPS, predicted, predicted * noise, LABELS)[0] == {}
    assert fit_traced(OPS, predicted, predicted * np.exp(MOST_LOG + 1), LABELS)[0] == {}


def test_corrections_round_trip_and_wild_ones_are_refused() -> None:
    predicted = np.array([op.num_bytes / 1e12 for op in OPS])
    kind = fit_traced(OPS, predicted, 2 * predicted, LABELS)[0]["add"]
    table = json.loads(json.dumps(kind.to_dict()))
    positions = np.array(kind.support)
    older = {"offset": table["offset"], "near": table["near"], **table["support"]}
    for saved in (table, older):
        again = TracedKind.from_dict(saved)
        again.check(3)
        assert again.log_factor(positions) == pytest.approx(kind.log_factor(positions), abs=1e-5)
    with pytest.raises(ValueError, match="axes"):
        TracedKind.from_dict({**older, "low": [1.0]}).check(3)


def test_calibration_by_imported_traces_keeps_what_helps(tmp_path: Path) -> None:
    from stepsight.experiments.calibration.calibrate_parts import calibrate_traces
    from stepsight.training.predictor.predictor import Predictor
    from tests.dataset.traced_jobs import many_sizes

    many_sizes(tmp_path / "runs")
    report = calibrate_traces([tmp_path / "runs"], "a100-sxm", tmp_path / "mine")
    assert report.released and "add" in report.calibrated.kernel.traced
    change = report.values["evidence"]["elementwise"]
    assert change["after"]["mape"] < change["before"]["mape"]
    assert report.values["host_kinds_s"]["add"] == pytest.approx(20e-6, rel=0.5)
    loaded = Predictor.load(tmp_path / "mine")
    asked = [Op("add", (2**20,), "fp32")]
    assert loaded.kernel.seconds(asked, 1) == pytest.approx(report.calibrated.kernel.seconds(asked, 1), rel=1e-4)
    assert loaded.manifest["calibrated_traces"]["kinds"] == sorted(loaded.kernel.traced)
    assert "launches" in report.text and "imported traces" in loaded.hardware.source
