"""Units: the blocks of a part of the model; equal blocks in a row are one unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepsight.dataset.base.caching import Memo, cached
from stepsight.simulator.blocks.family import embedding_block, head_block, layer_block
from stepsight.simulator.blocks.layer_parts import arrivals
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block
from stepsight.simulator.programs.passages import BackwardSpec, Passage, backward_passage, forward_passage
from stepsight.simulator.programs.sizes import PartShape


@dataclass(frozen=True, slots=True)
class Unit:
    """Equal consecutive blocks of a part.

    Attributes:
        block: One of them.
        name: ``layer{}``, ``embedding`` or ``head``.
        first: Number of the first.
        times: How many.
        again: Whether full recomputation repeats them.
        root: Whether FSDP wraps them with the model itself rather than each on its own.
        tensors, expert_tensors: Elements of the parameter tensors of one of them, in the order in which gradients
            arrive; others' and experts'.
    """

    block: Block
    name: str
    first: int = 0
    times: int = 1
    again: bool = True
    root: bool = False
    tensors: tuple[int, ...] = field(init=False)
    expert_tensors: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        others, experts = _tensors(self.block)
        object.__setattr__(self, "tensors", others)
        object.__setattr__(self, "expert_tensors", experts)

    @property
    def numel(self) -> int:
        """Elements of all parameters of one block, without experts."""
        return sum(self.tensors)

    @property
    def expert_numel(self) -> int:
        """Elements of the experts' parameters of one block."""
        return sum(self.expert_tensors)


_Tensors = tuple[tuple[int, ...], tuple[int, ...]]
_TENSORS: Memo[int, tuple[Block, _Tensors]] = Memo("tensors of blocks", 20_000)


def _tensors(block: Block) -> _Tensors:
    """Parameter tensors of a block, without experts and of experts, in the order in which gradients arrive."""
    known = _TENSORS.get(id(block))
    if known is None:
        found: tuple[list[int], list[int]] = ([], [])
        for step in reversed(block):
            found[step.expert].extend(step.parameters)
        _TENSORS[id(block)] = known = (block, (tuple(found[0]), tuple(found[1])))
    return known[1]


@cached(4096)
def part_units(shape: RankShape, part: PartShape, every: int = 1) -> tuple[Unit, ...]:
    """Blocks of a part in forward order; every ``every``-th layer is recomputed."""
    shared = shape.model.tied_embeddings and part.first and part.last
    here, there = arrivals(shape) if shape.scatter_p2p else ((), ())
    units = [Unit(embedding_block(shape, shared), "embedding", root=True)] if part.first else []
    if here and not part.first:
        units.append(Unit(here, "arrival", again=False))
    number = 0
    for kind, count in part.layers:
        block, end = layer_block(shape, kind), number + count
        while number < end:
            alike = end - number if every == 1 else 1 if number % every == 0 else every - number % every
            times = min(alike, end - number)
            units.append(Unit(block, "layer{}", number, times, number % every == 0))
            number += times
    if part.last:
        units.append(Unit(head_block(shape, shared), "head", root=True))
    elif there:
        units.append(Unit(there, "arrival", again=False))
    return tuple(units)


_PASSAGES: Memo[tuple[int, BackwardSpec | None, str], tuple[Block, Passage]] = Memo("passages of blocks", 20_000)


def passage_of(block: Block, backward: BackwardSpec | None = None, casts: str = "") -> Passage:
    """Forward or backward of a block, cached by identity: blocks are made once, and hashing one is more expensive.

    ``casts``: as in ``forward_passage``.
    """
    key = id(block), backward, casts
    known = _PASSAGES.get(key)
    if known is None:
        passage = forward_passage(block, casts) if backward is None else backward_passage(block, backward, casts)
        _PASSAGES[key] = known = (block, passage)  # a reference to the block keeps its id unique
    return known[1]
