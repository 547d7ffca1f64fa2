"""How many times as long calls take while other ranks compute on the same host: from scripts that ran both ways.

Ranks of a host share its memory bandwidth and last cache, and the threads that communicate run on the cores that
compute.  What is learned is one factor, or one for each family of ops, whichever is the simplest within one standard
error of the best on runs that are held back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.features.host_call_features import call_label
from stepsight.training.kernels.host_calls import MOST_CROWDED, HostCalls
from stepsight.training.measured.host_steps import HostStep

Array = NDArray[np.float64]
LEAST_S = 5e-5  # of a call that is compared: shorter ones are mostly the profiler's own time
LEAST_RUNS = 3  # for holding some back; fewer runs teach one factor
PRIOR = 0.5  # of the median family's seconds, which draw a family's factor to that of all calls


class _Run(NamedTuple):
    """Seconds of a run's calls by family: as one rank takes them alone, and beside other ranks."""

    alone: Mapping[str, float]
    beside: Mapping[str, float]


def learn_contention(steps: Sequence[HostStep], costs: HostCalls) -> dict[str, float]:
    """Factors by family of ops, ``""`` for all others; empty where ops lose nothing, or nothing tells.

    Args:
        steps: Of runs whose host several ranks shared.
        costs: Learned from runs of one rank; only calls that these measured are compared.
    """
    runs = [run for step in steps if (run := _compared(step, costs)).alone]
    if not runs:
        return {}
    if len(runs) < LEAST_RUNS:
        return _without_ones(_one_factor(runs))
    errors = np.array(
        [
            [_error(run, fit([*runs[:place], *runs[place + 1 :]])) for place, run in enumerate(runs)]
            for fit in (_nothing, _one_factor, _by_family)
        ]
    )
    best = errors[np.argmin(errors.mean(axis=1))]
    for own, fit in zip(errors, (_nothing, _one_factor, _by_family), strict=True):
        worse = own - best
        if worse.mean() <= worse.std(ddof=1) / np.sqrt(len(runs)):
            return _without_ones(fit(runs))
    return {}


def _compared(step: HostStep, costs: HostCalls) -> _Run:
    alone: dict[str, float] = {}
    beside: dict[str, float] = {}
    for call, op, seconds in zip(step.calls, step.ops, step.op_s.tolist(), strict=True):
        usual = costs.known.get((call_label(call, op), op), 0.0)
        if usual >= LEAST_S and seconds > 0:
            alone[op.family] = alone.get(op.family, 0.0) + usual
            beside[op.family] = beside.get(op.family, 0.0) + seconds
    return _Run(alone, beside)


def _nothing(runs: Sequence[_Run]) -> dict[str, float]:
    return {}


def _one_factor(runs: Sequence[_Run]) -> dict[str, float]:
    return {"": _bounded(float(np.median([sum(run.beside.values()) / sum(run.alone.values()) for run in runs])))}


def _by_family(runs: Sequence[_Run]) -> dict[str, float]:
    usual = _one_factor(runs)[""]
    names = sorted({name for run in runs for name in run.alone})
    alone = {name: sum(run.alone.get(name, 0.0) for run in runs) for name in names}
    beside = {name: sum(run.beside.get(name, 0.0) for run in runs) for name in names}
    prior = PRIOR * float(np.median(list(alone.values())))
    found = {name: _bounded((beside[name] + prior * usual) / (alone[name] + prior)) for name in names}
    return {"": usual, **found}


def _error(run: _Run, factors: Mapping[str, float]) -> float:
    """|log| error of all compared calls of a run."""
    usual = factors.get("", 1.0)
    predicted = sum(seconds * factors.get(name, usual) for name, seconds in run.alone.items())
    return abs(float(np.log(predicted / sum(run.beside.values()))))


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0), MOST_CROWDED)


def _without_ones(factors: dict[str, float]) -> dict[str, float]:
    return factors if any(factor > 1.0 for factor in factors.values()) else {}
