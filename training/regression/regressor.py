"""Seconds from three layers: physics gives the scale, trees the shape, neighbours the nearby measurements.

Used for ops and for collectives alike.  What a layer may do is decided by cross-validation over signatures,
so that no layer makes unseen signatures worse.

Physics: ``seconds = sum_j exp(log_constants[j]) * busy ** busy_exponents[j] * terms[:, j]`` with positive bounded
constants, fitted in log space with a prior, so that a handful of points suffices and no constant leaves what physics
allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import IF_SET, UNSAVED, Saved
from stepsight.training.corrections.corrector import LENGTHS, Neighbours, Support, faded, fit_neighbours, rows_by
from stepsight.training.regression.trees import MANY_ROWS, MIN_ROWS, Trees, fit_trees

Array = NDArray[np.float64]
Key = tuple[str, tuple[float, ...], float]

FOLDS = 5
TREE_SHARES = (0.5, 1.0, 0.0)  # weights of the trees; earlier ones are preferred
MIN_GAIN = 0.03  # a choice must lower the cross-validated error by this share to replace an earlier one
UNKNOWN = 1.0  # log-error charged if a fold leaves nothing of a kind to train on
MOST = 1e6  # busy devices: larger numbers are typing mistakes
MOST_WEIGHT = 1e6  # of a neighbour: two at one place whose times differ by a factor of 50 have some 2,000


@dataclass(frozen=True)
class SignatureRows:
    """Signatures as numbers for a regressor."""

    kinds: tuple[str, ...]  # kind of each row; physics is fitted per kind
    families: tuple[str, ...]  # family of each row; trees are fitted per family
    terms: Array  # physical quantities, (rows, terms)
    busy: Array  # devices of a node that compute at once, (rows,)
    positions: tuple[Array, ...]  # where each row lies among its kind, one array (axes,) per row
    features: Array  # for the trees, (rows, len(names))
    names: tuple[str, ...]  # of the features

    def __len__(self) -> int:
        return len(self.kinds)

    def take(self, index: NDArray[np.int64]) -> SignatureRows:
        kinds, families = (tuple(of[i] for i in index) for of in (self.kinds, self.families))
        positions, features = tuple(self.positions[i] for i in index), self.features[index]
        return SignatureRows(kinds, families, self.terms[index], self.busy[index], positions, features, self.names)

    def key(self, index: int) -> Key:
        """Identity of a row."""
        return (self.kinds[index], tuple(self.positions[index].round(6).tolist()), float(self.busy[index]))

    def places(self, index: NDArray[np.int64]) -> Array:
        """Positions of rows of one kind, with the busy devices as the last axis, ``(len(index), axes + 1)``."""
        return np.array([np.append(self.positions[i], np.log(self.busy[i])) for i in index], float)


@dataclass(frozen=True)
class Regressor(Saved):
    """Fitted layers; see the module."""

    physics: Mapping[str, Physics]  # by kind; a kind that is not here was never measured
    trees: Mapping[str, Trees] = field(metadata=UNSAVED)  # by family, where they help; files of LightGBM's text
    neighbours: Mapping[str, Neighbours]  # by kind; none where a table is so large that its trees say all
    support: Mapping[str, Support]  # by kind, lowest and highest position that was measured, two arrays (axes,)
    busy: tuple[float, float] = (1.0, 1.0)  # fewest and most busy devices of a node that were measured
    # by family, mean absolute log-error on signatures left out in turn
    errors: Mapping[str, float] = field(default_factory=dict)
    # seconds of each measured row, predicted by a fit that did not see its signature
    left_out: Mapping[Key, float] = field(default_factory=dict, metadata=UNSAVED)

    def seconds(self, rows: SignatureRows) -> Array:
        """Seconds of each row; NaN for kinds that were not measured."""
        log_seconds = self.log_without_neighbours(rows)
        for kind, index in rows_by(rows.kinds).items():
            if kind in self.neighbours:
                log_seconds[index] += self.neighbours[kind].log_factor(rows.places(index))
        return np.exp(log_seconds)

    def seconds_left_out(self, rows: SignatureRows) -> Array:
        """Like ``seconds``, but as if none of these signatures had been measured, as for jobs of new shapes."""
        seconds = self.seconds(rows)
        known = [self.left_out.get(rows.key(index), float(value)) for index, value in enumerate(seconds)]
        return np.array(known, dtype=np.float64)

    def log_without_neighbours(self, rows: SignatureRows) -> Array:
        """Logarithm of the seconds by physics and trees, ``(rows,)``; NaN for kinds that were not measured."""
        log_seconds = np.full(len(rows), np.nan)
        for kind, index in rows_by(rows.kinds).items():
            if kind not in self.physics:
                continue
            log_seconds[index] = np.log(self.physics[kind].seconds(rows.terms[index], rows.busy[index]))
            trees = self.trees.get(rows.families[index[0]])
            if trees is not None:
                # Trees ignore axes without different measured values.  Where a table is so large that its trees say
                # all, what is larger than anything measured runs as the largest do: efficiencies level off, and physics
                # alone would forget how well the largest ran.
                low, high = self.support[kind]
                top = high if kind in self.neighbours else np.full_like(high, np.inf)
                beyond = Support(low, top).beyond(np.array([rows.positions[i] for i in index]))
                excess = beyond[:, high > low].sum(axis=1)
                log_seconds[index] += trees.predict(rows.features[index], rows.names) * faded(excess)
        return log_seconds

    def with_share(self, share: float) -> Regressor:
        """Copy with trees weighted by ``share``; without trees if it is 0."""
        return replace(self, trees={family: replace(of, share=share) for family, of in self.trees.items() if share})

    def excess(self, kind: str, position: Array) -> float:
        """Distance of a position from the measured range, in log units summed over axes; 0 within."""
        return float(self.support[kind].beyond(position).sum())

    def gap(self, kind: str, position: Array) -> float:
        """Distance of a position (its first axes count) from the nearest measured one, in log units of the axis where
        they differ most; 0 where the table is so large that positions are not kept.
        """
        known = self.neighbours.get(kind)
        if known is None or not len(known.positions):
            return 0.0
        return float(np.abs(known.positions[:, : len(position)] - position).max(axis=1).min())

    def check(self, num_axes: Callable[[str], int], bounds: Callable[[str], Bounds]) -> None:
        """Check values read from a file, by a kind's number of axes and its constants' bounds."""
        if set(self.support) != set(self.physics) or not set(self.neighbours) <= set(self.physics):
            raise ValueError("physics and support must be of the same kinds, and neighbours of no others")
        if not 1 <= self.busy[0] <= self.busy[1] <= MOST:
            raise ValueError(f"1 <= least busy <= most busy <= {MOST:g} must hold, got {self.busy}")
        for kind, physics in self.physics.items():
            physics.check(kind, bounds(kind))
            axes = num_axes(kind)
            _check_positions(f"support of {kind}", np.stack(self.support[kind]), axes)
            if kind in self.neighbours:
                near = self.neighbours[kind]
                _check_positions(f"neighbours of {kind}", near.positions, axes + 1)
                least, most = LENGTHS[0], LENGTHS[-1]
                if not (least <= near.length <= most and (np.abs(near.weights) <= MOST_WEIGHT).all()):
                    rule = f"neighbours of {kind} must reach from {least} to {most}"
                    raise ValueError(f"{rule}, weights lie within +-{MOST_WEIGHT:g}")


def _check_positions(name: str, positions: Array, num_axes: int) -> None:
    if positions.shape[1:] != (num_axes,) or not (np.abs(positions) <= MOST_LOG).all():
        rule = f"{name} must have {num_axes} axes and logarithms within +-{MOST_LOG:g}"
        raise ValueError(f"{rule}, got {positions.shape[1:]} and {np.abs(positions).max(initial=0.0):g}")


def fit_regressor(
    rows: SignatureRows, seconds: Array, bounds: Mapping[str, Bounds], seed: int, *, judged: bool = True
) -> Regressor:
    """Fit every layer; trees and the reach of neighbours are chosen by family, by cross-validation. A signature may
    occur with several numbers of busy devices. ``judged``: whether errors are wanted of families with so many rows that
    nothing is chosen.
    """
    physics: dict[str, Physics] = {}
    trees: dict[str, Trees] = {}
    neighbours: dict[str, Neighbours] = {}
    support: dict[str, Support] = {}
    errors: dict[str, float] = {}
    left_out: dict[Key, float] = {}
    for family, index in rows_by(rows.families).items():
        own, measured = rows.take(index), seconds[index]
        share, length = 1.0, LENGTHS[0]
        if judged or len(own) < MANY_ROWS:
            share, length, off = _choose(own, measured, bounds, seed)
            errors[family] = float(np.abs(off).mean())
            left_out |= {own.key(i): float(measured[i] * np.exp(off[i])) for i in range(len(own))}
        fitted = _fit_physics(own, measured, bounds)
        if share:
            fitted = _with_trees(fitted, own, measured, seed).with_share(share)
        physics |= fitted.physics
        trees |= fitted.trees
        support |= fitted.support
        if len(own) < MANY_ROWS:
            residual = np.log(measured) - fitted.log_without_neighbours(own)
            neighbours |= {k: fit_neighbours(own.places(i), residual[i], length) for k, i in rows_by(own.kinds).items()}
    busy = (float(rows.busy.min()), float(rows.busy.max())) if len(rows) else (1.0, 1.0)
    return Regressor(physics, trees, neighbours, support, busy, errors, left_out)


def _fit_physics(rows: SignatureRows, seconds: Array, bounds: Mapping[str, Bounds]) -> Regressor:
    """Physics of one family, and its support."""
    kinds = rows_by(rows.kinds)
    physics = {k: fit_physics(rows.terms[i], rows.busy[i], seconds[i], bounds[k]) for k, i in kinds.items()}
    support = {kind: Support.of(np.array([rows.positions[i] for i in index])) for kind, index in kinds.items()}
    return Regressor(physics, {}, {}, support)


def _with_trees(fitted: Regressor, rows: SignatureRows, seconds: Array, seed: int) -> Regressor:
    """Fit the physics of one family, and trees on its residuals."""
    residual = np.log(seconds) - fitted.log_without_neighbours(rows)
    return replace(fitted, trees={rows.families[0]: fit_trees(rows.features, residual, rows.names, seed)})


def _choose(rows: SignatureRows, seconds: Array, bounds: Mapping[str, Bounds], seed: int) -> tuple[float, float, Array]:
    """Choose the trees' weight and the reach of neighbours; also ``log(predicted / measured)`` of left-out signatures.

    A table of many rows is left to its trees: physics alone is far behind, and neighbours take a part of it at most.
    """
    keys = [rows.key(index)[:2] for index in range(len(rows))]  # all rows of one signature share a fold
    distinct = sorted(set(keys))
    shuffled = np.random.default_rng(seed).permutation(len(distinct))
    fold_of = {distinct[place]: turn % FOLDS for turn, place in enumerate(shuffled)}
    folds = np.array([fold_of[key] for key in keys], dtype=np.int64)
    many = len(rows) >= MANY_ROWS
    shares = (1.0,) if many else TREE_SHARES if len(rows) >= MIN_ROWS else (0.0,)
    lengths = LENGTHS[:1] if many else LENGTHS
    off = {(share, length): np.full(len(rows), UNKNOWN) for share in shares for length in lengths}
    for fold in range(FOLDS):
        train, test = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        if not len(train) or not len(test):
            continue
        kept, left_out = rows.take(train), rows.take(test)
        bare = _fit_physics(kept, seconds[train], bounds)
        if any(shares):
            bare = _with_trees(bare, kept, seconds[train], seed)
        for share in shares:
            fitted = bare.with_share(share)
            predicted = fitted.log_without_neighbours(left_out)
            known = np.flatnonzero(np.isfinite(predicted))
            if many:
                off[share, lengths[0]][test[known]] = predicted[known] - np.log(seconds[test[known]])
                continue
            residual = np.log(seconds[train]) - fitted.log_without_neighbours(kept)
            kinds = rows_by(kept.kinds)
            for kind, index in rows_by(left_out.kinds).items():
                if kind not in kinds:
                    continue
                places, near = left_out.places(index), kept.places(kinds[kind])
                for length in lengths:
                    correction = fit_neighbours(near, residual[kinds[kind]], length).log_factor(places)
                    off[share, length][test[index]] = predicted[index] + correction - np.log(seconds[test[index]])
    best = next(iter(off))
    for share in shares:  # the best reach for each weight, then the best weight
        own = min(lengths, key=lambda length: float(np.abs(off[share, length]).mean()))
        if best[0] == share or np.abs(off[share, own]).mean() < np.abs(off[best]).mean() * (1 - MIN_GAIN):
            best = (share, own)
    return (*best, off[best])


Objective = Callable[[Array], tuple[float, Array, Array]]

CONVERGED = 1e-7  # stop after a step that lowers the loss by a smaller share
LEAST_DAMPING, MOST_DAMPING = 1e-6, 1e9


def minimise(objective: Objective, start: Array, low: Array, high: Array, *, longest: float, steps: int) -> Array:
    """The minimum within bounds of a loss, given as loss, gradient and Gauss-Newton Hessian of a point, ``(n,)``."""
    point, damping = np.clip(start, low, high), 1.0
    loss, gradient, hessian = objective(point)
    for _ in range(steps):
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        candidate = np.clip(point + np.clip(step, -longest, longest), low, high)
        result = objective(candidate)
        if result[0] < loss:
            converged = loss - result[0] < CONVERGED * loss
            point, (loss, gradient, hessian) = candidate, result
            damping = max(damping / 3, LEAST_DAMPING)
            if converged:
                break
        else:
            damping *= 4
            if damping > MOST_DAMPING:
                break
    return point


def robust_loss(residuals: Callable[[Array], tuple[Array, Array]], prior: Array, stds: Array) -> Objective:
    """Huber's loss of residuals (with their derivatives, in deviations), and a normal prior, for ``minimise``."""

    def objective(point: Array) -> tuple[float, Array, Array]:
        residual, jacobian = residuals(point)
        size, off = np.abs(residual), (point - prior) / stds
        weight = np.minimum(1.0, HUBER / np.maximum(size, 1e-12))
        loss = float(np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)).sum() + 0.5 * off @ off)
        gradient = jacobian.T @ (weight * residual) + off / stds
        return loss, gradient, (jacobian * weight[:, None]).T @ jacobian + np.diag(1.0 / stds**2)

    return objective


