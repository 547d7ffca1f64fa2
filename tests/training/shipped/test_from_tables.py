"""Tables of a made-up GPU whose backward kernels another one has measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables import Measurements, SourceFile
from stepsight.training.kernels.kernel_models import KernelModel
from stepsight.training.shipped.from_tables import (
    MOST_BYTES,
    conversion_seconds,
    fit_table,
    lend,
    op_table,
    products_alone,
)

GPU = find_hardware("a100-sxm-80gb")
assert GPU is not None
SIZES = [(m, n, k) for m in (256, 512, 1024, 2048) for n in (512, 1024, 4096) for k in (512, 2048)]


def _table(rows: list[tuple[Op, float, str, str]]) -> Measurements:
    works, seconds, device, software = zip(*rows, strict=True)
    blank = ("",) * len(rows)
    files = {"a": SourceFile("MIT", "0")}
    return Measurements(works, np.array(seconds), device, blank, software, ("a",) * len(rows), files)


@pytest.fixture(scope="module")
def model() -> KernelModel:
    own = [(Op("linear", d), 1.2 * roofline_seconds(Op("linear", d), GPU), GPU.name, "lib 1") for d in SIZES]
    own += [(Op("add", (2**p,)), 1.1 * roofline_seconds(Op("add", (2**p,)), GPU), GPU.name, "lib 1") for p in range(26)]
    elsewhere = [(Op("linear", d), 2 * roofline_seconds(Op("linear", d), GPU), "b", "lib 1") for d in SIZES]
    elsewhere += [
        (Op("linear_wgrad", d), 2 * 1.15 * roofline_seconds(Op("linear_wgrad", d), GPU), "b", "lib 1") for d in SIZES
    ]
    return fit_table(op_table(_table(own), GPU.name, ["lib"]), GPU, _table(elsewhere))


def test_software_is_told_apart_and_the_median_is_taken() -> None:
    op = Op("add", (64,))
    rows = [(op, 1.0, "a", "new 2"), (op, 3.0, "a", "new 1"), (op, 5.0, "a", "old"), (op, 9.0, "a", "other")]
    found = op_table(_table([*rows, (op, 7.0, "b", "new 2")]), "a", ["new", "old"])
    assert list(zip(found.ops, found.seconds.tolist(), found.variants.tolist(), strict=True)) == [
        (op, 2.0, 0),
        (op, 5.0, 1),
    ]


def test_what_is_lent_streams_at_the_bandwidth_of_who_borrows() -> None:
    """And computes as fast; of other devices nothing is taken."""
    lender, borrower = find_hardware("h100-sxm-80gb"), find_hardware("h200-sxm-141gb")
    assert lender is not None and borrower is not None
    product, addition = Op("linear", (8192, 8192, 8192)), Op("add", (2**30,))
    rows = [(op, 1.0, name, "lib") for op in (product, addition) for name in (lender.name, "b")]
    lent = lend(_table(rows), lender, borrower)
    assert lent.device == (borrower.name,) * 2 and lent.works == (product, addition)
    assert lent.seconds == pytest.approx([1, 3.35 / 4.8], rel=0.01)


def test_a_pattern_may_name_the_precision() -> None:
    products = [Op("linear", (64, 64, 64), dtype) for dtype in ("bf16", "fp8")]
    found = op_table(_table([(op, 1.0, "a", "lib") for op in products]), "a", ["lib fp8$", "lib bf16"])
    assert dict(zip(found.ops, found.variants.tolist(), strict=True)) == {products[0]: 1, products[1]: 0}


def test_a_measured_kind_is_as_measured(model: KernelModel) -> None:
    op = Op("linear", (768, 1024, 1024))
    assert model.seconds([op], 8)[0] == pytest.approx(1.2 * roofline_seconds(op, GPU), rel=0.06)
    assert model.unsupported(op) == ""


def test_a_kind_measured_elsewhere_takes_its_base_and_the_ratio_there(model: KernelModel) -> None:
    """That the other device is slower altogether says nothing."""
    assert model.ratios["linear_wgrad"].log_ratio == pytest.approx(math.log(1.15), abs=0.02)
    op = Op("linear_wgrad", (1024, 1024, 2048))
    assert model.seconds([op], 8)[0] == pytest.approx(1.15 * 1.2 * roofline_seconds(op, GPU), rel=0.06)
    assert model.unsupported(op) == ""


@pytest.mark.parametrize("op", [Op("linear_dgrad", (1024, 1024, 2048)), Op("softmax", (8192, 1024))], ids=str)
def test_a_kind_measured_nowhere_is_carried_by_physics_and_says_so(model: KernelModel, op: Op) -> None:
    assert 1.0 < model.seconds([op], 8)[0] / roofline_seconds(op, GPU) < 1.3
    assert "and physics" in model.unsupported(op)


def test_memory_is_never_outrun(model: KernelModel) -> None:
    op = Op("copy", (10**11,))
    assert op.num_bytes / model.seconds([op], 8)[0] < GPU.memory_bandwidth_bytes_per_s


def test_no_rows_are_an_error() -> None:
    empty = op_table(_table([(Op("add", (1,)), 1.0, "b", "x")]), GPU.name, ["x"])
    with pytest.raises(TableError, match="needs measured ops"):
        fit_table(empty, GPU, _table([(Op("add", (1,)), 1.0, "b", "x")]))


H100 = find_hardware("h100-sxm-80gb")
assert H100 is not None
SHAPES = [(m, n, k) for m in (4096, 8192) for n in (1024, 2048, 8192) for k in (2048, 4096, 8192, 16384)]
PASS = 5.0 / H100.memory_bandwidth_bytes_per_s  # read twice, written once
KERNEL_FLOPS = 1.3e15


def _seconds(dims: tuple[int, int, int], per_element: float) -> float:
    m, n, k = dims
    return 2 * m * n * k / KERNEL_FLOPS + per_element * m * k


def _products(dtype: str = "fp8", per_element: float = PASS, device: str = H100.name) -> Measurements:
    works = tuple(Op("linear", dims, dtype) for dims in SHAPES)
    columns = [(text,) * len(works) for text in (device, "", "engine 1", "a")]
    seconds = np.array([_seconds(dims, per_element) for dims in SHAPES])
    return Measurements(works, seconds, *columns, {"a": SourceFile("MIT", "0")})


def test_what_grows_with_the_input_alone_is_taken_away() -> None:
    alone = products_alone(_products(), H100)
    assert alone.seconds == pytest.approx([_seconds(dims, 0.0) for dims in SHAPES], rel=1e-6)
    assert alone.works == _products().works


@pytest.mark.parametrize("table", [_products("bf16"), _products(device="another"), _products().take(range(8))])
def test_others_stay_as_they_are(table: Measurements) -> None:
    """Other precisions, other devices, and what is too little to tell from."""
    assert products_alone(table, H100).seconds.tolist() == table.seconds.tolist()


def test_products_without_a_conversion_stay_as_they_are() -> None:
    bare = _products(per_element=0.0)
    assert products_alone(bare, H100).seconds == pytest.approx(bare.seconds, rel=1e-9)


def test_memory_bounds_the_conversion_and_the_roofline_the_product() -> None:
    slow = 100.0 / H100.memory_bandwidth_bytes_per_s
    dims, seconds = np.array(SHAPES, dtype=float), np.array([_seconds(d, slow) for d in SHAPES])
    assert conversion_seconds(dims, seconds, H100) * H100.memory_bandwidth_bytes_per_s == pytest.approx(MOST_BYTES)
    table = replace(_products(), seconds=np.array([2 * m * n * k / 1.9e15 + PASS * m * k for m, n, k in SHAPES]))
    peak = [2 * m * n * k / H100.flops_per_s("fp8") for m, n, k in SHAPES]
    assert (products_alone(table, H100).seconds >= np.array(peak) * (1 - 1e-9)).all()
