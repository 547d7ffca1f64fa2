"""What is lowered is what runs: the ops and collectives of a real step, signature by signature."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import read_run
from stepsight.experiments.demo.demo import STRATEGIES
from stepsight.simulator.programs.lower import lower
from stepsight.training.measured.planning import make_plan, stand_in_of

T5 = {"encoder_layers": 2, "encoder_seq_len": 24, "fused_attention": False}
FAMILIES: dict[str, dict[str, Any]] = {"gpt": {}, "llama": {}, "bert": {}, "t5": T5}
CASES = {
    1: [("gpt", "single"), ("llama", "single"), ("bert", "single"), ("t5", "single")],
    2: [
        ("llama", "tp2"), ("bert", "tp2"), ("bert", "tp2sp"), ("t5", "tp2"), ("t5", "tp2sp"), ("bert", "pp2"),
        ("bert", "ddp2"), ("t5", "ddp2"), ("bert", "fsdp2"), ("t5", "fsdp2"),
    ],
}  # fmt: skip


def _job(family: str, strategy: str) -> Job:
    return _parallel_job(family, STRATEGIES[strategy])


def _parallel_job(family: str, parallel: dict[str, Any]) -> Job:
    """Layers 64 wide, two or as many as stages, and as many micro-batches of two sequences, three at least."""
    p = ParallelSpec(**{"dp": 1, **parallel})
    layers, micro_batches = max(2, p.pp), max(3, p.pp)
    model = ModelSpec(family=family, layers=layers, hidden=64, heads=4, vocab=256, seq_len=16, **FAMILIES[family])
    return Job(
        model=model,
        parallel=p,
        batch=BatchSpec(micro_batch=2, global_batch=2 * micro_batches * p.dp, precision="fp32"),
        cluster=ClusterSpec(hardware="local-cpu", devices_per_node=p.tp * p.pp * p.dp, fabric="loopback"),
    )


def _works(program: Program) -> Counter[tuple[str, str]]:
    """Signatures by stream; messages between stages belong to no segment of the lowering."""
    works = [(node.stream, node.work) for node in program.nodes]
    return Counter((s, str(w)) for s, w in works if not (isinstance(w, Collective) and w.kind == "send_recv"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_family_runs_the_ops_that_are_lowered(ranks: int, cpu: Hardware, tmp_path: Path) -> None:
    if ranks > len(os.sched_getaffinity(0)):
        pytest.skip(f"needs {ranks} cores")
    from stepsight.dataset.harness.running.launch import collect

    jobs = {f"{family}-{strategy}": _job(family, strategy) for family, strategy in CASES[ranks]}
    counts = {"rounds": 1, "steps": 1, "warmup": 2, "profile_steps": 2}
    runs = [{"name": name, "role": "train", "job": job.to_dict(), **counts} for name, job in jobs.items()]
    collect({"schema": 1, "runs": runs, "events": []}, tmp_path / "out", progress=False)
    for name, job in jobs.items():
        lowered = lower(job, cpu)
        segments = read_run(tmp_path / "out" / "runs" / name).segments()
        assert {segment.stage for segment in segments} == set(range(job.parallel.pp))
        for segment in segments:
            expected = lowered.program(segment.label, segment.stage, segment.micro_batch)
            assert _works(segment.program) == _works(expected), (name, segment.label, segment.micro_batch)


MIXED = [("gpt", "ddp2"), ("llama", "fsdp2"), ("llama", "tp2sp"), ("gpt", "pp2")]


def test_mixed_precision_runs_the_ops_that_are_lowered(cpu: Hardware, tmp_path: Path) -> None:
    """In their types: products and activations in bf16, gradients, the loss and the step in fp32.

    Parameters are cast where they are used, and their gradients back.  What FSDP casts and copies is left out: traces
    do not tell the types of lists of tensors.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs 2 cores")
    from stepsight.dataset.harness.running.launch import collect

    jobs = {f"{family}-{strategy}": _mixed(_job(family, strategy)) for family, strategy in MIXED}
    counts = {"rounds": 1, "steps": 1, "warmup": 2, "profile_steps": 2}
    runs = [{"name": name, "role": "train", "job": job.to_dict(), **counts} for name, job in jobs.items()]
    collect({"schema": 1, "runs": runs, "events": []}, tmp_path / "out", progress=False)
    for name, job in jobs.items():
        lowered = lower(job, cpu)
        for segment in read_run(tmp_path / "out" / "runs" / name).segments():
            expected = lowered.program(segment.label, segment.stage, segment.micro_batch)
            works = _but_copies if job.parallel.zero_stage == 3 else _works
            assert works(segment.program) == works(expected), (name, segment.label)


