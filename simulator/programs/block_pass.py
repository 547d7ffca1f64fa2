"""One pass through a block: what is issued forward and backward, and the positions at which its gradients arrive.

When a pass is over, all of its streams are: what runs across blocks (``dp``) is the segment's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached, hashed_once
from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.step import Block, Comm, Flow, Item, Join, LostTime, OverlappedOp, Step
from stepsight.simulator.programs.data_flow import Marks, backward_flow, forward_flow
from stepsight.simulator.programs.op_level import STREAMS, Work, dependencies, issue

FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "input", "weight"

Gradients = HashedTuple[tuple[int, int, bool]]
Issued = tuple[Item, str, Marks]  # what is issued, the name of its step, and its marks


class Columns(NamedTuple):
    """Nodes of a pass, shape ``(num_nodes,)`` each."""

    work: NDArray[np.int32]  # index of the signature in ``works``
    # index into ``STREAMS`` of the stream that the time counts for; the host's calls count as host time, like transfers
    stream: NDArray[np.int8]
    share: NDArray[np.float64]  # the fraction of its signature's time that the node takes
    launched: NDArray[np.bool_]  # whether the host launches it: lost time has no launch
    beside: NDArray[np.bool_]  # whether it overlaps with the computation


def _is_beside(item: Item) -> bool:
    return isinstance(item, OverlappedOp) or (isinstance(item, Comm) and item.beside)


@dataclass(frozen=True, eq=False)
class BlockPass:
    """A program without traffic between replicas, and the positions at which its gradients arrive."""

    items: tuple[Issued, ...]
    # of each parameter tensor, in order of arrival: after how many nodes it is there, its elements on this rank, and
    # whether it is an expert's
    gradients: Gradients = Gradients(())  # noqa: RUF009  (it cannot change)

    @cached_property
    def program(self) -> Program:
        return issue(self.items)

    @cached_property
    def num_nodes(self) -> int:
        """Items that are work."""
        return len(self.nodes)

    @cached_property
    def first_step(self) -> int:
        """Items of the first step."""
        return next((at for at, (_, name, _) in enumerate(self.items) if name != self.items[0][1]), len(self.items))

    def between(self, first: int, last: int) -> Iterator[Issued]:
        """Items of nodes ``first`` to ``last`` (exclusive), and joins between them."""
        node = 0
        for item, name, flow in self.items:
            if first <= node < last or (node == last and isinstance(item, Join) and last == self.num_nodes):
                yield item, name, flow
            node += not isinstance(item, Join)

    @cached_property
    def nodes(self) -> tuple[Op | Comm | OverlappedOp | LostTime, ...]:
        """Items that are work: the nodes of ``program``, in its order."""
        return tuple([item for item, *_ in self.items if not isinstance(item, Join)])

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Distinct signatures in order of first use, indexed by ``work``."""
        return tuple(dict.fromkeys([_work_of(node) for node in self.nodes]))

    @cached_property
    def columns(self) -> Columns:
        """Facts of each node."""
        place, nodes = {work: at for at, work in enumerate(self.works)}, self.nodes
        host = STREAMS.index("offload")
        streams = [host * (n.record.bound == "host") if isinstance(n, Op) else STREAMS.index(n.stream) for n in nodes]
        return Columns(
            np.array([place[_work_of(node)] for node in nodes], dtype=np.int32),
            np.array(streams, dtype=np.int8),
            np.array([node.share if isinstance(node, LostTime) else 1.0 for node in nodes]),
            np.array([not isinstance(node, LostTime) for node in nodes], dtype=np.bool_),
            np.array([_is_beside(node) for node in nodes], dtype=np.bool_),
        )

    @cached_property
    def serial(self) -> bool:
        """Whether each node waits for the one before it; a passage can then be cut anywhere."""
        if not self.columns.beside.any():
            return True
        follows = {before for before, after, _ in self.program.all_edges() if after == before + 1}
        return len(follows) >= len(self.program) - 1

    @cached_property
    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Dependencies in CSR (pointer, before), stream order included."""
        return dependencies(self.program)


def _work_of(node: Op | Comm | OverlappedOp | LostTime) -> Work:
    return node if isinstance(node, Op) else node.work


def forward_pass(block: Block, casts: str = "") -> BlockPass:
    """Forward of a block; ``casts``: the type that parameters are cast to where they are used, empty: they are not."""
    items: list[Issued] = []
    _run_forward(items, [(step, step.name) for step in block], casts, ())
    return _closed(items)


def _run_forward(items: list[Issued], steps: Iterable[tuple[Step, str]], casts: str, before: Marks) -> Marks:
    """Add the forward of some steps with their names, after the casts of their parameters.

    ``before``, and what is returned: marks for the next item.
    """
    for step, name in steps:
        cast = _by_arrival(step, casts)[::-1] if casts else ()
        items += [(Op("cast", (numel,), casts), f"{name}.cast", (Flow.ASIDE,)) for numel in cast]
        flow, before = forward_flow(step, before)
        items += zip(step.forward, repeat(name), flow)
    return before


def _by_arrival(step: Step, casts: str) -> tuple[int, ...]:
    """Parameters of a step in the order in which gradients arrive: autocast casts a bias before its weight."""
    return tuple(sorted(step.parameters, reverse=True)) if casts else step.parameters


@hashed_once
@dataclass(frozen=True)
class BackwardSpec:
    """Additional work of a backward pass."""

    part: str = BACKWARD  # backward (all), input or weight: which gradients
    recompute: str = "none"  # none, selective (attention cores again) or full (the forward again)
    # full recomputation repeats all of the block; else it stops before the last step that keeps nothing
    whole: bool = False
    accumulate: bool = False  # one add for each parameter tensor (autograd's accumulation)
    bucket: bool = False  # one copy for each parameter tensor (into DDP's buckets)
    bucket_experts: bool = False  # the same for experts' parameters
    dtype: str = "fp32"  # of both


def backward_pass(block: Block, spec: BackwardSpec, casts: str = "") -> BlockPass:
    """Backward of a block: all of it, or only the gradients of the input or of the weights.

    ``casts``: as in ``forward_pass``; gradients of parameters are cast back.
    """
    items: list[Issued] = []
    arrived: list[tuple[int, int, bool]] = []  # of each gradient: items before it, its elements, whether an expert's
    last, again = _needed_again(block, spec) if spec.recompute == "full" and spec.part != WEIGHT else (-1, ())
    cores: dict[int, Block] = {}  # consecutive steps of attention cores, by the identity of the last of them
    if spec.recompute == "selective" and spec.part != WEIGHT:
        runs = [tuple(run) for is_core, run in groupby(block, lambda step: step.attention_core) if is_core]
        cores = {id(run[-1]): run for run in runs}
    marks: Marks = ()
    for place in reversed(range(len(block))):
        step = block[place]
        if again and place == last:
            marks = _run_forward(items, [(s, f"again.{s.name}") for s in again], casts, (*marks, Flow.RUN_AGAIN))
            marks = (*marks, Flow.RAN_AGAIN)
        if core := cores.get(id(step)):
            marks = _run_forward(items, [(s, f"{s.name}.again") for s in core], "", (*marks, Flow.RUN_AGAIN))
            marks = (*marks, Flow.RAN_AGAIN)
        way = step.backward if spec.part != WEIGHT else ()
        weights = step.weight_grad if spec.part != INPUT else ()
        flow, marks = backward_flow(step, way, weights, marks)
        items += zip(step.full_backward if way and weights else way or weights, repeat(step.name), flow)
        for numel in _by_arrival(step, casts) if spec.part != INPUT else ():
            first = Flow.COPY_LAST if numel < max(step.parameters) else Flow.COPY_FIRST
            copied = chain([(first,)], repeat((Flow.COPY_AGAIN,)))
            if casts:
                items.append((Op("cast", (numel,), casts), f"{step.name}.cast", next(copied)))
            if spec.accumulate:
                items.append((Op("add", (numel,), spec.dtype), f"{step.name}.accumulate", next(copied)))
            if spec.bucket_experts if step.expert else spec.bucket:
                items.append((Op("copy", (numel,), spec.dtype), f"{step.name}.bucket", (*next(copied), Flow.IN_BUCKET)))
            arrived.append((len(items), numel, step.expert))
    nodes = [0, *accumulate(int(not isinstance(item, Join)) for item, *_ in items)]
    return _closed(items, [(nodes[at], numel, expert) for at, numel, expert in arrived])


def _closed(items: list[Issued], gradients: Sequence[tuple[int, int, bool]] = ()) -> BlockPass:
    """A passage that ends when all of its streams have finished."""
    running: dict[str, None] = {}
    for item, *_ in items:
        if isinstance(item, Comm | OverlappedOp) and _is_beside(item):
            running[item.stream] = None
        elif isinstance(item, Join | Comm):
            running.pop(item.stream, None)
    return BlockPass((*items, *((Join(stream), "", ()) for stream in running)), Gradients(gradients))


def _needed_again(block: Block, spec: BackwardSpec) -> tuple[int, Block]:
    """The last step that full recomputation reaches, and the steps that it runs again just before that step's backward.

    PyTorch's checkpoint (not ``whole``) stops at the last step that keeps something for its backward.
    """
    last = max((index for index, step in enumerate(block) if spec.whole or step.saved), default=-1)
    without = [s.output_kept or (at == last and not spec.whole and s.ends_unneeded) for at, s in enumerate(block)]
    again = [
        replace(s, forward=tuple([item for item in s.forward if item not in s.products])) if less else s
        for s, less in zip(block, without, strict=True)
    ]
    return last, tuple(again[: last + 1])


@cached(8192)
def items_pass(items: tuple[Item, ...], name: str, flow: Marks = ()) -> BlockPass:
    return BlockPass(tuple((item, name, flow) for item in items))
