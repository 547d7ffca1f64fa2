"""Pure 16 bits: what is lowered is what runs, half of the bytes of fp32, and its memory that of PyTorch's tracker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.hardware import Hardware, find_hardware
from stepsight.dataset.job import Job
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.run_folder import read_run
from stepsight.experiments.studies.memory_accuracy import tracked_job, tracked_row
from stepsight.simulator.lowering.lower import lower, signatures
from stepsight.simulator.memory import estimate_memory

SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 16, "micro_batch": 2, "micro_batches": 3,
}  # fmt: skip


def _job(precision: str, **changes: Any) -> Job:
    return tracked_job({**SIZES, "precision": precision, **changes})


def test_a_real_step_runs_what_is_lowered(cpu: Hardware, tmp_path: Path) -> None:
    """Signature by signature, optimizer and loss included."""
    from stepsight.dataset.harness.running.launch import collect

    jobs = {family: _job("pure-bf16", family=family) for family in ("gpt", "llama")}
    counts = {"rounds": 1, "steps": 1, "warmup": 2, "profile_steps": 2}
    runs = [{"name": name, "role": "train", "job": job.to_dict(), **counts} for name, job in jobs.items()]
    collect({"schema": 1, "runs": runs, "events": []}, tmp_path / "out", progress=False)
    for name, job in jobs.items():
        lowered = lower(job, cpu)
        for segment in read_run(tmp_path / "out" / "runs" / name).segments():
            expected = lowered.program(segment.label, segment.stage, segment.micro_batch)
            assert sorted(str(node.work) for node in segment.program.nodes) == sorted(
                str(node.work) for node in expected.nodes
            ), (name, segment.label, segment.micro_batch)


def test_ops_and_messages_are_those_of_fp32_in_half_the_bytes() -> None:
    gpu = find_hardware("h200-sxm-141gb")
    assert gpu is not None
    changes = {"tp": 2, "sequence_parallel": True, "dp": 2, "zero_stage": 3}
    ops, messages = signatures(_job("pure-fp16", **changes), gpu)
    full, larger = signatures(_job("fp32", **changes), gpu)
    assert ops == {Op(op.kind, op.dims, "fp16") for op in full}
    assert messages == {replace(message, num_bytes=message.num_bytes // 2) for message in larger}
    assert all(isinstance(message, Collective) for message in messages)


def test_no_name_of_a_mixed_precision_changes() -> None:
    assert {op.dtype for op in signatures(_job("bf16"), find_hardware("h200-sxm-141gb"))[0]} == {"bf16", "fp32"}  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "family": "llama"}, {"tp": 2, "micro_batches": 1}])
def test_memory_is_what_torch_counts(changes: dict[str, Any]) -> None:
    large = {"hidden": 256, "vocab": 1024, "seq_len": 128}
    row = tracked_row(_job("pure-bf16", **large, **changes))
    assert row.error == pytest.approx(0.0, abs=0.02)  # as in fp32


def test_memory_of_the_job_keeps_its_reserve(cpu: Hardware) -> None:
    hardware = replace(cpu, reserved_bytes=1e6, fragmentation=0.1)
    stage = estimate_memory(_job("pure-bf16"), hardware).stages[0]
    assert stage.reserved == pytest.approx(1e6 + 0.1 * stage.tensors)
    assert stage.tensors == pytest.approx(estimate_memory(_job("fp32"), hardware).stages[0].tensors / 2)
