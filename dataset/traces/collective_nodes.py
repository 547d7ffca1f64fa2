"""Collectives among device events: from the arguments of NCCL's and RCCL's kernels, or from the calls around their
launches.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.rank_trace import Rendezvous
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.traces.classify import intern_op
from stepsight.dataset.traces.device_kernels import collective_of
from stepsight.dataset.traces.event_columns import Annotation, RankEvents
from stepsight.dataset.traces.kernel_kinds import Launch
from stepsight.dataset.traces.placement import Placement
from stepsight.dataset.traces.sweep import Call

_LIBRARIES = re.compile(
    r"^(void )?(nccl|rccl|mscclpp|mscclKernel|oneccl|ncclDev|nvshmem"
    r"|(deep_ep|dpsk::ep)::(intra|inter)node|(deep_ep|dpsk::ep)::internode_ll"
    r"|(vllm::|sglang::|aiter::)?cross_device_reduce|(one|two)_shot_all_?reduce|multimem_)",
    re.IGNORECASE,
)
_KERNELS = (
    ("AllReduce", "all_reduce"), ("ReduceScatter", "reduce_scatter"), ("AllGather", "all_gather"),
    ("SendRecv", "all_to_all"), ("Broadcast", "broadcast"), ("cross_device_reduce", "all_reduce"),
    ("one_shot", "all_reduce"), ("two_shot", "all_reduce"), ("Reduce", "reduce"), ("dispatch", "all_to_all"),
    ("combine", "all_to_all"), ("notify", "all_to_all"),
)  # fmt: skip
_MOST_DEPTH = 8  # enclosing calls of a launch that are examined


@dataclass
class Met:
    """A collective of one rank: its signature (an op if the group has one rank) and its rendezvous."""

    work: Op | Collective
    meets: Rendezvous | None


def is_collective(name: str) -> bool:
    """Whether a kernel belongs to a communication library."""
    return bool(_LIBRARIES.match(name[:40]))


class CollectiveNodes:
    """Finds the collectives of one rank.

    Args:
        events: Of the rank.
        world_size: Of its job.
        placement: Where ranks lie.
    """

    def __init__(self, events: RankEvents, world_size: int, placement: Placement) -> None:
        self._events, self._world_size, self._placement = events, world_size, placement
        self._numbers: dict[str, int] = {}
        self._calls: dict[int, tuple[list[float], list[Annotation]]] = {}
        named = [each for each in events.annotations if each.name.startswith(("nccl:", "rccl:", "stepsight::coll"))]
        for call in sorted([*named, *events.comms], key=lambda each: each.start):
            starts, calls = self._calls.setdefault(call.thread, ([], []))
            starts.append(call.start)
            calls.append(call)

    def find(self, row: int, launch: Launch, issued: float, thread: int) -> Met:
        """The collective of a device event; must be called in the order of launches."""
        args = self._events.collective_args.get(row, {})
        said = self._said(issued, thread)
        comm = Call(said, issued, issued, thread) if said else None
        work = collective_of(args, comm, self._world_size, self._placement, self._numbers)
        if work is not None:
            meets = work.meets
            number = args.get("Seq", said.get("Seq", -1))
            if meets is not None and isinstance(number, int) and number >= 0:
                meets = Rendezvous(meets.group, number, meets.ranks)
            return Met(work.work, meets)
        size = int({**said, **args}.get("Group size", self._world_size) or self._world_size)
        if size < 2:
            return Met(intern_op("copy", (0,), "fp32"), None)
        kind = next((kind for word, kind in _KERNELS if word.lower() in launch.name.lower()), "all_reduce")
        group = "nccl"
        number = self._numbers[group] = self._numbers.get(group, -1) + 1
        per_node = self._placement.ranks_per_node((), size)
        return Met(Collective(kind, 0, size, per_node), Rendezvous(group, number))

    def _said(self, issued: float, thread: int) -> dict[str, Any]:
        """The communication calls around a launch; a record has more information than an annotation."""
        starts, calls = self._calls.get(thread, ([], []))
        place = bisect_right(starts, issued)
        said: dict[str, Any] = {}
        for call in calls[max(place - _MOST_DEPTH, 0) : place]:
            if call.end < issued:
                continue
            if call.name.startswith(("nccl:", "rccl:")):
                shapes, types = call.args.get("Input Dims") or [[]], call.args.get("Input type") or [""]
                said = {"Collective name": call.name[5:], "shape": shapes[0], "type": types[0], **said}
            elif "Collective name" in call.args:
                said = {**said, **call.args}
        return said


def mask_of(events: RankEvents) -> NDArray[np.bool_]:
    """``(d,)``: whether each device event is a collective."""
    named = np.array([is_collective(name) for _, name, _ in events.kernels], dtype=np.bool_)
    mask = named[events.device["kernel"]] if len(events.device) else np.zeros(0, dtype=np.bool_)
    mask[list(events.collective_args)] = True
    return mask
