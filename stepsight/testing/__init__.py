"""Contracts for parts of your own: subclass one, return your part in its fixture, and run pytest.

- ``TraceReaderContract``: a reader of traces
- ``TableReaderContract``: a reader of tables of measurements
- ``LatencyModelContract``: a latency model
- ``ContextModelContract``: a context model
- ``OpKindContract``: a kind of op
- ``CollectiveKindContract``: a kind of collective
- ``ScheduleContract``: a kind of pipeline schedule

The parts of this package keep the same contracts.  They need pytest (``pip install pytest``).
"""

import pytest

for _name in ("kinds", "latency_models", "readers", "schedules"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")  # failures then show the values

from stepsight.testing.kinds import CollectiveKindContract, OpKindContract  # noqa: E402
from stepsight.testing.latency_models import ContextModelContract, LatencyModelContract  # noqa: E402
from stepsight.testing.readers import TableReaderContract, TraceReaderContract  # noqa: E402
from stepsight.testing.schedules import ScheduleContract  # noqa: E402

__all__ = [
    "CollectiveKindContract",
    "ContextModelContract",
    "LatencyModelContract",
    "OpKindContract",
    "ScheduleContract",
    "TableReaderContract",
    "TraceReaderContract",
]
