"""How well the tiles of a matrix product fill a device: a large part of what its shape does to its speed.

A product's output is cut into tiles, each computed by one processor; a last wave that fills only part of the
processors, and tiles that stick out over the edge, take as long as full ones (NVIDIA, "Matrix Multiplication Background
User's Guide", 2023).  Which tile a library takes is not known, so every usual one has a feature.
"""

from __future__ import annotations

from math import log

from stepsight.dataset.op import Op

TILES = ((256, 128), (128, 256), (128, 128), (64, 64), (128, 64), (64, 128), (64, 256), (256, 64), (192, 128))
TILE_FEATURES = (*(f"log_waste_{rows}x{columns}" for rows, columns in TILES), "log_tiles_per_processor")


def output_grid(op: Op) -> tuple[int, int, int] | None:
    """Independent outputs of an op, and rows and columns of each; None for kinds that are not tiled.

    An attention's output is tiled by queries alone.
    """
    dims = op.dims
    if op.family == "gemm":
        m, n, k = dims
        return {"linear_dgrad": (1, m, k), "linear_wgrad": (1, n, k)}.get(op.kind, (1, m, n))
    if op.family == "batched_gemm":
        return dims[0], dims[1], dims[2]
    if op.family == "grouped_gemm":
        groups, m, n, k = dims
        rows = -(-m // max(groups, 1))
        return {"grouped_linear_dgrad": (groups, rows, k), "grouped_linear_wgrad": (groups, n, k)}.get(
            op.kind, (groups, rows, n)
        )
    if op.family == "attention":
        return dims[0] * dims[1], dims[3], 1
    if op.family == "latent_attention":
        return dims[0] * dims[1], dims[2], 1
    return None


def tile_features(op: Op, num_processors: int) -> tuple[float, ...]:
    """In the order of ``TILE_FEATURES``: log of computed over useful output; zeros where nothing is known of tiles."""
    grid = output_grid(op)
    if grid is None or not num_processors or not min(grid):
        return (0.0,) * len(TILE_FEATURES)
    count, m, n = grid
    found = []
    for rows, columns in TILES:
        waves = -(-count * -(-m // rows) * -(-n // columns) // num_processors)
        found.append(log(waves * num_processors * rows * columns / (count * m * n)))
    return (*found, log(count * -(-m // 128) * -(-n // 128) / num_processors))
