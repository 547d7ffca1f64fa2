"""Formats of traces: how one rank's file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.base.registry import Registry, check_takes
from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.traces.kineto import read_kineto
from stepsight.dataset.traces.placement import Placement

# Takes the path of one rank's file and the rank's place in its job, and returns its trace or raises ``TraceError``.
# The name is that under which a run's manifest lists the file: ``"traces": {"0": {"kineto": "rank0.json.gz"}}``.
TraceReader = Callable[[Path, Placement], RankTrace]


def _check_reader(name: str, reader: Any) -> TraceReader:
    check_takes("a reader of traces", reader, ("path", "placement"))
    return reader  # type: ignore[no-any-return]


TRACE_READERS: Registry[TraceReader] = Registry(
    "trace format",
    {"kineto": read_kineto},
    group="stepsight.trace_readers",
    check=_check_reader,
    error=TraceError,
)


def read_rank_trace(form: str, path: Path, placement: Placement) -> RankTrace:
    """Read one rank's file with the reader of its format.

    Raises:
        TraceError: If there is no such format, or if the reader raises or returns something else than a trace.
    """
    reader = TRACE_READERS[form]
    try:
        trace = reader(path, placement)
    except (StepsightError, OSError):
        raise
    except Exception as error:  # a user's own reader may raise anything
        raise TraceError(f"trace format {form}: cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(trace, RankTrace):
        raise TraceError(f"trace format {form}: a reader must return a RankTrace, got {trace!r:.80} for {path}")
    return trace
