"""Corrections by published runs: near them, bounded, and nothing for what they do not tell of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsight import predict, predict_many
from stepsight.dataset.job.job import Job
from stepsight.training.corrections.residual import (
    JobFeatures,
    NearRuns,
    PublishedRun,
    PublishedRuns,
    block_of,
    published_runs,
)

JOB = Job.of("examples/gpt3-175b-1024.toml", {"framework": "nemo"})
LIKE = JobFeatures.of(JOB, "nemo")
ONE, TWO = (PublishedRun(name, f"source {name}", name, 0.2, LIKE) for name in ("one", "two"))


def runs(*those: PublishedRun) -> PublishedRuns:
    return PublishedRuns(those, 2.0)


def factor(found: PublishedRuns, like: JobFeatures = LIKE) -> float:
    residual = found.blocks.get(block_of(like))
    return 0.0 if residual is None else float(residual.log_factor([like])[0])


def test_a_job_near_a_run_is_as_slow_and_other_software_or_precision_is_not_corrected() -> None:
    found = runs(ONE)
    assert 0.15 < factor(found) <= 0.2
    for place in (0, 2, 5):
        labels = (*LIKE.labels[:place], "another", *LIKE.labels[place + 1 :])
        assert factor(found, replace(LIKE, labels=labels)) == 0.0
    far = replace(LIKE, place=tuple(value + 50.0 for value in LIKE.place))
    assert factor(found, far) == pytest.approx(0.0) and found.near(far) is None


def test_another_source_tells_a_part_and_the_own_one_most() -> None:
    """Two sources that agree tell more than one; what is asked of neither source is corrected by a part."""
    both = runs(ONE, TWO)
    stranger = both.without("source one")
    assert 0.02 < factor(stranger) < 0.08 < factor(runs(ONE)) < factor(both) <= 0.2
    assert both.without("nobody") is both and both.without(group=TWO.group).runs == (ONE,)


def test_no_correction_exceeds_what_a_run_shows() -> None:
    wild = runs(ONE, replace(TWO, log=9.0), replace(TWO, log=-9.0, digest="three"))
    (residual,) = wild.blocks.values()
    assert residual.limits == (-0.3, 0.3) and abs(factor(wild)) <= 0.3


def test_what_is_shipped_is_read_again_and_has_every_run_once() -> None:
    found = published_runs()
    assert PublishedRuns.from_dict(found.to_dict()) == found
    assert len({run.digest for run in found.runs}) == len(found.runs) > 500


def test_an_answer_shows_its_correction_and_physics_has_none() -> None:
    """One job alone and among others is corrected alike; the log of the factor is the one that is told."""
    run = next(run for run in published_runs().runs if run.like.labels[:3] == ("nemo", "h100-sxm-80gb", "bf16"))
    job = replace(JOB, cluster=replace(JOB.cluster, hardware="h100-sxm-80gb"))
    answer, physics = predict(job), predict(job, "physics")
    told = answer.published
    assert run is not None and told is not None and physics.published is None
    assert answer.iteration_time_s == pytest.approx(physics.iteration_time_s * 2.718281828459045**told.log_factor)
    assert answer.to_dict()["published"] == told.to_dict()
    many = predict_many([replace(job, batch=replace(job.batch, global_batch=n * 512)) for n in range(3, 13)])
    alone = predict(many[0].job)
    assert many[0].iteration_time_s == pytest.approx(alone.iteration_time_s)


def test_the_line_is_plain() -> None:
    assert str(NearRuns(0.0769610411, 12, ("BLOOM",))) == (
        "published runs like this one were 8.0 % slower than physics says: 12 runs, BLOOM"
    )
