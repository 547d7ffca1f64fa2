"""Gradient buckets: where a backward pass is interrupted to send one, and the resulting events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.compiling import compiled
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.clock.engine import DATA, RUN, SECOND, SEND
from stepsight.simulator.programs.block_pass import BlockPass, GradientTable
from stepsight.simulator.programs.replicas import BUCKET_NAMES, Replicas, bucket_works
from stepsight.simulator.programs.segment import NUM_COLUMNS, Segment


@dataclass(frozen=True, slots=True)
class Repeated:
    """A backward passage that runs several times in a row.

    Attributes:
        passage, times: What, and how often.
        name, newest: For people: the first has this number, the others lower ones.
    """

    passage: BlockPass
    times: int
    name: str
    newest: int


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Where gradients arrive in a backward pass; independent of the ops, the buckets and the replicas.

    Attributes:
        names: For people: of the passages' blocks, then of the two kinds of buckets.
        places: Of each unit: passage, its nodes, times, name, number, whether it can be cut anywhere; shape ``(u, 6)``.
        tensors: Node, elements and whether an expert's of each gradient of each unit, shape ``(g, 3)``.
        bounds: Gradients of unit ``i`` are ``bounds[i]:bounds[i + 1]``.
        most: No more buckets than this.
    """

    names: tuple[str, ...]
    places: NDArray[np.int64]
    tensors: NDArray[np.int64]
    bounds: NDArray[np.int64]
    most: int


class BucketRun(NamedTuple):
    """A backward pass in which gradients are sent bucket by bucket.

    Attributes:
        label: Of the segment.
        passages: Distinct ones.
        plan: Where their gradients arrive.
    """

    label: str
    passages: tuple[BlockPass, ...]
    plan: BucketPlan

    @classmethod
    def of(cls, label: str, units: Sequence[Repeated]) -> BucketRun:
        passages: dict[BlockPass, int] = {}
        rows = []
        for u in units:
            at = passages.setdefault(u.passage, len(passages))
            rows.append((at, u.passage.num_nodes, u.times, u.name, u.newest, u.passage.serial))
        tables = tuple([unit.passage.gradient_table for unit in units])
        return cls(label, tuple(passages), _plan(tuple(rows), tables))


@cached(4096)
def _plan(rows: tuple[tuple[int, int, int, str, int, bool], ...], tables: tuple[GradientTable, ...]) -> BucketPlan:
    """The plan of some units; it is the same for all micro-batches."""
    names = dict.fromkeys([*(name for _, _, _, name, _, _ in rows), *BUCKET_NAMES])
    number = {name: at for at, name in enumerate(names)}
    numbered = [(*row[:3], number[row[3]], *row[4:]) for row in rows]
    places = np.array(numbered, dtype=np.int64).reshape(-1, 6)
    bounds = np.cumsum([0, *(len(table.rows) for table in tables)])
    most = int((np.diff(bounds) * places[:, 2]).sum()) + 2
    tensors = np.concatenate([np.zeros((0, 3), dtype=np.int64), *(table.rows for table in tables)])
    return BucketPlan(tuple(names), places, tensors, bounds, most)


def send_buckets(run: BucketRun, replicas: Replicas) -> Segment:
    """Run a backward pass that sends gradients on the way; the last bucket has the remainder."""
    sent = _sent(run.plan, replicas)
    return Segment(run.label, run.passages, sent.works, sent.events, run.plan.names, replicas.compute_share)


class _Sent(NamedTuple):
    """The messages of replicas in a backward pass.

    Attributes:
        works: Distinct collectives.
        events: Of the segment.
    """

    works: tuple[Collective, ...]
    events: NDArray[np.int32]


