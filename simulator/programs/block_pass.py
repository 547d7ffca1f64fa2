"""One pass through a block as an op-level program, in the order in which a framework's host thread launches its nodes.

Streams: ``compute``; one for each kind of group (``tp``, ``cp``, ``ep``), for copies to the host (``offload``) and for
traffic between replicas (``dp``, ``dp2``).  An op waits for what the host was told to wait for; a collective starts
when the computation has come to it.

When a pass is over, all of its streams are: what runs across blocks (``dp``) is the segment's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached, hashed_once
from stepsight.dataset.graph.program import Dependency, Program, ProgramBuilder
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Block, Comm, Item, Join, LostTime, OverlappedOp, Step

Work = Op | Collective


class Issue:
    """Adds work to a program in the order of issue."""

    def __init__(self, label: str = "", compute_share: float = 0.0) -> None:
        self._builder = ProgramBuilder(label)
        self._share = compute_share
        self._last: int | None = None  # newest node of the computation: an op, or a collective that blocks
        self._awaited: list[int] = []  # nodes that the next op waits for
        self._newest: dict[str, int] = {}  # by stream: what runs beside the computation until it is joined
        self._taken: dict[int, tuple[Collective, str]] = {}  # messages sent since the last computation was issued
        self.lost: list[int] = []  # nodes of the computation time lost to these messages

    def program(self) -> Program:
        return self._builder.build()

    def add(self, item: Item, name: str) -> None:
        if isinstance(item, Op):
            self._last = self._node(item, "compute", name, self._awaited)
            self._awaited = []
        elif isinstance(item, LostTime):
            self._last = self._node(item.work, "compute", f"{name} (cores)", self._awaited, item.share)
            self._awaited = []
        elif isinstance(item, Join):
            if item.stream in self._newest:
                self._awaited.append(self._newest.pop(item.stream))
        elif isinstance(item, Comm) and not item.beside:
            self.block(item.work, item.stream, name)
        else:
            assert isinstance(item, Comm | OverlappedOp), item
            self._newest[item.stream] = self._node(item.work, item.stream, name, self._reached())

    def block(self, work: Collective, stream: str, name: str) -> int:
        """A collective that starts when the computation reaches it, and that the computation waits for."""
        self._last = self._node(work, stream, name, self._reached())
        self._newest.pop(stream, None)
        self._awaited = [self._last]
        return self._last

    def send(
        self,
        work: Collective,
        stream: str,
        name: str,
        after: Iterable[int] = (),
        *,
        early: bool = False,
        takes: bool = True,
    ) -> int:
        """A collective that overlaps with the computation; the ops after it lose ``compute_share`` of its time.

        ``early``: it was issued long before, and starts when its stream is free.  ``takes``: False for the host's work.
        """
        index = self._node(work, stream, name, sorted({*([] if early else self._reached()), *after}))
        if self._share > 0 and takes:
            self._taken[index] = (work, name)
        return index

    def wait(self, index: int) -> None:
        """Make the next op wait for a node; if no collective overlaps, no time is lost."""
        if index not in self._awaited:
            self._awaited.append(index)
        self._taken.pop(index, None)

    def take_time(self) -> None:
        """The time that the computation loses to messages in flight, before it continues."""
        for work, name in self._taken.values():
            self._last = self._node(work, "compute", f"{name} (cores)", self._awaited, self._share)
            self.lost.append(self._last)
            self._awaited = []
        self._taken.clear()

    def _reached(self) -> list[int]:
        return sorted({*self._awaited, *([] if self._last is None else [self._last])})

    def _node(self, work: Work, stream: str, name: str, after: Iterable[int], share: float = 1.0) -> int:
        why = Dependency.SYNCHRONISATION
        return self._builder.add(work, stream, name, after=after, why=why, share=share)


def issue(items: Iterable[tuple[Item, str]]) -> Program:
    one = Issue()
    for item, name in items:
        one.add(item, name)
    return one.program()


FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "input", "weight"
STREAMS = ("compute", "tp", "cp", "ep", "offload")  # streams

Gradients = HashedTuple[tuple[int, int, bool]]


@dataclass(frozen=True, eq=False)
class BlockPass:
    """A program without traffic between replicas, and the positions at which its gradients arrive."""

    items: tuple[tuple[Item, str], ...]  # what is issued, each with the name of its step
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
        return next((at for at, (_, name) in enumerate(self.items) if name != self.items[0][1]), len(self.items))

    def between(self, first: int, last: int) -> Iterator[tuple[Item, str]]:
        """Items of nodes ``first`` to ``last`` (exclusive), and joins between them."""
        node = 0
        for item, name in self.items:
            if first <= node < last or (node == last and isinstance(item, Join) and last == self.num_nodes):
                yield item, name
            node += not isinstance(item, Join)

    @cached_property
    def nodes(self) -> tuple[Op | Comm | OverlappedOp | LostTime, ...]:
        """Items that are work: the nodes of ``program``, in its order."""
        return tuple([item for item, _ in self.items if not isinstance(item, Join)])

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Distinct signatures in order of first use, indexed by ``work``."""
        return tuple(dict.fromkeys([_work_of(node) for node in self.nodes]))

    @cached_property
    def work(self) -> NDArray[np.int32]:
        """Signature of each node, shape ``(num_nodes,)``."""
        place = {work: at for at, work in enumerate(self.works)}
        return np.array([place[_work_of(node)] for node in self.nodes], dtype=np.int32)

    @cached_property
    def category(self) -> NDArray[np.int8]:
        """Index into ``STREAMS`` of each node, shape ``(num_nodes,)``: the stream that its time counts for.

        The host's calls count as host time, like transfers.
        """
        of_op = {True: STREAMS.index("offload"), False: 0}
        return np.array(
            [of_op[n.record.bound == "host"] if isinstance(n, Op) else STREAMS.index(n.stream) for n in self.nodes],
            dtype=np.int8,
        )

    @cached_property
    def share(self) -> NDArray[np.float64]:
        """The fraction of its signature's time that each node takes, shape ``(num_nodes,)``."""
        return np.array([node.share if isinstance(node, LostTime) else 1.0 for node in self.nodes])

    @cached_property
    def launched(self) -> NDArray[np.bool_]:
        """Whether the host launches each node (lost time has no launch), shape ``(num_nodes,)``."""
        return np.array([not isinstance(node, LostTime) for node in self.nodes], dtype=np.bool_)

    @cached_property
    def beside(self) -> NDArray[np.bool_]:
        """Whether each node overlaps with the computation, shape ``(num_nodes,)``."""
        beside = [isinstance(n, OverlappedOp) or (isinstance(n, Comm) and n.beside) for n in self.nodes]
        return np.array(beside, dtype=np.bool_)

    @cached_property
    def serial(self) -> bool:
        """Whether each node waits for the one before it; a passage can then be cut anywhere."""
        if not self.beside.any():
            return True
        follows = {before for before, after, _ in self.program.all_edges() if after == before + 1}
        return len(follows) >= len(self.program) - 1

    @cached_property
    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Dependencies in CSR (pointer, before), stream order included."""
        return dependencies(self.program)


def _work_of(node: Op | Comm | OverlappedOp | LostTime) -> Work:
    return node if isinstance(node, Op) else node.work


def dependencies(program: Program) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Dependencies of every node in CSR (pointer, before), with stream order, without duplicates."""
    incoming: list[list[int]] = [[] for _ in program.nodes]
    for earlier, later, _ in program.all_edges():
        if earlier not in incoming[later]:
            incoming[later].append(earlier)
    pointer = np.cumsum([0, *map(len, incoming)], dtype=np.int32)
    return pointer, np.array([need for needs in incoming for need in needs], dtype=np.int32)


