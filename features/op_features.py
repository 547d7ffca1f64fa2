"""Numbers from ops: the physical terms of their time, and features for the trees; names and version of all features.

Pure functions of nouns; every array has one row per op.  A model says which features it reads, and gets those columns.
A name always means one formula: a feature with another formula gets another name.  ``FEATURE_VERSION`` goes up only
where that cannot be, and then predictors of earlier versions are refused.

Tiles: a product's output is cut into tiles, each computed by one processor; a last wave that fills only part of the
processors, and tiles that stick out over the edge, take as long as full ones (NVIDIA, "Matrix Multiplication Background
User's Guide", 2023).  Which tile a library takes is not known, so every usual one has a feature.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds.op import DTYPE_BYTES, OP_KINDS, Op

TILES = ((256, 128), (128, 256), (128, 128), (64, 64), (128, 64), (64, 128), (64, 256), (256, 64), (192, 128))
TILE_FEATURES = (*(f"log_waste_{rows}x{columns}" for rows, columns in TILES), "log_tiles_per_processor")


def output_grid(op: Op) -> tuple[int, int, int] | None:
    """Independent outputs of an op, and rows and columns of each; None for kinds that are not tiled."""
    grid = op.record.grid
    return None if grid is None else grid(*op.dims)


def tile_features(op: Op, num_processors: int) -> tuple[float, ...]:
    """Compute ``TILE_FEATURES``: log of computed over useful output; zeros where tiles are unknown."""
    grid = output_grid(op)
    if grid is None or not num_processors or not min(grid):
        return (0.0,) * len(TILE_FEATURES)
    count, m, n = grid
    found = []
    for rows, columns in TILES:
        waves = -(-count * -(-m // rows) * -(-n // columns) // num_processors)
        found.append(log(waves * num_processors * rows * columns / (count * m * n)))
    return (*found, log(count * -(-m // 128) * -(-n // 128) / num_processors))


FEATURE_VERSION = 1


def columns_of(asked: Sequence[str], known: Sequence[str], model: str) -> list[int]:
    """Index in ``known`` of each feature that a model reads; raises ``PredictorError`` with those that are not."""
    check_known(asked, known, model)
    place = {name: index for index, name in enumerate(known)}
    return [place[name] for name in asked]


def check_known(asked: Collection[str], known: Collection[str], model: str) -> None:
    """Raise ``PredictorError`` with the features that a model reads and this version does not compute."""
    missing = sorted(set(asked) - set(known))
    if missing:
        raise PredictorError(
            f"{model} reads features that this version does not have: {', '.join(missing)}: register the kinds that "
            "they belong to, use the version that it was trained with, or train it again"
        )


def check_version(saved: Any, model: str) -> None:
    """Check the version of features that a model was saved with.  Raises ``PredictorError`` if it is another one."""
    if saved != FEATURE_VERSION:
        raise PredictorError(
            f"{model} must read features of version {FEATURE_VERSION}, got version {saved!r:.40}: use the version of "
            "stepsight that it was trained with, or train it again"
        )


Array = NDArray[np.float64]

OP_TERMS = ("calls", "flop", "bytes", "bytes_b", "bytes_c", "rows")
_BEFORE_DIMS = ("kind", "dtype_bytes", "log_busy", "log_flops", "log_bytes", "log_intensity", "log_roofline_s")
_AFTER_DIMS = ("alignment", *TILE_FEATURES, "variant")
_DIMS = len(_BEFORE_DIMS)


def op_feature_names() -> tuple[str, ...]:
    """Names of the columns of ``op_features``: one for each dim of the kind with the most dims, and others."""
    return _names(OP_KINDS.version)


@cached(4)
def _names(version: int) -> tuple[str, ...]:
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


def op_features(
    ops: Sequence[Op],
    hardware: Hardware,
    busy: Sequence[int] | int,
    variants: Sequence[int] | NDArray[np.int64] | int = 0,
) -> Array:
    """Features for trees, shape ``(len(ops), len(op_feature_names()))``.

    ``hardware``: for rooflines and tiles.  ``busy``: devices of the node that compute at the same time, one number or
    one per op.  ``variants``: which software ran it, one number or one per op; 0 is the one to predict for.
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
        kind = op.record  # the largest power of two, up to 64, that divides every aligned dim
        sizes = [size for name, size in zip(kind.dim_names, op.dims, strict=True) if name in (kind.aligned or ())]
        row[alignment] = min((min((size & -size).bit_length() - 1, 6) for size in sizes), default=0)
        row[alignment + 1 : -1] = tile_features(op, hardware.num_processors)
    return rows


def op_position(op: Op) -> Array:
    """Position of an op among its kind: log of every dim and of its bytes, for distances and supports."""
    return np.log(np.maximum([*op.dims, op.flops, op.num_bytes], 1.0))
