"""The record of a collective kind: everything that stepsight knows of it, except how the harness calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stepsight.dataset.kinds.kind_table import code_of

# How the bytes travel: around a ring of all ranks, from every rank straight to every other, or from one rank to one.
Route = Literal["ring", "direct", "message"]
Side = Literal["In", "Out"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CollectiveKind:
    """What one kind of collective moves, and what libraries call it.

    Attributes:
        name: As in ``Collective.kind``.
        counts: What ``Collective.num_bytes`` counts, for people.
        route: How the bytes travel.
        passes: Times that the buffer goes around the ring.
        trees: Whether NCCL may run it up and down trees over nodes.
        buffers: Buffers of ``num_bytes`` that a rank holds meanwhile.
        code: Number that represents the kind in the features of trees; see ``OpKind.code``.
        nccl_names: Names in NCCL's records, and the side whose size is ``num_bytes``.
        c10d_calls: PyTorch's calls from C++, and the input whose size is ``num_bytes``.
        gloo_spans: Spans of gloo's worker threads that may carry it.
        test_names: Names in tables of nccl-tests and of other benchmarks.
    """

    name: str
    counts: str
    route: Route = "ring"
    passes: float = 1.0
    trees: bool = False
    buffers: float = 1.0
    code: int = -1
    nccl_names: Mapping[str, Side] = field(default_factory=dict)
    c10d_calls: Mapping[str, int] = field(default_factory=dict)
    gloo_spans: tuple[str, ...] = ()
    test_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", code_of(self.name, self.code))

    def __repr__(self) -> str:
        return f"<CollectiveKind {self.name}>"
