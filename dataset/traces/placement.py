"""What a trace does not say of its rank: who shares a node, and along which parallel axis a group lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Facts about a rank that its trace does not state.

    Attributes:
        rank: Which rank, None if the trace is to be asked.
        devices_per_node: Ranks that share a node, filled in rank order; 0: all share one.
        tp, dp: Degrees, where known: ``rank = tp_rank + tp * (dp_rank + dp * stage)``; 0: not known.
    """

    rank: int | None = None
    devices_per_node: int = 0
    tp: int = 0
    dp: int = 0

    def ranks_per_node(self, ranks: Sequence[int], size: int) -> int:
        """``ceil(size / nodes)`` of a group."""
        if not self.devices_per_node or not ranks:
            return size
        return -(-size // len({rank // self.devices_per_node for rank in ranks}))

    def axis(self, ranks: Sequence[int]) -> str:
        """The parallel axis along which a group lies, "" if the degrees are not known or it is none."""
        if not (self.tp and self.dp) or len(ranks) < 2:
            return ""
        places = [(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)) for rank in ranks]
        varying = [
            name
            for name, values in zip(("tp", "dp", "pp"), zip(*places, strict=True), strict=True)
            if len(set(values)) > 1
        ]
        return varying[0] if len(varying) == 1 else ""

    def data_parallel_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shard as this one."""
        if not (self.tp and self.dp):
            return ()
        first = rank - rank // self.tp % self.dp * self.tp
        return tuple(range(first, first + self.tp * self.dp, self.tp))
