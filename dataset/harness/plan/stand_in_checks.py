"""The rules of ``stand_in`` in a run: one process does the work of one rank of a larger job.

``stand_in`` says which rank, and how long each collective takes::

    {"rank": r, "collectives": [{"kind", "num_bytes", "group_size", "ranks_per_node", "seconds"}]}
"""

from __future__ import annotations

from typing import Any

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
_SIZES = ("num_bytes", "group_size", "ranks_per_node")
_MOST, _MOST_S = 2**48, 3600.0  # a larger number is a typing mistake


def stand_in_problems(stand_in: Any, ranks: int) -> list[str]:
    """Return every problem of ``stand_in`` of a run, given the number of ranks of its job."""
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
