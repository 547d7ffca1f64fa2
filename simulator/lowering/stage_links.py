"""What joins pipeline stages: messages between parts, a shared table, and who waits for whom before the optimizer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.caching import cached
from stepsight.dataset.op import Collective
from stepsight.simulator.blocks.shape import Group, RankShape
from stepsight.simulator.clock.track import Track
from stepsight.simulator.lowering.rank_layout import Layout
from stepsight.simulator.lowering.sizes import Parts, boundary_bytes

Ints = NDArray[np.int32]


def tied_group(shape: RankShape, layout: Layout, track: Track) -> Group:
    """The two ranks that hold the same embedding's table in different stages; nobody if there is only one."""
    placed = track.schedule.placement[:, 0]
    first, last = int(placed[0]), int(placed[-1])
    if first == last or not shape.model.tied_embeddings:
        return Group()
    return Group(2, layout.pipeline_neighbours(first, last))


@cached(1024)
def meeting_stages(track: Track, tied: Group, *, all_meet: bool) -> Ints:
    """Number of each stage's group of those that wait for each other before the optimizer, shape ``(num_stages,)``.

    All meet for the norm of all gradients, two for a shared table.
    """
    if all_meet:
        return np.zeros(track.num_stages, dtype=np.int32)
    meets = np.arange(track.num_stages, dtype=np.int32)
    if tied.size > 1:
        placed = track.schedule.placement
        meets[placed[-1, 0]] = meets[placed[0, 0]]
    return meets


@cached(4096)
def stage_messages(shape: RankShape, parts: Parts, layout: Layout, track: Track) -> tuple[tuple[Collective, ...], Ints]:
    """Distinct messages, and which of them each message of the track is."""
    if not track.num_messages:
        return (), np.zeros(0, dtype=np.int32)
    kinds = list(zip(boundary_bytes(shape, parts), _nearness(track, layout), strict=True))
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kind for kind in kinds if kind[1]))}
    messages = tuple(Collective("send_recv", size, 2, near) for size, near in distinct)
    return messages, _message_kinds(track, tuple([distinct.get(kind, -1) for kind in kinds]))


@cached(1024)
def _message_kinds(track: Track, after_part: tuple[int, ...]) -> Ints:
    """Kind of each message of a track, from the kind of those after each part; -1: there is none."""
    if max(after_part) == 0:
        return np.zeros(track.num_messages, dtype=np.int32)
    kinds: Ints = np.array(after_part, dtype=np.int32)
    return np.asarray(kinds[_boundaries(track)])


@cached(512)
def _nearness(track: Track, layout: Layout) -> tuple[int, ...]:
    """After each part: whether its message stays within a node (2), leaves it (1), or there is none (0)."""
    placed = track.schedule.placement[:, 0].tolist()
    return tuple(0 if a == b else layout.pipeline_neighbours(a, b) for a, b in pairwise(placed))


@cached(512)
def _boundaries(track: Track) -> Ints:
    """The part after which each message passes."""
    return np.minimum(track.part[track.source], track.part[track.target])
