"""One process in the place of a rank: what its collectives do, and what time they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness_jobs as jobs
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stepsight.dataset.harness.base import annotate
from stepsight.dataset.harness.base.collective_calls import all_gather, gather, reduce_scatter
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.emulation import stand_in
from stepsight.dataset.harness.emulation.clocks import VirtualClock
from stepsight.dataset.harness.models.parallel import Training

CPU = torch.device("cpu")
OWN_S = 0.1  # seconds of what a test itself may compute
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
GROUPS = ((2, 1), (2, 2), (4, 4), (8, 4), (8, 8))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process, as a collection has it."""
    annotate.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _run(job: dict[str, Any], rank: int, seconds_per_mb: float) -> dict[str, Any]:
    """A run whose collectives take so long for each million bytes."""
    rows = [
        {"kind": kind, "num_bytes": 10**6, "group_size": size, "ranks_per_node": near, "seconds": seconds_per_mb}
        for kind in KINDS
        for size, near in GROUPS
    ]
    return {"job": job, "stand_in": {"rank": rank, "collectives": rows}}


def _job(model: dict[str, Any] | None = None, micro_batch: int = 1, **parallel: Any) -> dict[str, Any]:
    """Eight sequences for each replica."""
    job = jobs.job({"layers": 4, **(model or {})}, micro_batch, **parallel)
    job["batch"]["global_batch"] *= job["parallel"]["dp"]
    return job


def _steps(run: dict[str, Any], count: int, of: Callable[[Training], Any]) -> list[Any]:
    """What some steps give."""
    with stand_in.world(run, CPU):
        training = Training(run["job"], CPU)
        return [of(training) for _ in range(count)]


def _seconds(training: Training) -> float:
    begin = time.perf_counter()
    training.step()
    return time.perf_counter() - begin


@pytest.mark.parametrize(
    ("rank", "parallel"),
    [
        (7, {"dp": 8}),
        (3, {"dp": 8, "zero_stage": 3}),
        (1, {"tp": 4, "sequence_parallel": True}),
        (2, {"pp": 4}),
        (3, {"pp": 4, "schedule": "gpipe"}),
        (13, {"tp": 2, "pp": 2, "dp": 4}),
        (11, {"pp": 2, "dp": 8, "zero_stage": 3, "schedule": "gpipe"}),
    ],
)
def test_every_strategy_trains_as_one_of_its_ranks(rank: int, parallel: dict[str, Any]) -> None:
    """Torch's own DDP, FSDP2 and pipelines: values stay finite, and afterwards the world is what it was."""

    def look(training: Training) -> tuple[int, int, float, bool]:
        loss = float(training.step())
        return (
            dist.get_rank(),
            dist.get_world_size(),
            loss,
            all(p.isfinite().all() for p in training.model.parameters()),
        )

    job = _job(**parallel)
    found = _steps(_run(job, rank, 1e-6), 3, look)
    ranks = math.prod(job["parallel"][axis] for axis in ("tp", "pp", "dp"))
    assert {(at, of) for at, of, _, _ in found} == {(rank, ranks)}
    assert all(math.isfinite(loss) and finite for _, _, loss, finite in found)
    last = rank >= ranks - ranks // job["parallel"]["pp"]
    assert (found[-1][2] > 0) == last
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)


