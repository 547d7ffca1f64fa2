"""Advice if a job does not fit: the first change that makes it fit, tried from the cheapest in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job


class Need(Protocol):
    """The fields of a memory estimate that advice uses."""

    @property
    def peak_bytes(self) -> float: ...
    @property
    def fits(self) -> bool: ...


def advice(job: Job, peak_bytes: float, estimate: Callable[[Job], Need]) -> str:
    """Advise like ``recompute "selective" would free 12.3 GB``: the first sufficient change, else the one that frees
    most.

    Args:
        job: What does not fit.
        peak_bytes: What it needs.
        estimate: Memory of another job on the same hardware.
    """
    best, most = "", 0.0
    for words, tables in _changes(job):
        try:
            other = estimate(_changed(job, tables))
        except JobError:
            continue
        free = peak_bytes - other.peak_bytes
        if other.fits:
            return f"{words} would free {free / 1e9:.1f} GB, enough"
        if free > most:
            best, most = f"{words} would free {free / 1e9:.1f} GB, not enough alone", free
    return best


def _changes(job: Job) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    p, batch = job.parallel, job.batch
    if p.tp > 1 and not p.sequence_parallel:
        yield "sequence_parallel", {"parallel": {"sequence_parallel": True}}
    if p.zero_stage == 0 and p.dp > 1:
        yield "zero_stage 1", {"parallel": {"zero_stage": 1}}
    if p.recompute == "none":
        yield "recompute selective", {"parallel": {"recompute": "selective"}}
    if p.pp > 1 and p.schedule != "1f1b":
        yield "schedule 1f1b", {"parallel": {"schedule": "1f1b", "virtual_stages": 1, "stage_layers": ()}}
    if batch.micro_batch > 1:
        smaller = max(size for size in range(1, batch.micro_batch) if batch.micro_batch % size == 0)
        yield f"micro_batch {smaller}", {"batch": {"micro_batch": smaller}}
    if p.recompute != "full" or p.recompute_every > 1:
        yield "recompute full", {"parallel": {"recompute": "full", "recompute_every": 1}}
    if p.zero_stage < 3 and p.dp > 1:
        yield "zero_stage 3", {"parallel": {"zero_stage": 3}}
    if not job.optimizer.offload:
        yield "offloading the optimizer", {"optimizer": {"offload": True}}


def _changed(job: Job, tables: dict[str, dict[str, Any]]) -> Job:
    """The job with some values changed."""
    specs = {section: replace(getattr(job, section), **values) for section, values in tables.items()}
    return replace(job, **specs)
