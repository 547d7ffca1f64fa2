"""Kinds of ops and of collectives: one record for each, which everything else derives from.

A record stands in the module of its family.  A module of its own is one more line below.
"""

from __future__ import annotations

from stepsight.dataset.kinds import (
    attention_kinds,
    collective_kinds,
    elementwise_kinds,
    expert_kinds,
    gemm_kinds,
    optimizer_kinds,
    row_kinds,
    transfer_kinds,
)
from stepsight.dataset.kinds.collective_kind import CollectiveKind
from stepsight.dataset.kinds.kind_table import KindTable
from stepsight.dataset.kinds.op_kind import STREAMED, OpKind

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
    transfer_kinds,
)
_names: set[str] = set()
_ops = KindTable[OpKind]("op kind", (kind for family in _FAMILIES for kind in family.KINDS), _names)
_collectives = KindTable[CollectiveKind]("collective kind", collective_kinds.KINDS, _names)

OP_KINDS = _ops.by_name
COLLECTIVE_KINDS = _collectives.by_name


def kinds_version() -> tuple[int, int]:
    """Number of changes of op kinds and of collective kinds so far, by which others keep what they derive from them."""
    return _ops.version, _collectives.version


register_op_kind = _ops.register
registered_op_kind = _ops.registered
unregister_op_kind = _ops.unregister
register_collective_kind = _collectives.register
registered_collective_kind = _collectives.registered
unregister_collective_kind = _collectives.unregister
