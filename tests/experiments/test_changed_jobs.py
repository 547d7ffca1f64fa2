"""Changing keys of a job."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.experiments.changed_jobs import change_job
from stepsight.training.predictor.prediction import predict

JOB = Job.from_file(Path(__file__).parents[2] / "examples" / "llama3-70b-fsdp-512.toml")


def test_replicas_follow_the_number_of_devices() -> None:
    assert change_job(JOB, {"cluster.nodes": 32}).parallel.dp == 256
    assert change_job(JOB, {"parallel.tp": 8}).parallel.dp == 64
    assert change_job(JOB, {"batch.global_batch": 1024}).parallel.dp == JOB.parallel.dp


def test_the_same_links_as_a_table_give_the_same_time() -> None:
    """A fabric that is stated as numbers counts like the preset with these numbers; a slower one is slower."""
    latency_us = JOB.fabric.inter_node.latency_s * 1e6
    same = change_job(JOB, {"cluster.fabric.inter_node.latency_us": latency_us})
    slow = change_job(JOB, {"cluster.fabric.inter_node.bandwidth_gbytes_per_s": 5.0})
    expected = predict(JOB, "roofline").iteration_time_s
    assert predict(same, "roofline").iteration_time_s == pytest.approx(expected)
    assert predict(slow, "roofline").iteration_time_s > expected
    assert slow.fabric.intra_node == JOB.fabric.intra_node


def test_mistakes() -> None:
    with pytest.raises(JobError, match=r"not a key of a job \(did you mean 'cluster.nodes'"):
        change_job(JOB, {"cluster.node": 2})
    with pytest.raises(JobError, match="must divide"):
        change_job(JOB, {"cluster.nodes": 60})
