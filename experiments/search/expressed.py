"""The best strategy of a search that a training framework's configuration can express."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.configs.writers import write_config
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.space import Space
from stepsight.experiments.search.strategies import VARIED, strategies
from stepsight.training.predictor.ask_many import ask_many
from stepsight.training.predictor.prediction import predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

MOST_LEGAL = 20_000  # most strategies to check: some ten seconds
_KEYS = {f"parallel.{name}" for name in VARIED} | {"batch.micro_batch"}


def expresses(to: str, job: Job) -> bool:
    """Whether a format can express all degrees and options of a job's strategy."""
    return not _KEYS & {line.partition(" = ")[0] for line in write_config(job, to).ignored}


def best_expressed(
    result: SearchResult,
    to: str,
    predictor: Predictor | str | None = None,
    space: Space | dict[str, Any] | str | Path | None = None,
) -> tuple[Choice | None, bool]:
    """Find the best strategy that fits in memory and that a format can express.

    If the format does not express the best strategy, all legal strategies that it expresses are predicted: the search
    evaluated only those that could have been the best of all.

    Args:
        result: Of the search.
        to: Name of the format.
        predictor, space: Of the search.

    Returns:
        The strategy, or None; and whether all legal strategies were considered, not only those that were evaluated.
        Spaces of more than ``MOST_LEGAL`` strategies, and strategies with placed experts, are not looked through.
    """
    found = next((each for each in result.choices if each.fits and expresses(to, each.job)), None)
    if found is result.best:
        return found, True
    if result.legal > MOST_LEGAL or result.expert_loads is not None:
        return found, False
    best = result.best.job
    even = replace(best, parallel=replace(best.parallel, stage_layers=()))
    jobs = [job for job in strategies(even, Space.of(space)) if expresses(to, job)]
    known = [] if found is None else [found]
    if jobs:
        answers = ask_many(jobs, predictor, only_fitting=True)
        rows = np.array(answers).T.tolist()
        known += [
            Choice(job, peak, capacity, (time_s, low_s, high_s), lambda job: predict(job, predictor))
            for job, (time_s, low_s, high_s, peak, capacity) in zip(jobs, rows, strict=True)
            if peak <= capacity
        ]
    return min(known, key=lambda choice: choice.rank(result.goal), default=None), True
