"""Split rows for calibration: small runs to fit, larger ones to judge."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

from stepsight.dataset.base.errors import StepsightError
from stepsight.experiments.evaluation.error_metrics import series_of
from stepsight.experiments.evaluation.scored_row import Scored

MOST_GPUS = 8
Split = tuple[list[Scored], list[Scored]]


def split_by_size(rows: Sequence[Scored], most_gpus: int = MOST_GPUS) -> Split:
    """Rows to fit and rows to judge, of every source's hardware for itself.

    Its rows of at most ``most_gpus`` devices are fitted, or those of its smallest size where it has none; its larger
    ones judge.
    """
    return _split(rows, most_gpus, lambda row: (row.row.source, row.job.cluster.hardware))


def split_by_series(rows: Sequence[Scored], most_gpus: int = MOST_GPUS) -> Split:
    """Split every series: a model in one strategy; the smallest size of a larger model begins one too."""
    return _split(rows, most_gpus, series_of)


def _split(rows: Sequence[Scored], most_gpus: int, set_of: Callable[[Scored], Hashable]) -> Split:
    smallest: dict[Hashable, int] = {}
    for row in rows:
        name = set_of(row)
        smallest[name] = min(smallest.get(name, row.row.gpus), row.row.gpus)
    fitted: list[Scored] = []
    judging: list[Scored] = []
    for row in rows:
        limit = max(most_gpus, smallest[set_of(row)])
        (fitted if row.row.gpus <= limit else judging).append(row)
    return fitted, judging


def without_copies(judging: Sequence[Scored], fitted: Sequence[Scored]) -> list[Scored]:
    """Rows to judge, without runs that were fitted and are listed twice."""
    known = {row.digest for row in fitted}
    return [row for row in judging if not row.among(known)]


def read_most_gpus(text: str) -> int:
    """The number in ``8``, ``8gpus`` or ``<=8gpus``.

    Raises:
        StepsightError: If it is no such text.
    """
    found = re.fullmatch(r"\s*(?:<=|≤)?\s*([1-9]\d{0,8})\s*(?:gpus?|devices?)?\s*", text, re.IGNORECASE)
    if found is None:
        raise StepsightError(f"--calibrate takes a number of devices below 10^9, as in 8gpus, got {text!r:.40}")
    return int(found[1])
