"""Numbers from the statements of loop nests: a node for each operation, and edges for the data that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.harness.regions.body_ops import CYCLES, FLOAT, HALF, OPS, TRUTH, WHOLE, BodyOp
from stepsight.dataset.harness.regions.loop_nests import Nest
from stepsight.dataset.harness.regions.nest_work import TERMS, is_strided

Array = NDArray[np.float64]
Edges = NDArray[np.int64]
UseLevel = tuple[bool, int, float]  # whether a nest writes a buffer, how long ago it was touched (0 to 2), and bytes
KINDS = (FLOAT, HALF, WHOLE, TRUTH)
NUMBERS = ("log_times", "log_share_of_runs", "registers", "inputs", "readers", "carried", "log_stride", "log_bytes")
DATA_NUMBERS = ("same_runs", "log_runs_ratio", "carried", "last")
KEPT_SHARE = 1e-3  # of a region's time, before a machine said what its constants are: smaller ones have no node


@dataclass(frozen=True)
class StatementNumbers:
    """A region's operations as arrays.

    Attributes:
        x: ``(n, f)``.
        nest: Number of the nest that each is in, ``(n,)``.
        terms: What each does of ``TERMS``, bytes and strides aside, ``(n, t)``.
        levels: Its share of its nest's ``LEVELS``, ``(n, 9)``.
        edges: From an operation to those that take its result, ``(2, e)``.
        about: Of the edges, ``(e, len(DATA_NUMBERS))``.
    """

    x: Array
    nest: Edges
    terms: Array
    levels: Array
    edges: Edges
    about: Array


def statement_numbers(
    nests: Sequence[Nest],
    pointers: Sequence[Mapping[str, str]],
    uses: Sequence[Mapping[str, UseLevel]],
    strided: Array,
) -> StatementNumbers:
    """Arrays of the operations of nests.

    Args:
        nests: In order.
        pointers: Buffers by their names in the code, of each nest.
        uses: How each nest uses its buffers.
        strided: Strided accesses of each nest by reuse distance, ``(n, 3)``.
    """
    spent = [np.array([_cycles(op) for op in nest.ops]) for nest in nests]
    least = KEPT_SHARE * sum(float(each.sum()) for each in spent)
    parts = [_Body(*each, least) for each in zip(nests, pointers, uses, strided, spent, strict=True)]
    counts = np.cumsum([0, *(len(part.kept) for part in parts)])
    edges = [part.edges() + offset for part, offset in zip(parts, counts[:-1], strict=True)]
    return StatementNumbers(
        np.concatenate([part.rows() for part in parts]),
        np.repeat(np.arange(len(parts)), np.diff(counts)),
        np.concatenate([part.terms() for part in parts]),
        np.concatenate([part.levels() for part in parts]),
        np.concatenate(edges, axis=1).astype(np.int64),
        np.concatenate([part.about() for part in parts]),
    )


def _cycles(op: BodyOp) -> float:
    return CYCLES[op.name][0 if op.registers else 1] * op.work


class _Body:
    """The operations of a nest that have nodes; the first one stands for those that have none."""

    def __init__(
        self,
        nest: Nest,
        pointers: Mapping[str, str],
        uses: Mapping[str, UseLevel],
        strided: Array,
        spent: Array,
        least: float,
    ) -> None:
        self._nest, self._pointers, self._uses, self._strided = nest, pointers, uses, strided
        moved = [op.touch >= 0 and not nest.touches[op.touch].pointer.startswith("local") for op in nest.ops]
        kept = [place for place, cycles in enumerate(spent) if cycles > least or (moved[place] and cycles > least / 10)]
        self.kept = kept or [int(np.argmax(spent))] if len(spent) else []
        self._place = {old: new for new, old in enumerate(self.kept)}

    def rows(self) -> Array:
        """``x``."""
        ops = self._nest.ops
        most = max((op.times for op in ops), default=1.0)
        readers = np.zeros(len(ops))
        for op in ops:
            for each in op.inputs:
                readers[each] += 1
        found = np.zeros((len(self.kept), len(OPS) + 1 + len(KINDS) + len(NUMBERS)))
        for row, place in zip(found, self.kept, strict=True):
            op = ops[place]
            touch = self._nest.touches[op.touch] if op.touch >= 0 else None
            row[OPS.index(op.name)] = 1.0
            row[len(OPS)] = float(op.registers > 0)
            row[len(OPS) + 1 + KINDS.index(op.kind)] = 1.0
            row[-len(NUMBERS) :] = (
                np.log1p(op.times), np.log(max(op.times, 1e-3) / max(most, 1e-3)), op.registers, len(op.inputs),
                np.log1p(readers[place]), op.carried, np.log1p(touch.stride if touch else 0),
                np.log1p(touch.distinct if touch else 0),
            )  # fmt: skip
        return found

    def terms(self) -> Array:
        """``terms``."""
        found = np.zeros((max(len(self.kept), 0), len(TERMS)))
        for place, op in enumerate(self._nest.ops):
            found[self._place.get(place, 0), TERMS.index(op.term)] += op.work
        if len(found):
            found[0, TERMS.index("nests")] = 1.0
        return found

    def levels(self) -> Array:
        """``levels``: the bytes of a buffer belong to its first load, or to its last store."""
        found = np.zeros((len(self.kept), 3, 3))
        if not len(found):
            return found.reshape(0, 9)
        holder: dict[str, int] = {}
        strides: list[tuple[int, float]] = []
        for place, op in enumerate(self._nest.ops):
            if op.touch < 0:
                continue
            touch = self._nest.touches[op.touch]
            name, mine = self._pointers.get(touch.pointer, touch.pointer), self._place.get(place, 0)
            if name in self._uses and (name not in holder or touch.writes):
                holder[name] = mine
            if is_strided(touch):
                strides.append((mine, touch.times))
        for name, (writes, level, moved) in self._uses.items():
            found[holder.get(name, 0), int(writes), level] += moved
        whole = sum(times for _, times in strides)
        for mine, times in strides:
            found[mine, 2] += self._strided * times / max(whole, 1e-9)
        return found.reshape(len(found), 9)

    def edges(self) -> Edges:
        """Edges between nodes; those of a node that was left out go on to what reads it."""
        return np.array(self._pairs(), dtype=np.int64).reshape(-1, 2).T

    def about(self) -> Array:
        """Numbers of the edges."""
        ops = [self._nest.ops[place] for place in self.kept]
        rows = []
        for one, other in self._pairs():
            ratio = float(np.log(max(ops[other].times, 1e-3) / max(ops[one].times, 1e-3)))
            rows.append((float(abs(ratio) < 1e-6), ratio, float(ops[other].carried), float(other == len(ops) - 1)))
        return np.array(rows, dtype=np.float64).reshape(-1, len(DATA_NUMBERS))

    def _pairs(self) -> list[tuple[int, int]]:
        found = []
        for place in self.kept:
            for each in self._nest.ops[place].inputs:
                if each in self._place:
                    found.append((self._place[each], self._place[place]))
        return found
