"""Event profiling on one rank: what is measured, what is skipped and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepsight.dataset.harness.measuring import op_events, timing
from stepsight.dataset.harness.measuring.op_events import _merge, measure_events
from stepsight.dataset.harness.ops.callables import op_call
from stepsight.dataset.harness.ops.input_pool import Call, Pool

CPU = torch.device("cpu")
OPS = [{"kind": "add", "dims": [size], "dtype": "fp32"} for size in (64, 128, 192)]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(op_events, "measure_facts", lambda *_: {"peak_flops": {"fp32": 1e11}})  # takes a second
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _measure(ops: list[dict[str, Any]]) -> dict[str, Any]:
    event = {"name": "e", "world_size": 1, "ops": ops, "seconds": 0.05}
    return measure_events(event, CPU, lambda *_, **__: None)


def test_every_op_is_measured_once() -> None:
    found = _measure(OPS)
    assert sorted(record["op"]["dims"] for record in found["records"]) == [[64], [128], [192]]
    assert all(set(record) == {"op", "seconds", "min_seconds", "repeats"} for record in found["records"])
    assert set(found["took_seconds"]) == {"facts", "signatures"}
    assert found["skipped"] == []


@pytest.mark.parametrize(
    ("dtype", "text"),
    [("fp8", "dtype must be one of bf16, fp16, fp32, got 'fp8'"), ("tf32", "one of bf16, fp16, fp32, got 'tf32'")],
)
def test_dtypes_of_gpus_are_skipped_elsewhere(dtype: str, text: str) -> None:
    found = _measure([{"kind": "linear", "dims": [16, 16, 16], "dtype": dtype}])
    assert text in found["skipped"][0]["reason"]


@pytest.mark.parametrize(("failures", "measured"), [(1, 3), (2, 2)])
def test_where_memory_runs_out_pools_make_room_and_then_the_op_is_skipped(
    failures: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, cleared = [failures], []

    def scarce(kind: str, dims: list[int], pool: Pool) -> Call:
        if dims == [128] and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB\nand more lines")
        return op_call(kind, dims, pool)

    clear = Pool.clear
    monkeypatch.setattr(op_events, "op_call", scarce)
    monkeypatch.setattr(Pool, "clear", lambda pool: (cleared.append(pool), clear(pool)))
    found = _measure(OPS)
    assert len(found["records"]) == measured
    assert len(cleared) >= failures
    reasons = [skipped["reason"] for skipped in found["skipped"]]
    assert reasons == ["CUDA out of memory. Tried to allocate 1 TiB"] * (3 - measured)


def test_an_op_without_a_kernel_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(kind: str, dims: list[int], pool: Pool) -> Call:
        return Call(lambda: torch.empty(2, 3) @ torch.empty(2, 3))

    monkeypatch.setattr(op_events, "op_call", missing)
    found = _measure(OPS[:1])
    assert "mat1 and mat2 shapes cannot be multiplied" in found["skipped"][0]["reason"]


def test_the_hosts_seconds_are_recorded_where_they_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.Clock, "samples", lambda *_: timing.Samples([3e-6, 5e-6, 4e-6], [2e-5, 1e-5, 9e-5]))
    (record,) = _measure(OPS[:1])["records"]
    assert record["seconds"] == 4e-6
    assert record["host_seconds"] == 2e-5


@pytest.mark.parametrize("kind", ["all_reduce", "send_recv"])
def test_a_collective_takes_as_long_as_its_last_rank(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [[{"collective": {"kind": kind}, "samples": samples}] for samples in ([1.0, 5.0, 9.0], [5.0, 1.0, 1.0])]
    monkeypatch.setattr("stepsight.dataset.harness.measuring.op_events.gather", lambda _: ranks)
    (record,) = _merge(ranks[0])
    assert record["seconds"] == 5.0
    assert record["repeats"] == 3
