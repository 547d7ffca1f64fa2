from __future__ import annotations

from math import log

import numpy as np
import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.features.node_features import (
    FEATURE_VERSION,
    OP_TERMS,
    TILE_FEATURES,
    check_known,
    check_version,
    columns_of,
    op_feature_names,
    op_features,
    op_position,
    op_terms,
    tile_features,
)

HARDWARE = find_hardware("local-cpu")
assert HARDWARE is not None


@pytest.mark.parametrize("kind", OP_KINDS)
def test_every_kind_has_finite_numbers(kind: str) -> None:
    op = Op(kind, tuple(range(8, 8 + len(OP_KINDS[kind].dim_names))), "fp32")
    features = op_features([op, op], HARDWARE, [1, 2])
    assert features.shape == (2, len(op_feature_names()))
    assert np.isfinite(features).all()
    assert len(op_terms(op)) == len(OP_TERMS)
    assert min(op_terms(op)) >= 0
    assert np.isfinite(op_position(op)).all()


def test_busy_is_the_only_difference_between_contexts() -> None:
    one, two = op_features([Op("add", (64,), "fp32")] * 2, HARDWARE, [1, 2])
    assert [name for name, a, b in zip(op_feature_names(), one, two, strict=True) if a != b] == ["log_busy"]


def test_no_ops_give_no_rows() -> None:
    assert op_features([], HARDWARE, 1).shape == (0, len(op_feature_names()))


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
    assert (op.record.grid and op.record.grid(*op.dims)) == grid


@pytest.mark.parametrize("kind", OP_KINDS)
def test_nothing_is_said_of_unknown_processors_or_of_nothing(kind: str) -> None:
    num_dims = len(OP_KINDS[kind].dim_names)
    for op, num_processors in ((Op(kind, (64,) * num_dims), 0), (Op(kind, (0,) * num_dims), 108)):
        assert tile_features(op, num_processors) == (0.0,) * len(TILE_FEATURES)


def test_columns_are_found_by_name() -> None:
    assert columns_of(["c", "a"], ["a", "b", "c"], "a model") == [2, 0]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PredictorError, match=r"a model reads features that this version does not have: x, y: register"):
        columns_of(["y", "a", "x"], ["a"], "a model")
    check_known(["a"], ["a", "b"], "a model")


def test_another_version_is_refused() -> None:
    check_version(FEATURE_VERSION, "a model")
    with pytest.raises(PredictorError, match=f"of version {FEATURE_VERSION}, got version '2'"):
        check_version("2", "a model")