@cached(8192)
def _sent(plan: BucketPlan, replicas: Replicas) -> _Sent:
    cuts = _cuts(plan, -(-replicas.bucket_bytes // replicas.gradient_bytes))
    sent: dict[Collective, int] = {}
    works = []
    for numel, expert in cuts.sizes:
        first, second = bucket_works(replicas, numel, expert=expert)
        works.append(-1 if first is None else sent.setdefault(first, len(sent)))
        works.append(-1 if second is None else sent.setdefault(second, len(sent)))
    return _Sent(tuple(sent), _bucket_events(plan, cuts, tuple(works)))


@dataclass(frozen=True, eq=False)
class _Cuts:
    """The positions at which buckets are full.

    Attributes:
        cuts: As in ``bucket_rows``.
        sizes: Elements of each distinct bucket, and whether experts'.
    """

    cuts: NDArray[np.int64]
    sizes: tuple[tuple[int, bool], ...]


@cached(8192)
def _cuts(plan: BucketPlan, limit: int) -> _Cuts:
    table, found = np.empty((plan.most, 7), dtype=np.int64), np.zeros(2, dtype=np.int64)
    cut_buckets(plan.places, plan.tensors, plan.bounds, limit, table, found)
    cuts, sizes = np.ascontiguousarray(table[: found[0], :5]), table[: found[1], 5:]
    if cuts[:, 4].any():  # the cuts of experts come after the others
        cuts = cuts[np.lexsort((cuts[:, 4], cuts[:, 2], cuts[:, 1], cuts[:, 0]))]
    return _Cuts(cuts, tuple([(numel, bool(expert)) for numel, expert in sizes.tolist()]))


@cached(8192)
def _bucket_events(plan: BucketPlan, cuts: _Cuts, works: tuple[int, ...]) -> NDArray[np.int32]:
    """Events of a backward pass; ``works``: the one or two collectives of each size, -1 if none."""
    rows = np.empty((5 * len(cuts.cuts) + 3 * len(plan.places), NUM_COLUMNS), dtype=np.int32)
    count = np.zeros(1, dtype=np.int64)
    pairs = np.array(works, dtype=np.int64).reshape(-1, 2)
    bucket_rows(plan.places, cuts.cuts, pairs, len(plan.names) - 2, rows, count)
    return rows[: count[0]]


@compiled
def cut_buckets(
    places: NDArray[np.int64],
    tensors: NDArray[np.int64],
    bounds: NDArray[np.int64],
    limit: int,
    table: NDArray[np.int64],
    found: NDArray[np.int64],
) -> None:
    """The positions at which buckets are full.

    Args:
        places, tensors, bounds: See ``BucketPlan``.
        limit: A bucket is full when it holds this many elements.
        table: Filled, shape ``(most, 7)``.  A row is a cut: unit, turn, node, number of its size, whether experts';
            first the others', then the experts'.  Columns 5 and 6 list the distinct sizes: elements, whether experts'.
        found: Filled: how many cuts and sizes.
    """
    cuts, sizes = table[:, :5], table[:, 5:]
    at, distinct = 0, 0
    for expert in range(2):
        held, unit, turn, node = 0, -1, 0, 0
        for u in range(len(places) + 1):
            last = u == len(places)
            for t in range(1 if last else places[u, 2]):
                for g in range(0 if last else bounds[u], 1 if last else bounds[u + 1]):
                    if not last:
                        if tensors[g, 2] != expert:
                            continue
                        held += tensors[g, 1]
                        unit, turn = u, t
                        node = tensors[g, 0] if places[u, 5] else places[u, 1]
                    if held >= limit or (last and held > 0):
                        size = distinct
                        for known in range(distinct - 1, -1, -1):
                            if sizes[known, 0] == held and sizes[known, 1] == expert:
                                size = known
                                break
                        if size == distinct:
                            sizes[size, 0], sizes[size, 1] = held, expert
                            distinct += 1
                        cuts[at, 0], cuts[at, 1], cuts[at, 2], cuts[at, 3], cuts[at, 4] = unit, turn, node, size, expert
                        at += 1
                        held = 0
    found[0], found[1] = at, distinct


@compiled
def bucket_rows(
    places: NDArray[np.int64],
    cuts: NDArray[np.int64],
    works: NDArray[np.int64],
    names: int,
    rows: NDArray[np.int32],
    count: NDArray[np.int64],
) -> None:
    """Events of units that are interrupted where buckets are full.

    Args:
        places, cuts: As in ``cut_buckets``, cuts in the order of issue.
        works: The one or two collectives of each size, -1 if none, shape ``(num_sizes, 2)``.
        names: Index of the name of others' buckets; that of experts' follows.
        rows, count: Filled: events, and how many.
    """
    at, cut = 0, 0
    numbers = np.zeros(2, dtype=np.int64)
    for u in range(len(places)):
        passage, nodes, times, name, newest = places[u, 0], places[u, 1], places[u, 2], places[u, 3], places[u, 4]
        turn, node = 0, 0
        while True:
            here = cut < len(cuts) and cuts[cut, 0] == u
            until, stop = (cuts[cut, 1], cuts[cut, 2]) if here else (times, 0)
            if stop == nodes:
                until, stop = until + 1, 0
            if node > 0 and turn < until:
                _put(rows, at, (RUN, passage, node, nodes, 1, name, newest - turn, -1))
                at += 1
                turn, node = turn + 1, 0
            if turn < until:
                _put(rows, at, (RUN, passage, 0, nodes, until - turn, name, newest - turn, -1))
                at += 1
                turn = until
            if stop > node:
                _put(rows, at, (RUN, passage, node, stop, 1, name, newest - turn, -1))
                at += 1
                node = stop
            if not here:
                break
            expert = cuts[cut, 4]
            sent = -1
            for which in range(2):
                if works[cuts[cut, 3], which] >= 0:
                    clock = SECOND if which == 1 or expert == 1 else DATA
                    work, name_at = works[cuts[cut, 3], which], names + expert
                    _put(rows, at, (SEND, work, clock, sent, 0, name_at, numbers[expert], 0))
                    sent = at
                    at += 1
            numbers[expert] += 1
            cut += 1
    count[0] = at


def _put(rows: NDArray[np.int32], at: int, columns: tuple[int, ...]) -> None:
    """Fill in one row with a loop: numba takes seconds to compile the assignment of an array to a row."""
    for column in range(len(columns)):
        rows[at, column] = columns[column]
