"""Check that captured ranks issue their common collectives in the same order: otherwise they would deadlock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any

from stepsight.dataset.base.errors import CaptureError

Ranks = tuple[int, ...]
Issued = tuple[str, str, int, str]  # group by torch's name, kind, bytes, line of the script


def issued_by_group(record: Mapping[str, Any]) -> dict[Ranks, list[Issued]]:
    """Collectives of a record, without messages, by the participating ranks, in order."""
    found: dict[Ranks, list[Issued]] = {}
    for group, name, kind, num_bytes, line in record["issued"]:
        found.setdefault(tuple(record["groups"][group][1]), []).append((name, kind, num_bytes, line))
    return found


def check_orders(ranks: Mapping[int, Mapping[Ranks, Sequence[Issued]]]) -> None:
    """Compare the collectives that each two captured ranks issue together.

    Args:
        ranks: What each rank issued (``issued_by_group``).

    Raises:
        CaptureError: If two ranks differ; the message names the script's lines.
    """
    for one, other in combinations(sorted(ranks), 2):
        mine, theirs = ranks[one], ranks[other]
        for group in mine.keys() | theirs.keys():
            if one in group and other in group:
                _compare((one, mine.get(group, ())), (other, theirs.get(group, ())))


def _compare(one: tuple[int, Sequence[Issued]], other: tuple[int, Sequence[Issued]]) -> None:
    named = {each[0] for each in one[1]} == {each[0] for each in other[1]}  # else ranks name their groups differently
    for place, (mine, theirs) in enumerate(zip_longest(one[1], other[1])):
        if mine is None or theirs is None or mine[not named : 3] != theirs[not named : 3]:
            raise CaptureError(
                f"ranks {one[0]} and {other[0]} would wait for each other forever: as number {place + 1} of their "
                f"collectives rank {one[0]} issues {_text(mine)}, and rank {other[0]} {_text(theirs)}"
            )


def _text(issued: Issued | None) -> str:
    if issued is None:
        return "none"
    name, kind, num_bytes, line = issued
    return f"{kind} of {num_bytes} bytes in group {name}" + (f" at {line}" if line else "")
