"""How well the tiles of a matrix product fill a device: an important effect of its shape on its speed.

A product's output is cut into tiles, each computed by one processor; a last wave that fills only part of the
processors, and tiles that stick out over the edge, take as long as full ones (NVIDIA, "Matrix Multiplication Background
User's Guide", 2023).  Which tile a library takes is not known, so every usual one has a feature.
"""

from __future__ import annotations

from math import log

from stepsight.dataset.kinds.op import Op

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
