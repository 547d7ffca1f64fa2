"""Products in 8 bits that were timed with the conversion of their input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables import Measurements, SourceFile
from stepsight.training.kernels.quantized import MOST_BYTES, conversion_seconds, products_alone

GPU = find_hardware("h100-sxm-80gb")
assert GPU is not None
SHAPES = [(m, n, k) for m in (4096, 8192) for n in (1024, 2048, 8192) for k in (2048, 4096, 8192, 16384)]
PASS = 5.0 / GPU.memory_bandwidth_bytes_per_s  # read twice, written once
KERNEL_FLOPS = 1.3e15


def _seconds(dims: tuple[int, int, int], per_element: float) -> float:
    m, n, k = dims
    return 2 * m * n * k / KERNEL_FLOPS + per_element * m * k


def _table(dtype: str = "fp8", per_element: float = PASS, device: str = GPU.name) -> Measurements:
    works = tuple(Op("linear", dims, dtype) for dims in SHAPES)
    columns = [(text,) * len(works) for text in (device, "", "engine 1", "a")]
    seconds = np.array([_seconds(dims, per_element) for dims in SHAPES])
    return Measurements(works, seconds, *columns, {"a": SourceFile("MIT", "0")})


def test_what_grows_with_the_input_alone_is_taken_away() -> None:
    alone = products_alone(_table(), GPU)
    assert alone.seconds == pytest.approx([_seconds(dims, 0.0) for dims in SHAPES], rel=1e-6)
    assert alone.works == _table().works


@pytest.mark.parametrize("table", [_table("bf16"), _table(device="another"), _table().take(range(8))])
def test_others_stay_as_they_are(table: Measurements) -> None:
    """Other precisions, other devices, and what is too little to tell from."""
    assert products_alone(table, GPU).seconds.tolist() == table.seconds.tolist()


def test_products_without_a_conversion_stay_as_they_are() -> None:
    bare = _table(per_element=0.0)
    assert products_alone(bare, GPU).seconds == pytest.approx(bare.seconds, rel=1e-9)


def test_memory_bounds_the_conversion_and_the_roofline_the_product() -> None:
    slow = 100.0 / GPU.memory_bandwidth_bytes_per_s
    dims, seconds = np.array(SHAPES, dtype=float), np.array([_seconds(d, slow) for d in SHAPES])
    assert conversion_seconds(dims, seconds, GPU) * GPU.memory_bandwidth_bytes_per_s == pytest.approx(MOST_BYTES)
    table = replace(_table(), seconds=np.array([2 * m * n * k / 1.9e15 + PASS * m * k for m, n, k in SHAPES]))
    peak = [2 * m * n * k / GPU.flops_per_s("fp8") for m, n, k in SHAPES]
    assert (products_alone(table, GPU).seconds >= np.array(peak) * (1 - 1e-9)).all()
