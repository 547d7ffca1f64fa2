"""Strategies that a predictor cannot tell from the best, and what to measure to tell them apart.

Two strategies of a job share most of their ops, and errors that they share cancel when they are compared.  Here the
error of each kind of op and collective is taken as independent of the others, and of the same relative size for all
kinds: the size that makes up the prediction interval of the best strategy.  The error of a difference then comes from
the kinds of which one strategy spends more time than the other, along their critical paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepsight.dataset.op import Collective, Op
from stepsight.experiments.search.choices import Choice, Rival

MOST_RIVALS = 24  # strategies that are compared with the best: each comparison takes a whole prediction


def find_rivals(choices: Sequence[Choice]) -> tuple[Rival, ...]:
    """Find the strategies that cannot be told from the first.

    Args:
        choices: Best first.

    Returns:
        In the same order; of ``MOST_RIVALS`` strategies at most.
    """
    fitting = [choice for choice in choices if choice.fits and choice.seconds is not None]
    if not fitting:
        return ()
    best = fitting[0]
    assert best.seconds is not None
    time_s, _, high_s = best.seconds
    own = seconds_by_kind(best)
    size = math.log(high_s / time_s) / (_norm(list(own.values())) / time_s)  # relative error of each kind
    found = []
    for choice in fitting[1 : 1 + MOST_RIVALS]:
        assert choice.seconds is not None
        other = seconds_by_kind(choice)
        more = {kind: other.get(kind, 0.0) - own.get(kind, 0.0) for kind in {**own, **other}}
        slower, error = choice.seconds[0] / time_s - 1.0, size * _norm(list(more.values())) / time_s
        if abs(slower) <= error:
            measure = max(more, key=lambda kind: abs(more[kind]))
            found.append(Rival(choice, 100.0 * slower, 100.0 * error, measure, more[measure]))
    return tuple(found)


def seconds_by_kind(choice: Choice) -> dict[str, float]:
    """Seconds of the critical path of a strategy by kind of op and collective; they add up to the iteration time."""
    prediction = choice.prediction
    assert prediction is not None
    simulation = prediction.simulation
    counts = simulation.op_counts
    seconds = simulation.timer.work_seconds(list(counts))
    found: dict[str, float] = {}
    for work, each in zip(counts, seconds.tolist(), strict=True):
        kind = _kind(work)
        found[kind] = found.get(kind, 0.0) + counts[work] * each
    scale = prediction.iteration_time_s / simulation.iteration_time_s
    return {kind: value * scale for kind, value in found.items()}


def _kind(work: Op | Collective) -> str:
    if isinstance(work, Op):
        return work.kind
    return f"{work.kind} {'within a node' if work.num_nodes == 1 else 'across nodes'}"


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values))
