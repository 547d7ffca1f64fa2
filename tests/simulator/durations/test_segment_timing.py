"""Times of passages and segments: the host that launches, slow ranks, what collectives take from the computation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.hardware.hardware_facts import ONE_LAUNCH, LaunchCalls
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Comm, Item, Join, OverlappedOp
from stepsight.simulator.clock.engine import DATA
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.durations.segment_timing import AS_IT_IS, Slowdown, Timer, _across
from stepsight.simulator.programs.block_pass import BlockPass, items_pass
from stepsight.simulator.programs.segment import Segment, SegmentBuilder

Seconds = NDArray[np.float64]
SUM = Collective("all_reduce", 1000, 4, 4)
ACROSS = Collective("all_reduce", 1000, 4, 2)


class Given:
    """An op takes as many seconds as it has elements; a collective 1 ms for each byte."""

    def __init__(self, hardware: Hardware, knows_context: bool = False) -> None:
        self.hardware = hardware
        self.knows_context = knows_context
        self.calls = ONE_LAUNCH

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return np.array([op.dims[0] for op in ops], dtype=np.float64)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.array([c.num_bytes / 1000 for c in collectives])

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        return seconds


def ops(*seconds: int) -> tuple[Item, ...]:
    return tuple(Op("fill", (each,), "fp32") for each in seconds)


def segment(*, share: float = 0.0, work: Collective = SUM) -> Segment:
    """Ops of 1 and 2 seconds, a collective beside an op of 3, and one more that waits for it."""
    builder = SegmentBuilder("backward", share)
    builder.items(ops(1, 2), "before")
    sent = builder.send(work, DATA, "sent")
    builder.items(ops(3), "beside")
    builder.wait(sent)
    builder.items(ops(1), "after")
    return builder.build()


def host_path(launches: list[float], seconds: list[float]) -> float:
    """The end of ops in a row, each launched at its time and after the one before."""
    end = 0.0
    for launched, each in zip(launches, seconds, strict=True):
        end = max(end, launched) + each
    return end


@given(
    seconds=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    host=st.sampled_from([0.0, 0.5, 4.0]),
    times=st.integers(1, 5),
    knows_context=st.booleans(),
)
def test_the_host_launches_one_op_after_the_other(
    gpu: Hardware, seconds: list[int], host: float, times: int, knows_context: bool
) -> None:
    """An op starts once it is launched and the one before it is over; repeated layers too, with the same host."""
    timer = Timer(Given(replace(gpu, host_op_s=host), knows_context))
    builder = SegmentBuilder("forward")
    builder.run(items_pass(ops(*seconds), "ops"), "layer{}", times=times)
    timed = timer.segment(builder.build())
    all_ops = [float(each) for each in seconds] * times
    expected = host_path([host * (1 + at) for at in range(len(all_ops))], all_ops)
    assert timed.transition[0, 0] == pytest.approx(expected)
    assert timed.host == pytest.approx(expected - sum(all_ops))


@pytest.mark.parametrize("knows_context", [False, True])
def test_the_device_waits_for_blocking_launches(gpu: Hardware, knows_context: bool) -> None:
    """Each op takes its launch as well, however long the host has had."""
    given = Given(replace(gpu, host_op_s=0.5), knows_context)
    given.calls = LaunchCalls(2.0, blocking=True)
    builder = SegmentBuilder("forward")
    builder.items(ops(9, 1, 2), "ops")
    timed = Timer(given).segment(builder.build())
    assert timed.transition[0, 0] == pytest.approx(12 + 3 * 2 * 0.5)
    assert timed.host == pytest.approx(0.0)


def test_the_host_launches_all_streams(gpu: Hardware) -> None:
    """A message beside the computation takes its turn: the op after it is launched third."""
    items: tuple[Item, ...] = (
        *ops(1),
        Comm(SUM, "ep", beside=True),
        *ops(1),
        OverlappedOp(Op("to_host", (5,), "fp32")),
        Join("ep"),
        Join("offload"),
    )
    times = Timer(Given(replace(gpu, host_op_s=2.0))).passage(BlockPass(tuple((item, "", "") for item in items)))
    # Launched at 2, 4, 6, 8: the op ends at 3, the message at 5, the op at 7, and the copy, last, at 13.
    assert times.paths == pytest.approx((7.0, 13.0, 8.0))


@pytest.mark.parametrize(("share", "lost"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("knows_context", [False, True])
def test_what_is_sent_takes_its_share_of_the_computation(
    gpu: Hardware, share: float, lost: float, knows_context: bool
) -> None:
    """The same folded and op by op, and it is not time of the computation's own ops, nor launched."""
    for host in (0.0, 0.1):
        timer = Timer(Given(replace(gpu, host_op_s=host), knows_context))
        timed, whole = timer.segment(segment(share=share)), timer.ops(segment(share=share))
        assert timed.transition == pytest.approx(whole.transition)
        assert timed.transition[0, 0] == pytest.approx(7.0 + lost + host)
        assert timed.by_stream.tolist() == [7.0, 0.0, 0.0, 0.0, 0.0]
    slow_host = Timer(Given(replace(gpu, host_op_s=4.0), knows_context))
    one = segment(share=share)  # launched at 4, 8, 12, 16, 20: an op of 3, the last but one, ends at 19
    assert slow_host.segment(one).transition == pytest.approx(slow_host.ops(one).transition)
    assert slow_host.segment(one).transition[0, 0] == pytest.approx(21.0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("slowdown", [AS_IT_IS, Slowdown(2.0), Slowdown(data=10.0), Slowdown(1.5, 4.0, 3.0)])
@pytest.mark.parametrize("work", [SUM, ACROSS])
def test_slow_segments_are_the_same_folded_or_op_by_op(
    gpu: Hardware, share: float, slowdown: Slowdown, work: Collective
) -> None:
    timer, one = Timer(Given(gpu)), segment(share=share, work=work)
    assert timer.segment(one, slowdown).transition == pytest.approx(timer.ops(one, slowdown).transition)


def test_only_collectives_that_leave_a_node_are_slowed() -> None:
    works = [SUM, ACROSS, Op("fill", (1,), "fp32")]
    assert _across(works, 3.0).tolist() == [1.0, 3.0, 1.0]
    assert _across(works, 1.0).tolist() == [1.0, 1.0, 1.0]


def test_ranks_are_as_they_are_where_nothing_is_said() -> None:
    assert Slowdown() == AS_IT_IS == Slowdown(1.0, 1.0, 1.0, ())


def test_slow_links_slow_what_leaves_a_node(gpu: Hardware) -> None:
    """Ten times 1 s from the end of the second op, if it crosses nodes; beside the op of 3 s, if not."""
    timer, slow = Timer(Given(gpu)), Slowdown(data=10.0)
    assert timer.segment(segment(work=ACROSS), slow).transition[0, 0] == 3 + 10 + 1
    assert timer.segment(segment(work=SUM), slow).transition[0, 0] == 7


def test_slow_ranks_are_slow_at_ops(gpu: Hardware) -> None:
    """Twice 7 s of ops; the collective hides as before."""
    assert Timer(Given(gpu)).segment(segment(), Slowdown(2.0)).transition[0, 0] == 14


def test_mixed_ranks_wait_for_the_slowest_at_every_op(gpu: Hardware) -> None:
    """One device is slow at products, the other at memory: in step they are slower than either."""
    fabric = Fabric("one", Link(1e9, 0.0), Link(1e9, 0.0))
    quick: dict[str, Any] = {"peak_flops": {"fp32": 1e12}, "memory_bandwidth_bytes_per_s": 1e12, "op_latency_s": 0.0}
    here = RooflineLatency(replace(gpu, **{**quick, "peak_flops": {"fp32": 1e11}}), fabric)
    there = RooflineLatency(replace(gpu, **{**quick, "memory_bandwidth_bytes_per_s": 1e11}), fabric)
    builder = SegmentBuilder("forward")
    works = [Op("linear", (512, 512, 512), "fp32"), Op("fill", (10**6,), "fp32")]
    builder.items(works, "ops")
    one = builder.build()
    alone = [latency.op_seconds(works) for latency in (here, there)]
    mixed = Timer(here).segment(one, Slowdown(others=((there, 1.0),))).transition[0, 0]
    assert mixed == pytest.approx(np.maximum(*alone).sum())
    assert Timer(here).segment(one, Slowdown(0.0, others=((there, 1.0),))).transition[0, 0] == pytest.approx(
        alone[1].sum()
    )


def test_what_was_timed_is_remembered(gpu: Hardware) -> None:
    """By identity, and apart for every condition; another timer with other seconds starts anew."""
    timer, one = Timer(Given(gpu)), segment()
    assert timer.segment(one) is timer.segment(one)
    assert timer.segment(one, Slowdown(2.0)) is timer.segment(one, Slowdown(2.0)) is not timer.segment(one)
    assert timer.but({Op("fill", (3,), "fp32"): 30.0}).segment(one).transition[0, 0] == 34
    assert timer.segment(one).transition[0, 0] == 7
