"""Captured steps are timed by the dependencies of their graphs: closed forms of small ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.graph.program import COLLECTIVE, EDGE_COLUMNS, NODE_COLUMNS, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.hardware.hardware import find_fabric, find_hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.replay.captured_step import time_captured

WORK = Op("add", (1 << 26,), "bf16")
SUM = Collective("all_reduce", 1 << 28, 16, 8)
MESSAGE = Collective("send_recv", 1 << 26, 2, 1)


def latency() -> RooflineLatency:
    hardware = find_hardware("h100-sxm-80gb")
    assert hardware is not None
    plain = replace(hardware, host_op_s=0.0, host_kinds_s={}, comm_compute_share=0.0)
    return RooflineLatency(plain, find_fabric("dgx-h100"))


def graph(rank: int, works: list[tuple[Op | Collective, int]], edges: list[tuple[int, int]]) -> Program:
    """Nodes with their streams, and who waits for whom."""
    count = len(works)
    columns = {name: np.zeros(count, dtype=np.int64) for name in NODE_COLUMNS}
    columns["kind"] = np.array([OP if isinstance(work, Op) else COLLECTIVE for work, _ in works])
    columns["stream"] = np.array([stream for _, stream in works])
    columns["work"] = np.arange(count)
    columns["group"] = np.where(columns["kind"] == COLLECTIVE, 0, -1)
    columns["seq"] = np.where(columns["kind"] == COLLECTIVE, 0, -1)
    table = np.array([(*edge, WHY_NUMBER[Dependency.DATA]) for edge in edges], dtype=np.int64).reshape(-1, 3)
    return Program.of_columns(
        rank=rank,
        world_size=16,
        columns=columns,
        edge_columns=dict(zip(EDGE_COLUMNS, table.T, strict=True)),
        streams=("compute", "dp"),
        names=("op",),
        works=tuple(work for work, _ in works),
        groups=(("pp", (0, 1)),),
    )


def test_a_reduction_is_hidden_until_the_computation_waits_for_it() -> None:
    asked = latency()
    op, comm = asked.op_seconds([WORK])[0], asked.collective_seconds([SUM])[0]
    works: list[tuple[Op | Collective, int]] = [(WORK, 0), (SUM, 1), (WORK, 0), (WORK, 0)]
    step = time_captured([graph(0, works, [(0, 1), (0, 2), (2, 3), (1, 3)])], asked)
    assert step.iteration_time_s == pytest.approx(op + max(comm, op) + op)
    assert sum(step.breakdown.values()) == pytest.approx(step.iteration_time_s)


def test_a_receiver_waits_for_the_sender() -> None:
    asked = latency()
    op, message = asked.op_seconds([WORK])[0], asked.collective_seconds([MESSAGE])[0]
    sender = graph(0, [(WORK, 0), (WORK, 0), (MESSAGE, 1)], [(0, 1), (1, 2)])
    receiver = graph(1, [(MESSAGE, 1), (WORK, 0)], [(0, 1)])
    step = time_captured([sender, receiver], asked)
    assert step.iteration_time_s == pytest.approx(3 * op + message)
    assert step.breakdown["bubble"] == pytest.approx((2 * op + op) / 2)


def test_the_host_launches_one_after_the_other() -> None:
    asked = latency()
    asked.hardware = replace(asked.hardware, host_op_s=1.0)
    step = time_captured([graph(0, [(WORK, 0), (WORK, 0)], [(0, 1)])], asked)
    assert step.iteration_time_s == pytest.approx(2.0 + asked.op_seconds([WORK])[0])
