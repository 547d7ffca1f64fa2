"""Collectives that several traced ranks have in common, and the clocks of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsight.dataset.graph.program import COLLECTIVE, Program

# By which ends of one collective may differ after clocks are aligned: seconds, or parts of its duration.  A host may
# run something else before a rank comes back from it.
_MOST_APART = {"cuda": (2e-4, 0.1), "cpu": (0.1, 1.0)}

Meeting = dict[int, int]  # node by place of the rank


def meetings(graphs: Sequence[Program]) -> tuple[list[Meeting], list[float]]:
    """Collectives that at least two ranks recorded, and seconds to add to each rank's times to align the clocks.

    A collective is known by its group and its number in the group.  It ends on all ranks at about the same time, which
    aligns the clocks; what then ends apart is not one, because traces that are trimmed count from elsewhere.
    """
    numbered = numbered_alike(graphs)
    offsets = clock_offsets(graphs, numbered)
    least_s, part = _MOST_APART["cpu" if any(graph.device == "cpu" for graph in graphs) else "cuda"]
    found = []
    for members in numbered:
        ends = [float(graphs[place].end_s[node]) + offsets[place] for place, node in members.items()]
        longest = max(float(graphs[place].duration_s[node]) for place, node in members.items())
        if max(ends) - min(ends) <= max(least_s, part * longest):
            found.append(members)
    return found, offsets


def numbered_alike(graphs: Sequence[Program]) -> list[Meeting]:
    """Collectives of one group, number and kind, for each that at least two ranks recorded."""
    found: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
    for place, graph in enumerate(graphs):
        nodes = np.flatnonzero((graph.columns["kind"] == COLLECTIVE) & (graph.columns["group"] >= 0))
        groups, numbers = graph.columns["group"][nodes].tolist(), graph.columns["seq"][nodes].tolist()
        for node, group, number in zip(nodes.tolist(), groups, numbers, strict=True):
            name, ranks = graph.groups[group]
            if not ranks or graph.rank in ranks:
                found.setdefault((name, ranks, number), {})[place] = node
    several = [members for members in found.values() if len(members) > 1]
    # in trimmed traces, equal numbers may name different ones
    return [each for each in several if len({graphs[place].kind_of(node) for place, node in each.items()}) == 1]


def clock_offsets(graphs: Sequence[Program], met: Sequence[Meeting]) -> list[float]:
    """Seconds to add to each rank's times such that collectives end together; otherwise from the files' own clocks."""
    absolute = [graph.origin_us * 1e-6 for graph in graphs]
    base = min(absolute, default=0.0)
    offsets = [each - base for each in absolute]
    pairs: dict[tuple[int, int], list[float]] = {}
    for members in met:
        (place, end), *others = [(each, float(graphs[each].end_s[node])) for each, node in sorted(members.items())]
        for other, ended in others:
            pairs.setdefault((place, other), []).append(end - ended)
    done: set[int] = set()
    for (one, other), differences in sorted(pairs.items()):
        done.add(one)
        if other not in done:
            offsets[other] = offsets[one] + float(np.median(differences))
            done.add(other)
    low = min(offsets, default=0.0)
    return [offset - low for offset in offsets]
