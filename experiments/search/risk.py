"""Strategies that a predictor cannot distinguish from the best, and what to measure to distinguish them.

Two strategies of a job share most of their ops, and errors that they share cancel when they are compared.  Here the
error of each kind of op and collective is taken as independent of the others, and of the same relative size for all
kinds: the size that makes up the prediction interval of the best strategy.  The error of a difference then comes from
the kinds of which one strategy spends more time than the other, along their critical paths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.search.choices import Choice, Rival

Floats = NDArray[np.float64]
COVERAGE = 0.9  # of prediction intervals
DRAWS = 4096  # of errors; their number decides the last digit of a regret, not the order of strategies that differ
MOST_RIVALS = 24  # strategies that are compared with the best: each comparison takes a full prediction


def _compared(choices: Sequence[Choice]) -> list[Choice]:
    """The best strategies that fit, of which a full prediction is made."""
    return [choice for choice in choices if choice.fits and choice.seconds is not None][: 1 + MOST_RIVALS]


def find_rivals(choices: Sequence[Choice]) -> tuple[Rival, ...]:
    """Find the strategies that cannot be distinguished from the first, of ``MOST_RIVALS`` at most; best first."""
    if not (compared := _compared(choices)):
        return ()
    best = compared[0]
    own, time_s = seconds_by_kind(best), best.timed[0]
    size = _error_of_kinds(best, own)
    found = []
    for choice in compared[1:]:
        other = seconds_by_kind(choice)
        more = {kind: other.get(kind, 0.0) - own.get(kind, 0.0) for kind in {**own, **other}}
        slower, error = choice.timed[0] / time_s - 1.0, size * _norm(more.values()) / time_s
        if abs(slower) <= error:
            measure = max(more, key=lambda kind: abs(more[kind]))
            found.append(Rival(choice, 100.0 * slower, 100.0 * error, measure, more[measure]))
    return tuple(found)


def by_expected_regret(choices: Sequence[Choice]) -> tuple[list[Choice], tuple[float, ...]]:
    """Sort the fastest strategies by their expected regret.

    The regret of a strategy is how much longer it takes than the fastest of them turns out to take.  The errors of
    kinds of ops and collectives are drawn; strategies share them.

    Args:
        choices: The fastest first.

    Returns:
        All choices, and the expected regret in percent of the first of them: ``1 + MOST_RIVALS`` strategies at most.
    """
    if not (compared := _compared(choices)):
        return list(choices), ()
    spent = [seconds_by_kind(choice) for choice in compared]
    kinds = list(dict.fromkeys(kind for one in spent for kind in one))
    seconds = np.array([[one.get(kind, 0.0) for kind in kinds] for one in spent])
    size = _error_of_kinds(compared[0], spent[0]) / NormalDist().inv_cdf((1.0 + COVERAGE) / 2.0)
    rest = np.array([choice.timed[0] for choice in compared]) - seconds.sum(axis=1)  # launches
    regrets = expected_regrets(seconds, rest, size)
    order = np.argsort(regrets, kind="stable").tolist()
    first = {id(choice) for choice in compared}
    ranked = [*(compared[at] for at in order), *(choice for choice in choices if id(choice) not in first)]
    return ranked, tuple((100.0 * regrets[order]).tolist())


def expected_regrets(seconds: Floats, rest: Floats, size: float) -> Floats:
    """Mean excess of each strategy over the fastest one of each sample; relative, shape ``(n,)``.

    Args:
        seconds: Of each strategy by kind of op and collective, shape ``(n, kinds)``.
        rest: Seconds that have no error, shape ``(n,)``.
        size: Standard deviation of the logarithm of each kind's error, whose mean is 1.
    """
    half = np.random.default_rng(0).standard_normal((DRAWS // 2, seconds.shape[1]))
    errors = np.exp(size * np.concatenate([half, -half]) - size**2 / 2.0)
    times = errors @ seconds.T + rest
    return np.asarray((times / times.min(axis=1, keepdims=True)).mean(axis=0) - 1.0)


def _error_of_kinds(best: Choice, own: dict[str, float]) -> float:
    """Relative error of each kind that adds up to half of the interval of a strategy (with the interval's coverage)."""
    time_s, _, high_s = best.timed
    return math.log(high_s / time_s) / (_norm(own.values()) / time_s)


def seconds_by_kind(choice: Choice) -> dict[str, float]:
    """Seconds of the critical path of a strategy by kind of op and collective; they add up to the iteration time."""
    prediction = choice.prediction
    assert prediction is not None
    simulation = prediction.simulation
    counts = simulation.op_counts
    seconds = simulation.timer.work_seconds(list(counts)).tolist()
    scale = prediction.iteration_time_s / simulation.iteration_time_s
    found: dict[str, float] = defaultdict(float)
    for (work, count), each in zip(counts.items(), seconds, strict=True):
        found[_kind(work)] += count * each
    return {kind: value * scale for kind, value in found.items()}


def _kind(work: Op | Collective) -> str:
    if isinstance(work, Op):
        return work.kind
    return f"{work.kind} {'within a node' if work.num_nodes == 1 else 'across nodes'}"


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(value**2 for value in values))
