"""Training with nothing in fp32: eager PyTorch does what it does in fp32, with every tensor in 16 bits."""

from __future__ import annotations

from dataclasses import replace

from stepsight.dataset.caching import cached
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.specs import PURE
from stepsight.simulator.blocks.step import Beside, Comm, Item, Lost
from stepsight.simulator.lowering.passages import Passage
from stepsight.simulator.lowering.segment import Segment


@cached(512)
def in_full(job: Job) -> Job:
    """The same job in fp32, with buckets of as many elements; a job that is not ``PURE`` as it is."""
    if job.batch.precision not in PURE:
        return job
    wider = replace(job.parallel, bucket_mbytes=2 * job.parallel.bucket_mbytes)
    return replace(job, parallel=wider, batch=replace(job.batch, precision="fp32"))


@cached(4096)
def narrowed_segment(segment: Segment, dtype: str) -> Segment:
    """A segment of fp32 with its ops in a dtype and its messages of half the bytes."""
    passages = tuple(_passage(passage, dtype) for passage in segment.passages)
    return replace(segment, passages=passages, sent=tuple(map(halved, segment.sent)))


def halved(work: Collective) -> Collective:
    """Of half the bytes."""
    return replace(work, num_bytes=work.num_bytes // 2)


@cached(4096)
def _passage(passage: Passage, dtype: str) -> Passage:
    return replace(passage, items=tuple([(_item(item, dtype), name) for item, name in passage.items]))


def _item(item: Item, dtype: str) -> Item:
    if isinstance(item, Op):
        return replace(item, dtype=dtype)
    if isinstance(item, Beside):
        return replace(item, work=replace(item.work, dtype=dtype))
    return replace(item, work=halved(item.work)) if isinstance(item, Comm | Lost) else item
