"""A traced step beside the program of its job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import COLLECTIVE, OP, Program
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.read_rank import read_rank
from stepsight.experiments.questions.job_check import check_job, compare, comparison_text, lowered_works, stage_of
from stepsight.simulator.programs.lower import lower
from tests.dataset.traced_jobs import GpuJob

JOB = Job.from_dict(
    {
        "model": {"family": "gpt", "layers": 4, "hidden": 64, "heads": 2, "vocab": 128, "seq_len": 32},
        "parallel": {"tp": 2, "pp": 2, "dp": 1, "schedule": "1f1b"},
        "batch": {"micro_batch": 1, "global_batch": 4, "precision": "fp32"},
        "cluster": {"hardware": "local-cpu", "nodes": 1, "devices_per_node": 4, "fabric": "loopback"},
    }
)


def traced_as_lowered(tmp_path: Path, rank: int) -> Program:
    """A graph whose step holds just what the job lowers to."""
    works = lowered_works(lower(JOB, HARDWARE["local-cpu"]), stage_of(JOB, rank))
    own = [work for work, count in works.items() for _ in range(count)]
    start = np.linspace(0.0, 1.0, len(own), endpoint=False)
    numbers = {work: number for number, work in enumerate(works)}
    graph = read_rank(GpuJob().step(1).file.write(tmp_path / "trace.json"))
    nodes = {name: np.full(len(own), -1, dtype=np.int64) for name in graph.columns}
    nodes |= {"step": np.zeros(len(own), np.int64), "stream": np.zeros(len(own), np.int64)}
    nodes["work"] = np.array([numbers[work] for work in own])
    nodes["kind"] = np.array([OP if isinstance(work, Op) else COLLECTIVE for work in own])
    nodes["known"], nodes["name"] = np.ones(len(own), np.int64), np.zeros(len(own), np.int64)
    edges = {name: np.zeros(0, np.int64) for name in graph.edge_columns}
    graph = graph.replace(
        columns=nodes, edge_columns=edges, delay_s=np.zeros(0), works=tuple(works), steps_s=np.eye(1, 2, 1)
    )
    graph = graph.replace(start_s=start, duration_s=np.full(len(own), 1e-4), unrecorded_s=np.zeros(len(own)))
    return graph.replace(rank=rank, world_size=4, device="cpu", device_name="cpu")


def test_a_step_as_lowered_has_no_differences(tmp_path: Path) -> None:
    told = compare(JOB, [traced_as_lowered(tmp_path, 0), traced_as_lowered(tmp_path, 2)])
    assert told["alike_percent"] == pytest.approx(100) and [each["stage"] for each in told["stages"]] == [0, 1]
    assert not any(each["differences"] for each in told["stages"])
    kinds = {row["kind"]: row for row in told["stages"][0]["kinds"]}
    assert kinds["send_recv"]["traced"] == kinds["send_recv"]["lowered"] == 8  # four micro-batches there and back
    assert "no differences" in comparison_text(told)


def test_differences_are_named_by_kind_and_dims(tmp_path: Path) -> None:
    graph = traced_as_lowered(tmp_path, 0)
    wider = tuple(
        replace(work, dims=(work.dims[0], 2 * work.dims[1], work.dims[2]))
        if isinstance(work, Op) and work.kind == "linear"
        else work
        for work in graph.works
        if work.kind != "gelu"
    )
    kept = np.array([graph.works[number].kind != "gelu" for number in graph.columns["work"]])
    names = [work for work in graph.works if work.kind != "gelu"]
    moved = np.array([names.index(graph.works[number]) for number in graph.columns["work"][kept]])
    nodes = {name: values[kept] for name, values in graph.columns.items()} | {"work": moved}
    changed = graph.replace(columns=nodes, works=wider, start_s=graph.start_s[kept], duration_s=graph.duration_s[kept])
    whats = Counter(each["what"] for each in compare(JOB, [changed])["stages"][0]["differences"])
    assert whats["missing"] == 1 and whats["dims"] >= 1 and not whats["extra"]


def test_another_jobs_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the job has 4 devices"):
        check_job(JOB, [read_rank(GpuJob().step(1).file.write(tmp_path / "trace.json"))])
