"""Calibrate small, predict large: which rows a calibration may see, and which judge it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from stepsight.experiments.published.scored import Scored

MOST_GPUS = 8


def split_by_size(rows: Sequence[Scored], most_gpus: int = MOST_GPUS) -> tuple[list[Scored], list[Scored]]:
    """Rows to fit and rows to judge, of every source for itself.

    A source's rows of at most ``most_gpus`` devices are fitted, or those of its smallest size where it has none; its
    larger ones judge.
    """
    smallest: dict[Hashable, int] = {}
    for row in rows:
        name = row.row.source
        smallest[name] = min(smallest.get(name, row.row.gpus), row.row.gpus)
    fitted: list[Scored] = []
    judging: list[Scored] = []
    for row in rows:
        limit = max(most_gpus, smallest[row.row.source])
        (fitted if row.row.gpus <= limit else judging).append(row)
    return fitted, judging