def test_collectives_do_what_concerns_this_rank() -> None:
    with stand_in.world(_run(_job(dp=4), 2, 1e-6), CPU):
        assert gather("me") == ["me"]  # who measures is one process
        one = torch.arange(3.0)
        full = torch.empty(12)
        all_gather(full, one, dist.group.WORLD)
        assert full.tolist() == [0, 1, 2] * 4
        parts = torch.arange(12.0)
        all_gather(parts, parts[6:9], dist.group.WORLD)  # as FSDP2 does it: in place
        assert parts.tolist() == [6, 7, 8] * 4
        reduce_scatter(one, torch.arange(12.0), dist.group.WORLD)
        assert one.tolist() == [6, 7, 8]
        dist.all_reduce(one)
        assert one.tolist() == [6, 7, 8]
        received = torch.zeros(1000, requires_grad=True)
        dist.irecv(received, 1).wait()
        first = received.detach().clone()
        dist.irecv(received, 1).wait()
        assert 0.01 < first.std() < 0.03
        assert received.equal(first)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Virtual time: what another process does to this machine is no matter."""
    clock = VirtualClock()
    monkeypatch.setattr(stand_in, "HostClock", lambda: clock)
    return clock


def test_collectives_follow_one_another_without_holding_up_who_issues(clock: VirtualClock) -> None:
    """Two sums on one link take twice as long as one; a message takes its own link beside them."""
    tensor = torch.zeros(250_000)  # a million bytes
    with stand_in.world(_run(_job(tp=4), 0, 5.0), CPU):
        begin = clock.now()
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
        works += [dist.isend(tensor, 1), dist.irecv(tensor.clone(), 1)]
        assert clock.now() - begin == pytest.approx(0, abs=OWN_S)
        for work, end in zip((works[2], works[3], works[0], works[1]), (5, 5, 5, 10), strict=True):
            work.wait()
            assert clock.now() - begin == pytest.approx(end, abs=OWN_S)
        futures = [dist.group.WORLD.allreduce([tensor]).get_future() for _ in range(2)]
        again = clock.now()
        assert [future.wait()[0].shape for future in futures] == [tensor.shape] * 2
        assert clock.now() - again == pytest.approx(10, abs=OWN_S)


def test_a_collective_takes_its_time_on_the_real_clock() -> None:
    tensor = torch.zeros(250_000)
    with stand_in.world(_run(_job(tp=4), 0, 0.02), CPU):
        for end in (lambda work: work.wait(), lambda work: work.get_future().wait()):
            begin = time.perf_counter()
            end(dist.all_reduce(tensor, async_op=True))
            assert time.perf_counter() - begin >= 0.02


def test_groups_that_span_nodes_take_their_own_time() -> None:
    """Ranks of the job's cluster share nodes in their order; DDP's groups of a tensor-parallel job stride over them."""
    job = _job(dp=8)
    job["cluster"] |= {"nodes": 2, "devices_per_node": 4}
    run = _run(job, 0, 1e-6)
    run["stand_in"]["collectives"] = [r for r in run["stand_in"]["collectives"] if r["ranks_per_node"] == 4]
    assert len(_steps(run, 1, _seconds)) == 1
    job["cluster"] |= {"nodes": 1, "devices_per_node": 8}
    with pytest.raises(HarnessError, match="got no all_reduce of 8 ranks, 8 on each node"):
        _steps(run, 1, _seconds)


class _Slow(torch.autograd.Function):
    """A second of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: VirtualClock) -> torch.Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.sleep(1.0)
        return grad, None


class _Layer(torch.nn.Module):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.weight = torch.nn.Parameter(torch.zeros(250_000))  # a million bytes: half a bucket

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x, self.clock) + self.weight.mean()


def test_ddp_hides_communication_behind_backward_until_there_is_too_much_of_it(clock: VirtualClock) -> None:
    """The step is flat while gradients are reduced beside the computation, and then grows with slope 1.

    Two weights fill a bucket; a layer's weight has its gradient before its second of backward.  So the sums can start
    after 1, 3, 5 and 7 of the 8 seconds.
    """

    def step_s(communication_s: float) -> float:
        with stand_in.world(_run(_job(dp=8), 5, communication_s / 8), CPU):
            layers = torch.nn.Sequential(*(_Layer(clock) for _ in range(8)))
            model = DistributedDataParallel(layers, bucket_cap_mb=1, gradient_as_bucket_view=True)
            for _ in range(3):
                begin = clock.now()
                model(torch.zeros(1, requires_grad=True)).sum().backward()
            return clock.now() - begin

    assert [step_s(each) for each in (1e-6, 4, 16, 24)] == pytest.approx([8, 8, 1 + 16, 1 + 24], abs=OWN_S)