def forward_pass(block: Block, casts: str = "") -> BlockPass:
    """Forward of a block; ``casts``: the type that parameters are cast to where they are used, empty: they are not."""
    return _closed([(item, name) for step in block for item, name in _run_forward(step, step.name, casts)])


def _run_forward(step: Step, name: str, casts: str) -> list[tuple[Item, str]]:
    """Forward of a step, after the casts of its parameters."""
    own: list[tuple[Item, str]] = [(item, name) for item in step.forward]
    if not casts:
        return own
    return [*((Op("cast", (numel,), casts), f"{name}.cast") for numel in _by_arrival(step, casts)[::-1]), *own]


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
    items: list[tuple[Item, str]] = []
    arrived: list[tuple[int, int, bool]] = []  # of each gradient: items before it, its elements, whether an expert's
    last, again = _needed_again(block, spec) if spec.recompute == "full" and spec.part != WEIGHT else (-1, ())
    cores: dict[int, Block] = {}  # consecutive steps of attention cores, by the identity of the last of them
    if spec.recompute == "selective" and spec.part != WEIGHT:
        runs = [tuple(run) for is_core, run in groupby(block, lambda step: step.attention_core) if is_core]
        cores = {id(run[-1]): run for run in runs}
    for place in reversed(range(len(block))):
        step = block[place]
        for before in again if place == last else ():
            items += _run_forward(before, f"again.{before.name}", casts)
        for before in cores.get(id(step), ()):
            items += [(item, f"{before.name}.again") for item in before.forward]
        own = {BACKWARD: step.full_backward, INPUT: step.backward, WEIGHT: step.weight_grad}[spec.part]
        items += [(item, step.name) for item in own]
        for numel in _by_arrival(step, casts) if spec.part != INPUT else ():
            if casts:
                items.append((Op("cast", (numel,), casts), f"{step.name}.cast"))
            if spec.accumulate:
                items.append((Op("add", (numel,), spec.dtype), f"{step.name}.accumulate"))
            if spec.bucket_experts if step.expert else spec.bucket:
                items.append((Op("copy", (numel,), spec.dtype), f"{step.name}.bucket"))
            arrived.append((len(items), numel, step.expert))
    nodes = [0, *accumulate(int(not isinstance(item, Join)) for item, _ in items)]
    return _closed(items, [(nodes[at], numel, expert) for at, numel, expert in arrived])


def _closed(items: list[tuple[Item, str]], gradients: Sequence[tuple[int, int, bool]] = ()) -> BlockPass:
    """A passage that ends when all of its streams have finished."""
    running: dict[str, None] = {}
    for item, _ in items:
        if isinstance(item, OverlappedOp) or (isinstance(item, Comm) and item.beside):
            running[item.stream] = None
        elif isinstance(item, Join | Comm):
            running.pop(item.stream, None)
    return BlockPass((*items, *((Join(stream), "") for stream in running)), Gradients(gradients))


def _needed_again(block: Block, spec: BackwardSpec) -> tuple[int, Block]:
    """The last step that full recomputation reaches, and the steps that it runs again just before that step's backward.

    PyTorch's checkpoint (not ``whole``) stops at the last step that keeps something for its backward.
    """
    last = max((index for index, step in enumerate(block) if spec.whole or step.saved), default=-1)
    without = [s.output_kept or (at == last and not spec.whole and s.ends_unneeded) for at, s in enumerate(block)]
    again = [replace(s, forward=s.forward[:-1]) if less else s for s, less in zip(block, without, strict=True)]
    return last, tuple(again[: last + 1])


@cached(8192)
def items_pass(items: tuple[Item, ...], name: str) -> BlockPass:
    return BlockPass(tuple((item, name) for item in items))
