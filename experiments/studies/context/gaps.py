"""Task *gaps*: what the host takes between its calls, and how long a step is if a model says so.

The durations of ops and collectives are those of the trace; the time of the host between two calls, and within a call
that launches, comes from a model; the graph of the step is then replayed.  Models are judged on hosts that they have
not seen (jobs held out), on the speed of a host known from half of the job, and on the other half of a job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.imported.import_ranks import import_ranks
from stepsight.dataset.imported.rank_graph import HOST, WHY_NUMBER, RankGraph
from stepsight.experiments.studies.context.step_errors import StepTable, step_table
from stepsight.simulator.replay.replay import replay

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Keys = Sequence[tuple[str, ...]]
PRIOR = 3.0  # calls of the more general key that a key's own mean is mixed with
LEAST_JOBS = 3
STALL, LEAST_STALL_S = 20.0, 5e-4  # times the median of a job's calls: the script waits, loads data or compiles
_WAITS = ("Synchronize", "step")  # parts of names of calls whose own time is no work of the host


@dataclass(frozen=True)
class HostCalls:
    """What the host of a rank does, one row for each edge between two of its calls.

    Attributes:
        edges: ``(c,)``: places of the edges in the graph.
        target: ``(c,)``: the later call.
        keys: From general to special: the call; what it launches; and whether the framework's call is the same.
        spent_s: ``(c, 2)``: between the calls, and within the later one (0 if that waits).
        stall: ``(c, 2)``: whether that is no work of launching: the script waits, loads data or compiles, or the call
            blocks until the device has caught up.
        half: ``(c,)``: 0 or 1: by step, or by turn where there is one step alone.
    """

    edges: Ints
    target: Ints
    keys: Keys
    spent_s: Array
    stall: NDArray[np.bool_]
    half: Ints


@dataclass(frozen=True)
class GapJob:
    """A job whose host is modelled."""

    name: str
    ranks: list[RankGraph]
    calls: list[HostCalls]


def gap_jobs(folder: Path) -> list[GapJob]:
    """Jobs of a folder that has a folder for each, with the Kineto traces of its ranks.

    Raises:
        TraceError: If fewer than three have steps and a host that launches.
    """
    jobs = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        ranks = [graph for file in sorted(path.glob("*.json*")) for graph in import_ranks([file]).graphs]
        ranks = [rank for rank in ranks if rank.device != "cpu" and len(rank.steps_s)]
        calls = [host_calls(rank) for rank in ranks]
        if any(len(each.edges) for each in calls):
            jobs.append(GapJob(path.name, ranks, calls))
    if len(jobs) < LEAST_JOBS:
        raise TraceError(f"{folder} must hold traces of {LEAST_JOBS} jobs with steps and launches, got {len(jobs)}")
    return jobs


def host_calls(rank: RankGraph) -> HostCalls:
    """Calls of a rank's host."""
    source, target, why = (rank.edges[name] for name in ("source", "target", "why"))
    launched = np.full(len(rank), -1)
    launch = why == WHY_NUMBER[Dependency.LAUNCH]
    launched[source[launch]] = target[launch]
    order = (why == WHY_NUMBER[Dependency.HOST_ORDER]) & (rank.nodes["kind"][target] == HOST)
    edges = np.flatnonzero(order & (rank.nodes["kind"][source] == HOST))
    edges = edges[np.argsort(rank.start_s[target[edges]], kind="stable")]
    keys: list[tuple[str, ...]] = []
    turn: Counter[tuple[str, ...]] = Counter()
    halves = []
    one_step = len(rank.steps_s) < 2
    for before, call in zip(source[edges].tolist(), target[edges].tolist(), strict=True):
        name = rank.names[rank.nodes["name"][call]]
        node, last = int(launched[call]), int(launched[before])
        kind = rank.kind_of(node) if node >= 0 else name
        same = node >= 0 and last >= 0 and rank.nodes["call"][node] == rank.nodes["call"][last] >= 0
        keys.append(("launch" if node >= 0 else name, kind, f"{kind} {'inside' if same else 'first'}"))
        step = int(rank.nodes["step"][node if node >= 0 else call])
        turn[keys[-1]] += 1
        halves.append(turn[keys[-1]] % 2 if one_step or step < 0 else step % 2)
    calls = target[edges]
    waits = [any(word in rank.names[rank.nodes["name"][call]] for word in _WAITS) for call in calls.tolist()]
    inside = np.where(np.array(waits, dtype=np.bool_), 0.0, rank.duration_s[calls])
    spent = np.stack([np.maximum(rank.delay_s[edges], 0.0), inside], axis=1)
    usual = np.median(spent, axis=0) if len(spent) else np.zeros(2)
    stall = spent > np.maximum(STALL * usual, LEAST_STALL_S)
    return HostCalls(edges, calls, keys, spent, stall, np.array(halves, dtype=np.int64))


