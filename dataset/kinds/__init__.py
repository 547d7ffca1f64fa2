"""Kinds of ops and of collectives: one record for each, from which everything else is derived.

A record stands in the module of its family.  A module of its own is one more line below.
"""

from __future__ import annotations

from typing import Any

from stepsight.dataset.kinds import (
    attention_kinds,
    collective_kinds,
    convolution_kinds,
    elementwise_kinds,
    expert_kinds,
    gemm_kinds,
    optimizer_kinds,
    row_kinds,
    traced_kinds,
    transfer_kinds,
)
from stepsight.dataset.kinds.collective_kind import CollectiveKind
from stepsight.dataset.kinds.kind_table import KindTable
from stepsight.dataset.kinds.op_kind import STREAMED, OpKind, check_base

__all__ = [
    "COLLECTIVE_KINDS",
    "OP_KINDS",
    "STREAMED",
    "CollectiveKind",
    "OpKind",
    "kinds_version",
    "register_collective_kind",
    "register_op_kind",
    "registered_collective_kind",
    "registered_op_kind",
    "unregister_collective_kind",
    "unregister_op_kind",
]

_FAMILIES = (
    gemm_kinds,
    attention_kinds,
    row_kinds,
    elementwise_kinds,
    expert_kinds,
    optimizer_kinds,
    convolution_kinds,
    traced_kinds,
    transfer_kinds,
)
_tables: list[KindTable[Any]] = []
OP_KINDS: KindTable[OpKind] = KindTable(
    "op kind", (kind for family in _FAMILIES for kind in family.KINDS), "stepsight.op_kinds", _tables, check_base
)
COLLECTIVE_KINDS: KindTable[CollectiveKind] = KindTable(
    "collective kind", collective_kinds.KINDS, "stepsight.collective_kinds", _tables
)


def kinds_version() -> tuple[int, int]:
    """Number of changes of op kinds and of collective kinds so far, with which caches detect changes."""
    return OP_KINDS.version, COLLECTIVE_KINDS.version


register_op_kind = OP_KINDS.add
registered_op_kind = OP_KINDS.added
unregister_op_kind = OP_KINDS.unregister
register_collective_kind = COLLECTIVE_KINDS.add
registered_collective_kind = COLLECTIVE_KINDS.added
unregister_collective_kind = COLLECTIVE_KINDS.unregister
