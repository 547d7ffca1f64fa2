"""What an engine does is lowered, whatever the data type; pure 16 bits are what runs, in half of the bytes of fp32."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.job.job import ExecutionSpec, Job
from stepsight.dataset.job.specs import ENGINES, PRECISIONS
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.dataset.runs.run_folder import read_run
from stepsight.experiments.studies.torch_agreement import tracked_job, tracked_row
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs import lower as lowering
from stepsight.simulator.programs.lower import Lowered, lower, signatures
from tests.simulator.any_job import devices, jobs
from tests.simulator.conftest import JobMaker

SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 16, "micro_batch": 2, "micro_batches": 3,
}  # fmt: skip


def _job(precision: str, **changes: Any) -> Job:
    return tracked_job({**SIZES, "precision": precision, **changes})


Line = tuple[str, str, tuple[int, ...]]
ANY = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def _lines(program: Program, keep: Callable[[str], bool] = lambda kind: kind != "cast") -> list[Line]:
    """Name, kind and dims of every op; of a collective its ranks in the place of dims.

    FSDP casts gradients where it copies them into their message: neither counts.
    """
    out = []
    for node in program.nodes:
        work = node.work
        if keep(work.kind) and not ("gradients" in node.name and work.kind == "copy"):
            out.append((node.name, work.kind, work.dims if isinstance(work, Op) else (work.group_size,)))
    return out


def _typed(asked: Job, hardware: Hardware, dtype: str) -> Lowered:
    """A job lowered with the semantics that it has, and another type of activations and weights."""
    known = lowering._asked(asked, hardware)
    kernels = known.semantics.kernels
    kernels = replace(kernels, casts_parameters=kernels.casts_parameters and dtype != kernels.main_dtype)
    semantics = replace(known.semantics, kernels=kernels)
    return lowering._lower(known._replace(shape=replace(known.shape, precision=dtype), semantics=semantics))


@ANY
@given(job=jobs(), hardware=devices(), engine=st.sampled_from(ENGINES))
def test_with_the_same_semantics_types_of_as_many_bytes_are_lowered_alike(
    job: Job, hardware: Hardware, engine: str
) -> None:
    """bf16 and fp16: the same programs and messages, op by op, with the type's name exchanged."""
    job = replace(job, execution=ExecutionSpec(engine=engine), batch=replace(job.batch, precision="bf16"))
    one, other = (_typed(job, hardware, dtype) for dtype in ("bf16", "fp16"))
    assert one.messages == other.messages
    for program, again in zip(one.programs, other.programs, strict=True):
        assert program.edges == again.edges
        for node, twin in zip(program.nodes, again.nodes, strict=True):
            work = node.work
            if isinstance(work, Op) and work.dtype == "bf16":
                work = replace(work, dtype="fp16")
            assert twin.work == work and twin.name == node.name and twin.stream == node.stream


@ANY
@given(job=jobs(), hardware=devices(), engine=st.sampled_from(ENGINES))
def test_with_the_same_semantics_a_wider_type_runs_the_same_ops_without_casts(
    job: Job, hardware: Hardware, engine: str
) -> None:
    """fp32 and bf16 with main parameters in fp32: but for casts, the same ops of the same dims in the same order.

    Where parameters are cast, gradients of biases arrive after those of weights, and buckets may hold others.
    """
    plain = replace(job.parallel, gradient_dtype="", offload_activations=False)  # both turn bytes into ops
    batch = replace(job.batch, precision="bf16")
    job = replace(job, parallel=plain, execution=ExecutionSpec(engine=engine), batch=batch)
    half, full = (_typed(job, hardware, dtype) for dtype in ("bf16", "fp32"))
    assert [2 * message.num_bytes for message in half.messages] == [message.num_bytes for message in full.messages]
    for narrow, wide in zip(half.programs, full.programs, strict=True):
        lines, others = _lines(narrow), _lines(wide)
        if engine == "eager-pytorch":
            lines, others = (sorted(line for line in each if "gradients" not in line[0]) for each in (lines, others))
        assert lines == others
        assert not [node for node in wide.nodes if node.work.kind == "cast"]


