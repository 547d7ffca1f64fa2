import pytest

from stepsight.dataset.hardware.hardware import find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.training.kernels.derived_kinds import MAX_LOG_RATIO, Ratio, as_run, base_of, dtype_class, least_seconds

GPU, CPU = find_hardware("a100-sxm-80gb"), find_hardware("local-cpu")
assert GPU is not None and CPU is not None


@pytest.mark.parametrize("kind", OP_KINDS)
def test_every_kind_is_traced_to_a_product_an_attention_or_an_addition(kind: str) -> None:
    """Whatever was measured or not: bases end, and never in a circle."""
    at, seen = Op(kind, (64,) * len(OP_KINDS[kind].dim_names)), []
    while (base := base_of(at, GPU)) is not None:
        assert base not in seen
        seen.append(base)
        at = base
    assert at.kind == "add" or at.family in ("host", "host_calls", "transfer")


@pytest.mark.parametrize("kind", ["linear_dgrad", "linear_wgrad", "grouped_linear_dgrad", "grouped_linear_wgrad"])
def test_a_layout_does_as_much_as_its_base(kind: str) -> None:
    op = Op(kind, (8, 4096, 512, 1024)[-len(OP_KINDS[kind].dim_names) :])
    base = base_of(op, GPU)
    assert base is not None and base.flops == op.flops
    assert base.num_bytes == op.num_bytes


def test_outputs_of_layouts() -> None:
    assert base_of(Op("linear_dgrad", (2, 3, 5)), GPU) == Op("linear", (2, 5, 3))
    assert base_of(Op("linear_wgrad", (2, 3, 5)), GPU) == Op("linear", (3, 5, 2))
    assert base_of(Op("grouped_linear", (4, 40, 3, 5)), GPU) == Op("linear", (10, 3, 5))
    assert base_of(Op("batched_matmul", (4, 2, 3, 5)), GPU) == Op("linear", (8, 3, 5))


def test_what_streams_is_an_addition_of_as_many_bytes() -> None:
    op = Op("adamw", (6_000_000, 10), "fp32")
    base = base_of(op, GPU)
    assert base is not None and base.kind == "add"
    assert roofline_seconds(base, GPU) == pytest.approx(roofline_seconds(op, GPU), rel=1e-3)


def test_four_bits_are_known_by_eight_and_these_by_sixteen() -> None:
    eight = base_of(Op("linear", (2, 3, 5), "nvfp4"), GPU)
    assert eight == Op("linear", (2, 3, 5), "fp8")
    assert base_of(eight, GPU) == base_of(Op("linear", (2, 3, 5), "tf32"), GPU) == Op("linear", (2, 3, 5), "bf16")


def test_precision_makes_kernels_of_their_own_for_products_on_gpus_alone() -> None:
    assert dtype_class(Op("linear", (2, 3, 5), "fp8"), GPU) == "fp8"
    assert dtype_class(Op("linear", (2, 3, 5), "fp16"), GPU) == ""
    assert dtype_class(Op("linear", (2, 3, 5), "fp32"), CPU) == ""
    assert dtype_class(Op("gelu", (2,), "fp32"), GPU) == ""


def test_a_gpu_pads_heads() -> None:
    odd = Op("attention", (1, 8, 8, 64, 64, 108, 1))
    assert as_run(odd, GPU).dims[5] == 128
    assert as_run(odd, CPU) == odd
    even = Op("attention", (1, 8, 8, 64, 64, 96, 1))
    assert as_run(even, GPU) == even


def test_memory_bounds_what_no_cache_holds() -> None:
    assert least_seconds(Op("copy", (10**6,)), GPU) < 0
    long = Op("copy", (10**10,))
    assert 1 < least_seconds(long, GPU) * GPU.memory_bandwidth_bytes_per_s / long.num_bytes < 1.1
    assert least_seconds(long, CPU) == 0


def test_a_ratio_beyond_belief_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie from"):
        Ratio(MAX_LOG_RATIO + 0.1, "here")
