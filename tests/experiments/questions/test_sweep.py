"""Changing keys of a job, and predicting it over ranges of its keys."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.questions.sweep import Axis, change_job, sweep, sweep_csv, sweep_text
from stepsight.training.prediction.prediction import predict

JOB = Job.from_file(Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml")
LLAMA = Job.from_file(Path(__file__).parents[3] / "examples" / "llama3-70b-fsdp-512.toml")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cluster.nodes=8..1024", (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("cluster.nodes=3..13", (3, 6, 12)),
        ("cluster.nodes=8..24+8", (8, 16, 24)),
        ("parallel.recompute=none,full", ("none", "full")),
        ("parallel.sequence_parallel=true,false", (True, False)),
        ("parallel.bucket_mbytes=1.5", (1.5,)),
    ],
)
def test_axes(text: str, values: tuple[object, ...]) -> None:
    assert Axis.parse(text).values == values


@pytest.mark.parametrize(("text", "rule"), [
    ("cluster.nodes", "takes KEY="), ("cluster.nodes=9..8", "FIRST <= LAST"), ("cluster.nodes=8..9+0", "STEP > 0"),
    ("cluster.nods=1", "did you mean"),
])  # fmt: skip
def test_mistakes(text: str, rule: str) -> None:
    with pytest.raises(StepsightError, match=rule):
        Axis.parse(text)


def test_every_combination_and_why_some_are_not_legal() -> None:
    """Combinations come in order; one that breaks a rule has its reason; weak scaling keeps the time per device."""
    axes = [Axis("cluster.nodes", (64, 128)), Axis("batch.micro_batch", (1, 7))]
    points = sweep(JOB, axes, "roofline")
    assert [tuple(point.values.values()) for point in points] == [(64, 1), (64, 7), (128, 1), (128, 7)]
    assert [point.prediction is not None for point in points] == [True, False, True, False]
    assert "must divide global_batch" in points[1].problem and "not legal" in sweep_text(JOB, axes, points)
    assert len(sweep_csv(points).splitlines()) == 5
    weak = sweep(JOB, axes[:1], "roofline", weak=True)
    assert [point.prediction.job.batch.global_batch for point in weak if point.prediction] == [768, 1536]


def test_a_sweep_without_a_legal_job_is_refused() -> None:
    with pytest.raises(StepsightError, match="no job of the sweep is legal; the first one"):
        sweep(JOB, [Axis("batch.micro_batch", (7,))], "roofline")


def test_replicas_follow_the_number_of_devices() -> None:
    assert change_job(LLAMA, {"cluster.nodes": 32}).parallel.dp == 256
    assert change_job(LLAMA, {"parallel.tp": 8}).parallel.dp == 64
    assert change_job(LLAMA, {"batch.global_batch": 1024}).parallel.dp == LLAMA.parallel.dp


def test_the_micro_batch_of_a_recommendation_model_follows_its_shared_batch() -> None:
    job = Job.from_file(Path(__file__).parents[3] / "examples" / "dlrm-dcnv2-64h100.toml")
    whole = job.batch.global_batch
    for values, micro in (
        ({"batch.global_batch": 2 * whole}, 2 * job.batch.micro_batch),
        ({"cluster.nodes": 2 * job.cluster.nodes}, job.batch.micro_batch // 2),
        ({"batch.micro_batch": job.batch.micro_batch // 2}, job.batch.micro_batch // 2),
    ):
        changed = change_job(job, values)
        assert changed.batch.micro_batch == micro
        assert changed.num_micro_batches == (2 if "batch.micro_batch" in values else 1)
    stated = Job.of(job, {"batch.micro_batch": job.batch.micro_batch})
    with pytest.raises(JobError, match="micro_batch \\* dp must divide global_batch"):
        change_job(stated, {"cluster.nodes": 2 * job.cluster.nodes})


def test_the_same_links_as_a_table_give_the_same_time() -> None:
    """A fabric that is stated as numbers counts like the preset with these numbers; a slower one is slower."""
    latency_us = LLAMA.fabric.inter_node.latency_s * 1e6
    same = change_job(LLAMA, {"cluster.fabric.inter_node.latency_us": latency_us})
    slow = change_job(LLAMA, {"cluster.fabric.inter_node.bandwidth_gbytes_per_s": 5.0})
    expected = predict(LLAMA, "roofline").iteration_time_s
    assert predict(same, "roofline").iteration_time_s == pytest.approx(expected)
    assert predict(slow, "roofline").iteration_time_s > expected
    assert slow.fabric.intra_node == LLAMA.fabric.intra_node


def test_unknown_keys_and_broken_rules() -> None:
    with pytest.raises(JobError, match=r"not a key of a job \(did you mean 'cluster.nodes'"):
        change_job(LLAMA, {"cluster.node": 2})
    with pytest.raises(JobError, match="must divide"):
        change_job(LLAMA, {"cluster.nodes": 60})
