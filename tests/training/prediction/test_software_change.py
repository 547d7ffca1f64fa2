"""What another release of a framework changes: the profile, and a drift with a doubt that grows with the months."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.job.job import Job
from stepsight.training.prediction.ask_many import predict
from stepsight.training.prediction.software_change import RATE_LOG, SPREAD_LOG, software_change

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama3-70b-fsdp-512.toml"


def nemo(date: str) -> Job:
    return Job.of(EXAMPLE, {"framework": "nemo", "execution.date": date})


def test_a_later_release_is_faster_and_doubted_by_the_months_between() -> None:
    change = software_change(nemo("2025-01"), nemo("2025-05"))
    assert change.log_factor == pytest.approx(4 * RATE_LOG["nemo"]) and change.log_factor < 0
    assert change.doubt_log == pytest.approx(2 * SPREAD_LOG)
    back = software_change(nemo("2025-05"), nemo("2025-01"))
    assert (back.log_factor, back.doubt_log) == (-change.log_factor, change.doubt_log)


def test_outside_of_the_dated_runs_the_drift_stands_still_and_the_doubt_grows() -> None:
    last, later, latest = (software_change(nemo("2025-01"), nemo(date)) for date in ("2026-05", "2027-01", "2029-01"))
    assert later.doubt_log > last.doubt_log
    assert latest.log_factor == later.log_factor and latest.doubt_log > later.doubt_log


def test_another_profile_brings_its_facts_and_no_drift() -> None:
    change = software_change(nemo("2025-01"), nemo("2026-06"))
    assert change.log_factor == 0 and "profile nemo-2026-06 instead of nemo" in change.text


def test_software_without_dated_runs_keeps_its_time() -> None:
    usual = Job.of(EXAMPLE)
    change = software_change(usual, Job.of(EXAMPLE, {"execution.date": "2025-05"}))
    assert change.log_factor == 0 and ("names no framework" in change.text or "states no date" in change.text)
    torchtitan = [
        Job.of(EXAMPLE, {"framework": "torchtitan", "execution.date": date}) for date in ("2025-01", "2025-05")
    ]
    change = software_change(*torchtitan)
    assert change.log_factor == 0 and change.doubt_log > 0 and "no pairs of dated runs" in change.text


def test_predict_answers_for_a_date_and_for_a_container() -> None:
    usual = nemo("2025-01")
    now, later = predict(usual), predict(usual, date="2025-05")
    assert later.iteration_time_s == pytest.approx(now.iteration_time_s * math.exp(4 * RATE_LOG["nemo"]))
    assert later.high_s / later.iteration_time_s > now.high_s / now.iteration_time_s
    assert later.to_dict()["software"]["change"]["log_factor"] < 0 and "change" not in now.to_dict()["software"]
    assert sum(later.breakdown.values()) == pytest.approx(later.iteration_time_s)
    boxed = predict(usual, container="nvcr.io/nvidia/nemo:25.05")
    assert boxed.iteration_time_s == pytest.approx(later.iteration_time_s)
    assert replace(boxed.job.execution, container="", date="2025-01") == usual.execution
