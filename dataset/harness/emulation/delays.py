"""How long the collectives of a stand-in take, as its plan says (see ``plan.stand_in_checks``).

Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

from ..plan_error import HarnessError


class Delays:
    """Seconds of collectives by kind, bytes, group size and ranks per node.

    Between two sizes of a kind and group seconds are log-linear in bytes, beyond the ends in proportion to them.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._known: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for row in rows:
            key = (row["kind"], row["group_size"], row["ranks_per_node"])
            self._known.setdefault(key, []).append((row["num_bytes"], row["seconds"]))
        for found in self._known.values():
            found.sort()

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
        """Seconds of one collective.

        Raises:
            HarnessError: If the table has none of its kind and group.
        """
        known = self._known.get((kind, group_size, ranks_per_node))
        if known is None:
            raise HarnessError(
                f"stand_in.collectives must tell every collective of the job, got no {kind} of {group_size} ranks, "
                f"{ranks_per_node} on each node"
            )
        sizes = [size for size, _ in known]
        after = bisect_left(sizes, num_bytes)
        if after == 0 or after == len(sizes):
            size, seconds = known[min(after, len(sizes) - 1)]
            return seconds * num_bytes / size
        (small, short), (large, long) = known[after - 1], known[after]
        part = math.log(num_bytes / small) / math.log(large / small)
        return math.exp((1 - part) * math.log(short) + part * math.log(long))
