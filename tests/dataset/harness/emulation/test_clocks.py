"""Virtual times of streams, events and waits."""

from __future__ import annotations

from typing import Any

import harness_jobs as jobs
import pytest
import torch

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.emulation.clocks import TELLING_S, HostLine, Stream, VirtualClock, ended, followed
from stepsight.dataset.harness.emulation.stand_in import table_of_delays
from stepsight.dataset.harness.plan.plan_checks import check_plan, ranks_needed

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
    assert [end.result() for end in ends] == pytest.approx([3, 6], abs=HOST)
    clock.sleep(4)
    line.wait(ends[0])
    assert clock.now() == pytest.approx(4, abs=HOST)
    line.wait(ends[1])
    assert clock.now() == pytest.approx(6, abs=HOST)
    assert line.issue(1, None).result() == pytest.approx(7, abs=HOST)


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


def row(num_bytes: int, seconds: float, kind: str = "all_reduce", size: int = 8) -> dict[str, Any]:
    return {"kind": kind, "num_bytes": num_bytes, "group_size": size, "ranks_per_node": size, "seconds": seconds}


def test_between_sizes_log_linear_and_beyond_them_in_proportion() -> None:
    delay = table_of_delays(
        [row(10_000, 9e-3), row(100, 1e-3), row(100, 5.0, size=4), row(100, 7.0, kind="all_gather")]
    )
    sizes = (100, 1_000, 10_000, 50, 20_000)
    assert [delay("all_reduce", n, 8, 8) for n in sizes] == pytest.approx([1e-3, 3e-3, 9e-3, 5e-4, 18e-3])
    assert delay("all_gather", 100, 8, 8) == 7.0


def test_a_collective_that_the_table_does_not_tell_is_refused() -> None:
    with pytest.raises(HarnessError, match="got no send_recv of 2 ranks, 1 on each node"):
        table_of_delays([row(100, 1e-3)])("send_recv", 100, 2, 1)


def test_a_stand_in_needs_one_process_whatever_its_job() -> None:
    """A collection may hold plain runs beside them."""
    plain = jobs.run("plain", jobs.job(tp=2))
    stand_in = {
        **jobs.run("large", jobs.job({"vocab": 512}, micro_batch=1, dp=8)),
        "stand_in": {"rank": 7, "collectives": []},
    }
    plan = check_plan(jobs.plan([plain, stand_in]))
    assert [ranks_needed(run) for run in plan["runs"]] == [2, 1]


@pytest.mark.parametrize(
    ("stand_in", "message"),
    [
        (3, "stand_in is a table of rank and collectives, got 3"),
        ({"rank": 0}, r"stand_in is a table of rank and collectives, got \['rank'\]"),
        ({"rank": 8, "collectives": []}, "stand_in.rank must be one of the job's 8 ranks, got 8"),
        ({"rank": True, "collectives": []}, "stand_in.rank must be one of the job's 8 ranks, got True"),
        ({"rank": 0, "collectives": {}}, "stand_in.collectives must be a list, got {}"),
        ({"rank": 0, "collectives": [{"kind": "all_reduce"}]}, "a collective of a stand-in has kind, num_bytes"),
        ({"rank": 0, "collectives": [row(0, 1.0)]}, "num_bytes of a stand-in's collective must be .* from 1 .*, got 0"),
        ({"rank": 0, "collectives": [row(2**60, 1.0)]}, "num_bytes of a stand-in's collective must be .*, got 115"),
        ({"rank": 0, "collectives": [row(8, -1.0)]}, "seconds of a stand-in's collective must be .* > 0 .*, got -1"),
        ({"rank": 0, "collectives": [row(8, 1e300)]}, "seconds of a stand-in's .* at most 3600, got 1e"),
        ({"rank": 0, "collectives": [row(8, 1.0, kind="gossip")]}, "must be one of all_reduce, .*, got 'gossip'"),
    ],
)
def test_a_wrong_stand_in_is_refused_with_the_rule(stand_in: Any, message: str) -> None:
    run = {**jobs.run("large", jobs.job(micro_batch=1, dp=8)), "stand_in": stand_in}
    with pytest.raises(HarnessError, match=message):
        check_plan(jobs.plan([run]))


def test_there_is_nothing_to_stand_in_for_in_a_job_of_one_rank() -> None:
    run = {**jobs.run("small", jobs.job()), "stand_in": {"rank": 0, "collectives": []}}
    with pytest.raises(HarnessError, match="a stand-in is for a job of at least 2 ranks, got 1"):
        check_plan(jobs.plan([run]))


def test_spins_follow_the_clock_that_the_device_has_under_load() -> None:
    pace = 2.0e9
    for _ in range(30):
        cycles = round(pace * 5e-4)
        pace = followed(pace, cycles, cycles / 1.5e9)  # it computes beside them, and its clock is lower
    assert pace == pytest.approx(1.5e9, rel=0.01)


def test_short_spins_tell_of_their_launches_rather_than_of_the_clock() -> None:
    assert followed(2.0e9, 1000, 0.9 * TELLING_S) == followed(2.0e9, 0, 0.0) == 2.0e9
