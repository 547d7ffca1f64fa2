import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.features.op_features import OP_TERMS, op_feature_names, op_features, op_position, op_terms

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
