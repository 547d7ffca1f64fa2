"""Kinds of ops and of collectives: one record for each, from which everything else is derived.

A record stands in the module of what bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.caching import cached
from stepsight.dataset.kinds import kind_table, op_kinds
from stepsight.dataset.kinds.kind_table import STREAMED as STREAMED
from stepsight.dataset.kinds.kind_table import CollectiveKind as CollectiveKind
from stepsight.dataset.kinds.kind_table import KindTable, Side, check_base
from stepsight.dataset.kinds.kind_table import OpKind as OpKind

_tables: list[KindTable[Any]] = []
OP_KINDS: KindTable[OpKind] = KindTable("op kind", op_kinds.KINDS, "stepsight.op_kinds", _tables, check_base)
COLLECTIVE_KINDS: KindTable[CollectiveKind] = KindTable(
    "collective kind", kind_table.KINDS, "stepsight.collective_kinds", _tables
)


def kinds_version() -> tuple[int, int]:
    """Number of changes of op kinds and of collective kinds so far, with which caches detect changes."""
    return OP_KINDS.version, COLLECTIVE_KINDS.version


@cached(4)
def _names(version: tuple[int, int]) -> tuple[dict[str, tuple[str, Side]], dict[str, tuple[str, int]], dict[str, str]]:
    kinds = COLLECTIVE_KINDS.values()
    return (
        {name: (kind.name, side) for kind in kinds for name, side in kind.nccl_names.items()},
        {name: (kind.name, index) for kind in kinds for name, index in kind.c10d_calls.items()},
        {name: kind.name for kind in kinds for name in kind.test_names},
    )


def nccl_names() -> Mapping[str, tuple[str, Side]]:
    """NCCL's and PyTorch's names of a collective: the kind, and which side of it is the full buffer."""
    return _names(kinds_version())[0]


def c10d_calls() -> Mapping[str, tuple[str, int]]:
    """c10d calls that a Python wrapper cannot see (DDP's): the kind, and the input that holds the full buffer."""
    return _names(kinds_version())[1]


def benchmark_names() -> Mapping[str, str]:
    """Names in tables of nccl-tests and of other benchmarks: the kind."""
    return _names(kinds_version())[2]


def gloo_spans(name: str) -> tuple[str, ...]:
    """Spans of gloo's worker threads that may carry a collective of a kind, or a ``send`` or ``recv``."""
    kind = COLLECTIVE_KINDS.get(name)
    return kind.gloo_spans if kind is not None and kind.gloo_spans else (name,)