class KeyMeans:
    """Mean seconds by key, mixed with those of the more general key."""

    def __init__(self, calls: Sequence[tuple[HostCalls, NDArray[np.bool_], float]]) -> None:
        """Take calls, which of them count, and by how much."""
        sums: dict[str, Array] = defaultdict(lambda: np.zeros(4))
        for each, chosen, weight in calls:
            for place in np.flatnonzero(chosen).tolist():
                works = ~each.stall[place]
                row = weight * np.array([*(works * each.spent_s[place]), *works])
                for level, key in enumerate(("", *each.keys[place])):
                    sums[f"{level} {key}"] += row
        self._sums = sums

    def seconds(self, calls: HostCalls, levels: int = 4) -> Array:
        """``(c, 2)``: as ``spent_s``."""
        known: dict[tuple[str, ...], Array] = {}
        return np.array([known.setdefault(key, self._of(key, levels)) for key in calls.keys]).reshape(-1, 2)

    def _of(self, keys: tuple[str, ...], levels: int) -> Array:
        mean = np.zeros(2)
        for level, key in enumerate(("", *keys)[:levels]):
            found = self._sums.get(f"{level} {key}")
            if found is not None:
                prior = PRIOR if level else 0.0
                mean = (found[:2] + prior * mean) / np.maximum(found[2:] + prior, 1e-12)
        return mean


def modelled(job: GapJob, spent: Sequence[Array]) -> float:
    """Seconds of a step if the host takes what is given, ``(c, 2)`` for each rank."""
    changed = []
    for rank, calls, seconds in zip(job.ranks, job.calls, spent, strict=True):
        delay, duration = rank.delay_s.copy(), rank.duration_s.copy()
        delay[calls.edges] = np.where(calls.stall[:, 0], calls.spent_s[:, 0], seconds[:, 0])
        works = calls.spent_s[:, 1] > 0
        duration[calls.target[works]] = seconds[works, 1]
        changed.append(replace(rank, delay_s=delay, duration_s=duration))
    return replay(changed).replayed_s


def _all(calls: HostCalls) -> NDArray[np.bool_]:
    return np.ones(len(calls.edges), dtype=np.bool_)


def _others(jobs: Sequence[GapJob], job: GapJob) -> KeyMeans:
    """Means over the other jobs; each job counts alike."""
    rows = []
    for other in jobs:
        if other is not job:
            total = sum(len(calls.edges) for calls in other.calls)
            rows += [(calls, _all(calls), 1000.0 / total) for calls in other.calls]
    return KeyMeans(rows)


def _halves(job: GapJob, spent: Callable[[HostCalls, int], Array]) -> list[Array]:
    """Seconds of each half of a job's calls, where ``spent`` is told the other half."""
    found = []
    for calls in job.calls:
        each = np.zeros((len(calls.edges), 2))
        for half in (0, 1):
            own = calls.half == half
            each[own] = spent(calls, 1 - half)[own]
        found.append(each)
    return found


def _scaled(job: GapJob, means: KeyMeans, levels: int) -> list[Array]:
    """Means of other jobs, times the speed of this host as the other half of its calls tells it."""
    rates = []
    for half in (0, 1):
        works = [~calls.stall & (calls.half == half)[:, None] for calls in job.calls]
        measured = sum((own * calls.spent_s).sum(axis=0) for own, calls in zip(works, job.calls, strict=True))
        told = sum((own * means.seconds(c, levels)).sum(axis=0) for own, c in zip(works, job.calls, strict=True))
        rates.append(np.asarray(measured) / np.maximum(told, 1e-12))
    return _halves(job, lambda calls, half: means.seconds(calls, levels) * rates[half])


def _own(job: GapJob, levels: int) -> list[Array]:
    means = [KeyMeans([(calls, calls.half == half, 1.0) for calls in job.calls]) for half in (0, 1)]
    return _halves(job, lambda calls, half: means[half].seconds(calls, levels))


def judge_gaps(folder: Path) -> StepTable:
    """Error of a step by each model.

    Raises:
        TraceError: If fewer than three jobs have steps and a host that launches.
    """
    jobs = gap_jobs(folder)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for job in jobs:
        truth = replay(job.ranks).replayed_s
        for name, spent in _models(jobs, job).items():
            seconds = modelled(job, spent)
            found[name][job.name] = 100.0 * (seconds / truth - 1.0)
    return step_table("gaps", "error of a step from the time of the host", found)


def _models(jobs: Sequence[GapJob], job: GapJob) -> dict[str, list[Array]]:
    means = _others(jobs, job)
    return {
        "stalls alone": [np.zeros((len(calls.edges), 2)) for calls in job.calls],
        "one time for all launches, other jobs": [means.seconds(calls, 2) for calls in job.calls],
        "by kind of op, other jobs": [means.seconds(calls) for calls in job.calls],
        "one time for all launches, speed of this host": _scaled(job, means, 2),
        "by kind of op, speed of this host": _scaled(job, means, 4),
        "one time for all launches, half of this job": _own(job, 2),
        "by kind of op, half of this job": _own(job, 4),
    }
