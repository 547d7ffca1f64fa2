"""Lower bounds of any schedule: the least seconds and bytes of a model's blocks on a rank.

A stage's computation runs one passage at a time, and traffic of replicas, messages and launches only delay it (every
rule of the clock is a maximum or a sum of times that are not negative).  So the seconds of its passages, added up, are
a lower bound of the iteration for every schedule and every way of sharing states.  They come from the same timer as the
prediction, so that the bound holds for any latency model, smooth or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.simulator.blocks.family import embedding_block, find_family, head_block, layer_block
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.memory.block import Gradients, end_memory, layer_memory
from stepsight.simulator.programs.part_units import passage_of
from stepsight.simulator.programs.passages import WEIGHT, BackwardSpec, Passage


class PassKind(NamedTuple):
    """A pass through a block.

    Attributes:
        part: ``forward``, ``backward``, ``input`` or ``weight``.
        recompute: ``none``, ``selective`` or ``full``.
        whole: As ``BackwardSpec.whole``.
    """

    part: str
    recompute: str = "none"
    whole: bool = False


@dataclass(frozen=True, eq=False)
class BlockFloors:
    """Seconds of passes through blocks.

    The blocks are one layer of each kind, then the embedding, then the head.

    Attributes:
        seconds: What the computation takes; shape ``(num_shapes, num_blocks, num_passes)``.
        launches: What the host takes to launch them, same shape.
    """

    seconds: Floats
    launches: Floats


def block_floors(
    timer: Timer, shapes: Sequence[RankShape], kinds: Sequence[str], passes: Sequence[PassKind]
) -> BlockFloors:
    """Time passes through the blocks of several ranks; all durations are requested in one batch.

    Args:
        timer: Of the latency model that predicts.
        shapes: Of ranks.
        kinds: Kinds of layers, in the order of ``BlockFloors``.
        passes: Which passes.
    """
    found = [
        _passage(block, pass_kind, shape, end=at >= len(kinds))
        for shape in shapes
        for at, block in enumerate(_blocks(shape, kinds))
        for pass_kind in passes
    ]
    timer.work_seconds(list(dict.fromkeys(work for passage in found for work in passage.works)))
    paths = np.array([timer.passage(passage).paths for passage in found], dtype=np.float64)
    paths = paths.reshape(len(shapes), len(kinds) + 2, len(passes), 3)
    return BlockFloors(paths[..., 0], paths[..., 2])


def _blocks(shape: RankShape, kinds: Sequence[str]) -> list[Block]:
    return [*(layer_block(shape, kind) for kind in kinds), embedding_block(shape, False), head_block(shape, False)]


def _passage(block: Block, kind: PassKind, shape: RankShape, *, end: bool) -> Passage:
    if kind.part == "forward":
        return passage_of(block)
    spec = BackwardSpec(kind.part, kind.recompute, whole=kind.whole, dtype=shape.kernels.main_dtype)
    if end and kind.recompute == "full":
        spec = replace(spec, recompute="none", whole=False)
    if kind.part == WEIGHT:
        spec = replace(spec, recompute="none")
    return passage_of(block, spec)


def block_sizes(shapes: Sequence[RankShape], kinds: Sequence[str], recompute: Sequence[str]) -> tuple[Floats, Floats]:
    """Sizes of blocks in memory.

    Returns:
        Elements of the parameters of each block, of others and of experts, shape ``(num_shapes, num_blocks, 2)``;
        bytes that it keeps from forward to backward, shape ``(num_shapes, num_blocks, len(recompute))``.
    """
    numel, kept = np.zeros((len(shapes), len(kinds) + 2, 2)), np.zeros((len(shapes), len(kinds) + 2, len(recompute)))
    none = Gradients()
    for row, shape in enumerate(shapes):
        for at, kind in enumerate(kinds):
            memories = [layer_memory(shape, kind, how, none) for how in recompute]
            numel[row, at] = memories[0].numel, memories[0].expert_numel
            kept[row, at] = 0.0 if shape.offload_activations else [memory.kept for memory in memories]
        for at, is_head in ((len(kinds), False), (len(kinds) + 1, True)):
            memory = end_memory(shape, is_head, shape.model.tied_embeddings and is_head, none)
            numel[row, at], kept[row, at] = (memory.numel, memory.expert_numel), memory.kept
    return numel, np.maximum(kept, 0.0)


@cached(1024)
def layer_counts(shape: RankShape, num_parts: int, kinds: tuple[str, ...], every: int) -> tuple[Floats, Floats]:
    """Blocks of each part of a model that is split evenly.

    Args:
        shape: Its model counts alone.
        num_parts: Parts of the model.
        kinds: Kinds of layers, in the order of ``BlockFloors``.
        every: Of each part, the first and every n-th layer after it are recomputed.

    Returns:
        How many blocks of each part there are, and how many of these are recomputed; shape
        ``(num_parts, num_blocks)``.
    """
    of_layers = [kinds.index(kind) for kind, count in find_family(shape.model.family).layer_kinds(shape.model)
                 for _ in range(count)]  # fmt: skip
    each, rest = divmod(len(of_layers), num_parts)
    counts, again = np.zeros((2, num_parts, len(kinds) + 2))
    begin = 0
    for part in range(num_parts):
        own = of_layers[begin : begin + each + (part < rest)]
        begin += len(own)
        np.add.at(counts[part], own, 1.0)
        np.add.at(again[part], own[::every], 1.0)
    counts[0, -2] = counts[-1, -1] = 1.0
    return counts, again
