from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.dataset.runs.run_manifest import HARDWARE
from stepsight.features.node_features import op_position
from stepsight.training.corrections.corrector import Neighbours, Support
from stepsight.training.kernels.kernel_models import MAX_LOG_RATIO, Ratio, as_run, base_of, dtype_class, least_seconds
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor

Truth = Callable[[Op, int], float]


@pytest.mark.parametrize("busy", [1, 2])
def test_shapes_that_were_never_measured_are_predicted(predictor: Predictor, op_truth: Truth, busy: int) -> None:
    unseen = [
        Op("linear", (160, 224, 320), "fp32"),
        Op("gelu", (50_000,), "fp32"),
        Op("layer_norm", (160, 320), "fp32"),
    ]
    expected = [op_truth(op, busy) for op in unseen]
    assert predictor.kernel.seconds(unseen, busy) == pytest.approx(expected, rel=0.06)


def test_far_beyond_the_measured_sizes_physics_carries_on(predictor: Predictor, op_truth: Truth) -> None:
    large = Op("linear", (8192, 8192, 8192), "fp32")
    assert predictor.kernel.seconds([large], 1)[0] == pytest.approx(op_truth(large, 1), rel=0.15)


def test_a_kind_never_measured_falls_back_on_the_roofline_and_is_reported(predictor: Predictor) -> None:
    op = Op("rope", (4096,), "fp32")
    assert predictor.kernel.seconds([op], 1)[0] == roofline_seconds(op, predictor.hardware)
    assert predictor.kernel.unsupported(op) == "rope[4096]fp32: no rope was measured"


def test_every_family_never_measured_falls_back_on_the_roofline(predictor: Predictor) -> None:
    """Also kinds of a family of which others were measured."""
    measured = predictor.kernel.regressor.physics
    unknown = [Op(kind, (64,) * len(of.dim_names), "fp32") for kind, of in OP_KINDS.items() if kind not in measured]
    assert len({op.family for op in unknown}) > 6
    expected = [roofline_seconds(op, predictor.hardware) for op in unknown]
    assert predictor.kernel.seconds(unknown, 1).tolist() == expected


def test_sizes_outside_the_measured_range_are_reported(predictor: Predictor) -> None:
    assert predictor.kernel.unsupported(Op("gelu", (50_000,), "fp32")) == ""
    assert "outside the measured range" in predictor.kernel.unsupported(Op("gelu", (5_000_000,), "fp32"))


def test_what_a_box_sleeps_is_known(predictor: Predictor) -> None:
    """Its ranks sleep as long as they are told, whatever was measured, and however many of them at once."""
    told = replace(predictor.kernel, hardware=replace(predictor.hardware, name=HARDWARE))
    assert predictor.kernel.crowded(64) and told.crowded(64) == ""
    assert told.unsupported(Op("rope", (4096,), "fp32")) == ""


def test_errors_by_family_are_cross_validated(predictor: Predictor) -> None:
    assert set(predictor.kernel.regressor.errors) == {"gemm", "elementwise", "norm"}
    assert max(predictor.kernel.regressor.errors.values()) < 0.05


def test_no_op_takes_no_time(predictor: Predictor) -> None:
    assert predictor.kernel.seconds([], 1).shape == (0,)
    assert np.isfinite(predictor.kernel.seconds([Op("gelu", (0,), "fp32")], 1)).all()


@pytest.mark.parametrize(
    ("op", "longer"),
    [
        (Op("add", (2**29,)), Op("add", (2**31,))),
        (Op("layer_norm", (2**14, 2560)), Op("layer_norm", (2**16, 2560))),
        (Op("dropout", (2**29,)), Op("dropout", (2**31,))),  # as an addition of as many bytes
    ],
)
def test_what_streams_keeps_the_bandwidth_of_the_longest_that_was_measured(op: Op, longer: Op) -> None:
    """Beyond any cache and any launch, four times the work takes four times as long."""
    shipped = shipped_predictor("a100-sxm")
    assert shipped is not None
    seconds = shipped.kernel.seconds([op, longer], 1)
    assert seconds[1] / seconds[0] == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("kind", ["attention", "flash1_attention_backward"])
def test_padded_heads_take_as_long_as_those_they_are_padded_to(kind: str) -> None:
    shipped = shipped_predictor("a100-sxm")
    assert shipped is not None
    padded, whole = (Op(kind, (4, 16, 16, 2048, 2048, size, 1)) for size in (80, 96))
    seconds = shipped.kernel.seconds([padded, whole], 1)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


def test_a_hole_within_the_measured_range_is_told() -> None:
    """A shape between two measured ones, far from both, counts as outside with its distance."""
    shipped = shipped_predictor("h100-sxm")
    assert shipped is not None
    kernel, low, high = shipped.kernel, Op("rms_norm", (128, 1024)), Op("rms_norm", (131072, 16384))
    places = np.array([[*op_position(op), 0.0] for op in (low, high)])
    sparse = {"rms_norm": Neighbours(1.0, places, np.zeros(2))}
    support = {**kernel.regressor.support, "rms_norm": Support(places[0, :-1], places[1, :-1])}
    kernel = replace(kernel, regressor=replace(kernel.regressor, neighbours=sparse, support=support))
    assert kernel.unsupported(low) == kernel.unsupported(high) == ""
    assert "within the measured range, but 32.0 x from the nearest measured" in kernel.unsupported(
        Op("rms_norm", (4096, 4096))
    )


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
