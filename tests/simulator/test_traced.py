"""What is lowered is what runs: the ops and collectives of a real step, signature by signature."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.op import Collective
from stepsight.dataset.program import Program
from stepsight.dataset.trace import read_run
from stepsight.experiments.local_jobs import STRATEGIES
from stepsight.simulator.lowering import lower

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
    """Two layers 64 wide, three micro-batches of two sequences."""
    p = ParallelSpec(**{"dp": 1, **STRATEGIES[strategy]})  # type: ignore[arg-type]
    model = ModelSpec(family=family, layers=2, hidden=64, heads=4, vocab=256, seq_len=16, **FAMILIES[family])
    return Job(
        model=model,
        parallel=p,
        batch=BatchSpec(micro_batch=2, global_batch=6 * p.dp, precision="fp32"),
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
    from stepsight.dataset.harness.launch import collect

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
