"""Runs of two ranks and of one rank alone, as ``pair_collecting`` writes them: ops, their time alone, their overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import read_json
from stepsight.dataset.imported.import_ranks import import_ranks
from stepsight.dataset.imported.rank_graph import COLLECTIVE, OP, RankGraph
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.context.beside import overlapping
from stepsight.experiments.studies.pairs.pair_collecting import ALONE, PAIR, RESULT

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Key = tuple[str, object, int]  # name of the call, its signature, and its number among equal calls of a step
RANKS = 2
LEAST_SHARE = 0.01  # of an op's time: rarer overlaps of the usual step are left out


@dataclass(frozen=True)
class PairRun:
    """One run of two ranks.

    Attributes:
        job: Its name.
        ranks: Graphs on one clock.
        keys: By rank and node, which call it is; None outside of steps.
        alone_s: By rank and node, seconds of an op alone; NaN for what is not an op, or did not run alone.
        steps: Numbers of the steps that count: all but the last, which an observer slows.
        spread: Of a call alone between runs and steps: mean |log| over its median, weighted by time.
    """

    job: str
    ranks: tuple[RankGraph, ...]
    keys: tuple[tuple[Key | None, ...], ...]
    alone_s: tuple[Array, ...]
    steps: tuple[int, ...]
    spread: float


@dataclass(frozen=True)
class Spans:
    """Ops and the active parts of collectives of both ranks, at once.

    Shapes: ``n`` spans, ``e`` pairs.

    Attributes:
        rank: ``(n,)``.
        node: ``(n,)``: of the rank's graph.
        is_op: ``(n,)``; else it is a collective.
        start_s: ``(n,)``.
        spent_s: ``(n,)``: of ops alone; of collectives while they are active.
        measured_s: ``(n,)``: as traced.
        pairs: ``(2, e)``: a span, and an op that it overlaps.
        both_s: ``(e,)`` seconds in which both run.
    """

    rank: Ints
    node: Ints
    is_op: NDArray[np.bool_]
    start_s: Array
    spent_s: Array
    measured_s: Array
    pairs: Ints
    both_s: Array


def read_pair_runs(folder: Path) -> list[PairRun]:
    """All runs of two ranks of a folder that has a folder for each job."""
    found = []
    for job in sorted(path for path in folder.iterdir() if path.is_dir()):
        known, spread = _alone_seconds(sorted(path for path in job.glob(f"{ALONE}*") if (path / RESULT).exists()))
        for run in sorted(path for path in job.glob(f"{PAIR}*") if (path / RESULT).exists()):
            ranks = _on_one_clock(_graphs(run, range(RANKS)))
            keys = tuple(tuple(_keys(rank)) for rank in ranks)
            alone = tuple(np.array([known.get(key, np.nan) if key else np.nan for key in own]) for own in keys)
            found.append(PairRun(job.name, ranks, keys, alone, _steps(ranks[0]), spread))
    return found


def timed_steps(folder: Path) -> dict[str, tuple[float, float]]:
    """Median seconds of a step without a profiler, alone and of two ranks, by job."""
    found = {}
    for job in sorted(path for path in folder.iterdir() if path.is_dir()):
        medians = []
        for mode in (ALONE, PAIR):
            steps: list[float] = []
            for path in sorted(job.glob(f"{mode}*/{RESULT}")):
                rounds = [[s for each in rank["rounds"] for s in each] for rank in read_json(path)]
                steps += [max(column) for column in zip(*rounds, strict=True)]
            medians.append(float(np.median(steps)) if steps else float("nan"))
        found[job.name] = (medians[0], medians[1])
    return found


def _graphs(folder: Path, ranks: Sequence[int]) -> list[RankGraph]:
    return list(import_ranks([folder / f"rank{rank}.kineto.json.gz" for rank in ranks]).graphs)


def _on_one_clock(ranks: Sequence[RankGraph]) -> tuple[RankGraph, ...]:
    """Graphs whose times count from the same moment: processes of one machine share a clock."""
    origin = min(rank.origin_us for rank in ranks)
    shifts = [1e-6 * (rank.origin_us - origin) for rank in ranks]
    return tuple(
        replace(rank, start_s=rank.start_s + shift, steps_s=rank.steps_s + shift)
        for rank, shift in zip(ranks, shifts, strict=True)
    )


def _steps(rank: RankGraph) -> tuple[int, ...]:
    return tuple(range(max(1, len(rank.steps_s) - 1)))


def _keys(rank: RankGraph) -> list[Key | None]:
    """The key of each op and collective of a step; None of all other nodes."""
    seen: dict[tuple[int, str, object], int] = defaultdict(int)
    found: list[Key | None] = []
    for kind, work, name, step in zip(*(rank.nodes[n].tolist() for n in ("kind", "work", "name", "step")), strict=True):
        if kind not in (OP, COLLECTIVE) or step < 0 or work < 0:
            found.append(None)
            continue
        call = rank.names[name] if kind == OP else rank.works[work].kind
        signature = rank.works[work] if kind == OP else None  # all ranks number collectives of a kind alike
        found.append((call, signature, seen[step, call, signature]))
        seen[step, call, signature] += 1
    return found


def _alone_seconds(folders: Sequence[Path]) -> tuple[Mapping[Key, float], float]:
    """Mean seconds of each call alone, and how much a call differs from it (mean |log|, weighted by time)."""
    times: dict[Key, list[float]] = defaultdict(list)
    for folder in folders:
        rank = _graphs(folder, [0])[0]
        steps = set(_steps(rank))
        for node, key in enumerate(_keys(rank)):
            if key is not None and rank.nodes["kind"][node] == OP and int(rank.nodes["step"][node]) in steps:
                times[key].append(float(rank.duration_s[node]))
    usual = {key: float(np.mean(found)) for key, found in times.items()}
    off = [abs(np.log(each / usual[key])) for key, found in times.items() for each in found if each > 0]
    weight = [each for found in times.values() for each in found if each > 0]
    return usual, float(np.average(off, weights=weight)) if weight else 0.0


def spans_of(run: PairRun, step: int, starts: Sequence[Array] | None = None) -> Spans:
    """What runs at once in a step if each op takes its time alone from when it starts.

    A collective is active from when its last rank has come until it ends on each rank.

    Args:
        run: The run.
        step: Which.
        starts: By rank, when each node starts; None: as traced.
    """
    given = [rank.start_s for rank in run.ranks] if starts is None else starts
    ranks, nodes, begins, lengths = [], [], [], []
    active = _active(run, given, step)
    for place, rank in enumerate(run.ranks):
        inside = (rank.nodes["step"] == step) & rank.on_device & (rank.duration_s > 0)
        own = np.flatnonzero(inside)
        is_op = rank.nodes["kind"][own] == OP
        seconds = np.where(np.isfinite(run.alone_s[place][own]), run.alone_s[place][own], rank.duration_s[own])
        begin = np.where(is_op, given[place][own], active[place][0][own])
        seconds = np.where(is_op, seconds, active[place][1][own])
        ranks.append(np.full(len(own), place, dtype=np.int64))
        nodes.append(own)
        begins.append(begin)
        lengths.append(seconds)
    rank_of, node, start, seconds = (np.concatenate(each) for each in (ranks, nodes, begins, lengths))
    kinds = np.concatenate([rank.nodes["kind"][own] for rank, own in zip(run.ranks, nodes, strict=True)])
    lane = 2 * rank_of + (kinds == COLLECTIVE)
    pairs, both = overlapping(start, start + seconds, lane)
    measured = np.concatenate([rank.duration_s[own] for rank, own in zip(run.ranks, nodes, strict=True)])
    keep = kinds[pairs[1]] == OP
    spent = np.maximum(seconds, 1e-9)
    return Spans(rank_of, node, kinds == OP, start, spent, measured, pairs[:, keep], both[keep])


def _active(run: PairRun, starts: Sequence[Array], step: int) -> list[tuple[Array, Array]]:
    """By rank, when each node begins to be active, and for how long; only collectives differ from their span."""
    ranks = run.ranks
    found = [(start.copy(), rank.duration_s.copy()) for rank, start in zip(ranks, starts, strict=True)]
    numbered = []
    for rank, keys in zip(ranks, run.keys, strict=True):
        own = np.flatnonzero((rank.nodes["kind"] == COLLECTIVE) & (rank.nodes["step"] == step)).tolist()
        numbered.append({keys[node]: node for node in own})
    for key in set(numbered[0]).intersection(*numbered[1:]):
        nodes = [own[key] for own in numbered]
        traced = max(rank.start_s[node] for rank, node in zip(ranks, nodes, strict=True))
        last = max(start[node] for start, node in zip(starts, nodes, strict=True))
        for rank, (begin, length), node in zip(ranks, found, nodes, strict=True):
            begin[node], length[node] = last, max(float(rank.end_s[node]) - traced, 0.0)
    return found


def usual_spans(runs: Sequence[PairRun]) -> Spans:
    """The usual step of some runs of a job, as nodes of the first run.

    Seconds and overlaps are means over all steps: one step on a shared machine says little, and a step is a sum of all
    seconds, slow ones included.
    """
    steps = [(run, spans_of(run, step)) for run in runs for step in run.steps]
    place: dict[tuple[int, Key | None], int] = {}
    times: list[tuple[list[float], list[float], list[float]]] = []
    both: dict[tuple[int, int], float] = defaultdict(float)
    for number, (run, spans) in enumerate(steps):
        named = [(r, run.keys[r][n]) for r, n in zip(spans.rank.tolist(), spans.node.tolist(), strict=True)]
        index = [
            place.setdefault((r, key), len(place)) if not number else place.get((r, key), -1) for r, key in named if key
        ]
        times += [([], [], []) for _ in range(len(place) - len(times))]
        begin = float(spans.start_s.min())
        columns = (spans.spent_s, spans.measured_s, spans.start_s - begin)
        for at, own in enumerate(index):
            if own >= 0:
                for kept, values in zip(times[own], columns, strict=True):
                    kept.append(float(values[at]))
        for source, target, seconds in zip(*spans.pairs.tolist(), spans.both_s.tolist(), strict=True):
            if index[source] >= 0 and index[target] >= 0:
                both[index[source], index[target]] += seconds
    spent, measured, start = (np.array([np.mean(each[part]) for each in times]) for part in range(3))
    first = steps[0][1]
    pairs = np.array(list(both), dtype=np.int64).reshape(-1, 2).T
    mean = np.array(list(both.values())) / np.array([len(times[target][0]) for target in pairs[1].tolist()])
    keep = mean > LEAST_SHARE * spent[pairs[1]]
    return Spans(first.rank, first.node, first.is_op, start, spent, measured, pairs[:, keep], mean[keep])


def sizes_of(rank: RankGraph, nodes: Ints) -> Array:
    """Bytes and FLOP of nodes, ``(n, 2)``."""
    found = []
    for work in rank.nodes["work"][nodes].tolist():
        each = rank.works[work] if work >= 0 else None
        found.append((0.0, 0.0) if each is None else (float(each.num_bytes), float(getattr(each, "flops", 0.0))))
    return np.array(found).reshape(-1, 2)


def is_narrow(rank: RankGraph, nodes: Ints) -> NDArray[np.bool_]:
    """Whether ops compute in 16 bits, ``(n,)``."""
    works = [rank.works[work] if work >= 0 else None for work in rank.nodes["work"][nodes].tolist()]
    return np.array([isinstance(each, Op) and each.dtype in ("bf16", "fp16") for each in works], dtype=np.bool_)
