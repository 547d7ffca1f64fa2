"""A job file that is written reads back as an equal job."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import ModelSpec
from stepsight.dataset.job.specs import MODELS
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


@pytest.mark.parametrize("framework", ["", "megatron-core", "torchtitan"])
@pytest.mark.parametrize("name", MODELS)
def test_what_differs_from_a_known_model(name: str, framework: str, tmp_path: Path) -> None:
    """A known model's value that a job sets to the default of all models is not the model's again when read back."""
    given = {
        "model": {"name": name},
        "batch": {"micro_batch": 1, "global_batch": 64},
        "parallel": {"recompute": "none"},
    }
    cluster = {"hardware": "h100-sxm-80gb", "nodes": 8, "devices_per_node": 8}
    own = Job.from_dict({**given, "cluster": cluster, "framework": framework})
    plain, path = {item.name: item.default for item in fields(ModelSpec)}, tmp_path / "job.toml"
    for key in MODELS[name].keys() & plain:
        with suppress(JobError):  # some values need others
            job = replace(own, model=replace(own.model, **{key: plain[key]}))
            path.write_text(job_toml(job))
            assert getattr(Job.from_file(path).model, key) == getattr(job.model, key)
