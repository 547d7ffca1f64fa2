"""Separate 8-bit products from the conversion of their input; inference engines time both together.

aiconfigurator's collectors call ``sgl_per_token_quant_fp8`` and then ``fp8_scaled_mm``, or TensorRT-LLM's ``Linear``
without a scale of its input, which it then finds (``collector/sglang/collect_gemm.py``, ``collector/trtllm``, 2025-26).
In training the conversion is an op of its own, done once for several products.  It shows in the tables: a product's
time grows with ``n`` from a start that grows with ``m * k``, in 8 bits alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables import Measurements

Array = NDArray[np.float64]

LEAST_ROWS, LEAST_SIDE = 4096, 1024  # fewest products that are long enough for an estimate
MIN_EVIDENCE = 20
MOST_BYTES = 12.0  # memory traffic per element: three passes and their writes, at a low bandwidth


def products_alone(table: Measurements, hardware: Hardware) -> Measurements:
    """The same rows, with 8-bit products without the conversion of their input.

    What an element's conversion takes is found for every device and software from their own rows, and is bounded by
    what memory needs for it; nothing becomes faster than the roofline at the device's peaks.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, work in enumerate(table.works):
        if isinstance(work, Op) and work.kind == "linear" and work.dtype == "fp8":
            groups.setdefault((table.device[index], table.software[index]), []).append(index)
    seconds = table.seconds.copy()
    for (device, _), rows in groups.items():
        if device == hardware.name:
            dims = np.array([table.works[i].dims for i in rows], dtype=np.float64)  # type: ignore[union-attr]
            seconds[rows] = _alone(dims, seconds[rows], hardware)
    return replace(table, seconds=seconds)


def conversion_seconds(dims: Array, seconds: Array, hardware: Hardware) -> float:
    """Time of the conversion per element of the input; 0 if too few rows show it.

    Args:
        dims: ``m``, ``n`` and ``k`` of products with their conversion, shape ``(rows, 3)``.
        seconds: Of each, shape ``(rows,)``.
        hardware: Whose memory bounds it.
    """
    m, n, k = dims.T
    long = (m >= LEAST_ROWS) & (n >= LEAST_SIDE) & (k >= LEAST_SIDE)
    if long.sum() < MIN_EVIDENCE or len(set(n[long])) < 2:
        return 0.0
    terms = np.stack([m * k, m * n * k], axis=1)[long] / seconds[long, None]  # errors relative to the time
    (element, _), *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    return float(np.clip(element, 0.0, MOST_BYTES / hardware.memory_bandwidth_bytes_per_s))


def _alone(dims: Array, seconds: Array, hardware: Hardware) -> Array:
    m, n, k = dims.T
    least = np.maximum(
        2 * m * n * k / hardware.flops_per_s("fp8"),
        (m * k + n * k + m * n) / hardware.memory_bandwidth_bytes_per_s,
    )
    without = seconds - conversion_seconds(dims, seconds, hardware) * m * k
    alone: Array = np.minimum(seconds, np.maximum(without, least))
    return alone
