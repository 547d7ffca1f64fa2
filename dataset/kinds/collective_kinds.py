"""The record of a collective kind, and the collectives of training; how each is called is the harness's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds.kind_table import check_record

# Pattern of the transfers: around a ring of all ranks, from every rank directly to every other, or from one rank to
# one.
Route = Literal["ring", "direct", "message"]
Side = Literal["In", "Out"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CollectiveKind:
    """Properties of one kind of collective: its transfers, and its names in libraries.

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

    Raises:
        StepsightError: On construction, if a field has a wrong type or value.
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
        names, calls = self.nccl_names, self.c10d_calls
        numbers = {
            key: isinstance(getattr(self, key), int | float) and getattr(self, key) for key in ("passes", "buffers")
        }
        sides = isinstance(names, Mapping) and all(side in get_args(Side) for side in names.values())
        places = isinstance(calls, Mapping) and all(type(at) is int and at >= 0 for at in calls.values())
        rules = [
            ("counts", _are_texts((self.counts,)), "a line of text"),
            ("passes", 0 < numbers["passes"] < inf, "a finite number > 0"),
            ("buffers", 1 <= numbers["buffers"] < inf, "a finite number >= 1"),
            ("nccl_names", sides and _are_texts(tuple(names)), "a table of In or Out by name"),
            ("c10d_calls", places and _are_texts(tuple(calls)), "a table of inputs by call"),
            *((key, _are_texts(getattr(self, key)), "a tuple of names") for key in ("gloo_spans", "test_names")),
        ]
        check_record(self, "collective kind", {"route": Route}, rules)

    def __repr__(self) -> str:
        return f"<CollectiveKind {self.name}>"


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text and text.isprintable() for text in value)


def _fields(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}


KINDS = tuple(CollectiveKind(name=name, **_fields(facts)) for name, facts in preset("collective_kinds.toml").items())
