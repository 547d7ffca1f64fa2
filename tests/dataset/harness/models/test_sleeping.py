"""Computation that is slept, between parameters and activations that are real."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.base import annotate
from stepsight.dataset.harness.models import sleeping
from stepsight.dataset.harness.models.parallel import end_groups, parts_of_stage
from stepsight.dataset.harness.models.sleeping import Block, Part, Rank, SleepingTraining
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.runs.run_manifest import HARDWARE, read_box
from stepsight.training.measured.planning import SleepingLatency, box_plan

NO_GROUPS = dict.fromkeys(("tp", "dp", "pp", "cp", "ep"))


def _op(kind: str, seconds: float) -> list[Any]:
    return ["op", kind, [8], "fp32", seconds]


def _step(**changes: Any) -> dict[str, Any]:
    step = {"forward": [], "backward": [], "weight": [], "parameters": [], "weight_first": False}
    return {**step, **changes}


class _Watched(Rank):
    """Notes what is done instead of sleeping."""

    def __init__(self) -> None:
        super().__init__(None)
        self.done: list[str] = []

    def do(self, items: Any) -> None:
        self.done += [item[1] for item in items]


def _seconds(device: Rank, ops: list[float]) -> float:
    start = time.perf_counter()
    device.begin()
    for seconds in ops:
        device.compute(seconds)
    device.finish()
    return time.perf_counter() - start


def test_ops_follow_one_another_whatever_the_host_does_between_them() -> None:
    """Short ops are slept together: each is as long as it is said, and so are all of them."""
    assert _seconds(Rank(NO_GROUPS), [0.02, 0.03]) >= 0.05
    assert _seconds(Rank(NO_GROUPS), [0.001] * 40) >= 0.04


def test_the_host_runs_ahead_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    device, slept = Rank(NO_GROUPS), []
    monkeypatch.setattr(sleeping.time, "sleep", slept.append)
    device.begin()
    device.compute(200.0)
    assert slept == []
    device.finish()
    assert slept == [pytest.approx(200.0, abs=60.0)]


def test_a_pace_changes_every_sleep() -> None:
    device = Rank(NO_GROUPS)
    device.pace = 3.0
    assert _seconds(device, [0.02]) >= 0.06


def test_a_segment_ends_when_the_device_is_done() -> None:
    rank, spans = Rank(NO_GROUPS), []
    with annotate.noting(spans), rank.segment("forward", 2, 1):
        rank.do([_op("gelu", 0.004)])
    ((label, stage, micro_batch, start, end),) = spans
    assert (label, stage, micro_batch) == ("forward", 1, 2)
    assert end - start >= 0.004


@pytest.mark.parametrize("weight_first", [False, True])
def test_a_block_goes_back_in_the_order_that_its_steps_say(weight_first: bool) -> None:
    """Steps backwards, and in each the input's gradient before or after the weights'; these have their sizes."""
    rank = _Watched()
    steps = [
        _step(forward=[_op("f0", 1)], backward=[_op("b0", 1)]),
        _step(
            forward=[_op("f1", 1)], backward=[_op("b1", 1)], weight=[_op("w1", 1)],
            parameters=[6, 2], weight_first=weight_first,
        ),
    ]  # fmt: skip
    block = Block(rank, steps)
    block(torch.zeros(1, 1, requires_grad=True)).sum().backward()
    assert rank.done == ["f0", "f1", *(["w1", "b1"] if weight_first else ["b1", "w1"]), "b0"]
    assert [tuple(weight.grad.shape) for weight in block.weights] == [(6,), (2,)]


def test_a_part_takes_and_passes_activations_of_their_size() -> None:
    sleeps = {
        "parts": [[0], [1, 0]],
        "blocks": [[_step()], [_step(parameters=[3])]],
        "root": [1],
        "boundary_numel": [12],
    }
    first, last = (Part(Rank(NO_GROUPS), sleeps, number) for number in (0, 1))
    passed = first(torch.zeros(1, 1))
    assert tuple(passed.shape) == (1, 12)
    received = passed.detach().requires_grad_()
    loss = last(received)
    assert tuple(loss.shape) == (1, 1) and last.wrapped == [last.layers[1]]
    loss.sum().backward()
    assert received.grad is not None and tuple(received.grad.shape) == (1, 12)


@pytest.mark.parametrize(
    ("schedule", "chunks", "parts"),
    [("1f1b", 1, [1]), ("1f1b", 2, [1, 5]), ("zbv", 2, [1, 6]), ("dualpipev", 2, [1, 6]), ("looped-bfs", 3, [1, 5, 9])],
)
def test_a_stage_holds_its_parts(schedule: str, chunks: int, parts: list[int]) -> None:
    assert parts_of_stage({"pp": 4, "virtual_stages": chunks, "schedule": schedule}, 1) == parts


@pytest.fixture
def fake_world() -> Iterator[None]:
    """This process is the first of two, which never answer."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("parallel", [ParallelSpec(dp=2), ParallelSpec(tp=2)], ids=["ddp", "tp"])
def test_nothing_is_left_of_a_run(parallel: ParallelSpec) -> None:
    """Neither its model nor its process groups, whose threads would wake for ever."""
    box, hardware = read_box("2x1@200mbit"), find_hardware(HARDWARE)
    assert hardware is not None
    model = ModelSpec(family="gpt", layers=1, hidden=32, heads=2, vocab=64, seq_len=8)
    cluster = ClusterSpec(hardware=HARDWARE, nodes=2, devices_per_node=1, fabric=box.fabric)
    batch = BatchSpec(micro_batch=1, global_batch=2, precision="fp32")
    job = Job(model=model, parallel=parallel, batch=batch, cluster=cluster)
    plan = box_plan(box, [("run", "train", job, {})], SleepingLatency(hardware, box.links))
    groups = len(dist.distributed_c10d._world.pg_map)
    training = SleepingTraining(plan["runs"][0], torch.device("cpu"))
    assert len(dist.distributed_c10d._world.pg_map) > groups
    seen, mesh = weakref.ref(training), training.mesh
    del training
    end_groups(mesh)
    assert seen() is None
    assert len(dist.distributed_c10d._world.pg_map) == groups
