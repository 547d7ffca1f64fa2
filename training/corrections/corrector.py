"""What every correction of predictions is: a factor, the support that it was learned on, a prior, and a doubt.

``Predictor.corrections`` lists them in the order in which they are applied: nearby signatures (``Neighbours``), ratios
of kinds (``Ratio``), a device's ops against those of other devices (``transferred.Correction``), kernels in traces
(``TracedKind``), collectives of a cluster (``SiteResidual``), calls of a shared host (``Contention``), resources
(``Constants``) and whole iterations (``Residual``, of published runs and of own ones).  Each multiplies a prediction
by ``exp(log_factor)``.  Far from what taught it nothing is left of the factor, and the doubt is the prior's.  What was
learned of a whole kind, label or resource is known of all its work.

What is learned from values at other points is the posterior of a Gaussian process with mean zero: far from every
observation its mean is zero and its variance is the prior's (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, equations 2.25 and 2.26).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import ROUNDED, Saved
from stepsight.dataset.kinds.op import Op
from stepsight.features.node_features import op_position

Array = NDArray[np.float64]
Asked = TypeVar("Asked", contravariant=True)
H = TypeVar("H", bound=Hashable)

FADE = 0.7  # log units beyond what was measured after which a correction falls to 1/e


class Corrector(Protocol[Asked]):
    """Multiplies predictions by what was learned."""

    @property
    def prior_std_log(self) -> float:
        """How far from 1 factors are believed to be before anything was measured, in log units."""
        ...

    def log_factor(self, asked: Asked) -> Array:
        """Logarithm of each factor, ``(asked,)``."""
        ...

    def known(self, asked: Asked) -> Array:
        """Share of the prior's variance that the measurements explain of each, 0 to 1, ``(asked,)``; by default all."""
        return np.ones(len(asked))  # type: ignore[arg-type]


def corrected(seconds: Array, asked: Asked, corrector: Corrector[Asked]) -> Array:
    """Seconds of what is asked, ``(asked,)``, times the factors of a correction."""
    return np.asarray(seconds * np.exp(corrector.log_factor(asked)))


def doubt(corrector: Corrector[Asked], asked: Asked, noise: float = 0.0) -> Array:
    """Deviation that is left of each log-factor, with the noise of a repeated measurement, ``(asked,)``."""
    left = corrector.prior_std_log**2 * (1.0 - corrector.known(asked))
    return np.asarray(np.sqrt(left + noise**2))


def faded(excess: Array) -> Array:
    """Share of a correction that is left so many log units beyond what was measured, 0 to 1."""
    return np.asarray(np.exp(-excess / FADE))


def rows_by(labels: Iterable[H]) -> dict[H, NDArray[np.int64]]:
    """Numbers of the rows with each label."""
    groups: dict[H, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    return {label: np.array(rows, dtype=np.int64) for label, rows in groups.items()}


class Support(NamedTuple):
    """Lowest and highest position that was measured, in log units, ``(axes,)`` each."""

    low: Array
    high: Array

    @classmethod
    def of(cls, positions: Array) -> Support:
        """The range of positions, ``(rows, axes)``."""
        return cls(positions.min(axis=0), positions.max(axis=0))

    def beyond(self, positions: Array) -> Array:
        """How far positions, ``(..., axes)``, lie outside the range on each axis; same shape."""
        return np.asarray(np.maximum(np.maximum(self.low - positions, positions - self.high), 0.0))


NOISE = 0.03  # log-seconds; two library versions, and repeats on one machine, agree within about 3 %
MAX_POINTS = 600
LENGTHS = (0.02, 0.25, 0.5, 1.0, 2.0)  # log units; the first one only reproduces measured signatures


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A process given its observations."""

    covariance: Array  # of the observations, their noise included, (n, n)
    values: Array  # the observations, (n,)

    @cached_property
    def weights(self) -> Array:
        """The contribution of each observation to the mean elsewhere, per unit of covariance with it, ``(n,)``."""
        return np.asarray(np.linalg.solve(self.covariance, self.values), dtype=np.float64)

    @cached_property
    def inverse(self) -> Array:
        """Inverse of the covariance, ``(n, n)``."""
        return np.asarray(np.linalg.inv(self.covariance), dtype=np.float64)

    def mean(self, shared: Array) -> Array:
        """Expected values, ``(...)``, at points whose covariance with the observations is ``shared``, ``(..., n)``."""
        return np.asarray(shared @ self.weights)

    def explained(self, shared: Array) -> Array:
        """Share of each point's variance, ``(...)``, that the observations explain; ``shared`` is ``(..., n)``."""
        return np.asarray(((shared @ self.inverse) * shared).sum(axis=-1))

    def cost(self) -> float:
        """Minus twice the log-likelihood of the observations, up to a constant."""
        _, log_determinant = np.linalg.slogdet(self.covariance)
        return float(self.values @ self.weights + log_determinant)

    def left_out(self, groups: Sequence[Hashable]) -> tuple[Array, Array]:
        """Every observation less its prediction from other groups, and the deviation expected, ``(n,)`` each."""
        weights = self.inverse @ self.values
        off, stds = np.zeros(len(self.values)), np.zeros(len(self.values))
        for group in set(groups):
            index = np.array([i for i, other in enumerate(groups) if other == group])
            block = np.linalg.inv(self.inverse[np.ix_(index, index)])
            off[index] = block @ weights[index]
            stds[index] = np.sqrt(np.diag(block))
        return off, stds


@dataclass(frozen=True)
class Neighbours(Saved):
    """Positions that were measured, ``(points, axes)``, and their weights, ``(points,)``."""

    length: float
    positions: Array = field(metadata=ROUNDED)
    weights: Array = field(metadata=ROUNDED)

    prior_std_log = NOISE

    def log_factor(self, asked: Array) -> Array:
        """Log-residual at each position, ``(rows, axes)``; shape ``(rows,)``."""
        if not len(self.weights):
            return np.zeros(len(asked))
        return np.asarray(_similarity(asked, self.positions, self.length) @ self.weights)

    def known(self, asked: Array) -> Array:
        """Squared similarity with the nearest measured position, ``(rows,)``."""
        if not len(self.weights):
            return np.zeros(len(asked))
        return np.asarray(_similarity(asked, self.positions, self.length).max(axis=1) ** 2)

    def __post_init__(self) -> None:
        if self.weights.ndim != 1:
            raise ValueError(f"weights of neighbours must be one list of numbers, got shape {self.weights.shape}")
        if self.positions.ndim != 2:  # an empty list in a file tells no axes
            axes = -1 if len(self.weights) else 0
            object.__setattr__(self, "positions", self.positions.reshape(len(self.weights), axes))
        if len(self.positions) != len(self.weights) or not self.length > 0:
            got = f"{len(self.positions)} positions, {len(self.weights)} weights and length {self.length}"
            raise ValueError(f"neighbours must have a weight for each position and a length > 0, got {got}")


def _similarity(left: Array, right: Array, length: float) -> Array:
    squares = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * squares / length**2))


