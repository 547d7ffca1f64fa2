"""Closed forms of what a box is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import ParallelSpec
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.experiments.studies.box_cases import MODELS, case
from stepsight.experiments.studies.small_to_large import formula, ideal, roofline

BERT = replace(MODELS["bert"], layers=8)


def job_of(text: str, **parallel: int) -> Job:
    return case("bert", BERT, read_box(text), ParallelSpec(**parallel)).job  # type: ignore[arg-type]


def test_without_communication_they_agree() -> None:
    job = job_of("1x1@100mbit")
    assert ideal(job) == pytest.approx(roofline(job), rel=1e-6)
    assert formula(job) == pytest.approx(roofline(job), rel=0.02)  # no optimizer in it


def test_a_pipeline_of_free_messages_is_the_bubble_formula() -> None:
    fast = job_of("4x1@100000mbit", pp=4)
    assert formula(fast) == pytest.approx(ideal(fast), rel=0.08)  # its slowest stage is every stage


def test_communication_takes_time() -> None:
    job = job_of("8x1@100mbit", tp=8)
    assert ideal(job) < 0.9 * roofline(job)
