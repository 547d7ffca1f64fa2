"""Fit ``HostCalls``, the durations of calls on a host, to steps of scripts and to calls measured alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_graph import PHASES
from stepsight.dataset.kinds.op import Op
from stepsight.features.host_call_features import call_label
from stepsight.training.kernels.host_calls import FUSED, Alone, HostCalls, fit_host_calls, fit_loops, loop_terms
from stepsight.training.measured.host_contention import learn_contention
from stepsight.training.measured.host_steps import HostStep
from stepsight.training.regression.fitted_physics import Bounds, fit_physics

Array = NDArray[np.float64]

_STEP = Bounds(  # scale of all calls; seconds between calls by phase; seconds of every step
    prior=np.array([1.0, 5e-6, 3e-6, 2e-6, 3e-4]),
    low=np.array([0.8, 1e-8, 1e-8, 1e-8, 1e-6]),
    high=np.array([1.25, 1e-4, 1e-4, 1e-4, 2e-3]),
)
_NOISE = 0.1  # deviation of log-seconds between steps


def learn_host_calls(steps: Sequence[HostStep], alone: Alone | None = None, seed: int = 0) -> HostCalls:
    """Learn the durations of calls from steps.

    Args:
        steps: At least one of a single rank; those of several ranks of a host tell what calls lose beside each other.
        alone: Shortest and longest seconds of calls that were measured alone, by label and op.
        seed: Of the trees.
    """
    together = [step for step in steps if step.ranks > 1]
    steps = [step for step in steps if step.ranks == 1]
    distinct: dict[tuple[str, Op, int], list[float]] = {}
    known: dict[tuple[str, Op], list[float]] = {}
    for step in steps:
        for call, op, phase, seconds in zip(step.calls, step.ops, step.phase.tolist(), step.op_s.tolist(), strict=True):
            if seconds > 0:
                distinct.setdefault((call, op, phase), []).append(seconds)
                known.setdefault((call_label(call, op), op), []).append(seconds)
    calls = [(*key, float(np.median(values))) for key, values in distinct.items()]
    found = fit_host_calls([each for each in calls if each[1].kind != FUSED] or calls, seed)
    inside = {key: float(np.median(values)) for key, values in known.items()}
    scale, gaps_s, step_s = _between(steps)
    learned = replace(found, known=inside, alone=alone or {}, scale=scale, gaps_s=gaps_s, step_s=step_s)
    loops = {op: seconds for (_, op), seconds in inside.items() if op.kind == FUSED}
    if loops:
        learned = replace(learned, loops=fit_loops(loop_terms(list(loops)), np.array(list(loops.values()))))
    return replace(learned, crowded=learn_contention(together, learned))


def _between(steps: Sequence[HostStep]) -> tuple[float, tuple[float, ...], float]:
    """The time between calls: ``scale``, ``gaps_s`` and ``step_s`` of ``HostCalls``."""
    terms = np.array([[step.op_s.sum(), *step.counts(), 1.0] for step in steps])
    measured = np.array([step.step_s for step in steps])
    fitted = fit_physics(terms, np.ones(len(steps)), measured, _STEP, noise=_NOISE, prior_std=1.0)
    scale, *gaps, rest = np.exp(fitted.log_constants).tolist()
    return scale, tuple(gaps), rest


def step_seconds(costs: HostCalls, calls: Sequence[str], ops: Sequence[Op], phases: Sequence[int]) -> float:
    """Seconds of a step of consecutive calls."""
    counts = np.bincount(np.asarray(phases, dtype=np.int64), minlength=len(PHASES))
    return float(costs.seconds(calls, ops, phases).sum() + counts @ np.array(costs.gaps_s) + costs.step_s)
