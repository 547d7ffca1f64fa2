"""Calibration by iteration times: made-up truths are found again, within physics, and fade where no job is alike."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.training.corrections.calibration import NAMES, RESOURCES, Calibration, Constants
from stepsight.training.corrections.corrector import doubt
from stepsight.training.corrections.residual import JobFeatures
from stepsight.training.fitting.train_tables import TimedJob, fit_calibration
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor


def job(hidden: int = 4096, tp: int = 1, nodes: int = 1, seq_len: int = 2048, layers: int = 8) -> Job:
    return Job(
        model=ModelSpec(family="llama", layers=layers, hidden=hidden, heads=32, vocab=32000, seq_len=seq_len),
        parallel=ParallelSpec(tp=tp, dp=8 * nodes // tp, zero_stage=1),
        batch=BatchSpec(micro_batch=1, global_batch=64 * nodes),
        cluster=ClusterSpec(hardware="a100-sxm-80gb", nodes=nodes, devices_per_node=8, fabric="dgx-a100"),
    )


JOBS = [job(hidden, tp, 1, seq) for hidden in (1024, 2048, 4096) for tp in (1, 4) for seq in (1024, 4096)]


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    found = shipped_predictor("a100-sxm")
    assert found is not None
    return found


def truth(predictor: Predictor, jobs: list[Job], **factors: float) -> list[TimedJob]:
    """Iterations on devices whose resources are slower than the predictor thinks."""
    logs = tuple(math.log(factors.get(name, 1.0)) for name in NAMES)
    slower = replace(predictor, calibration=Calibration(constants=Constants(logs)))
    return [TimedJob(job, predict(job, slower).iteration_time_s, "lab") for job in jobs]


def half_width(found: Calibration, job: Job, software: str, otherwise: float, *, judged: bool = False) -> float:
    (correction,) = found.of_jobs([job], [software])
    return found.half_width_log(correction, otherwise, judged=judged)


def test_slow_resources_are_found_and_carried_to_larger_jobs(predictor: Predictor) -> None:
    """The factors move towards the truth, and jobs of other sizes are predicted far better for it."""
    fitted = fit_calibration(predictor, truth(predictor, JOBS, products=1.1, near_links=1.2)).predictor
    found = fitted.calibration.constants.to_dict()
    assert 1.04 < found["products"] < 1.12
    assert found["near_links"] > 1.02
    assert found["far_links"] == pytest.approx(1.0)  # nothing was seen of them
    for row in truth(predictor, [job(8192, 8, 2), job(4096, 4, 16)], products=1.1, near_links=1.2):
        before, after = predict(row.job, predictor), predict(row.job, fitted, software="lab")
        assert abs(after.iteration_time_s / row.seconds - 1) < 0.4 * abs(before.iteration_time_s / row.seconds - 1)


def test_few_groups_of_runs_tell_no_resources_apart(predictor: Predictor) -> None:
    """Three kinds of jobs, each at several sizes, correct iterations of their like; a fourth kind tells of factors."""
    jobs = [job(tp=tp, nodes=nodes) for tp in (1, 2, 4, 8) for nodes in (1, 2)]
    for kinds, plain in ((3, True), (4, False)):
        fitted = fit_calibration(predictor, truth(predictor, jobs[: 2 * kinds], products=1.2)).predictor
        assert fitted.calibration.constants.plain is plain
        (row,) = truth(predictor, [job(nodes=8)], products=1.2)
        assert predict(row.job, fitted, software="lab").iteration_time_s == pytest.approx(row.seconds, rel=0.04)


def test_a_job_that_was_fitted_is_reproduced_at_every_size(predictor: Predictor) -> None:
    """Whatever was off by a factor for a small run is so for a large one."""
    small = job()
    rows = [TimedJob(small, 1.2 * predict(small, predictor).iteration_time_s, "lab")]
    fitted = fit_calibration(predictor, rows).predictor
    for nodes in (1, 4, 32):
        before, after = predict(job(nodes=nodes), predictor), predict(job(nodes=nodes), fitted, software="lab")
        assert after.iteration_time_s == pytest.approx(1.2 * before.iteration_time_s, rel=0.04)
        assert after.low_s < 1.2 * before.iteration_time_s < after.high_s < 1.25 * after.iteration_time_s


def test_nothing_is_said_of_jobs_unlike_all_that_were_fitted(predictor: Predictor) -> None:
    """The residual fades with distance, the deviation grows to that of any job."""
    small, large = job(256, layers=2), job(16384, 8, layers=96)
    rows = [TimedJob(small, 1.2 * predict(small, predictor).iteration_time_s)]
    calibration = fit_calibration(predictor, rows).predictor.calibration
    residual = calibration.residual
    assert residual is not None
    asked = [JobFeatures.of(each) for each in (small, large)]
    logs, left, known = residual.log_factor(asked), doubt(residual, asked, residual.noise), residual.known(asked)
    assert abs(logs[1]) < 0.1 * abs(logs[0]) and left[1] > 3 * left[0]
    assert left[1] == pytest.approx(math.hypot(residual.spread, residual.noise), rel=0.05)
    assert known[0] > 0.95 and known[1] < 0.05
    assert half_width(calibration, large, "", 0.3) == pytest.approx(0.3, rel=0.03)
    assert half_width(calibration, small, "", 0.3) < 0.15


def test_no_factor_leaves_physics(predictor: Predictor) -> None:
    """Runs ten times too slow do not make products ten times slower."""
    rows = [TimedJob(row.job, 10 * row.seconds) for row in truth(predictor, JOBS)]
    found = fit_calibration(predictor, rows).predictor.calibration.constants
    for name, value in zip(NAMES, found.logs, strict=True):
        assert RESOURCES[name].low_log <= value <= RESOURCES[name].high_log
    with pytest.raises(ValueError, match=r"the log of products must lie from -0\.25 to 0\.4"):
        Constants((1.0, 0.0, 0.0, 0.0, 0.0))


def test_no_interval_is_narrower_than_what_runs_are_off_by(predictor: Predictor) -> None:
    """Those that were fitted, where ten are; those that judged, but not for themselves."""
    rows = [TimedJob(job(), seconds) for seconds in np.geomspace(1.0, 1.5, 10)]
    found = fit_calibration(predictor, rows).predictor.calibration
    assert found.left_log == pytest.approx(math.log(1.5) / 2, rel=0.1)
    assert half_width(found, job(), "", 0.1) == found.left_log
    assert fit_calibration(predictor, rows[:9]).predictor.calibration.left_log == 0.0
    judged = replace(found, judged_log=0.4)
    assert half_width(judged, job(), "", 0.1) == 0.4
    assert half_width(judged, job(), "", 0.1, judged=True) == found.left_log
    assert half_width(Calibration.from_dict(judged.to_dict()), job(), "", 0.1) == 0.4
    with pytest.raises(ValueError, match=r"0 <= left_log and judged_log <= 100 must hold, .* and -1\.0"):
        Calibration.from_dict({**found.to_dict(), "judged_log": -1})


def test_a_calibration_is_saved_whole(predictor: Predictor) -> None:
    """Read again it corrects by as much, to the last bit."""
    fitted = fit_calibration(predictor, truth(predictor, JOBS[:4], products=1.1)).predictor.calibration
    again = Calibration.from_dict(fitted.to_dict())
    assert again.factor(job(), "lab") == fitted.factor(job(), "lab")
    assert half_width(again, job(), "lab", 0.2) == half_width(fitted, job(), "lab", 0.2) < 0.2
    assert again.constants.logs == pytest.approx(fitted.constants.logs)
    assert half_width(Calibration.from_dict({"scale": 1.0}), job(), "lab", 0.2) == 0.2
