"""The op table: every measured op and collective in long form, in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepsight.dataset.op import Collective, Op

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "work",  # "op" or "collective"
    "kind",
    "family",  # of an op; "collective" otherwise
    "dims",  # list of int64; empty for a collective
    "dtype",  # of an op; "" otherwise
    "num_bytes",  # of a collective; 0 otherwise
    "group_size",
    "ranks_per_node",
    "busy",  # ranks computing at the same time on the node
    "seconds",
    "in_context",  # False: measured alone (an event); True: within a training step (a trace)
    "source",  # name of the event file or "<run>/rank<k>"
    "run",  # name of the run; "" for an event
    "role",  # of the run; "event" for an event
)


def op_table(collection: Path) -> pd.DataFrame:
    """All events and all traced nodes of a collection, one row each, columns ``COLUMNS``.

    The digest of what was read is in ``frame.attrs["digest"]``.
    """
    raise NotImplementedError


def write_op_table(frame: pd.DataFrame, path: Path) -> None:
    """Write Parquet whole or not at all, digest included."""
    raise NotImplementedError


def read_op_table(path: Path) -> pd.DataFrame:
    """Read what ``write_op_table`` wrote.

    Raises:
        TraceError: If it is no op table.
    """
    raise NotImplementedError


def works(frame: pd.DataFrame) -> list[Op | Collective]:
    """Signature of every row; equal rows share one object."""
    raise NotImplementedError
