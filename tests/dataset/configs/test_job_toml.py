"""A job file that is written reads back as an equal job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.job.job import Job
from tests.simulator.any_job import jobs

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*-*.toml"))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=jobs(uneven_cluster=True))
def test_any_job(job: Job, tmp_path: Path) -> None:
    for framework in ("", "megatron-core", "torchtitan"):
        told = replace(job, framework=framework)
        path = tmp_path / "job.toml"
        path.write_text(job_toml(told))
        vocab = Job.from_file(path).model.vocab  # a framework may pad it
        recompute = told.parallel.recompute != "selective" or framework != "torchtitan"
        if vocab == told.model.vocab and recompute:
            assert Job.from_file(path).to_dict() == told.to_dict()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path, tmp_path: Path) -> None:
    job = Job.from_file(path)
    out = tmp_path / "job.toml"
    out.write_text(job_toml(job))
    assert Job.from_file(out) == job
