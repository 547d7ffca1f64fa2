"""Buckets of gradients that a backward pass sends on the way: a plan says where it is interrupted for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached, compiled
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.clock.engine import DATA, RUN, SECOND, SEND
from stepsight.simulator.programs.block_pass import BlockPass
from stepsight.simulator.programs.segment import BUCKET_NAMES, NUM_COLUMNS, Segment
from stepsight.simulator.programs.sizes import Replicas, bucket_works

Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Where gradients arrive in a backward pass; independent of the ops, the buckets and the replicas."""

    names: tuple[str, ...]  # for people: of the passages' blocks, then of the two kinds of buckets
    places: Longs  # of each unit: passage, its nodes, times, name, number, whether it can be cut anywhere; shape (u, 6)
    tensors: Longs  # node, elements and whether an expert's of each gradient of each unit, shape (g, 3)
    bounds: Longs  # gradients of unit i are bounds[i]:bounds[i + 1]


def plan_buckets(units: Sequence[tuple[BlockPass, int, str, int]]) -> tuple[tuple[BlockPass, ...], BucketPlan]:
    """Distinct passages of a backward pass, and where their gradients arrive.

    ``units``: passages in the order of backward; how often each runs in a row, its name, and the number of the first.
    """
    passages: dict[BlockPass, int] = {}
    rows = []
    for passage, times, name, newest in units:
        at = passages.setdefault(passage, len(passages))
        rows.append((at, passage.num_nodes, times, name, newest, passage.serial))
    return tuple(passages), _plan(tuple(rows), tuple([passage.gradients for passage, *_ in units]))


@cached(4096)
def _plan(
    rows: tuple[tuple[int, int, int, str, int, bool], ...], gradients: tuple[HashedTuple[tuple[int, int, bool]], ...]
) -> BucketPlan:
    """The plan of some units; it is the same for all micro-batches."""
    names = dict.fromkeys([*(name for _, _, _, name, _, _ in rows), *BUCKET_NAMES])
    number = {name: at for at, name in enumerate(names)}
    places = np.array([(*row[:3], number[row[3]], *row[4:]) for row in rows], dtype=np.int64).reshape(-1, 6)
    tensors = np.array([gradient for own in gradients for gradient in own], dtype=np.int64).reshape(-1, 3)
    return BucketPlan(tuple(names), places, tensors, np.cumsum([0, *map(len, gradients)]))


def send_buckets(label: str, passages: tuple[BlockPass, ...], plan: BucketPlan, replicas: Replicas) -> Segment:
    """Run a backward pass that sends gradients on the way; the last bucket has the remainder."""
    sent, events = _sent(plan, replicas)
    return Segment(label, passages, sent, events, plan.names, replicas.compute_share)


@cached(8192)
def _sent(plan: BucketPlan, replicas: Replicas) -> tuple[tuple[Collective, ...], NDArray[np.int32]]:
    """Distinct collectives of a backward pass, and the events of its segment."""
    limit = -(-replicas.bucket_bytes // replicas.gradient_bytes)
    sent: dict[Collective, int] = {}
    works = []
    for numel, expert in _cuts(plan, limit)[1]:
        for work in bucket_works(replicas, numel, expert=bool(expert)):
            works.append(-1 if work is None else sent.setdefault(work, len(sent)))
    return tuple(sent), _bucket_events(plan, limit, tuple(works))


@cached(8192)
def _cuts(plan: BucketPlan, limit: int) -> tuple[Longs, list[list[int]]]:
    """Where buckets are full, as ``bucket_rows`` takes it; elements of each distinct one, and whether experts'."""
    most = int((np.diff(plan.bounds) * plan.places[:, 2]).sum()) + 2
    table, found = np.empty((most, 7), dtype=np.int64), np.zeros(2, dtype=np.int64)
    cut_buckets(plan.places, plan.tensors, plan.bounds, limit, table, found)
    cuts = np.ascontiguousarray(table[: found[0], :5])
    if cuts[:, 4].any():  # the cuts of experts come after the others
        cuts = cuts[np.lexsort((cuts[:, 4], cuts[:, 2], cuts[:, 1], cuts[:, 0]))]
    return cuts, table[: found[1], 5:].tolist()


@cached(8192)
def _bucket_events(plan: BucketPlan, limit: int, works: tuple[int, ...]) -> NDArray[np.int32]:
    """Events of a backward pass; ``works``: the two collectives of each size, -1 if none."""
    cuts, _ = _cuts(plan, limit)
    rows = np.empty((5 * len(cuts) + 3 * len(plan.places), NUM_COLUMNS), dtype=np.int32)
    count = np.zeros(1, dtype=np.int64)
    bucket_rows(plan.places, cuts, np.array(works, dtype=np.int64).reshape(-1, 2), len(plan.names) - 2, rows, count)
    return rows[: count[0]]


@compiled
def cut_buckets(places: Longs, tensors: Longs, bounds: Longs, limit: int, table: Longs, found: Longs) -> None:
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
def bucket_rows(places: Longs, cuts: Longs, works: Longs, names: int, rows: NDArray[np.int32], count: Longs) -> None:
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
                at = _put(rows, at, (RUN, passage, node, nodes, 1, name, newest - turn, -1))
                turn, node = turn + 1, 0
            if turn < until:
                at = _put(rows, at, (RUN, passage, 0, nodes, until - turn, name, newest - turn, -1))
                turn = until
            if stop > node:
                at = _put(rows, at, (RUN, passage, node, stop, 1, name, newest - turn, -1))
                node = stop
            if not here:
                break
            expert = cuts[cut, 4]
            sent = -1
            for which in range(2):
                if works[cuts[cut, 3], which] >= 0:
                    clock = SECOND if which == 1 or expert == 1 else DATA
                    work, name_at = works[cuts[cut, 3], which], names + expert
                    follows, sent = sent, at
                    at = _put(rows, at, (SEND, work, clock, follows, 0, name_at, numbers[expert], 0))
            numbers[expert] += 1
            cut += 1
    count[0] = at


def _put(rows: NDArray[np.int32], at: int, columns: tuple[int, ...]) -> int:
    """Fill in one row, and return the place of the next; a loop, as numba takes seconds to compile an assignment."""
    for column in range(len(columns)):
        rows[at, column] = columns[column]
    return at + 1
