"""Ops and collectives: work by its signature.

Two ops with the same signature are the same event: they are measured once and predicted once
(the saving of DistSim, arXiv:2306.08423).  What a kind means and costs is in its record (``dataset.kinds``); nothing
here knows any hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, CollectiveKind, OpKind
from stepsight.dataset.kinds.kind_table import refuse_cost

__all__ = ["COLLECTIVE_KINDS", "DTYPE_BYTES", "MOST_SIZE", "OP_KINDS", "Collective", "CollectiveKind", "Op", "OpKind"]

# nvfp4 has 4 bits and an 8-bit scale for every 16 values (0.56 bytes); what trains with it holds two layouts of an
# operand, one along rows and one along columns, so that a whole byte is counted.
DTYPE_BYTES = MappingProxyType({"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "nvfp4": 1})
MOST_SIZE = 2**48  # elements and bytes of any measured op: a larger number is a mistake
OPAQUE = "opaque"  # a kind: kernels that fit no other
_OPS, _COLLECTIVES = OP_KINDS.known, COLLECTIVE_KINDS.known
MOST_BYTES, MOST_FLOPS = 2.0**56, 2.0**90  # of all operands of an op


@dataclass(frozen=True, slots=True)
class Op:
    """One compute kernel call by its signature."""

    kind: str  # a key of ``OP_KINDS``
    dims: tuple[int, ...]  # in the order of the kind's ``dim_names``
    dtype: str = "bf16"  # a key of ``DTYPE_BYTES``

    def __post_init__(self) -> None:
        kind = _OPS[self.kind]
        if len(self.dims) != len(kind.dim_names) or min(self.dims) < 0:
            raise ValueError(f"{self.kind} takes non-negative dims {kind.dim_names}, got {self.dims}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r:.80}")

    @property
    def record(self) -> OpKind:
        """What is known of its kind."""
        return _OPS[self.kind]

    @property
    def family(self) -> str:
        return _OPS[self.kind].family

    @property
    def flops(self) -> float:
        """FLOP of one call."""
        flops = _OPS[self.kind].flops(*self.dims)
        return flops if 0 <= flops < inf else refuse_cost(self, "flops", flops)

    @property
    def num_bytes(self) -> float:
        """Bytes read plus written by one call."""
        elements = _OPS[self.kind].elements(*self.dims)
        return (elements if 0 <= elements < inf else refuse_cost(self, "elements", elements)) * DTYPE_BYTES[self.dtype]

    @property
    def sized(self) -> bool:
        """Whether all its sizes are known: where a trace does not tell one, it is 0, which only flags may be."""
        named = zip(self.record.dim_names, self.dims, strict=True)
        return self.kind != OPAQUE and all(size or name in self.record.flags for name, size in named)

    def __str__(self) -> str:
        return f"{self.kind}[{'x'.join(map(str, self.dims))}]{self.dtype}"


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication by its signature."""

    kind: str  # a key of ``COLLECTIVE_KINDS``
    num_bytes: int  # of the full buffer; ``CollectiveKind.counts`` says which one that is
    group_size: int  # ranks that take part
    ranks_per_node: int  # how many of them share a node (``group_size`` when all do)

    def __post_init__(self) -> None:
        _ = _COLLECTIVES[self.kind]  # it is known
        if self.group_size < 2 or not 1 <= self.ranks_per_node <= self.group_size or self.num_bytes < 0:
            rule = "a collective needs num_bytes >= 0, group_size >= 2 and 1 <= ranks_per_node <= group_size"
            raise ValueError(f"{rule}, got {self.num_bytes}, {self.group_size}, {self.ranks_per_node}")

    @property
    def record(self) -> CollectiveKind:
        """What is known of its kind."""
        return _COLLECTIVES[self.kind]

    @property
    def sized(self) -> bool:
        """Whether its bytes are known."""
        return self.num_bytes > 0

    @property
    def num_nodes(self) -> int:
        return -(-self.group_size // self.ranks_per_node)

    def __str__(self) -> str:
        return f"{self.kind}[{self.num_bytes}B over {self.group_size} ranks, {self.ranks_per_node} per node]"


def check_sizes(works: Iterable[Op | Collective], where: str) -> None:
    """Check that sizes are whole numbers that anybody could have run: files also hold NaN, fractions and others."""
    for work in works:
        sizes = work.dims if isinstance(work, Op) else (work.num_bytes, work.group_size, work.ranks_per_node)
        whole = all(isinstance(size, int) and 0 <= size <= MOST_SIZE for size in sizes)
        if not whole or work.num_bytes > MOST_BYTES or (isinstance(work, Op) and work.flops > MOST_FLOPS):
            raise ValueError(f"sizes of {where} must be whole numbers from 0 to {MOST_SIZE}, got {work!s:.120}")
