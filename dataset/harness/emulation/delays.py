"""How long the collectives of a stand-in take, as its plan says (see ``plan.stand_in_checks``).

Standard library only.
"""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_left
from typing import Any, BinaryIO

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
                f"stand_in.collectives must list every collective of the job, got no {kind} of {group_size} ranks, "
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


class AskedDelays:
    """Seconds of collectives that another process tells, each signature once.

    Args:
        questions: Where to ask, a line of JSON for each signature: kind, bytes, group size and ranks per node.
        answers: Where to read the seconds, a line each; ``{"error": ...}`` in place of what cannot be told.
    """

    def __init__(self, questions: BinaryIO, answers: BinaryIO) -> None:
        self._questions, self._answers = questions, answers
        self._known: dict[tuple[str, int, int, int], float] = {}
        self._lock = threading.Lock()

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
        """Seconds of one collective.

        Raises:
            HarnessError: If a delay is unknown.
        """
        key = (kind, num_bytes, group_size, ranks_per_node)
        with self._lock:
            if key not in self._known:
                self._questions.write(json.dumps(key).encode() + b"\n")
                self._questions.flush()
                told = json.loads(self._answers.readline() or b'{"error": "who tells delays has ended"}')
                if isinstance(told, dict):
                    raise HarnessError(told["error"])
                self._known[key] = float(told)
            return self._known[key]