NOISE = 0.05  # deviation of log-seconds between repeated measurements
HUBER = 2.0  # residuals beyond this many deviations count linearly
PRIOR_STD = 2.0  # of constants, log units
STEPS = 80
BUSY_PRIOR_STD = 0.5
LONGEST_STEP = 1.5  # log units
SHARPNESS = 6.0  # smooth maximum: the power of a norm
MOST_LOG = 100.0  # of any logarithm of a saved predictor: larger ones are typing mistakes
SLACK = 1e-6  # of a constant in log units, for rounding when saved
MAX_BUSY_EXPONENT = 1.2  # 1: the quantity is fully shared among the busy devices of a node


@dataclass(frozen=True)
class Bounds:
    """Prior, lowest and highest constant of each term, ``(terms,)``; of ``overlapping`` ones the longest counts."""

    prior: Array
    low: Array
    high: Array
    overlapping: tuple[int, ...] = ()


@dataclass(frozen=True)
class Physics(Saved):
    """Fitted constants of one kind, shapes ``(terms,)``; of ``overlapping`` terms only the longest counts."""

    log_constants: Array
    busy_exponents: Array
    overlapping: tuple[int, ...] = field(default=(), metadata=IF_SET)

    def seconds(self, terms: Array, busy: Array) -> Array:
        """Seconds of each row; ``terms`` is ``(rows, terms)``, ``busy`` is ``(rows,)``."""
        return np.asarray(self._parts(terms, busy).sum(axis=1) + 1e-12)

    def _parts(self, terms: Array, busy: Array) -> Array:
        weights = self.log_constants + np.log(busy)[:, None] * self.busy_exponents
        parts = np.asarray(terms * np.exp(weights))
        if self.overlapping:  # shares of a smooth maximum, which add up to it
            columns = list(self.overlapping)
            among = parts[:, columns]
            longest = among.max(axis=1, keepdims=True) + 1e-30
            powers = (among / longest) ** SHARPNESS
            total = powers.sum(axis=1, keepdims=True) + 1e-30
            parts[:, columns] = longest * total ** (1 / SHARPNESS - 1) * powers
        return parts

    def check(self, kind: str, bounds: Bounds) -> None:
        """Check values read from a file against the bounds of a fit."""
        num_terms = len(bounds.low)
        shapes = (self.log_constants.shape, self.busy_exponents.shape)
        if shapes != ((num_terms,), (num_terms,)):
            raise ValueError(f"{kind} must have {num_terms} constants and as many exponents, got {shapes}")
        if not (np.abs([*self.log_constants, *self.busy_exponents]) <= MOST_LOG).all():
            rule = f"constants and exponents of {kind} must lie within +-{MOST_LOG:g}"
            raise ValueError(f"{rule}, got {self.to_dict()!s:.80}")
        low, high = np.log(bounds.low) - SLACK, np.log(bounds.high) + SLACK
        likely = (low <= self.log_constants) & (self.log_constants <= high)
        if not (likely & (self.busy_exponents >= 0) & (self.busy_exponents <= MAX_BUSY_EXPONENT)).all():
            rule = f"constants of {kind} must be what physics allows"
            raise ValueError(f"{rule}, and exponents lie within 0 and {MAX_BUSY_EXPONENT}, got {self.to_dict()!s:.120}")
        if not set(self.overlapping) <= set(range(num_terms)):
            raise ValueError(f"overlapping terms of {kind} must be of 0 ... {num_terms - 1}, got {self.overlapping}")


