"""The demo's held-out runs are held out."""

from stepsight.dataset.job.job import Job
from stepsight.experiments.demo.demo import jobs_of, search_job


def shape(job: Job) -> tuple[int, ...]:
    model = job.model
    return model.layers, model.hidden, model.heads, model.ffn, model.vocab, model.seq_len


def test_no_heldout_shape_is_trained_on() -> None:
    """Model shapes of held-out runs occur neither in training runs nor in event profiles."""
    seen = {shape(job) for job in (*jobs_of("train"), *jobs_of("profile"))}
    assert len(jobs_of("heldout")) >= 12
    assert not seen & {shape(job) for job in jobs_of("heldout")}
    assert not {job.model.hidden for job in jobs_of("profile")} & {job.model.hidden for job in jobs_of("heldout")}


def test_jobs_run_on_two_cores() -> None:
    """Every real run needs at most two ranks; the searched cluster is larger."""
    assert {job.cluster.num_devices for job in (*jobs_of("train"), *jobs_of("heldout"))} == {1, 2}
    assert search_job().cluster.num_devices > 2
