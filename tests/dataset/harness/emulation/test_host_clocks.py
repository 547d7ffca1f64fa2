"""Virtual times of streams, events and waits."""

from __future__ import annotations

import pytest
import torch

from stepsight.dataset.harness.emulation.clocks import HostLine, Stream, VirtualClock, ended

HOST = 0.05  # what this test itself may compute


def test_streams_overlap_though_one_thread_does_all_the_work() -> None:
    clock = VirtualClock()
    other = Stream(clock)
    with clock.current(other):
        clock.sleep(10)
        done = other.record_event()
        clock.sleep(5)
    clock.sleep(4)
    assert clock.now() == pytest.approx(4, abs=HOST)
    done.wait()
    assert clock.now() == pytest.approx(10, abs=HOST)
    clock.stream.wait_stream(other)
    assert clock.now() == pytest.approx(15, abs=HOST)


def test_collectives_of_a_line_follow_one_another_and_only_waits_cost_time() -> None:
    clock = VirtualClock()
    line = HostLine(clock)
    ends = [line.issue(3, None), line.issue(3, None)]
    assert ends == pytest.approx([3, 6], abs=HOST)
    clock.sleep(4)
    line.wait(ends[0])
    assert clock.now() == pytest.approx(4, abs=HOST)
    line.wait(ends[1])
    assert clock.now() == pytest.approx(6, abs=HOST)
    assert line.issue(1, None) == pytest.approx(7, abs=HOST)


def test_a_future_is_done_at_once_and_costs_time_where_it_is_waited_for() -> None:
    clock = VirtualClock()
    future = clock.future(ended(8), [torch.ones(1)])
    assert future.done()
    assert clock.now() == pytest.approx(0, abs=HOST)
    assert future.wait()[0].item() == 1
    assert clock.now() == pytest.approx(8, abs=HOST)


def test_futures_of_a_backward_pass_are_waited_for_at_its_end() -> None:
    """As DDP does in C++."""
    clock = VirtualClock()
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: clock.future(ended(clock.now() + 9), [grad]) and None)
    (2 * leaf).sum().backward()
    assert clock.now() == pytest.approx(9, abs=HOST)
