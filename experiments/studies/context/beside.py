"""What runs at the same time on a device, and what class a kernel is of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.imported.rank_graph import COLLECTIVE, OP, RankGraph

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
CLASSES = ("product", "attention", "reduction", "copy", "optimizer", "other")
BESIDE = ("collective", "copy", "op")  # what may run beside a kernel
_WORDS = {
    "product": ("linear", "matmul", "conv", "gemm", "bmm", "expert"),
    "attention": ("attention",),
    "reduction": ("norm", "softmax", "reduce", "loss", "sum", "pool"),
    "copy": ("copy", "transfer", "fill", "cast", "concat"),
    "optimizer": ("foreach", "adam", "optimizer", "sgd"),
}


@dataclass(frozen=True)
class Beside:
    """What runs at the same time on a device.

    Attributes:
        ops: Nodes that are kernels.
        pairs: ``(2, e)``: a node, and a kernel that it runs beside.
        both_s: ``(e,)`` seconds in which both run.
        spent_s: ``(n,)`` seconds of each node that this holds for.
        share: ``(n, 3)``: part of each node's time in which some of ``BESIDE`` runs too.
        what: ``(n,)``: index of ``BESIDE``.
    """

    ops: Ints
    pairs: Ints
    both_s: Array
    spent_s: Array
    share: Array
    what: Ints

    @classmethod
    def of(cls, rank: RankGraph, spent_s: Array) -> Beside:
        """Nodes that run at once if each takes ``spent_s`` from when it started."""
        device = np.flatnonzero(rank.on_device & (rank.duration_s > 0))
        start = rank.start_s[device]
        among, found = overlapping(start, start + spent_s[device], rank.nodes["stream"][device])
        table = device[among]
        what = np.array([what_of(rank, node) for node in range(len(rank))])
        share = np.zeros((len(rank), len(BESIDE)))
        np.add.at(share, (table[1], what[table[0]]), found / spent_s[table[1]])
        keep = rank.nodes["kind"][table[1]] == OP
        ops = device[rank.nodes["kind"][device] == OP]
        return cls(ops, table[:, keep], found[keep], spent_s, np.minimum(share, 1.0), what)


def overlapping(start_s: Array, end_s: Array, lane: Ints) -> tuple[Ints, Array]:
    """Spans of different lanes that run at the same time.

    Args:
        start_s: ``(n,)``.
        end_s: Likewise.
        lane: Likewise: stream, thread or rank.

    Returns:
        ``(2, e)`` places of both, in both directions; and the seconds of each overlap, ``(e,)``.
    """
    pairs, seconds = [], []
    active: list[int] = []
    for place in np.argsort(start_s, kind="stable").tolist():
        active = [other for other in active if end_s[other] > start_s[place]]
        for other in active:
            if lane[other] != lane[place]:
                both = min(end_s[other], end_s[place]) - start_s[place]
                pairs += [(other, place), (place, other)]
                seconds += [both, both]
        active.append(place)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T, np.array(seconds)


def what_of(rank: RankGraph, node: int) -> int:
    """Index of ``BESIDE``."""
    if rank.nodes["kind"][node] == COLLECTIVE:
        return 0
    return 1 if class_of(rank.kind_of(node)) == CLASSES.index("copy") else 2


def class_of(kind: str) -> int:
    """Index of ``CLASSES``."""
    for name, words in _WORDS.items():
        if any(word in kind for word in words):
            return CLASSES.index(name)
    return CLASSES.index("other")
