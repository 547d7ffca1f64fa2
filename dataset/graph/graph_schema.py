"""Schema of the dataset's graphs: types of nodes and edges, columns of features and targets, and exact signatures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.columns import NODE_KINDS, PHASES, Floats, Ints
from stepsight.dataset.graph.relations import CONCURRENT
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, DTYPE_BYTES, OP_KINDS, Collective, Op

RENDEZVOUS = "rendezvous"
_MOST_DIMS = 7
WORK_TYPES = ("op", "collective")
DTYPES = tuple(DTYPE_BYTES)  # by the number in a signature

NUMBERS = (
    "log_flops", "log_bytes", *(f"log_dim{number}" for number in range(_MOST_DIMS)), "element_bytes", "log_blocks",
    "log_threads", "registers", "log_shared_bytes", "log_group_size", "ranks_per_node_share", "is_known", "is_peer",
    *(f"is_{phase}" for phase in PHASES),
)  # fmt: skip
TARGETS = ("log_seconds_alone", "log_seconds_in_context")
EDGE_NUMBERS = ("overlap_s", "log_bytes", "distance", "delay_s", "log_bytes_since")

_BETWEEN_WORKS = [(source, target) for source in WORK_TYPES for target in WORK_TYPES]
_PAIRS: dict[str, list[tuple[str, str]]] = {
    "data": _BETWEEN_WORKS,
    "stream_order": _BETWEEN_WORKS,
    "launch": [("host", "op"), ("host", "collective"), ("op", "collective")],
    "synchronisation": [*_BETWEEN_WORKS, ("op", "host"), ("collective", "host")],
    RENDEZVOUS: [("collective", "collective")],
    "host_order": [(source, target) for source in ("host", "op") for target in ("host", "op")],
    CONCURRENT: _BETWEEN_WORKS,
}


def edge_types() -> list[tuple[str, str, str]]:
    """Every edge type of a graph of the dataset, in a fixed order; each graph has all of them, empty or not."""
    found = [(source, relation, target) for relation, pairs in _PAIRS.items() for source, target in pairs]
    found += [(kind, "runs_on", "stream") for kind in NODE_KINDS]
    return found + [("stream", "runs", kind) for kind in NODE_KINDS]


def kind_names() -> tuple[str, ...]:
    """Names of kinds by the number in ``kind`` of a node: ops, collectives, and a call of the host."""
    ops = sorted(OP_KINDS.values(), key=lambda kind: kind.code)
    collectives = sorted(COLLECTIVE_KINDS.values(), key=lambda kind: kind.code)
    return (*(kind.name for kind in ops), *(kind.name for kind in collectives), "host")


def work_numbers(works: Sequence[Op | Collective]) -> Floats:
    """Numbers of each signature, and zeros in the last row for calls of the host."""
    rows = np.zeros((len(works) + 1, 2 + _MOST_DIMS + 1 + 2))
    for number, work in enumerate(works):
        if isinstance(work, Op):
            dims = [np.log1p(dim) for dim in work.dims[:_MOST_DIMS]]
            rows[number, : 2 + len(dims)] = [np.log1p(work.flops), np.log1p(work.num_bytes), *dims]
            rows[number, 2 + _MOST_DIMS] = DTYPE_BYTES[work.dtype]
        else:
            rows[number, 1] = np.log1p(work.num_bytes)
            rows[number, -2:] = np.log1p(work.group_size), work.ranks_per_node / work.group_size
    return rows


def node_numbers(numbers: Floats, launch: Floats, known: Floats | Ints, phase: Ints) -> NDArray[np.float32]:
    """Columns ``NUMBERS`` of ``n`` nodes.

    Of rows of ``work_numbers``; of blocks, threads, registers and bytes of shared memory of each launch, ``(n, 4)``;
    whether each kind is known, and index of ``PHASES``, ``(n,)``.
    """
    sizes = np.log1p(launch)
    sizes[:, 2] = launch[:, 2] / 256.0
    flags = [known > 0, np.zeros(len(known)), *(phase == each for each in range(len(PHASES)))]
    columns = [numbers[:, :-2], sizes, numbers[:, -2:], np.stack(flags, axis=1)]
    return np.concatenate(columns, axis=1).astype(np.float32)


def signature_width() -> int:
    """Columns of ``signature``: the type and the dims of the kind of op with the most dims."""
    return 1 + max(_MOST_DIMS, *(len(kind.dim_names) for kind in OP_KINDS.values()))


def signatures(works: Sequence[Op | Collective]) -> Ints:
    """Exact sizes of each signature, ``(len(works) + 1, signature_width())``; -1 for unused columns.

    Of an op: the index of its type in ``DTYPES``, then its dims.  Of a collective: bytes, size of the group, and its
    ranks on each node.  The last row is for calls of the host.
    """
    rows = np.full((len(works) + 1, signature_width()), -1, dtype=np.int64)
    for number, work in enumerate(works):
        if isinstance(work, Op):
            values = [DTYPES.index(work.dtype), *work.dims]
        else:
            values = [work.num_bytes, work.group_size, work.ranks_per_node]
        rows[number, : len(values)] = values
    return rows


def work_of(kind: str, signature: Sequence[int]) -> Op | Collective:
    """The op or collective of a row of ``signatures``."""
    if kind in OP_KINDS:
        count = len(OP_KINDS[kind].dim_names)
        return Op(kind, tuple(signature[1 : 1 + count]), DTYPES[signature[0]])
    return Collective(kind, *signature[:3])
