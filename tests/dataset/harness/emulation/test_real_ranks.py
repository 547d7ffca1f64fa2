"""Several real ranks of an emulated world: they exchange values, and begin together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.emulation.clocks import VirtualClock
from stepsight.dataset.harness.emulation.stand_in import RealRanksGroup, World

RANKS, REAL = [0, 2, 4, 6], [2, 6]  # of the job: places 1 and 3 of the group are real
HOST = 0.2  # seconds that the test itself may compute


def _second(kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
    """Every collective takes a second."""
    return 1.0


def _together(act: Callable[[RealRanksGroup, VirtualClock], Any]) -> list[Any]:
    """What both real ranks give, each on a thread and a clock of its own."""
    store = dist.HashStore()

    def run(place: int) -> Any:
        clock = VirtualClock()
        world = World(_second, 8, torch.device("cpu"), clock, real=REAL, store=store)
        return act(RealRanksGroup(place, RANKS, "test", world), clock)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, (1, 3)))


def _options(kind: Any, **values: Any) -> Any:
    found = kind()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def test_sums_are_over_real_ranks() -> None:
    def act(group: RealRanksGroup, clock: VirtualClock) -> list[Any]:
        total, largest, mean = (torch.full((2,), float(group.rank())) for _ in range(3))
        group.allreduce([total]).wait()
        group.allreduce([largest], _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)).wait()
        group.allreduce([mean], _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)).wait()
        shard = torch.zeros(1)
        group.reduce_scatter_single(shard, torch.arange(4.0)).wait()
        return [total.tolist(), largest.tolist(), mean.tolist(), shard.item()]

    assert _together(act) == [[[4, 4], [3, 3], [2, 2], 2 * place] for place in (1, 3)]


def test_gathers_hold_own_values_where_no_rank_runs() -> None:
    def act(group: RealRanksGroup, clock: VirtualClock) -> list[Any]:
        own = float(group.rank())
        full, rows = torch.zeros(4), torch.zeros(4)
        group.all_gather_single(full, torch.tensor([own])).wait()
        group.all_to_all_single(rows, torch.arange(4.0) + 10 * own, [], [], None).wait()
        root = torch.tensor([own])
        group.broadcast([root], _options(dist.BroadcastOptions, rootRank=3)).wait()
        return [full.tolist(), rows.tolist(), root.item()]

    first, last = _together(act)
    assert first == [[1, 1, 1, 3], [10, 11, 12, 31], 3]
    assert last == [[3, 1, 3, 3], [30, 13, 32, 33], 3]


def test_messages_pass_between_real_ranks() -> None:
    def act(group: RealRanksGroup, clock: VirtualClock) -> float:
        peer = 4 - group.rank()
        sent, got = torch.tensor([float(group.rank())]), torch.zeros(1)
        works = [group.send([sent], peer), group.recv([got], peer)]
        for work in works:
            work.wait()
        return got.item()

    assert _together(act) == [3, 1]


def test_a_collective_begins_when_the_last_rank_has_issued_it() -> None:
    """Rank 3 computes for 5 seconds; both are through 1 second later, and a second collective follows the first."""

    def act(group: RealRanksGroup, clock: VirtualClock) -> tuple[float, float]:
        if group.rank() == 3:
            clock.sleep(5)
        works = [group.allreduce([torch.ones(1)]) for _ in range(2)]
        works[0].wait()
        first = clock.now()
        future = works[1].get_future()
        future.wait()
        return first, clock.now()

    for first, second in _together(act):
        assert first == pytest.approx(6, abs=HOST)
        assert second == pytest.approx(7, abs=HOST)


def test_different_collectives_are_refused() -> None:
    def act(group: RealRanksGroup, clock: VirtualClock) -> str:
        with pytest.raises(HarnessError) as caught:
            group.allreduce([torch.ones(group.rank())]).wait()
        return str(caught.value)

    assert "rank 2 calls all_reduce of 4 bytes in a group of 4 and rank 6 calls all_reduce of 12" in _together(act)[0]
