"""Changes of a traced step with odd values are refused before any work."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.experiments.tasks.settings import TraceChanges

ODD = [0, -1, math.nan, math.inf, 1e300]


@pytest.mark.parametrize(
    "asked",
    [
        *({"faster": {"gemm": value}} for value in (*ODD, 1e-300)),
        {"faster": {"": 2.0}},
        {"faster": {" ": 2.0}},
        *({"batch": value} for value in (*ODD, "", "x", "nanx", "-1x", "2xx", "1e-300x")),
        *({"replicas": value} for value in (0, -1, 10**30)),
        *({"bucket_mb": value} for value in ODD[1:]),
    ],
    ids=str,
)
def test_odd_values_state_the_rule(asked: dict[str, Any]) -> None:
    with pytest.raises(StepsightError, match=r"takes|must be"):
        TraceChanges(**asked)
