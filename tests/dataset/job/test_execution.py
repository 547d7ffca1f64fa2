"""What an execution engine does: chosen in one place, filled by profiles and by what jobs state."""

from dataclasses import is_dataclass
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job import execution
from stepsight.dataset.job.execution import ENGINE_SEMANTICS, default_engine, semantics_of
from stepsight.dataset.job.frameworks import find_framework
from stepsight.dataset.job.job import ExecutionSpec, Job
from stepsight.dataset.job.specs import ENGINES, PRECISIONS
from stepsight.simulator.blocks.layer_parts import cast
from stepsight.simulator.programs.sizes import rank_shape


def job_of(precision: str = "bf16", *, engine: str = "", framework: str = "", **tables: dict[str, Any]) -> Job:
    """A small job."""
    base: dict[str, dict[str, Any]] = {
        "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32},
        "batch": {"micro_batch": 1, "global_batch": 8, "precision": precision},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
        "execution": {"engine": engine} if engine else {},
        "parallel": {},
        "optimizer": {},
    }
    joined: dict[str, Any] = {name: {**table, **tables.get(name, {})} for name, table in base.items()}
    return Job.from_dict({**joined, "framework": framework})


def test_every_engine_has_semantics_and_every_precision_an_engine() -> None:
    assert set(ENGINE_SEMANTICS) == set(ENGINES)
    assert {default_engine(precision) for precision in PRECISIONS} == {"eager-pytorch", "megatron"}


def test_products_alone_are_rounded_to_tf32() -> None:
    """All else is fp32, and the engine is that of fp32."""
    shape = rank_shape(job_of("tf32"))
    assert shape.gemm("linear", 2, 3, 5).dtype == shape.core_product(1, 2, 3, 5).dtype == "tf32"
    assert (shape.dtype, shape.casts, shape.quantizes) == ("fp32", False, False)
    assert semantics_of(job_of("tf32")) == semantics_of(job_of("fp32"))


def test_four_bits_convert_operands_as_eight_do_with_a_scale_of_the_whole_tensor() -> None:
    shape = rank_shape(job_of("nvfp4", cluster={"hardware": "b200-sxm-180gb"}))
    assert (shape.dtype, shape.quantizes, shape.core_product(1, 2, 3, 5).dtype) == ("bf16", True, "bf16")
    assert [op.kind for op in cast(shape, 8)] == ["reduce", "copy"]


def test_one_type_for_everything_is_what_the_harness_runs() -> None:
    """fp32 and pure 16 bits; an engine that is stated goes before, and is read back."""
    for precision in ("fp32", "pure-bf16", "pure-fp16"):
        assert default_engine(precision) == "eager-pytorch"
        job = job_of(precision, engine="megatron")
        assert semantics_of(job).states.gradient_buffers and not semantics_of(job_of(precision)).states.gradient_buffers
        assert Job.from_dict(job.to_dict()) == job


def test_a_job_that_states_no_engine_is_written_without_one() -> None:
    """So that files written before engines were named stay the same."""
    assert "execution" not in job_of().to_dict()
    assert job_of(engine="megatron").to_dict()["execution"]["engine"] == "megatron"


def test_a_profile_fills_the_engine_and_a_job_goes_before() -> None:
    assert job_of("fp32", framework="Megatron-LM").execution == ExecutionSpec(engine="megatron")
    stated = job_of("fp32", framework="Megatron-LM", engine="eager-pytorch")
    assert stated.execution.engine == "eager-pytorch"
    assert find_framework("transformers").engine == job_of(framework="transformers").execution.engine == ""


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(
        JobError, match=r"execution.engine must be one of '', eager-pytorch, megatron, deepspeed-0.3, got 'jax'"
    ):
        job_of(engine="jax")


@pytest.mark.parametrize(
    ("precision", "stated", "dtype"),
    [
        ("bf16", "", "fp32"),
        ("bf16", "model", "bf16"),
        ("bf16", "fp32-cast", "fp32"),
        ("fp16", "", "fp16"),
        ("fp16", "fp32", "fp32"),
        ("fp8", "model", "bf16"),
        ("fp32", "model", "fp32"),
        ("pure-bf16", "", "bf16"),
        ("pure-bf16", "fp32", "bf16"),  # nothing is in fp32
    ],
)
def test_types_of_gradients(precision: str, stated: str, dtype: str) -> None:
    states = semantics_of(job_of(precision, parallel={"gradient_dtype": stated})).states
    assert states.gradient_dtype == dtype


def test_sharded_gradients_of_fp16_are_summed_in_fp32() -> None:
    assert semantics_of(job_of("fp16", parallel={"zero_stage": 3})).states.gradient_dtype == "fp32"


@pytest.mark.parametrize("engine", ENGINES)
def test_only_mixed_precision_has_another_main_type(engine: str) -> None:
    """What is kept most exactly is in fp32, in pure 16 bits in these; only fp16 scales its loss."""
    semantics = {precision: semantics_of(job_of(precision, engine=engine)) for precision in PRECISIONS}
    main = {precision: found.kernels.main_dtype for precision, found in semantics.items()}
    assert main == dict.fromkeys(PRECISIONS, "fp32") | {"pure-bf16": "bf16", "pure-fp16": "fp16"}
    assert [precision for precision, found in semantics.items() if found.states.scales_loss] == ["fp16"]


def test_modules_that_are_measured_whole_are_not_taken_apart() -> None:
    """What the harness measures as one op stays one."""
    model = {"eager_kernels": True, "norms_again": True}
    eager, megatron = (semantics_of(job_of("fp32", engine=engine, model=model)).kernels for engine in ENGINES[:2])
    assert (eager.separate_kernels, eager.norms_again) == (False, False)
    assert (megatron.separate_kernels, megatron.norms_again) == (True, True)


def test_cpus_have_the_harness_habits_where_a_job_states_none() -> None:
    """PyTorch's pipeline runtime, and gradients that a pipeline reduces when it is over."""
    job = job_of(parallel={"pp": 2})
    here, there = (semantics_of(job, kind).overlap for kind in ("cpu", "gpu"))
    assert (here.runtime, here.gradients) == ("torch", False)
    assert (there.runtime, there.gradients) == ("asynchronous", True)
    stated = semantics_of(job_of(parallel={"pp": 2, "runtime": "deepspeed"}), "cpu")
    assert stated.overlap.runtime == "deepspeed"


@pytest.mark.parametrize(
    ("table", "form"),
    [({}, "fused"), ({"fused": False}, "foreach"), ({"offload": True, "fused": False}, "host")],
)
def test_forms_of_the_optimizer(table: dict[str, Any], form: str) -> None:
    assert semantics_of(job_of(optimizer=table)).optimizer == form


class _Reading:
    """Notes which fields of a job are read."""

    def __init__(self, value: Any, path: str, read: set[str]) -> None:
        self._value, self._path, self._read = value, path, read

    def __getattr__(self, name: str) -> Any:
        path, value = f"{self._path}{name}", getattr(self._value, name)
        if is_dataclass(value):
            return _Reading(value, f"{path}.", self._read)
        self._read.add(path)
        return value


@pytest.mark.parametrize("precision", PRECISIONS)
def test_remembered_semantics_are_told_apart_by_all_that_they_read(precision: str) -> None:
    read, keys = set[str](), set[str]()
    for engine in ENGINES:
        execution._semantics(_Reading(job_of(precision, engine=engine), "", read), False, False)  # type: ignore[arg-type]
    execution._RELEVANT(_Reading(job_of(precision), "", keys))
    assert read <= keys | {"parallel.zero_stage", "parallel.pp"}
