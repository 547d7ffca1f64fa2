"""Numbers from the code of compiled regions: a node for each loop nest, and edges for what a cache may still hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.harness.regions.accesses import LINE
from stepsight.dataset.harness.regions.body_ops import CALLS, CYCLES, FUNCTIONS, MOVES, PLAIN
from stepsight.dataset.harness.regions.loop_nests import Nest
from stepsight.dataset.harness.regions.nest_work import (
    FORMS,
    MIDDLE,
    NEAR,
    TERMS,
    Use,
    is_strided,
    nests_by_call,
    terms_of,
    uses_of,
)
from stepsight.dataset.harness.regions.region_record import Region
from stepsight.features.statement_features import StatementNumbers, UseLevel, statement_numbers

Array = NDArray[np.float64]
Edges = NDArray[np.int64]

CYCLE_S = 3e-10
_SECONDS = {
    "read_bytes": 3e-11, "written_bytes": 5e-11, "strided": 2e-9, "nests": 1e-7,
    **{f"{form}_{name}": each[place] * CYCLE_S for place, form in enumerate(FORMS) for name, each in CYCLES.items()},
}  # fmt: skip
TERM_SECONDS = np.array([_SECONDS[name] for name in TERMS])  # of one of each, before a machine said what they are
_GATHERED = ("gather", "scatter")
PARTS = {  # of a roofline, each with the terms that it adds up
    "reads": ("read_bytes",), "writes": ("written_bytes",), "strided": ("strided",),
    "indirect": tuple(f"{form}_{name}" for form in FORMS for name in _GATHERED),
    "moves": tuple(f"{form}_{name}" for form in FORMS for name in MOVES if name not in _GATHERED),
    "vectors": tuple(f"vector_{name}" for name in PLAIN), "scalars": tuple(f"scalar_{name}" for name in PLAIN),
    "groups": tuple(f"{form}_{name}" for form in FORMS for name in CALLS),
    "functions": tuple(f"vector_{name}" for name in FUNCTIONS),
    "scalar_functions": tuple(f"scalar_{name}" for name in FUNCTIONS), "nests": ("nests",),
}  # fmt: skip
LEVELS = tuple(f"{level}_{what}" for what in ("read", "written", "strided") for level in ("near", "middle", "far"))
LEVEL_SECONDS = np.array([4e-12, 6e-12, 6e-11, 1e-11, 1e-11, 3e-11, 2e-10, 4e-10, 3e-9])
LEVELLED = ("read_bytes", "written_bytes", "strided")  # terms that ``LEVELS`` split by reuse distance
RELATIONS = ("feeds", "shares", "again")  # last touched by a writer, by a reader, or in the last run of the region
EDGE_NUMBERS = ("log_bytes", "log_since", "log_between", "writes", "wrote", "strided", "log_own_bytes")


@dataclass(frozen=True)
class NestNumbers:
    """A region's nests as arrays.

    Attributes:
        x: ``(n, f)``.
        terms: How much each does of ``TERMS``, ``(n, t)``.
        levels: Bytes read and written, and strided accesses, by reuse distance: ``LEVELS``, ``(n, 9)``.
        key: What kind each is, ``(n,)``.
        call: Number of the launch that each is in, ``(n,)``.
        edges: By relation, ``(2, e)`` and ``(e, len(EDGE_NUMBERS))``.
        footprint: Bytes of all buffers that are touched.
        statements: The operations within the nests.
    """

    x: Array
    terms: Array
    levels: Array
    key: Edges
    call: Edges
    edges: Mapping[str, tuple[Edges, Array]]
    footprint: float
    statements: StatementNumbers


def nest_numbers(region: Region) -> NestNumbers:
    """Arrays of a region whose code was read."""
    code = nests_by_call(region)
    nests, uses, calls = [], [], []
    for number, launch in enumerate(region.launches):
        for nest in code[launch.call]:
            nests.append(nest)
            uses.append(uses_of(nest, launch.pointers, region.buffers))
            calls.append(number)
    told = [list(terms_of(nest, use).values()) for nest, use in zip(nests, uses, strict=True)]
    terms = np.array(told).reshape(-1, len(TERMS))
    rows = [_row(nest, use, each) for nest, use, each in zip(nests, uses, terms, strict=True)]
    edges, names = _edges(uses)
    touched = {name: region.buffers.get(name, 0) for use in uses for name in use}
    levels = _levels(terms, edges)
    pointers = [region.launches[call].pointers for call in calls]
    return NestNumbers(
        np.array(rows),
        terms,
        levels,
        np.array([_kind(each) for each in terms], dtype=np.int64),
        np.array(calls, dtype=np.int64),
        edges,
        float(sum(touched.values())),
        statement_numbers(nests, pointers, _use_levels(len(nests), edges, names), levels[:, 6:]),
    )


def _use_levels(
    count: int, edges: Mapping[str, tuple[Edges, Array]], names: Mapping[str, Sequence[str]]
) -> list[dict[str, UseLevel]]:
    """How each nest uses its buffers, by name."""
    found: list[dict[str, UseLevel]] = [{} for _ in range(count)]
    for relation, (where, about) in edges.items():
        written = about[:, EDGE_NUMBERS.index("writes")] > 0
        moved = np.expm1(about[:, 0])
        for name, target, writes, level, each in zip(
            names[relation], where[1], written, edge_levels(about), moved, strict=True
        ):
            found[target][name] = bool(writes), int(level), float(each)
    return found


def _row(nest: Nest, uses: Mapping[str, Use], terms: Array) -> list[float]:
    touches = nest.touches
    read, written = sum(u.read for u in uses.values()), sum(u.written for u in uses.values())
    strided = [t for t in touches if is_strided(t)]
    seconds = terms * TERM_SECONDS
    told = [
        read + written, max((max(u.read, u.written) for u in uses.values()), default=0.0),
        max((t.stride for t in strided), default=0), max((t.distinct for t in strided), default=0.0),
        sum(t.times for t in touches if t.form == "vector" and t.num_bytes != LINE),
        sum(nest.operations.values()) / max(read + written, 1.0),
        float(len(uses)), float(len(touches)),
    ]  # fmt: skip
    shares = part_sums(seconds[None])[0] / seconds.sum()
    return [*np.log1p(terms).tolist(), *np.log1p(told).tolist(), *shares.tolist(), float(np.log(seconds.sum()))]


def part_sums(seconds: Array) -> Array:
    """Seconds by part of seconds by term: ``(n, t)`` to ``(n, len(PARTS))``."""
    names = list(TERMS)
    return np.stack([seconds[:, [names.index(each) for each in terms]].sum(axis=1) for terms in PARTS.values()], axis=1)


def _kind(terms: Array) -> int:
    """Vector or scalar code, with strides, with gathers, with reductions, with slow functions: one number."""
    told = dict(zip(TERMS, terms.tolist(), strict=True))
    seconds = terms * TERM_SECONDS
    slow = bool(part_sums(seconds[None])[0][-3:-1].sum() > 0.3 * seconds.sum())
    reduces, looks = (any(told[name] for name in PARTS[part]) for part in ("groups", "indirect"))
    vector, scalar = (sum(told[f"{form}_{name}"] for name in PLAIN) for form in FORMS)
    return int(16 * (vector >= scalar) + 8 * bool(told["strided"]) + 4 * looks + 2 * reduces + slow)


def _levels(terms: Array, edges: Mapping[str, tuple[Edges, Array]]) -> Array:
    """``LEVELS`` of each nest."""
    found = np.zeros((len(terms), 3, 3))
    for where, about in edges.values():
        level = edge_levels(about)
        moved = np.expm1(about[:, 0])
        writes, strided = about[:, EDGE_NUMBERS.index("writes")] > 0, about[:, EDGE_NUMBERS.index("strided")] > 0
        for target, row, column, each in zip(where[1], writes.astype(np.int64), level, moved, strict=True):
            found[target, row, column] += each
        for target, column, each in zip(where[1][strided], level[strided], moved[strided], strict=True):
            found[target, 2, column] += each
    apart = found[:, 2]
    found[:, 2] = terms[:, [TERMS.index("strided")]] * apart / np.maximum(apart.sum(axis=1, keepdims=True), 1.0)
    return found.reshape(len(terms), 9)


def edge_levels(about: Array) -> Edges:
    """Near (0), middle or far (2): by the bytes that were touched since, and half of those of the nest itself."""
    columns = [np.expm1(about[:, EDGE_NUMBERS.index(name)]) for name in ("log_since", "log_own_bytes", "log_bytes")]
    return np.searchsorted([NEAR, MIDDLE], columns[0] + 0.5 * (columns[1] + columns[2]))


def _edges(
    uses: Sequence[Mapping[str, Use]],
) -> tuple[dict[str, tuple[Edges, Array]], dict[str, list[str]]]:
    """An edge to every use of a buffer, from the nest that touched it last, in this run of the region or the last.

    Beside them the buffers that they are for.

    ``since`` counts the bytes that other nests touched between.
    """
    sizes = np.array([sum(max(u.read, u.written) for u in use.values()) for use in uses])
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    whole = float(before[-1])
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in RELATIONS}
    names: dict[str, list[str]] = {name: [] for name in RELATIONS}
    last: dict[str, tuple[int, bool]] = {}
    for turn in range(2):  # the first run shows what the last one leaves
        for number, use in enumerate(uses):
            for name, each in use.items():
                if turn and name in last:
                    source, wrote = last[name]
                    again = source >= number
                    since = before[number] - before[source + 1] + (whole if again else 0.0)
                    relation = "again" if again else "feeds" if wrote else "shares"
                    between = number - source + (len(uses) if again else 0)
                    names[relation].append(name)
                    rows[relation].append(
                        (
                            source, number, np.log1p(max(each.read, each.written)), np.log1p(max(since, 0.0)),
                            np.log(between) if between > 0 else 0.0, float(each.written > 0), float(wrote),
                            float(each.strided), np.log1p(sizes[number]),
                        )
                    )  # fmt: skip
                last[name] = number, each.written > 0
        if not turn:
            last = {name: (number, wrote) for name, (number, wrote) in last.items()}
    made = {}
    for relation, found in rows.items():
        table = np.array(found, dtype=np.float64).reshape(len(found), 2 + len(EDGE_NUMBERS))
        made[relation] = table[:, :2].T.astype(np.int64), table[:, 2:]
    return made, names
