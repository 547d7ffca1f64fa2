"""Steps of scripts whose ops run on the host, without the profiler's overhead.

A profiler takes time for every call that it records, within ops and between them: a step of many small ops is twice as
long with it.  Steps that were timed without it say how much of that is taken off (``dataset.runs.trace``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_graph import PHASES
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.trace import profiling_correction, without_overhead
from stepsight.dataset.trace_graphs.graph_schema import NUMBERS, work_of

if TYPE_CHECKING:
    from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SLOWED = 1.2  # times the median of the steps before: traces that earlier versions imported hold observed steps


@dataclass(frozen=True, eq=False)
class HostStep:
    """The work of one rank's host in one step.

    Shapes: ``n`` ops in order.

    Attributes:
        name: Of the run.
        ops: ``(n,)`` signatures.
        calls: ``(n,)`` names of the framework's calls.
        phase: ``(n,)``: index of ``PHASES``.
        op_s: ``(n,)``: seconds without a profiler, the median over traced steps.
        step_s: Median seconds of a step that was timed without a profiler.
        place: Of the graph of such a step in the dataset.
        ranks: Of the run, on one host.
    """

    name: str
    ops: tuple[Op, ...]
    calls: tuple[str, ...]
    phase: Ints
    op_s: Floats
    step_s: float
    place: int = -1
    ranks: int = 1

    def counts(self) -> Floats:
        """Number of ops by phase, shape ``(len(PHASES),)``."""
        return np.bincount(self.phase, minlength=len(PHASES)).astype(np.float64)


def host_step(graphs: TraceGraphs, places: Sequence[int]) -> HostStep | None:
    """What a run's host does in one step, from the dataset's graphs of its steps.

    Args:
        graphs: The dataset.
        places: Of the run's steps in it.

    Returns:
        Of the first rank.  None where a device computed, or no step was timed without a profiler.
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
