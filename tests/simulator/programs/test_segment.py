"""Events that repeat are what they say."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Item
from stepsight.simulator.clock.engine import DATA, SECOND
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.programs.plans import _Gathers
from stepsight.simulator.programs.segment import Segment, SegmentBuilder
from tests.simulator.any_job import devices, jobs
from tests.simulator.conftest import JobMaker


def body(builder: SegmentBuilder, turn: int, since: list[int]) -> None:
    """One turn: ops, a message, another after it, and a wait for the turn before."""
    items: tuple[Item, ...] = (Op("copy", (64,), "fp32"),)
    builder.items(items, "layer{}", turn)
    first = builder.send(Collective("all_gather", 1024, 4, 4), DATA, "sent{}", turn)
    second = builder.send(Collective("all_reduce", 256, 2, 1), SECOND, "sent{}", turn, after=first)
    if since:
        builder.wait(since[-1])
    since.append(second)


def rows(segment: Segment) -> list[tuple[object, ...]]:
    return [(n.name, n.work, n.stream, n.share) for n in segment.program.nodes]


@given(turns=st.integers(1, 6))
def test_repeating_is_writing_it_out(turns: int) -> None:
    """Nodes, names, and who waits for whom."""
    segments = []
    for repeated in (False, True):
        builder, since = SegmentBuilder("forward", compute_share=0.1), []  # type: tuple[SegmentBuilder, list[int]]
        for turn in range(3):  # the last two are alike
            start = builder.num_events
            body(builder, turn, since)
        if repeated:
            builder.repeat(start, turns, 1)
        else:
            for turn in range(turns):
                body(builder, 3 + turn, since)
        segments.append(builder.build())
    one, other = segments
    assert np.array_equal(one.events, other.events)
    assert rows(one) == rows(other)
    assert list(one.program.all_edges()) == list(other.program.all_edges())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(job=jobs(), hardware=devices())
def test_layers_that_are_alike_are_as_one_by_one(job: Job, hardware: Hardware) -> None:
    """FSDP's layers, whatever is gathered ahead: the same programs as if each were written down on its own."""
    with pytest.MonkeyPatch.context() as patch:
        clear_caches()
        patch.setattr(_Gathers, "repeat", lambda self, unit, since, most, step: 0)
        slow = lower(job, hardware)
        clear_caches()
    fast: Lowered = lower(job, hardware)
    assert len(fast.segments) == len(slow.segments)
    for one, other in zip(fast.segments, slow.segments, strict=True):
        assert rows(one) == rows(other)
        assert list(one.program.all_edges()) == list(other.program.all_edges())


def test_a_segment_of_nothing_takes_no_time(make_job: JobMaker, gpu: Hardware) -> None:
    """A stage may have no layer: neither ops, nor gradients to send."""
    low = lower(make_job(pp=3, dp=2, stage_layers=(2, 0, 2)), gpu)
    for label in ("forward", "backward", "optimizer"):
        assert len(low.program(label, 1, 0)) == 0
