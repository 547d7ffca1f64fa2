"""Contracts for parts of your own: subclass one, return your part in its fixture, and run pytest.

- ``TraceReaderContract``: a reader of traces
- ``TableReaderContract``: a reader of tables of measurements
- ``LatencyModelContract``: a latency model
- ``OpKindContract``: a kind of op
- ``CollectiveKindContract``: a kind of collective
- ``ScheduleContract``: a kind of pipeline schedule

The parts of this package keep the same contracts.  They need pytest (``pip install pytest``).
"""

import pytest

for _name in (
    "latency_model_contract",
    "op_kind_contract",
    "schedule_contract",
    "table_reader_contract",
    "trace_reader_contract",
):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")  # failures then show the values

from stepsight.testing.latency_model_contract import LatencyModelContract  # noqa: E402
from stepsight.testing.op_kind_contract import CollectiveKindContract, OpKindContract  # noqa: E402
from stepsight.testing.schedule_contract import ScheduleContract  # noqa: E402
from stepsight.testing.table_reader_contract import TableReaderContract  # noqa: E402
from stepsight.testing.trace_reader_contract import TraceReaderContract  # noqa: E402

__all__ = [
    "CollectiveKindContract",
    "LatencyModelContract",
    "OpKindContract",
    "ScheduleContract",
    "TableReaderContract",
    "TraceReaderContract",
]
