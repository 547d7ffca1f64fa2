"""What shipped predictors answer to a little more or a little better; ``make invariants`` tries 10,000 jobs.

What physics says holds exactly: better links never make a job slower.  Sizes are another matter.  Measured kernels do
get faster where a larger shape fits its tiles better, and trees make steps of what they saw; so a larger job may be
faster, but by no more than ``MOST_GAIN``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import FABRICS, Link, find_fabric
from stepsight.dataset.job.job import Job
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

TRIED = int(os.environ.get("INVARIANT_JOBS", "25"))
ROUNDING = 1e-9  # of a time, for the order in which floats are added
MOST_GAIN = 0.05  # of a time
SHIPPED = {"a100-sxm": ("a100-sxm-80gb", "dgx-a100"), "h100-sxm": ("h100-sxm-80gb", "dgx-h100")}

every_job = settings(
    max_examples=TRIED, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=TRIED < 100
)


@cache
def _predictor(name: str) -> Predictor:
    return Predictor.load(name)


@st.composite
def shipped_jobs(draw: st.DrawFn) -> tuple[Job, Predictor]:
    """Transformers from the smallest to those of 13 billion parameters, on 1 to 1024 GPUs."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    name = one_of(*SHIPPED)
    hardware, fabric = SHIPPED[name]
    tp, pp, dp = one_of(1, 1, 2, 4, 8), one_of(1, 1, 2, 4), one_of(1, 2, 3, 4, 8, 16, 32)
    devices = tp * pp * dp
    per_node = min(8, devices)
    assume(devices % per_node == 0)
    hidden, micro_batch = one_of(512, 768, 1024, 1600, 2048, 4096, 5120), one_of(1, 2, 4)
    tables = {
        "model": {
            "family": one_of("gpt", "llama"), "layers": pp * one_of(1, 2, 4, 12), "hidden": hidden,
            "heads": hidden // 64, "vocab": one_of(8192, 32000, 51200, 128256),
            "seq_len": one_of(128, 512, 1024, 2048, 4096),
        },
        "parallel": {
            "tp": tp, "pp": pp, "dp": dp, "zero_stage": one_of(0, 1, 0 if pp > 1 else 3),
            "sequence_parallel": tp > 1, "recompute": one_of("none", "selective", "full"),
        },
        "batch": {"micro_batch": micro_batch, "global_batch": micro_batch * dp * one_of(1, 2, 4, 8)},
        "cluster": {
            "hardware": hardware, "fabric": fabric, "nodes": devices // per_node, "devices_per_node": per_node,
        },
    }  # fmt: skip
    try:
        return Job.from_dict(tables), _predictor(name)
    except JobError:
        assume(False)
        raise


def _model(**changes: Callable[[int], int]) -> Callable[[Job], Job]:
    return lambda job: replace(
        job, model=replace(job.model, **{key: of(getattr(job.model, key)) for key, of in changes.items()})
    )


def _batch(micro_batch: int, micro_batches: int) -> Callable[[Job], Job]:
    """So many sequences more in a micro-batch, and so many micro-batches more."""

    def larger(job: Job) -> Job:
        size, dp = job.batch.micro_batch, job.parallel.dp
        count = job.batch.global_batch // (size * dp) + micro_batches
        size += micro_batch
        return replace(job, batch=replace(job.batch, micro_batch=size, global_batch=size * dp * count))

    return larger


LARGER: dict[str, Callable[[Job], Job]] = {
    "vocabulary + 512": _model(vocab=lambda vocab: vocab + 512),
    "vocabulary + 25 %": _model(vocab=lambda vocab: 5 * vocab // 4),
    "feed-forward + 1024": _model(ffn=lambda ffn: ffn + 1024),
    "sequence + 64": _model(seq_len=lambda seq_len: seq_len + 64),
    "sequence + 50 %": _model(seq_len=lambda seq_len: 3 * seq_len // 2),
    "a sequence more": _batch(1, 0),
    "a micro-batch more": _batch(0, 1),
    "layers": lambda job: replace(job, model=replace(job.model, layers=job.model.layers + job.parallel.pp)),
}


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)


def _quicker(link: Link) -> Link:
    return replace(link, latency_s=link.latency_s / 1.01)


BETTER: dict[str, Callable[[Link, Link], tuple[Link, Link]]] = {
    "within nodes": lambda near, far: (_faster(near, 1.01), far),
    "within nodes, much": lambda near, far: (_faster(near, 1.5), far),
    "between nodes": lambda near, far: (near, _faster(far, 1.01)),
    "between nodes, much": lambda near, far: (near, _faster(far, 1.5)),
    "latency": lambda near, far: (_quicker(near), _quicker(far)),
}


@pytest.fixture(scope="module", autouse=True)
def _better_fabrics() -> Iterator[None]:
    """Fabrics that are named after what is better about them."""
    with ExitStack() as stack:
        for _, name in SHIPPED.values():
            fabric = find_fabric(name)
            for what, better in BETTER.items():
                near, far = better(fabric.intra_node, fabric.inter_node)
                made = replace(fabric, name=f"{name}: {what}", intra_node=near, inter_node=far)
                stack.enter_context(FABRICS.registered(made.name, made))
        yield


@every_job
@given(shipped_jobs(), st.sampled_from(sorted(BETTER)))
def test_better_links_never_make_a_job_slower(asked: tuple[Job, Predictor], what: str) -> None:
    job, predictor = asked
    better = replace(job, cluster=replace(job.cluster, fabric=f"{job.cluster.fabric}: {what}"))
    seconds = predict(job, predictor).iteration_time_s
    assert predict(better, predictor).iteration_time_s <= seconds * (1 + ROUNDING)


@every_job
@given(shipped_jobs(), st.sampled_from(sorted(LARGER)))
def test_a_larger_job_is_hardly_faster(asked: tuple[Job, Predictor], what: str) -> None:
    job, predictor = asked
    try:
        larger = LARGER[what](job)
    except JobError:
        assume(False)
        raise
    seconds = predict(job, predictor).iteration_time_s
    assert predict(larger, predictor).iteration_time_s >= seconds * (1 - MOST_GAIN)
