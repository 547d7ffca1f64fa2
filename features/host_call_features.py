"""Numbers from framework calls that run on a host: the terms of their time, and features for trees.

A kind such as ``elementwise`` holds calls that differ by a factor of ten on a CPU, so the call's name counts beside its
op.  Pure functions; every array has one row per call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.features.op_features import op_terms

Array = NDArray[np.float64]

CALL_TERMS = ("calls", "flop", "bytes", "units", "fresh_bytes")
NUM_DIMS = 9  # of the kind with the most of them
CALL_FEATURES = (
    "kind", "phase", "dtype_bytes", "log_flops", "log_bytes", "log_intensity", "log_physics_s", "log_lanes",
    "log_made_bytes", "log_share", "log_growth", *(f"log_dim{place}" for place in range(NUM_DIMS)),
)  # fmt: skip

# From about this size on the C library gives memory back and takes it anew, and each fresh page costs a fault.
FRESH_BYTES = 750_000
_LANES = 16  # numbers of 4 bytes in the widest vector of a CPU; channels and columns are padded to it
_ROWS = 4  # rows of a product that a kernel processes together
_SEVERAL = frozenset(
    ("elementwise", "copy", "add", "reduce", "fill", "sort", "random", "pool", "pool_backward", "foreach", "dropout",
     "batch_norm", "batch_norm_backward", "cast")
)  # fmt: skip  # kinds that hold calls which differ
_SAME = {  # one call by its name in traces, and by its name under autograd
    "adaptive_avg_pool2d": "mean", "_adaptive_avg_pool2d": "mean", "batch_norm": "native_batch_norm",
    "max_pool2d": "max_pool2d_with_indices", "max_pool3d": "max_pool3d_with_indices",
    "native_dropout": "dropout",
}  # fmt: skip


def call_label(call: str, op: Op) -> str:
    """The unit of fitting: the op's kind, or the call if its kind has several that differ."""
    if op.family == "conv":
        ins, groups, positions, inside = op.dims[1], op.dims[5], op.dims[3], op.dims[6]
        form = "depthwise" if groups > 1 and ins == 1 else "grouped" if groups > 1 else ""
        form = form or ("transposed" if inside < positions else "")
        return f"{op.kind}/{form}" if form else op.kind
    if op.kind not in _SEVERAL:
        return op.kind
    name = call.removeprefix("aten::")
    return f"{op.kind}/{_SAME.get(name, name)}"


def holds_several(kind: str) -> bool:
    """Whether the calls of a kind differ in their durations."""
    return kind in _SEVERAL


def call_terms(call: str, op: Op) -> tuple[float, ...]:
    """Quantities whose weighted sum is a call's time, in the order of ``CALL_TERMS``."""
    compute = op.record.bound == "compute"
    made = made_bytes(call, op)
    fresh = float(made) if made > FRESH_BYTES else 0.0
    return (1.0, padded_flops(op) if compute else 0.0, op.num_bytes, op_terms(op)[-1], fresh)


def call_features(calls: Sequence[str], ops: Sequence[Op], phases: Sequence[int], physics: Array) -> Array:
    """Features for trees, shape ``(calls, len(CALL_FEATURES))``; ``physics``: seconds by the terms alone."""
    rows = np.full((len(ops), len(CALL_FEATURES)), np.nan)
    for row, call, op, phase, seconds in zip(rows, calls, ops, phases, physics.tolist(), strict=True):
        flops, moved = max(op.flops, 1.0), max(op.num_bytes, 1.0)
        row[:11] = (
            op.record.code % 1000, phase, DTYPE_BYTES[op.dtype], math.log(flops), math.log(moved),
            math.log(flops / moved), math.log(seconds), math.log(max(padded_flops(op), 1.0) / flops),
            math.log1p(made_bytes(call, op)), *_shape(op),
        )  # fmt: skip
        row[11 : 11 + len(op.dims)] = np.log1p(op.dims[:NUM_DIMS])
    return rows


def padded_flops(op: Op) -> float:
    """FLOP of an op whose channels and columns are padded to a CPU's vectors."""
    if op.family == "conv":
        batch, ins, outs, positions, window, groups, inside = op.dims[:7]
        products = 1 + op.dims[8] if op.kind == "conv_backward" else 1
        if groups > 1 and ins == 1:
            channels = float(_up(outs, _LANES))
        else:
            wide = _up(ins, _LANES) if ins > 3 else ins  # kernels of images with few channels do not pad
            channels = float(groups * _up(max(outs // max(groups, 1), 1), _LANES) * wide)
        return 2.0 * products * batch * channels * window * min(positions, inside)
    if op.family in ("gemm", "batched_gemm"):
        m, n, k = op.dims[-3:]
        batch = op.dims[0] if len(op.dims) == 4 else 1
        if op.kind == "linear_wgrad":
            m, n, k = n, k, m
        elif op.kind == "linear_dgrad":
            n, k = k, n
        return 2.0 * batch * _up(m, _ROWS) * _up(n, _LANES) * k
    return op.flops


def made_bytes(call: str, op: Op) -> int:
    """Bytes of a call's result; 0 if it writes in place or the result is unknown."""
    dims, size, kind = op.dims, DTYPE_BYTES[op.dtype], op.kind
    if call.endswith("_") or kind == "reduce":
        return 0
    if op.family == "conv":
        batch, _, outs, positions = dims[:4]
        return size * (batch * outs * positions if kind == "conv" else dims[8] * batch * dims[1] * dims[5] * dims[6])
    if op.family in ("gemm", "batched_gemm") and op.record.operands is not None:
        return int(size * op.record.operands(*dims)[2])
    if op.family == "embedding_bag":
        return size * dims[1] * (dims[3] if kind == "embedding_bag_backward" else dims[2])
    if op.family == "embedding":
        return size * dims[1] * (dims[2] if kind == "embedding_backward" else dims[0])
    if op.family == "attention":
        return size * dims[0] * dims[1] * dims[3] * dims[5]
    if op.family == "pool":
        return size * dims[0] * (dims[1] if kind == "pool_backward" else dims[2])
    return size * math.prod(dims) if op.record.bound == "memory" else 0


def _shape(op: Op) -> tuple[float, float]:
    """Logarithms of the outputs of one group, or a product's rows over its columns; and of the growth in positions."""
    if op.family == "conv":
        return math.log1p(op.dims[2] / max(op.dims[5], 1)), math.log1p(op.dims[6]) - math.log1p(op.dims[3])
    if op.family == "gemm" and len(op.dims) == 3:
        m, n, k = op.dims
        return math.log1p(m) - math.log1p(n), math.log1p(n) - math.log1p(k)
    return 0.0, 0.0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