def _mixed(job: Job) -> Job:
    execution = replace(job.execution, engine="eager-pytorch")
    return replace(job, batch=replace(job.batch, precision="bf16"), execution=execution)


def _but_copies(program: Program) -> Counter[tuple[str, str]]:
    return Counter({key: count for key, count in _works(program).items() if not key[1].startswith(("copy[", "cast["))})


SIGNATURE = ("kind", "num_bytes", "group_size", "ranks_per_node")
STAND_INS = [  # family, rank, strategy
    ("gpt", 5, {"dp": 8, "bucket_mbytes": 0.05}),
    ("llama", 3, {"dp": 8, "zero_stage": 3}),
    ("gpt", 1, {"tp": 4}),
    ("llama", 2, {"tp": 4, "sequence_parallel": True}),
    *[("gpt", stage, {"pp": 4}) for stage in (0, 1, 3)],
    ("gpt", 9, {"tp": 2, "pp": 3, "dp": 3}),
    ("llama", 11, {"tp": 2, "pp": 3, "dp": 2, "sequence_parallel": True}),
    ("gpt", 27, {"tp": 2, "dp": 16, "zero_stage": 3}),
]


def test_a_stand_in_runs_the_ops_that_are_lowered(cpu: Hardware, tmp_path: Path) -> None:
    """One process does what a rank of a job does that this machine could not hold; its collectives tell their time.

    A collection holds them beside plain runs.
    """
    from stepsight.dataset.harness.running.launch import collect

    counts = {"rounds": 1, "steps": 1, "warmup": 2, "profile_steps": 2}
    jobs = [(_parallel_job(family, p), rank) for family, rank, p in STAND_INS]
    runs: list[tuple[str, Job, dict[str, Any]]] = [
        ("train", job, {**counts, "stand_in": stand_in_of(job, rank)}) for job, rank in jobs
    ]
    runs.insert(1, ("train", _job("gpt", "single"), counts))
    plan = make_plan(runs, event_seconds=0)
    collect(plan, tmp_path / "out", progress=False)
    plain = plan["runs"].pop(1)
    assert read_run(tmp_path / "out" / "runs" / plain["name"]).manifest.stand_in is None
    for (job, rank), planned in zip(jobs, plan["runs"], strict=True):
        trace = read_run(tmp_path / "out" / "runs" / planned["name"])
        assert (trace.manifest.stand_in, trace.manifest.world_size, trace.manifest.busy) == (rank, 1, 1)
        assert all(map(math.isfinite, trace.manifest.losses))
        stage = rank // (job.parallel.tp * job.parallel.dp)
        assert bool(trace.manifest.losses) == (stage == job.parallel.pp - 1)
        lowered, rows = lower(job, replace(cpu, comm_compute_share=0.0)), planned["stand_in"]["collectives"]
        told = {Collective(*(row[k] for k in SIGNATURE)): row["seconds"] for row in rows}
        segments = trace.segments()
        assert {segment.label for segment in segments} == {"forward", "backward", "optimizer"}
        for segment in segments:
            assert (segment.rank, segment.stage) == (rank, stage)
            expected = lowered.program(segment.label, stage, segment.micro_batch)
            assert _works(segment.program) == _works(expected), (planned["name"], segment.label, segment.micro_batch)
        for node, seconds in zip(trace.ranks[0].program.nodes, trace.ranks[0].duration_s, strict=True):
            if isinstance(node.work, Collective):
                assert seconds > 0.99 * told[node.work]