@ANY
@given(job=jobs(), hardware=devices(), engine=st.sampled_from(ENGINES), dtype=st.sampled_from(["bf16", "fp16"]))
def test_pure_16_bits_are_the_engine_without_main_copies(job: Job, hardware: Hardware, engine: str, dtype: str) -> None:
    """As the same engine in fp32, which has none either: every op in 16 bits, every message of half the bytes."""
    plain = replace(job.parallel, offload_activations=False, dp_shard=0)  # which round bytes
    job = replace(job, parallel=plain, execution=ExecutionSpec(engine=engine))
    wider = replace(plain, bucket_mbytes=2 * plain.bucket_mbytes)
    full = lower(replace(job, parallel=wider, batch=replace(job.batch, precision="fp32")), hardware)
    pure = lower(replace(job, batch=replace(job.batch, precision=f"pure-{dtype}")), hardware)
    assert pure.messages == tuple(replace(message, num_bytes=message.num_bytes // 2) for message in full.messages)
    for program, narrow in zip(full.programs, pure.programs, strict=True):
        for node, twin in zip(program.nodes, narrow.nodes, strict=True):
            work = node.work
            half = replace(work, dtype=dtype) if isinstance(work, Op) else replace(work, num_bytes=work.num_bytes // 2)
            assert twin.work == half and twin.name == node.name


@pytest.mark.parametrize("gradients", ["", "fp32", "fp32-cast"])
def test_megatron_in_fp32_differs_from_eager_pytorch_where_it_says_so(
    make_job: JobMaker, gpu: Hardware, gradients: str
) -> None:
    """Gradients are neither added by autograd nor copied into buckets, and products read their buffers."""
    eager = make_job(dp=4, micro_batches=2, gradient_dtype=gradients, recompute="full")
    megatron = replace(eager, execution=ExecutionSpec(engine="megatron"))
    one, other = (lower(job, gpu) for job in (eager, megatron))
    assert _lines(one.program("forward")) == _lines(other.program("forward"))
    assert _lines(one.program("optimizer")) == _lines(other.program("optimizer"))
    last = eager.num_micro_batches - 1
    lines, others = (Counter(_lines(low.program("backward", micro_batch=last))) for low in (one, other))
    gone, new = lines - others, others - lines
    assert {name.rpartition(".")[2] for name, _, _ in gone} == {"accumulate", "bucket"}
    tensors = sum(name.endswith(".bucket") for name, _, _ in gone.elements())
    assert gone.total() == 2 * tensors > 0
    products = 4 * eager.model.layers  # weights of linears
    reads = {"": 0, "fp32": products, "fp32-cast": products}[gradients]
    again = [line for line in new.elements() if line[0].startswith("layer") and ".again." not in line[0]]
    assert [kind for _, kind, _ in again].count("add" if gradients == "fp32-cast" else "reduce") == reads
    recomputed = [line for line in new.elements() if ".again." in line[0]]
    assert len(again) == reads and new.total() == reads + len(recomputed)
    assert {name.rpartition(".")[2] for name, _, _ in recomputed} <= {
        "residual",
        "fc2",
    }  # Megatron repeats the whole layer


def test_a_job_of_megatron_in_fp32_is_megatrons(gpu: Hardware) -> None:
    """The profile of a framework names the engine; without a framework fp32 stays what the harness runs."""
    tables = make_tables()
    plain, megatron = (Job.from_dict({**tables, "framework": name}) for name in ("", "Megatron-LM 0.14"))
    kinds = [{node.name for node in lower(job, gpu).program("backward").nodes} for job in (plain, megatron)]
    assert [any(name.endswith(".bucket") for name in names) for names in kinds] == [True, False]


def make_tables() -> dict[str, Any]:
    """A job in fp32 with two replicas."""
    return {
        "model": {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32},
        "batch": {"micro_batch": 1, "global_batch": 2, "precision": "fp32"},
        "cluster": {"hardware": "h200-sxm-141gb", "nodes": 1, "devices_per_node": 2},
    }


def test_nothing_in_the_simulator_asks_which_precision_it_is() -> None:
    """Of a data type only bytes and kernels are asked: casts to fp8 are kernels."""
    names = {*PRECISIONS, *DTYPE_BYTES} - {"fp8"}
    for path in Path(lowering.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not names & words, (path, node.lineno)


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
    assert row["error"] == pytest.approx(0.0, abs=0.02)  # as in fp32


def test_memory_of_the_job_keeps_its_reserve(cpu: Hardware) -> None:
    hardware = replace(cpu, reserved_bytes=1e6, fragmentation=0.1)
    stage = estimate_memory(_job("pure-bf16"), hardware).stages[0]
    pipeline_run = stage.gradients + stage.activations + stage.temporary  # allocated and freed in each step
    assert stage.reserved == pytest.approx(1e6 + 0.1 * pipeline_run)
    assert stage.tensors == pytest.approx(estimate_memory(_job("fp32"), hardware).stages[0].tensors / 2)
