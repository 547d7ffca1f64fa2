"""The rules of ``box`` in a plan."""

from __future__ import annotations

from typing import Any

MOST_NODES = 250  # addresses of one subnet
_MOST_RANKS = 1024  # on a node


def box_problems(box: Any) -> list[str]:
    """Return everything that is wrong with ``box`` of a plan.

    A box is ``{"nodes", "ranks_per_node", "mbits_per_s": [per node]}``; ``"latency_ms": [per node]`` is optional.
    """
    if not isinstance(box, dict) or set(box) - {"latency_ms"} != {"nodes", "ranks_per_node", "mbits_per_s"}:
        return [f"a box has nodes, ranks_per_node, mbits_per_s and maybe latency_ms, got {box!r:.80}"]
    problems = []
    for key, most in (("nodes", MOST_NODES), ("ranks_per_node", _MOST_RANKS)):
        value = box[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            problems.append(f"{key} of a box must be a whole number from 1 to {most}, got {value!r:.80}")
    sized = not problems
    for key, least, most in (("mbits_per_s", 1, 100_000), ("latency_ms", 0, 1000)):
        numbers = box.get(key, [0.0] * box["nodes"] if sized else [])
        good = isinstance(numbers, list) and all(
            isinstance(number, int | float) and not isinstance(number, bool) and least <= number <= most
            for number in numbers
        )
        if not good:
            problems.append(f"{key} of a box must hold numbers from {least} to {most:,}, got {numbers!r:.80}")
        elif sized and len(numbers) != box["nodes"]:
            problems.append(f"{key} of a box must hold one number per node, got {len(numbers)} for {box['nodes']}")
    return problems
