from math import log

import pytest

from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.features.tiles import TILE_FEATURES, output_grid, tile_features


def test_a_full_wave_wastes_nothing() -> None:
    """108 processors, 108 tiles of 128 x 128."""
    features = dict(zip(TILE_FEATURES, tile_features(Op("linear", (12 * 128, 9 * 128, 64)), 108), strict=True))
    assert features["log_waste_128x128"] == pytest.approx(0)
    assert features["log_tiles_per_processor"] == pytest.approx(0)


def test_one_row_too_many_costs_a_wave_and_a_row_of_tiles() -> None:
    features = dict(zip(TILE_FEATURES, tile_features(Op("linear", (12 * 128 + 1, 9 * 128, 64)), 108), strict=True))
    assert features["log_waste_128x128"] == pytest.approx(log(2 * 12 * 128 / (12 * 128 + 1)))


@pytest.mark.parametrize(
    ("op", "grid"),
    [
        (Op("linear", (2, 3, 5)), (1, 2, 3)),
        (Op("linear_dgrad", (2, 3, 5)), (1, 2, 5)),
        (Op("linear_wgrad", (2, 3, 5)), (1, 3, 5)),
        (Op("batched_matmul", (7, 2, 3, 5)), (7, 2, 3)),
        (Op("grouped_linear", (4, 10, 3, 5)), (4, 3, 3)),
        (Op("grouped_linear_dgrad", (4, 10, 3, 5)), (4, 3, 5)),
        (Op("grouped_linear_wgrad", (4, 10, 3, 5)), (4, 3, 5)),
        (Op("attention", (2, 8, 8, 64, 32, 128, 1)), (16, 64, 1)),
        (Op("mla_attention", (2, 8, 64, 32, 192, 128, 1)), (16, 64, 1)),
        (Op("gelu", (64,)), None),
    ],
    ids=str,
)
def test_what_is_tiled_is_the_output(op: Op, grid: tuple[int, int, int] | None) -> None:
    assert output_grid(op) == grid


@pytest.mark.parametrize("kind", OP_KINDS)
def test_nothing_is_said_of_unknown_processors_or_of_nothing(kind: str) -> None:
    num_dims = len(OP_KINDS[kind].dim_names)
    for op, num_processors in ((Op(kind, (64,) * num_dims), 0), (Op(kind, (0,) * num_dims), 108)):
        assert tile_features(op, num_processors) == (0.0,) * len(TILE_FEATURES)