def fit_neighbours(positions: Array, residuals: Array, length: float, *, noise: float = NOISE) -> Neighbours:
    """Gaussian-process weights for log-residuals, ``(points,)``, at positions, ``(points, axes)``."""
    if len(positions) > MAX_POINTS:  # the cost is cubic; large tables are covered by the trees
        chosen = np.random.default_rng(0).choice(len(positions), MAX_POINTS, replace=False)
        positions, residuals = positions[chosen], residuals[chosen]
    signal = max(float(np.mean(residuals**2)), noise**2)
    covariance = _similarity(positions, positions, length) + (noise**2 / signal) * np.eye(len(positions))
    return Neighbours(length, positions, GaussianProcess(covariance, residuals).weights)


# A predictor of tables says how long a kernel takes alone, by the library that the tables measured.  In a training step
# another variant of it runs, beside other work.  Each kind of traced kernels has what predicts left-out signatures
# best: nothing, a factor, or a factor and a Gaussian process on what it leaves.

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


def fit_traced(
    ops: Sequence[Op], predicted: Array, measured: Array, labels: Sequence[str]
) -> tuple[dict[str, TracedKind], Array]:
    """Corrections by kind, of those that they help, and each op's log-factor by a fit that did not see it."""
    found: dict[str, TracedKind] = {}
    left_out = np.zeros(len(ops))
    residual = np.log(measured / predicted)
    for name, index in rows_by(labels).items():
        index = index[np.abs(residual[index]) <= MOST_LOG]
        if len(index) < FEWEST:
            continue
        positions, own = np.array([op_position(ops[i]) for i in index]), residual[index]
        folds = np.random.default_rng(0).permutation(len(own)) % FOLDS
        error = float(np.abs(own).mean())
        for length in (0.0, *_REACH):  # of neighbours; 0: only a factor
            left = np.zeros(len(own))
            for fold in range(min(FOLDS, len(own))):
                out = folds == fold
                left[out] = _fit(positions[~out], own[~out], length).log_factor(positions[out])
            off = float(np.abs(own - left).mean())
            if off < error * (1 - MIN_GAIN):
                found[name], left_out[index], error = _fit(positions, own, length), left, off
    return found, left_out


def _fit(positions: Array, residual: Array, length: float) -> TracedKind:
    count = len(residual)
    offset = float(np.clip(np.median(residual) * count / (count + _PRIOR), -MOST_LOG, MOST_LOG))
    near = Neighbours(LENGTHS[0], np.zeros((0, positions.shape[1])), np.zeros(0))
    if length:
        near = fit_neighbours(positions, residual - offset, length)
    return TracedKind(offset, near, Support.of(positions))
