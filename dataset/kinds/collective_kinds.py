"""The record of a collective kind, and the collectives of training; how each is called is the harness's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

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
        passes, buffers = (isinstance(one, int | float) and abs(one) < inf for one in (self.passes, self.buffers))
        sides = _maps(self.nccl_names, lambda side: side in get_args(Side))
        rules = (
            ("counts", _is_text(self.counts), "a line of text"),
            ("passes", passes and self.passes > 0, "a finite number > 0"),
            ("buffers", buffers and self.buffers >= 1, "a finite number >= 1"),
            ("nccl_names", sides, "a table of In or Out by name"),
            ("c10d_calls", _maps(self.c10d_calls, lambda at: type(at) is int and at >= 0), "a table of inputs by call"),
            ("gloo_spans", _are_texts(self.gloo_spans), "a tuple of names"),
            ("test_names", _are_texts(self.test_names), "a tuple of names"),
        )
        check_record(self, "collective kind", {"route": Route}, rules)

    def __repr__(self) -> str:
        return f"<CollectiveKind {self.name}>"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _maps(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(_is_text(name) and is_right(of) for name, of in value.items())


KINDS = (
    CollectiveKind(
        name="all_reduce",
        counts="the reduced buffer",
        passes=2.0,
        trees=True,
        code=0,
        nccl_names={"allreduce": "In", "all_reduce": "In", "allreduce_coalesced": "In"},
        c10d_calls={"c10d::allreduce_": 0},
        gloo_spans=("all_reduce",),
        test_names=("all_reduce",),
    ),
    CollectiveKind(
        name="all_gather",
        counts="the gathered output",
        code=1,
        nccl_names={
            "allgather": "Out",
            "all_gather": "Out",
            "_allgather_base": "Out",
            "_all_gather_base": "Out",
            "allgather_into_tensor_coalesced": "Out",
        },
        c10d_calls={"c10d::_allgather_base_": 0},
        gloo_spans=("all_gather", "_all_gather_base"),
        test_names=("all_gather",),
    ),
    CollectiveKind(
        name="reduce_scatter",
        counts="the whole input",
        code=2,
        nccl_names={"reduce_scatter": "In", "_reduce_scatter_base": "In", "reduce_scatter_tensor_coalesced": "In"},
        c10d_calls={"c10d::_reduce_scatter_base_": 1},
        gloo_spans=("reduce_scatter", "_reduce_scatter_base", "all_reduce"),  # gloo runs it as an all-reduce
        test_names=("reduce_scatter",),
    ),
    CollectiveKind(
        name="all_to_all",
        counts="the input of one rank",
        route="direct",
        buffers=2.0,
        code=3,
        nccl_names={"all_to_all": "In", "all_to_allv": "In"},
        c10d_calls={"c10d::alltoall_base_": 1},
        gloo_spans=("all_to_all",),
        test_names=("alltoall",),
    ),
    CollectiveKind(
        name="broadcast",
        counts="the buffer",
        code=4,
        nccl_names={"broadcast": "In", "_broadcast_oop": "In"},
        c10d_calls={"c10d::broadcast_": 0},
        gloo_spans=("broadcast",),
        test_names=("broadcast",),
    ),
    CollectiveKind(
        name="send_recv",
        counts="the message",
        route="message",
        code=5,
        nccl_names={"send": "In", "recv": "Out"},
        test_names=("sendrecv",),
    ),
)
