"""Traced runs for training, read through the graph dataset alone: ops and collectives, and steps that the host runs.

A profiler takes time for every call that it records, within ops and between them: a step of many small ops is twice as
long with it.  Steps that were timed without it say how much of that is taken off (``dataset.runs.trace``).

Ranks of a host share its memory bandwidth and last cache, and the threads that communicate run on the cores that
compute: scripts that ran alone and beside others tell how many times as long calls take.  What is learned is one
factor, or one for each family of ops, whichever is the simplest within one standard error of the best on runs that are
held back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.graph_table import NUMBERS, kind_names, work_of
from stepsight.dataset.graph.program import PHASES
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.hardware.hardware import reported_devices
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import read_imported
from stepsight.dataset.runs.trace import profiling_correction, without_overhead
from stepsight.dataset.tables.measurements import device_name, is_other_device
from stepsight.training.kernels import host_calls
from stepsight.training.regression.regressor import Bounds, fit_physics

if TYPE_CHECKING:
    from stepsight.dataset.graph.graph_table import GraphTable
    from stepsight.dataset.trace_graphs.learning_segments import StepWorks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SLOWED = 1.2  # times the median of the steps before: traces that earlier versions imported hold observed steps


@dataclass(frozen=True, eq=False)
class HostStep:
    """The ``n`` ops of one rank's host in one step, in order."""

    name: str  # of the run
    ops: tuple[Op, ...]  # (n,) signatures
    calls: tuple[str, ...]  # (n,) names of the framework's calls
    phase: Ints  # (n,): index of PHASES
    op_s: Floats  # (n,): seconds without a profiler, the median over traced steps
    step_s: float  # median seconds of a step that was timed without a profiler
    place: int = -1  # of the graph of such a step in the dataset
    ranks: int = 1  # of the run, on one host


def host_step(graphs: GraphTable, places: Sequence[int]) -> HostStep | None:
    """What the host of a run's first rank does in a step; None where a device computed, or no step was timed."""
    about = graphs.about
    places = sorted(places, key=about["step"].__getitem__)
    timed_s, ranks, hardware = ({about[name][place] for place in places} for name in ("timed_s", "rank", "hardware"))
    if not ranks or hardware != {"cpu"} or timed_s == {0.0}:
        return None
    places = [place for place in places if about["rank"][place] == min(ranks)]
    steps = [graphs.select([place]) for place in places]
    # Steps with the most common sequence of ops; without a slow last one, which an observer may have slowed.
    spans = [float(step.about["span_s"][0]) for step in steps]
    slow = len(steps) > 1 and spans[-1] > _SLOWED * float(np.median(spans[:-1]))
    rows = [step.rows["op"] for step in (steps[:-1] if slow else steps)]
    works = [np.concatenate([ops["kind"][:, None], ops["signature"]], axis=1) for ops in rows]  # with exact signatures
    sequences = [tuple(map(tuple, own.tolist())) for own in works]
    usual = max(set(sequences), key=sequences.count, default=())
    alike = [number for number, each in enumerate(sequences) if each == usual and usual]
    if not alike:
        return None
    step_s = timed_s.pop()
    profiled = float(np.median([spans[number] for number in alike]))
    per_event_s, drift = profiling_correction(step_s, profiled, float(steps[0].about["events"][0]), 0.0)
    seconds = []
    for ops in (rows[number] for number in alike):
        traced, recorded = np.exp(ops["y"][:, 1].astype(np.float64)), ops["recorded"].astype(np.float64)
        seconds.append(drift * without_overhead(traced, recorded, per_event_s))
    first, kinds = rows[alike[0]], kind_names()
    known = [work_of(kinds[kind], exact) for kind, *exact in usual]
    calls = tuple(steps[alike[0]].about["calls"][0][call] for call in first["call"].tolist())
    phase = first["x"][:, [NUMBERS.index(f"is_{phase}") for phase in PHASES]].argmax(axis=1).astype(np.int64)
    told = tuple(work for work in known if isinstance(work, Op)), calls, phase, np.median(seconds, axis=0)
    return HostStep(str(about["run"][places[0]]), *told, step_s, places[alike[0]], len(ranks))


