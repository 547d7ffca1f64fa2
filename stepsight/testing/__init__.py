"""Contracts for parts of your own: subclass one, return your part in its fixture, and run pytest.

They need pytest (``pip install "stepsight[testing]"``).  The parts of this package keep the same ones.  For example::

    from stepsight.testing import ScheduleContract

    class TestMySchedule(ScheduleContract):
        @pytest.fixture
        def kind(self):
            return ScheduleKind(my_schedule, virtual_stages=(1, 1))

The fixtures are ``kind`` of ``ScheduleContract``, ``OpKindContract`` and ``CollectiveKindContract``, ``latency`` of
``LatencyModelContract``, and ``model`` of ``ContextModelContract``.  ``TraceReaderContract`` and
``TableReaderContract`` read a sample that the subclass gives.
"""

from typing import TYPE_CHECKING

from stepsight.dataset.base.errors import need

need("pytest")
import pytest  # noqa: E402

for _name in ("kinds", "latency_models", "readers", "schedules"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")  # failures then show the values

from stepsight.testing.kinds import CollectiveKindContract as CollectiveKindContract  # noqa: E402
from stepsight.testing.kinds import OpKindContract as OpKindContract  # noqa: E402
from stepsight.testing.latency_models import ContextModelContract as ContextModelContract  # noqa: E402
from stepsight.testing.latency_models import LatencyModelContract as LatencyModelContract  # noqa: E402
from stepsight.testing.readers import TableReaderContract as TableReaderContract  # noqa: E402
from stepsight.testing.readers import TraceReaderContract as TraceReaderContract  # noqa: E402
from stepsight.testing.schedules import ScheduleContract as ScheduleContract  # noqa: E402

if not TYPE_CHECKING:  # type checkers take the imports above; ``help`` shows what is listed
    __all__ = sorted(name for name in globals() if name.endswith("Contract"))
