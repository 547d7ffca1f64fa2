"""Links between pipeline stages: messages between parts, a shared table, and which stages meet before the optimizer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import HashedTuple, cached
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.blocks.shape import Group, RankShape
from stepsight.simulator.clock.track import Track
from stepsight.simulator.programs.rank_layout import Layout
from stepsight.simulator.programs.sizes import Parts, boundary_bytes

Ints = NDArray[np.int32]
Placement = HashedTuple[int]  # the stage of each part of the model, in its order


def tied_group(shape: RankShape, layout: Layout, placement: Placement) -> Group:
    """The two ranks in different stages that hold the same embedding table; None if there is only one."""
    first, last = placement[0], placement[-1]
    if first == last or not shape.model.tied_embeddings:
        return Group()
    return Group(2, layout.pipeline_neighbours(first, last))


@cached(1024)
def meeting_stages(placement: Placement, tied: Group, *, all_meet: bool) -> Ints:
    """Group of each stage: stages of one group wait for each other before the optimizer; shape ``(num_stages,)``.

    All meet for the norm of all gradients, two for a shared table.
    """
    num_stages = max(placement) + 1
    if all_meet:
        return np.zeros(num_stages, dtype=np.int32)
    meets = np.arange(num_stages, dtype=np.int32)
    if tied.size > 1:
        meets[placement[-1]] = meets[placement[0]]
    return meets


@cached(4096)
def part_messages(
    shape: RankShape, parts: Parts, layout: Layout, placement: Placement
) -> tuple[tuple[Collective, ...], tuple[int, ...]]:
    """Distinct messages between stages, and the message after each part, -1 if none."""
    kinds = list(zip(boundary_bytes(shape, parts), _nearness(placement, layout), strict=True))
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kind for kind in kinds if kind[1]))}
    messages = tuple(Collective("send_recv", size, 2, near) for size, near in distinct)
    return messages, tuple([distinct.get(kind, -1) for kind in kinds])


@cached(1024)
def message_kinds(track: Track, after_part: tuple[int, ...]) -> Ints:
    """Kind of each message of a track, from the kinds after each part; shape ``(num_messages,)``."""
    if not track.num_messages or max(after_part) == 0:
        return np.zeros(track.num_messages, dtype=np.int32)
    kinds: Ints = np.array(after_part, dtype=np.int32)
    return np.asarray(kinds[_boundaries(track)])


@cached(512)
def _nearness(placement: Placement, layout: Layout) -> tuple[int, ...]:
    """For each part: whether the message after it stays within a node (2) or leaves it (1), or there is none (0)."""
    return tuple(0 if a == b else layout.pipeline_neighbours(a, b) for a, b in pairwise(placement))


@cached(512)
def _boundaries(track: Track) -> Ints:
    """The part that sends each message."""
    return np.minimum(track.part[track.source], track.part[track.target])
