"""What is left of whole iterations, read back."""

from __future__ import annotations

from typing import Any

import pytest

from stepsight.training.corrections.residual import SCALES, UNLIKE, Residual

ROW: dict[str, Any] = {"place": [1.0] * len(SCALES), "labels": ["x"] * len(UNLIKE), "doublings": 3.0, "log": 0.1}


def table(changes: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"spread": 0.1, "noise": 0.01, "rows": [{**ROW, **row}], **changes}


def test_a_residual_is_read_as_it_was_written() -> None:
    assert Residual.from_dict(table({})).to_dict() == table({})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (table({"noise": 1e-200}), "spread and noise from 0.001 to 1, got 1, 0.1, 1e-200"),
        (table({"spread": 2}), "spread and noise from 0.001 to 1"),
        (table({"rows": []}), "a residual needs rows"),
        (table({}, log=1e3), r"logs of a residual must lie within \+-100, got \(1000.0,\)"),
        (table({}, log=float("nan")), "logs of a residual must lie within"),
        (table({}, doublings=1e300), r"places and doublings must lie within \+-1000"),
        (table({}, doublings=float("inf")), "places and doublings must lie within"),
        (table({}, place=[float("nan")] * len(SCALES)), "places and doublings must lie within"),
        (table({}, place=[1.0]), "12 places and 6 labels must be there"),
        (table({}, place="x" * len(SCALES)), "place must be a list"),
    ],
)
def test_numbers_that_nothing_was_off_by_are_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Residual.from_dict(value)
