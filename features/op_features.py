"""Numbers from ops: physical quantities that take time, and features for the trees.

Pure functions of nouns; every array has one row per op.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.op import DTYPE_BYTES, OP_KINDS, Op
from stepsight.dataset.physics import roofline_seconds
from stepsight.features.tiles import TILE_FEATURES, tile_features

Array = NDArray[np.float64]

KIND_IDS = {kind: index for index, kind in enumerate(OP_KINDS)}
FAMILIES = tuple(dict.fromkeys(kind.family for kind in OP_KINDS.values()))
FAMILY_IDS = {family: index for index, family in enumerate(FAMILIES)}
MAX_DIMS = max(len(kind.dim_names) for kind in OP_KINDS.values())

OP_TERMS = ("calls", "flop", "bytes", "bytes_b", "bytes_c", "rows")
OP_FEATURES = (
    "kind",
    "dtype_bytes",
    "log_busy",
    "log_flops",
    "log_bytes",
    "log_intensity",
    "log_roofline_s",
    *(f"log_dim{i}" for i in range(MAX_DIMS)),
    "alignment",
    *TILE_FEATURES,
    "variant",
)
_DIMS = OP_FEATURES.index("log_dim0")
_ALIGNMENT = OP_FEATURES.index("alignment")


def op_terms(op: Op) -> tuple[float, ...]:
    """Quantities whose weighted sum is an op's time, in the order of ``OP_TERMS``.

    A matrix product moves three operands that caches treat differently, so each has a term of its own;
    row-wise kinds pay per row, fused optimizers per tensor.
    """
    size = DTYPE_BYTES[op.dtype]
    family = op.family
    if family == "gemm":
        m, n, k = op.dims
        return (1.0, op.flops, float(m * k * size), float(n * k * size), float(m * n * size), 0.0)
    if family in ("grouped_gemm", "batched_gemm"):
        count, m, n, k = op.dims
        each = count if family == "batched_gemm" else 1  # the rows of a grouped product are those of all groups
        sides = (float(each * m * k * size), float(count * n * k * size), float(each * m * n * size))
        return (1.0, op.flops, *sides, float(count))
    if family in ("attention", "latent_attention"):
        dims = dict(zip(OP_KINDS[op.kind].dim_names, op.dims, strict=True))
        heads = dims["batch"] * dims["heads"]
        return (1.0, op.flops, op.num_bytes, float(heads * dims["q_len"] * dims["kv_len"] * size), 0.0, float(heads))
    if family in ("norm", "loss", "embedding", "softmax", "permute"):
        return (1.0, op.flops, op.num_bytes, 0.0, 0.0, float(op.dims[0]))
    if family in ("optimizer", "host"):
        return (1.0, op.flops, op.num_bytes, 0.0, 0.0, float(op.dims[1]))
    return (1.0, op.flops, op.num_bytes, 0.0, 0.0, 0.0)


def _alignment(op: Op) -> int:
    """Logarithm of the largest power of two, up to 64, that divides every dim of a matrix product; 0 for others."""
    if op.family not in ("gemm", "grouped_gemm", "batched_gemm"):
        return 0
    return min(min((dim & -dim).bit_length() - 1, 6) for dim in op.dims[-3:])


def op_features(
    ops: Sequence[Op],
    hardware: Hardware,
    busy: Sequence[int] | int,
    variants: Sequence[int] | NDArray[np.int64] | int = 0,
) -> Array:
    """Features for trees, shape ``(len(ops), len(OP_FEATURES))``.

    Args:
        busy: Devices of the node that compute at the same time, one number or one per op.
        variants: Which software ran it, one number or one per op; 0 is the one to predict for.
    """
    busies = np.broadcast_to(np.asarray(busy, dtype=np.float64), (len(ops),))
    rows = np.zeros((len(ops), len(OP_FEATURES)))
    rows[:, -1] = variants
    for row, op, num_busy in zip(rows, ops, busies, strict=True):
        flops, num_bytes = max(op.flops, 1.0), max(op.num_bytes, 1.0)
        row[:_DIMS] = (
            KIND_IDS[op.kind],
            DTYPE_BYTES[op.dtype],
            np.log(num_busy),
            np.log(flops),
            np.log(num_bytes),
            np.log(flops / num_bytes),
            np.log(roofline_seconds(op, hardware) + 1e-9),
        )
        row[_DIMS : _DIMS + len(op.dims)] = np.log1p(op.dims)
        row[_ALIGNMENT] = _alignment(op)
        row[_ALIGNMENT + 1 : -1] = tile_features(op, hardware.num_processors)
    return rows


def op_position(op: Op) -> Array:
    """Where an op lies among its kind: log of every dim and of its bytes, for distances and supports."""
    return np.log(np.maximum([*op.dims, op.flops, op.num_bytes], 1.0))
