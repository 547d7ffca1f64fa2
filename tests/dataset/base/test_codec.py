from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from stepsight.dataset.base.files import IF_SET, ROUNDED, UNSAVED, Saved


class Ends(NamedTuple):
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Part(Saved):
    name: str
    scale: float = field(default=1.0, metadata=IF_SET)


@dataclass(frozen=True)
class Model(Saved):
    ends: Ends
    parts: Mapping[str, Part]
    numbers: NDArray[np.float64] = field(metadata=ROUNDED)
    shape: tuple[int, ...]
    known: bool
    part: Part | None = field(default=None, metadata=IF_SET)
    trees: Any = field(default=None, metadata=UNSAVED)


MODEL = Model(Ends(np.zeros(1), np.ones(1)), {"a": Part("x", 2.0)}, np.array([1 / 3]), (1, 2), True, trees=object())
TABLE = {
    "ends": {"low": [0.0], "high": [1.0]},
    "parts": {"a": {"name": "x", "scale": 2.0}},
    "numbers": [0.333333],
    "shape": [1, 2],
    "known": True,
}


def test_a_model_is_saved_by_its_fields_and_read_back_by_their_types() -> None:
    assert MODEL.to_dict() == TABLE
    again = Model.from_dict({**TABLE, "part": {"name": "y"}}, trees=3)
    assert (again.part, again.trees, again.shape) == (Part("y"), 3, (1, 2))
    assert again.to_dict() == {**TABLE, "part": {"name": "y"}}


@pytest.mark.parametrize("wrong", [{"known": 1}, {"shape": 3}, {"shape": [1.5]}, {"parts": []}, {"numbers": ["x"]}])
def test_a_value_of_another_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Model.from_dict({**TABLE, **wrong})


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(KeyError, match="known"):
        Model.from_dict({name: value for name, value in TABLE.items() if name != "known"})