def fit_physics(
    terms: Array, busy: Array, seconds: Array, bounds: Bounds, *, noise: float = NOISE, prior_std: float = PRIOR_STD
) -> Physics:
    """Robust maximum a posteriori by projected Levenberg-Marquardt: ``terms`` are physical quantities, ``(rows,
    terms)``, ``busy`` devices that compute at once and ``seconds`` measured, ``(rows,)``; ``noise`` and ``prior_std``
    in log units.
    """
    count = terms.shape[1]
    low = np.concatenate([np.log(bounds.low), np.zeros(count)])
    high = np.concatenate([np.log(bounds.high), np.full(count, MAX_BUSY_EXPONENT)])
    prior = np.concatenate([np.log(bounds.prior), np.zeros(count)])
    stds = np.concatenate([np.full(count, prior_std), np.full(count, BUSY_PRIOR_STD)])
    wanted, log_busy = np.log(seconds), np.log(busy)[:, None]

    def residuals(theta: Array) -> tuple[Array, Array]:
        parts = Physics(theta[:count], theta[count:], bounds.overlapping)._parts(terms, busy)
        total = parts.sum(axis=1) + 1e-12
        shares = parts / total[:, None]
        return (np.log(total) - wanted) / noise, np.concatenate([shares, shares * log_busy], axis=1) / noise

    # A measured latency may lie outside its bounds.
    theta = minimise(robust_loss(residuals, prior, stds), prior, low, high, longest=LONGEST_STEP, steps=STEPS)
    return Physics(theta[:count], theta[count:], bounds.overlapping)
