"""Corrections of kernels by traces: learned where they help, bounded, faded outside what was traced."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.kinds.op import Op
from stepsight.training.corrections.traced import MOST_LOG, TracedKind, fit_traced, log_factors

OPS = [Op("add", (2**power,), "bf16") for power in range(16, 28)]
LABELS = [op.kind for op in OPS]


def test_a_factor_of_a_kind_is_learned_and_fades_outside_its_sizes() -> None:
    predicted = np.array([op.num_bytes / 1e12 for op in OPS])
    kinds, left_out = fit_traced(OPS, predicted, 1.5 * predicted, LABELS)
    assert left_out[1:-1] == pytest.approx(np.log(1.5), rel=0.2)
    inside = log_factors(kinds, [Op("add", (3 * 2**20,), "bf16")], ["add"])
    far = log_factors(kinds, [Op("add", (2**40,), "bf16")], ["add"])
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
    from stepsight.experiments.calibration.calibrate_parts import calibrate_traces, traces_text
    from stepsight.training.predictor.predictor import Predictor
    from tests.dataset.traced_jobs import many_sizes

    many_sizes(tmp_path / "runs")
    report = calibrate_traces([tmp_path / "runs"], "a100-sxm", tmp_path / "mine")
    assert report.released and report.kernels_better and "add" in report.calibrated.kernel.traced
    change = report.changes["elementwise"]
    after, before = change.after.mape, change.before.mape
    assert after is not None and before is not None and after < before
    assert report.launches["add"] == pytest.approx(20e-6, rel=0.5)
    loaded = Predictor.load(tmp_path / "mine")
    asked = [Op("add", (2**20,), "fp32")]
    assert loaded.kernel.seconds(asked, 1) == pytest.approx(report.calibrated.kernel.seconds(asked, 1), rel=1e-4)
    assert loaded.manifest["calibrated_traces"]["kinds"] == sorted(loaded.kernel.traced)
    assert "launches" in traces_text(report) and "imported traces" in loaded.hardware.source