_STEP = Bounds(  # scale of all calls; seconds between calls by phase; seconds of every step
    prior=np.array([1.0, 5e-6, 3e-6, 2e-6, 3e-4]),
    low=np.array([0.8, 1e-8, 1e-8, 1e-8, 1e-6]),
    high=np.array([1.25, 1e-4, 1e-4, 1e-4, 2e-3]),
)
_NOISE = 0.1  # deviation of log-seconds between steps


def learn_host_calls(
    steps: Sequence[HostStep], alone: host_calls.Alone | None = None, seed: int = 0
) -> host_calls.HostCalls:
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
                known.setdefault((host_calls.call_label(call, op), op), []).append(seconds)
    calls = [(*key, float(np.median(values))) for key, values in distinct.items()]
    found = host_calls.fit_host_calls([each for each in calls if each[1].kind != host_calls.FUSED] or calls, seed)
    inside = {key: float(np.median(values)) for key, values in known.items()}
    counts = [np.bincount(step.phase, minlength=len(PHASES)).astype(np.float64) for step in steps]
    terms = np.array([[step.op_s.sum(), *own, 1.0] for step, own in zip(steps, counts, strict=True)])
    measured = np.array([step.step_s for step in steps])
    between = fit_physics(terms, np.ones(len(steps)), measured, _STEP, noise=_NOISE, prior_std=1.0)
    scale, *gaps, step_s = np.exp(between.log_constants).tolist()
    learned = replace(found, known=inside, alone=alone or {}, scale=scale, gaps_s=tuple(gaps), step_s=step_s)
    loops = {op: seconds for (_, op), seconds in inside.items() if op.kind == host_calls.FUSED}
    if loops:
        terms = host_calls.loop_terms(list(loops))
        learned = replace(learned, loops=host_calls.fit_loops(terms, np.array(list(loops.values()))))
    return replace(learned, contention=host_calls.Contention(learn_contention(together, learned)))


LEAST_S = 5e-5  # of a call that is compared: shorter ones are mostly the profiler's own time
LEAST_RUNS = 3  # for holding some back; fewer runs teach one factor
PRIOR = 0.5  # of the median family's seconds, which draw a family's factor to that of all calls


# Seconds of a run's calls by family: as one rank takes them alone, and beside other ranks.
_Run = tuple[dict[str, float], dict[str, float]]


def learn_contention(steps: Sequence[HostStep], costs: host_calls.HostCalls) -> dict[str, float]:
    """Factors by family of ops, ``""`` for all others; empty where ops lose nothing, or nothing tells.

    ``steps``: of runs whose host several ranks shared.  ``costs``: learned from runs of one rank; only calls that these
    measured are compared.
    """
    runs: list[_Run] = []
    for step in steps:
        alone, beside = defaultdict[str, float](float), defaultdict[str, float](float)
        for call, op, seconds in zip(step.calls, step.ops, step.op_s.tolist(), strict=True):
            usual = costs.known.get((host_calls.call_label(call, op), op), 0.0)
            if usual >= LEAST_S and seconds > 0:
                alone[op.family] += usual
                beside[op.family] += seconds
        runs += [(alone, beside)] if alone else []
    form = 1
    if len(runs) >= LEAST_RUNS:
        errors = np.zeros((3, len(runs)))  # |log| errors of all compared calls of each run, held back
        for form, place in np.ndindex(errors.shape):
            factors, run = _factors([*runs[:place], *runs[place + 1 :]], form), runs[place]
            predicted = [seconds * factors.get(name, factors.get("", 1.0)) for name, seconds in run[0].items()]
            errors[form, place] = abs(np.log(sum(predicted) / sum(run[1].values())))
        worse = errors - errors[np.argmin(errors.mean(axis=1))]
        form = int(np.argmax(worse.mean(axis=1) <= worse.std(axis=1, ddof=1) / np.sqrt(len(runs))))
    found = _factors(runs, form) if runs else {}
    return found if any(factor > 1.0 for factor in found.values()) else {}


def _factors(runs: Sequence[_Run], form: int) -> dict[str, float]:
    """Factors by runs; ``form``: 0 none, 1 that of all calls, 2 one of each family, drawn to that of all calls."""
    if not form:
        return {}
    usual = float(np.median([sum(beside.values()) / sum(alone.values()) for alone, beside in runs]))
    found = {"": min(max(usual, 1.0), host_calls.MOST_CROWDED)}
    if form == 2:
        names = sorted({name for alone, _ in runs for name in alone})
        alone, beside = ([sum(run[part].get(name, 0.0) for run in runs) for name in names] for part in (0, 1))
        prior = PRIOR * float(np.median(alone))
        for name, least, most in zip(names, alone, beside, strict=True):
            found[name] = min(max((most + prior * found[""]) / (least + prior), 1.0), host_calls.MOST_CROWDED)
    return found


