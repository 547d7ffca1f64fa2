"""Numbers from ops: the physical terms of their time, and features for the trees.

Pure functions of nouns; every array has one row per op.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds import kinds_version
from stepsight.dataset.kinds.op import DTYPE_BYTES, OP_KINDS, Op
from stepsight.features.tiles import TILE_FEATURES, tile_features

Array = NDArray[np.float64]

OP_TERMS = ("calls", "flop", "bytes", "bytes_b", "bytes_c", "rows")
_BEFORE_DIMS = ("kind", "dtype_bytes", "log_busy", "log_flops", "log_bytes", "log_intensity", "log_roofline_s")
_AFTER_DIMS = ("alignment", *TILE_FEATURES, "variant")
_DIMS = len(_BEFORE_DIMS)


def op_feature_names() -> tuple[str, ...]:
    """Names of the columns of ``op_features``: one for each dim of the kind with the most dims, and others."""
    return _names(kinds_version())


@cached(4)
def _names(version: tuple[int, int]) -> tuple[str, ...]:
    num_dims = max(len(kind.dim_names) for kind in OP_KINDS.values())
    return (*_BEFORE_DIMS, *(f"log_dim{i}" for i in range(num_dims)), *_AFTER_DIMS)


def op_terms(op: Op) -> tuple[float, ...]:
    """Quantities whose weighted sum is an op's time, in the order of ``OP_TERMS``.

    Operands that caches treat differently have a term each, as the three of a matrix product.  Row-wise kinds pay per
    row, fused optimizers per tensor: ``OpKind.units``.
    """
    kind = op.record
    units = float(kind.units(*op.dims))
    if kind.operands is None:
        return (1.0, op.flops, op.num_bytes, 0.0, 0.0, units)
    size = DTYPE_BYTES[op.dtype]
    a, b, c = kind.operands(*op.dims)
    return (1.0, op.flops, float(a * size), float(b * size), float(c * size), units)


def _alignment(op: Op) -> int:
    """Logarithm of the largest power of two, up to 64, that divides every aligned dim; 0 without any."""
    kind = op.record
    if not kind.aligned:
        return 0
    sizes = (size for name, size in zip(kind.dim_names, op.dims, strict=True) if name in kind.aligned)
    return min(min((size & -size).bit_length() - 1, 6) for size in sizes)


def op_features(
    ops: Sequence[Op],
    hardware: Hardware,
    busy: Sequence[int] | int,
    variants: Sequence[int] | NDArray[np.int64] | int = 0,
) -> Array:
    """Features for trees, shape ``(len(ops), len(op_feature_names()))``.

    Args:
        ops: Signatures.
        hardware: For rooflines and tiles.
        busy: Devices of the node that compute at the same time, one number or one per op.
        variants: Which software ran it, one number or one per op; 0 is the one to predict for.
    """
    busies = np.broadcast_to(np.asarray(busy, dtype=np.float64), (len(ops),))
    names = op_feature_names()
    alignment = len(names) - len(_AFTER_DIMS)
    rows = np.zeros((len(ops), len(names)))
    rows[:, -1] = variants
    for row, op, num_busy in zip(rows, ops, busies, strict=True):
        flops, num_bytes = max(op.flops, 1.0), max(op.num_bytes, 1.0)
        row[:_DIMS] = (
            op.record.code,
            DTYPE_BYTES[op.dtype],
            np.log(num_busy),
            np.log(flops),
            np.log(num_bytes),
            np.log(flops / num_bytes),
            np.log(roofline_seconds(op, hardware) + 1e-9),
        )
        row[_DIMS : _DIMS + len(op.dims)] = np.log1p(op.dims)
        row[alignment] = _alignment(op)
        row[alignment + 1 : -1] = tile_features(op, hardware.num_processors)
    return rows


def op_position(op: Op) -> Array:
    """Position of an op among its kind: log of every dim and of its bytes, for distances and supports."""
    return np.log(np.maximum([*op.dims, op.flops, op.num_bytes], 1.0))
