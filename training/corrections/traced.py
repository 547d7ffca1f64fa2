"""Corrections of a predictor's kernels from traces of real steps: a factor for each kind, and more near traced sizes.

A predictor of tables says how long a kernel takes alone, by the library that the tables measured.  In a training step
another variant of it runs, beside other work.  Each kind has what predicts signatures that were left out best: nothing,
a factor, or a factor and a Gaussian process on what it leaves; it fades for sizes that no trace holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.codec import ROUNDED, Saved
from stepsight.dataset.kinds.op import Op
from stepsight.features.op_features import op_position
from stepsight.training.corrections.corrector import LENGTHS, Neighbours, Support, faded, fit_neighbours

Array = NDArray[np.float64]

FEWEST = 4  # fewest signatures of a kind for a correction
FOLDS = 5
MIN_GAIN = 0.1  # a choice must lower the error on left-out signatures by this share to replace a simpler one
MOST_LOG = 1.6  # limit of a correction: beyond a factor of 5, the call does not show the op's real sizes
_PRIOR = 2.0  # weight of the predictor, in signatures
_REACH = LENGTHS[2:]  # shorter lengths would memorise single signatures


@dataclass(frozen=True)
class TracedKind(Saved):
    """The correction of one kind; log-seconds."""

    offset: float = field(metadata=ROUNDED)  # of every op of the kind
    near: Neighbours  # what is left near signatures that were traced
    support: Support  # positions that were traced

    prior_std_log = 0.3  # kernels in traces against tables of the same kernels

    def log_factor(self, asked: Array) -> Array:
        """Logarithm of the factor at positions ``(rows, axes)``, shape ``(rows,)``; zero far from the support."""
        found = np.clip(self.offset + self.near.log_factor(asked), -MOST_LOG, MOST_LOG)
        return np.asarray(found * self.known(asked))

    def known(self, asked: Array) -> Array:
        """Share that is left of the correction at positions ``(rows, axes)``, shape ``(rows,)``."""
        return faded(self.support.beyond(asked).max(axis=1))

    def holds(self, op: Op) -> bool:
        """Whether an op lies within the traced range."""
        return bool((self.support.beyond(op_position(op)) <= 1e-9).all())

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], **given: Any) -> Self:
        """As of ``Saved``; earlier versions saved the ends of the support beside the other fields."""
        return super().from_dict({"support": value, **value}, **given)

    def check(self, axes: int) -> None:
        """Check values read from a file.  Raises ``ValueError`` if arrays do not fit each other, or so many axes."""
        (low, high), near = self.support, self.near
        shaped = low.shape == high.shape == (axes,) and near.positions.shape in ((0, 0), (len(near.weights), axes))
        numbers = np.concatenate([low, high, near.positions.ravel(), near.weights, [self.offset]])
        if not shaped or not np.isfinite(numbers).all() or not 0 < near.length <= LENGTHS[-1]:
            raise ValueError(
                f"a traced kind must have finite numbers and {axes} axes, got {low.shape} and {high.shape}"
            )


def log_factors(kinds: Mapping[str, TracedKind], ops: Sequence[Op], labels: Sequence[str]) -> Array:
    """Logarithm of the factor of each op, ``(len(ops),)``; ``labels`` are their kinds with precisions."""
    out = np.zeros(len(ops))
    for name, index in _by_label(labels):
        if name in kinds:
            out[index] = kinds[name].log_factor(np.array([op_position(ops[i]) for i in index]))
    return out


def fit_traced(
    ops: Sequence[Op], predicted: Array, measured: Array, labels: Sequence[str]
) -> tuple[dict[str, TracedKind], Array]:
    """Corrections by kind, of those that they help, and each op's log-factor by a fit that did not see it."""
    found: dict[str, TracedKind] = {}
    left_out = np.zeros(len(ops))
    residual = np.log(measured / predicted)
    for name, index in _by_label(labels):
        index = index[np.abs(residual[index]) <= MOST_LOG]
        if len(index) < FEWEST:
            continue
        positions, own = np.array([op_position(ops[i]) for i in index]), residual[index]
        length, left = _choose(positions, own)
        if length >= 0.0:
            found[name], left_out[index] = _fit(positions, own, length), left
    return found, left_out


def _choose(positions: Array, residual: Array) -> tuple[float, Array]:
    """The reach of neighbours (0: only a factor, below 0: nothing helps), and log-factors of left-out positions."""
    folds = np.random.default_rng(0).permutation(len(residual)) % FOLDS
    best, best_left = -1.0, np.zeros(len(residual))
    error = float(np.abs(residual).mean())
    for length in (0.0, *_REACH):
        left = np.zeros(len(residual))
        for fold in range(FOLDS):
            out = folds == fold
            if out.any():
                left[out] = _fit(positions[~out], residual[~out], length).log_factor(positions[out])
        off = float(np.abs(residual - left).mean())
        if off < error * (1 - MIN_GAIN):
            best, best_left, error = length, left, off
    return best, best_left


def _fit(positions: Array, residual: Array, length: float) -> TracedKind:
    count = len(residual)
    offset = float(np.clip(np.median(residual) * count / (count + _PRIOR), -MOST_LOG, MOST_LOG))
    near = fit_neighbours(positions, residual - offset, length) if length else Neighbours.none(positions.shape[1])
    return TracedKind(offset, near, Support.of(positions))


def _by_label(labels: Sequence[str]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    names = np.array(labels, dtype=object)
    for name in dict.fromkeys(labels):
        yield name, np.flatnonzero(names == name)