HELDOUT = "heldout"  # role of runs that judge: they never train


@dataclass(frozen=True)
class ImportedSegments:
    """An imported run, read from the dataset."""

    folder: Path  # the run folder
    name: str  # of the run
    device: str  # name of the device as the trace has it; cpu where the host computed
    job: Job | None  # the job that ran; None if unknown
    segments: tuple[TracedSegment, ...]  # of all steps and ranks
    steps: StepWorks  # what ran in all steps, kernel by kernel
    host: HostStep | None  # the step of a host that computes; None where a device does, or where no step was timed

    whole = False  # its iteration was not timed without a profiler


def read_imported_segments(folders: Iterable[Path], hardware: str = "") -> list[ImportedSegments]:
    """Read imported runs, except those that judge; one on another hardware than named is a ``TraceError``."""
    runs = [run for run in map(read_imported, folders) if run.role != HELDOUT]
    for run in runs:
        known = hardware in reported_devices().values() or run.hardware in reported_devices()
        differs = run.hardware != "cpu" and known and device_name(run.hardware) != hardware
        check_device(run.hardware, hardware, run.folder, differs)
    found = read_graphs([run.folder for run in runs], ("segment", "step"))
    return [
        ImportedSegments(run.folder, run.name, run.hardware or "cuda", run.job, *graphs)
        for run, graphs in zip(runs, found, strict=True)
    ]


def check_device(told: str, hardware: str, where: Path, differs: bool = False) -> None:
    """Refuse a measured device that is not the hardware to learn; ``differs``: it is known to be another one."""
    if hardware and (differs or is_other_device(told, hardware)):
        got = f"{told or 'a GPU without a name'!r:.80} in {where}; `train --hardware` names the measured device"
        rule = f"every run must be on the predictor's hardware: the device must be {hardware!r:.80}"
        raise TraceError(f"{rule}, got {got}")


def imported_times(runs: Iterable[ImportedSegments]) -> dict[Op | Collective, list[float]]:
    """Seconds of each signature over all imported runs: of an op where nothing ran beside it, if that ever was, and of
    a collective from when its last rank came to it, if all of its ranks were traced.
    """
    found: dict[Op | Collective, list[float]] = {}
    for segment in (segment for run in runs for segment in run.segments):
        times = zip(segment.program.nodes, segment.alone_s.tolist(), segment.slot_s.tolist(), strict=True)
        for node, alone, inside in times:
            seconds = alone if isinstance(node.work, Op) and alone > 0 else inside
            if node.work.sized and seconds > 0:
                found.setdefault(node.work, []).append(seconds)
    return found


# Contents of the dataset about a run: its segments, the work of its steps if requested, and the step of a host that
# computes; None where a device does, or where no step was timed.
RunGraphs = tuple[tuple[TracedSegment, ...], "StepWorks", HostStep | None]


def read_graphs(folders: Sequence[Path], scopes: Sequence[str] = ("segment",)) -> list[RunGraphs]:
    """Read the graphs of each traced run, as a dataset of them holds them.

    ``folders``: run folders, each with traces.  ``scopes``: ``segment``, and ``step`` for launches and overlap.  Raises
    ``TraceError`` if a folder is no run, or its traces cannot be read.
    """
    if not folders:
        return []
    from stepsight.dataset.trace_graphs.graph_dataset import read_graph_table
    from stepsight.dataset.trace_graphs.learning_segments import learning_segments, step_works

    graphs = read_graph_table(folders, scopes)[0]
    found: list[list[TracedSegment]] = [[] for _ in folders]
    steps: list[list[int]] = [[] for _ in folders]
    of_segments = []
    for place, (run, scope) in enumerate(zip(graphs.about["source"], graphs.about["scope"], strict=True)):
        if scope == "step":
            steps[run].append(place)
        else:
            of_segments.append(run)
    for run, segment in zip(of_segments, learning_segments(graphs), strict=True):
        found[run].append(segment)
    works = [step_works(graphs.select(places)) for places in steps]
    hosts = [host_step(graphs, places) if places else None for places in steps]
    return list(zip(map(tuple, found), works, hosts, strict=True))
