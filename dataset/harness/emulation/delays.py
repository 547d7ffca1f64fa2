"""How long the collectives of a stand-in take, as its plan says.  Standard library only.

``stand_in`` of a run says that one process does what a rank of the job does, and how long collectives take then::

    {"rank": r, "collectives": [{"kind", "num_bytes", "group_size", "ranks_per_node", "seconds"}]}
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

from ..plan_error import HarnessError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
_SIZES = ("num_bytes", "group_size", "ranks_per_node")
_MOST, _MOST_S = 2**48, 3600.0  # beyond, a number is a slip of the pen


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


def stand_in_problems(stand_in: Any, ranks: int) -> list[str]:
    """What is wrong with ``stand_in`` of a run whose job has so many ranks."""
    if not isinstance(stand_in, dict) or set(stand_in) != {"rank", "collectives"}:
        got = sorted(stand_in) if isinstance(stand_in, dict) else stand_in
        return [f"stand_in is a table of rank and collectives, got {got!r:.80}"]
    rank, rows = stand_in["rank"], stand_in["collectives"]
    problems = []
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        problems.append(f"stand_in.rank must be one of the job's {ranks} ranks, got {rank!r:.80}")
    if ranks < 2:
        problems.append(f"a stand-in is for a job of at least 2 ranks, got {ranks}")
    if not isinstance(rows, list):
        return [*problems, f"stand_in.collectives must be a list, got {rows!r:.80}"]
    return problems + [text for row in rows for text in _row_problems(row)]


def _row_problems(row: Any) -> list[str]:
    if not isinstance(row, dict) or set(row) != {"kind", *_SIZES, "seconds"}:
        return [f"a collective of a stand-in has kind, {', '.join(_SIZES)} and seconds, got {row!r:.120}"]
    problems = []
    if row["kind"] not in KINDS:
        problems.append(f"kind of a stand-in's collective must be one of {', '.join(KINDS)}, got {row['kind']!r:.80}")
    for name in _SIZES:
        if isinstance(row[name], bool) or not isinstance(row[name], int) or not 1 <= row[name] <= _MOST:
            rule = f"must be a whole number from 1 to {_MOST}"
            problems.append(f"{name} of a stand-in's collective {rule}, got {row[name]!r:.80}")
    seconds = row["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_S:
        rule = f"must be a number > 0 and at most {_MOST_S:g}"
        problems.append(f"seconds of a stand-in's collective {rule}, got {seconds!r:.80}")
    return problems
