"""Steps of scripts whose ops run on the host, without the profiler's overhead, and what they teach.

A profiler takes time for every call that it records, within ops and between them: a step of many small ops is twice as
long with it.  Steps that were timed without it say how much of that is taken off (``dataset.runs.trace``).

Ranks of a host share its memory bandwidth and last cache, and the threads that communicate run on the cores that
compute: scripts that ran alone and beside others tell how many times as long calls take.  What is learned is one
factor, or one for each family of ops, whichever is the simplest within one standard error of the best on runs that are
held back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_graph import PHASES
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.trace import profiling_correction, without_overhead
from stepsight.dataset.trace_graphs.graph_schema import NUMBERS, work_of
from stepsight.training.kernels.host_calls import (
    FUSED,
    MOST_CROWDED,
    Alone,
    Contention,
    HostCalls,
    call_label,
    fit_host_calls,
    fit_loops,
    loop_terms,
)
from stepsight.training.regression.fitted_physics import Bounds, fit_physics

if TYPE_CHECKING:
    from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SLOWED = 1.2  # times the median of the steps before: traces that earlier versions imported hold observed steps


@dataclass(frozen=True, eq=False)
class HostStep:
    """The work of one rank's host in one step.

    Shapes: ``n`` ops in order.
    """

    name: str  # of the run
    ops: tuple[Op, ...]  # (n,) signatures
    calls: tuple[str, ...]  # (n,) names of the framework's calls
    phase: Ints  # (n,): index of PHASES
    op_s: Floats  # (n,): seconds without a profiler, the median over traced steps
    step_s: float  # median seconds of a step that was timed without a profiler
    place: int = -1  # of the graph of such a step in the dataset
    ranks: int = 1  # of the run, on one host

    def counts(self) -> Floats:
        """Number of ops by phase, shape ``(len(PHASES),)``."""
        return np.bincount(self.phase, minlength=len(PHASES)).astype(np.float64)


def host_step(graphs: TraceGraphs, places: Sequence[int]) -> HostStep | None:
    """What a run's host does in one step, from the dataset's graphs of its steps.

    ``graphs``: the dataset.  ``places``: of the run's steps in it.  Returns of the first rank.  None where a device
    computed, or no step was timed without a profiler.
    """
    places = sorted(places, key=graphs.values("step").__getitem__)
    timed_s, ranks, hardware = (
        {graphs.values(name)[place] for place in places} for name in ("timed_s", "rank", "hardware")
    )
    if not ranks or hardware != {"cpu"} or timed_s == {0.0}:
        return None
    places = [place for place in places if graphs.values("rank")[place] == min(ranks)]
    steps = [_Step.of(graphs, place) for place in places]
    alike = _alike(steps)
    if not alike:
        return None
    step_s = timed_s.pop()
    profiled = float(np.median([steps[number].span_s for number in alike]))
    correction = profiling_correction(step_s, profiled, steps[0].events, 0.0)
    seconds = np.median(
        [
            correction.drift * without_overhead(steps[number].seconds, steps[number].recorded, correction.per_event_s)
            for number in alike
        ],
        axis=0,
    )
    first = steps[alike[0]]
    works = [work_of(graphs.kinds[kind], exact) for kind, *exact in first.works]
    ops = tuple(work for work in works if isinstance(work, Op))
    name = str(graphs.values("run")[places[0]])
    return HostStep(name, ops, first.calls, first.phase, seconds, step_s, places[alike[0]], len(ranks))


@dataclass(frozen=True, eq=False)
class _Step:
    """Ops of a traced step, ``(n,)`` each."""

    works: tuple[tuple[int, ...], ...]  # kind, and exact signature
    calls: tuple[str, ...]
    phase: Ints
    seconds: Floats
    recorded: Floats
    span_s: float
    events: float

    @classmethod
    def of(cls, graphs: TraceGraphs, place: int) -> _Step:
        told = {name: graphs.column("op", name, [place])[0] for name in ("kind", "signature", "x", "y", "recorded")}
        names = graphs.values("calls")[place]
        calls = tuple(names[call] for call in graphs.column("op", "call", [place])[0].tolist())
        columns = [NUMBERS.index(f"is_{phase}") for phase in PHASES]
        works = np.concatenate([told["kind"][:, None], told["signature"]], axis=1)
        return cls(
            tuple(map(tuple, works.tolist())),
            calls,
            told["x"][:, columns].argmax(axis=1).astype(np.int64),
            np.exp(told["y"][:, 1].astype(np.float64)),
            told["recorded"].astype(np.float64),
            float(graphs.values("span_s")[place]),
            float(graphs.values("events")[place]),
        )


def _alike(steps: Sequence[_Step]) -> list[int]:
    """Steps with the most common sequence of ops; without a slow last one, which an observer may have slowed."""
    spans = [step.span_s for step in steps]
    slow = len(steps) > 1 and spans[-1] > _SLOWED * float(np.median(spans[:-1]))
    works = [step.works for step in (steps[:-1] if slow else steps)]
    usual = max(set(works), key=works.count, default=())
    return [step for step, each in enumerate(works) if each == usual and usual]


_STEP = Bounds(  # scale of all calls; seconds between calls by phase; seconds of every step
    prior=np.array([1.0, 5e-6, 3e-6, 2e-6, 3e-4]),
    low=np.array([0.8, 1e-8, 1e-8, 1e-8, 1e-6]),
    high=np.array([1.25, 1e-4, 1e-4, 1e-4, 2e-3]),
)
_NOISE = 0.1  # deviation of log-seconds between steps


def learn_host_calls(steps: Sequence[HostStep], alone: Alone | None = None, seed: int = 0) -> HostCalls:
    """Learn the durations of calls from steps.

    ``steps``: at least one of a single rank; those of several ranks of a host tell what calls lose beside each other.
    ``alone``: shortest and longest seconds of calls that were measured alone, by label and op.
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
    return replace(learned, contention=Contention(learn_contention(together, learned)))


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


LEAST_S = 5e-5  # of a call that is compared: shorter ones are mostly the profiler's own time
LEAST_RUNS = 3  # for holding some back; fewer runs teach one factor
PRIOR = 0.5  # of the median family's seconds, which draw a family's factor to that of all calls


class _Run(NamedTuple):
    """Seconds of a run's calls by family: as one rank takes them alone, and beside other ranks."""

    alone: Mapping[str, float]
    beside: Mapping[str, float]


def learn_contention(steps: Sequence[HostStep], costs: HostCalls) -> dict[str, float]:
    """Factors by family of ops, ``""`` for all others; empty where ops lose nothing, or nothing tells.

    ``steps``: of runs whose host several ranks shared.  ``costs``: learned from runs of one rank; only calls that these
    measured are compared.
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
