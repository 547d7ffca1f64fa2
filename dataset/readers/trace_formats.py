"""Formats of traces: how one rank's file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepsight.dataset.errors import TraceError
from stepsight.dataset.readers.kineto import read_kineto
from stepsight.dataset.readers.placement import Placement
from stepsight.dataset.registry import Registry
from stepsight.dataset.trace import RankTrace

# Takes the path of one rank's file and the rank's place in its job, and returns its trace or raises ``TraceError``.
# The name is that under which a run's manifest lists the file: ``"traces": {"0": {"kineto": "rank0.json.gz"}}``.
TraceReader = Callable[[Path, Placement], RankTrace]

TRACE_READERS: Registry[TraceReader] = Registry(
    "trace format", {"kineto": read_kineto}, group="stepsight.trace_readers", error=TraceError
)
