"""Seconds of NCCL's collectives between nodes: its cheapest choice, a few fitted factors, and a cluster's corrections.

NCCL's own constants (``collective_features.choice_terms``) carry algorithms, protocols, ranks and sizes; the fabric's
stated latencies and bandwidths carry the network.  What is fitted are five factors, within physical bounds and with a
prior: first for all kinds of one route together, then for each kind around those.

A cluster's peculiarities (the size at which its NCCL changes algorithm, how its adapters take medium messages) recur at
similar sizes on similar numbers of ranks.  So of one cluster's own measurements, what the factors leave is a Gaussian
process over bytes, ranks and ranks per node.  A sum that fits into one chunk goes from node to node as a whole: at each
size, what it takes between two nodes, and what further nodes add, have a factor each, which hold for any number of
nodes.  All of it counts, for each kind and size, as far as layouts that were left out say that it improves the
prediction.  A larger message or another node never takes less time: a curve over sizes is the
isotonic regression of what was learned, over sizes and then over nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo
from stepsight.dataset.base.files import IF_SET, Saved
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective
from stepsight.features.collective_features import CHOICE_TERMS, LINK_FACTS, NCCL, OVERLAPPING, choice_terms, link_facts
from stepsight.training.corrections.corrector import GaussianProcess, Neighbours, Support, fit_neighbours, rows_by
from stepsight.training.regression.regressor import SHARPNESS, SLACK, Bounds, minimise, robust_loss

# Bytes of the curve's knots: half octaves, up to 16 GiB.
KNOTS = np.unique(np.round(2.0 ** np.arange(0, 34.01, 0.5)).astype(np.int64))
LOG_KNOTS = np.log(KNOTS.astype(np.float64))
OCTAVE = float(np.log(2.0))
# Log units of bytes, ranks and ranks per node over which measurements are alike, and of sizes for what is carried over.
WIDTHS, SHARE_WIDTH = OCTAVE * np.array([1.5, 2.5, 2.5]), 2 * OCTAVE
MOST = 1.0  # log units of a correction
MOST_DOUBLINGS = 17  # of the nodes of a corrected curve
MAX_CURVES = 128  # entries of a model's cache
CARRIED = 0.1  # log units that measurements must differ from what is known before they say what carries over
# What is left of the two factors of sums in one chunk, at KNOTS: all up to NCCL's chunk in LL, nothing from four on.
ONE_CHUNK = np.clip(1 - (LOG_KNOTS - np.log(NCCL.tree_chunk[0])) / (2 * OCTAVE), 0.0, 1.0)
DEPTH_STD, DEPTH_STEPS = 0.5, 4  # log units of their prior, and linear fits in turn
SITE_FOLDS = 5  # groups of layouts, or of sizes, that are left out in turn


def read_curve(log_seconds: Array, num_bytes: Array) -> Array:
    """Seconds at some sizes by a curve at ``KNOTS``, ``(sizes,)``; beyond the last, in proportion to bytes."""
    sizes = np.log(np.maximum(num_bytes, 1.0))
    return np.asarray(np.exp(np.interp(sizes, LOG_KNOTS, log_seconds) + np.maximum(sizes - LOG_KNOTS[-1], 0.0)))


def never_falling(values: Array) -> Array:
    """The nearest non-decreasing values (least squares): largest least mean (Robertson et al. 1988, theorem 1.4.4)."""
    first, last = np.indices((len(values), len(values)))
    sums, counts = np.concatenate([[0.0], np.cumsum(values)]), np.maximum(last - first + 1, 1)
    means = np.where(first <= last, (sums[last + 1] - sums[first]) / counts, np.inf)
    least = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.where(first <= last, least, -np.inf).max(axis=0))


@dataclass(frozen=True)
class SiteResidual(Saved):
    """What one cluster's measurements of a kind say beyond its factors."""

    near: Neighbours  # at ``place`` in units of ``WIDTHS``
    before: Array  # factors of ``CHOICE_TERMS`` before the cluster was measured
    shares: Array  # of the change of factors, of ``near`` and of ``depth`` that carries over, at KNOTS
    # logarithms of factors of a sum in one chunk, of its time between two nodes and of what further nodes add, at
    # KNOTS, (2, knots); empty where a single number of nodes was measured, and of other kinds
    depth: Array = field(default_factory=lambda: np.zeros((0, len(KNOTS))), metadata=IF_SET)

    prior_std_log = 0.15  # by which NCCL's constants are wrong on a real network

    def log_factor(self, asked: Sequence[Collective]) -> Array:
        """Logarithm of the factor of each collective, ``(asked,)``."""
        return np.clip(self.near.log_factor(_scaled(asked)), -MOST, MOST)

    def known(self, asked: Sequence[Collective]) -> Array:
        """Squared similarity with the nearest measured collective, ``(asked,)``."""
        return self.near.known(_scaled(asked))


def _scaled(asked: Sequence[Collective]) -> Array:
    return np.array([place(each) for each in asked]).reshape(-1, AXES) / WIDTHS


Array = NDArray[np.float64]
Rows = tuple[Array, Array, float]  # terms of a kind's choices, logarithms of measured seconds, log units of noise

# Factors of ``CHOICE_TERMS``.  No adapter is faster than stated.  NVLink reaches 0.75 to 0.8 of what is stated.  The
# prior and its spread are what public logs of nccl-tests from six clusters suggest together (ABCI 2.0 with V100 and
# with A100, Sirius, an HGX H100 on InfiniBand, AWS p5, GCP a3-megagpu; 8 to 128 ranks, 4 B to 16 GiB): NCCL's own
# constants hold for LL, and steps in LL128 and Simple take longer than it counts.
FACTORS = Bounds(
    prior=np.array([1.2, 1.1, 1.7, 1.08, 1.25]),
    low=np.array([0.5, 0.3, 0.3, 1.0, 0.9]),
    high=np.array([10.0, 10.0, 10.0, 3.0, 4.0]),
    overlapping=OVERLAPPING,
)
PRIOR_STD = np.array([0.3, 0.2, 0.3, 0.1, 0.15])  # log units
CLUSTERS = 6  # whose mean the prior is: one more cluster moves what is expected of another one by little
KIND_STD = 0.5  # of those: how much a kind may differ from its route
NOISE = 0.15  # log units by which NCCL's constants are wrong on a real network
INDEPENDENT = 4.0  # weight of a cluster's rows of a kind, in rows: they share the cluster's peculiarities
SITE_NOISE, SITE_INDEPENDENT = 0.1, 16.0  # the same if a cluster is fitted on its own measurements
STEPS = 60
LONGEST_STEP = 0.5  # of a factor's logarithm
AXES = 3  # of the measured range: logarithms of bytes, ranks and ranks per node


@dataclass(frozen=True)
class BetweenNodes(Saved):
    """Fitted factors of collectives between nodes."""

    # of CHOICE_TERMS, (terms,) each, by kind, and by route for kinds that were not measured
    factors: Mapping[str, Array]
    # smallest and largest logarithm of bytes, ranks and ranks per node that were measured, by kind
    support: Mapping[str, Support]
    errors: Mapping[str, float]  # mean absolute log-error on layouts that were left out in turn, by kind
    # what one cluster's own measurements say, by kind
    residuals: Mapping[str, SiteResidual] = field(default_factory=dict, metadata=IF_SET)
    _known: Memo[Any, tuple[Array, Array]] = field(
        default_factory=lambda: Memo("collectives: corrected curves", MAX_CURVES), init=False, compare=False, repr=False
    )

    def seconds(self, collectives: Sequence[Collective], fabric: Fabric) -> Array:
        """Seconds of each collective alone, ``(collectives,)``."""
        seconds = np.asarray(self.parts(collectives, fabric).sum(axis=1))
        layouts = rows_by((each.kind, each.ranks_per_node) for each in collectives if self.residuals)
        for (kind, near), members in layouts.items():
            if kind in self.residuals:
                nodes, curves = self._curves(kind, near, fabric)
                steps = np.arange(len(nodes))
                for each, own in rows_by(collectives[index].num_nodes for index in members).items():
                    at = float(np.interp(np.log(each), nodes, steps))
                    low, high = curves[int(at)], curves[min(int(at) + 1, len(nodes) - 1)]
                    num_bytes = np.array([collectives[index].num_bytes for index in members[own]], dtype=np.float64)
                    seconds[members[own]] = read_curve(low + (at - int(at)) * (high - low), num_bytes)
        return seconds

    def _curves(self, kind: str, near: int, fabric: Fabric) -> tuple[Array, Array]:
        """Logarithms of numbers of nodes, ``(nodes,)``, and of corrected seconds at ``KNOTS``, ``(nodes, knots)``.

        They fall neither with sizes, except as far as physics does (injected messages), nor with nodes: powers of two,
        and the measured numbers.
        """
        known = self._known.get((kind, near, fabric))
        if known is not None:
            return known
        residual = self.residuals[kind]
        ranks = np.exp(residual.near.positions * WIDTHS)[:, 1:]
        measured = {round(n / near) for n, own in ranks.tolist() if round(own) == near}
        nodes = sorted({2**power for power in range(1, MOST_DOUBLINGS + 1)} | measured)
        works = [Collective(kind, size, each * near, near) for each in nodes for size in KNOTS.tolist()]
        before = np.log(replace(self, factors={kind: residual.before}).parts(works, fabric).sum(axis=1))
        after = np.log(self.parts(works, fabric).sum(axis=1)) + residual.log_factor(works)
        before, after = before.reshape(len(nodes), -1), after.reshape(len(nodes), -1)
        if len(residual.depth):
            added = np.exp(residual.depth[0]) * np.exp(before[0]), np.exp(residual.depth[1]) * np.exp(before)
            after += ONE_CHUNK * (np.log(added[0] + added[1] * (1 - np.exp(before[0] - before))) - after)
        logs = before + residual.shares * (after - before)
        falls = before - np.minimum.accumulate(before[:, ::-1], axis=1)[:, ::-1]
        rising = falls + np.array([never_falling(row) for row in logs - falls])
        found = np.log(nodes), np.transpose([never_falling(column) for column in rising.T])
        self._known[kind, near, fabric] = found
        return found

    def parts(self, collectives: Sequence[Collective], fabric: Fabric) -> Array:
        """Seconds of each collective by ``CHOICE_TERMS`` in the cheapest choice, ``(collectives, terms)``."""
        kinds = rows_by(collective.kind for collective in collectives)
        links, parts = link_facts(fabric), np.empty((len(collectives), len(CHOICE_TERMS)))
        for kind, members in kinds.items():
            terms = choice_terms([collectives[index] for index in members], links)
            parts[members] = _cheapest(terms, self.factors_of(kind))
        return parts

    def factors_of(self, kind: str) -> Array:
        """Factors of a kind or route, a kind's or else its route's; the prior if neither was measured."""
        known, record = self.factors.get(kind), COLLECTIVE_KINDS.get(kind)
        return self.factors.get(record.route if record else kind, FACTORS.prior) if known is None else known

    def __post_init__(self) -> None:
        for name, factors in self.factors.items():
            low, high = FACTORS.low * (1 - SLACK), FACTORS.high * (1 + SLACK)
            if factors.shape != (len(CHOICE_TERMS),) or not ((low <= factors) & (factors <= high)).all():
                rule = f"factors of {name} must lie within {FACTORS.low.tolist()} and {FACTORS.high.tolist()}"
                raise ValueError(f"{rule}, got {factors.tolist()!s:.80}")
        for kind, residual in self.residuals.items():
            shares, depth, most = residual.shares, residual.depth, 2 * MOST
            if depth.shape not in ((0, len(KNOTS)), (2, len(KNOTS))) or not (np.abs(depth) <= most).all():
                rule = f"two lists of {len(KNOTS)} numbers from {-most:g} to {most:g}"
                raise ValueError(f"the depth of {kind} must be {rule}, got {depth.tolist()!s:.80}")
            if shares.shape != KNOTS.shape or not ((shares >= 0) & (shares <= 1)).all():
                rule = f"must be {len(KNOTS)} numbers from 0 to 1"
                raise ValueError(f"the shares of {kind} {rule}, got {shares.tolist()!s:.80}")
        for kind, (low, high) in self.support.items():
            if low.shape != (AXES,) or high.shape != (AXES,) or not (low <= high).all():
                raise ValueError(f"the measured range of {kind} must be two lists of {AXES} numbers, lowest first")


UNFITTED = BetweenNodes({}, {}, {})


def place(collective: Collective) -> Array:
    """Logarithms of bytes, ranks and ranks per node, ``(AXES,)``."""
    return np.log([max(collective.num_bytes, 1), collective.group_size, collective.ranks_per_node])


def fit_between_nodes(
    collectives: Sequence[Collective],
    fabrics: Sequence[Fabric],
    seconds: Array,
    *,
    start: BetweenNodes | None = None,
    noise: float = NOISE,
    independent: float = INDEPENDENT,
) -> BetweenNodes:
    """Fit the factors of collectives between nodes, around those of ``start`` (NCCL's constants, a little slower).
    ``noise``: log units by which a measurement may miss the model; ``independent``: rows of a kind that all of them
    count for, infinite where the answers are for the same cluster.
    """
    kinds = rows_by(collective.kind for collective in collectives)
    links = np.array([link_facts(fabric) for fabric in fabrics]).reshape(-1, LINK_FACTS)
    noises = {kind: noise * max(1.0, len(index) / independent) ** 0.5 for kind, index in kinds.items()}
    terms = {kind: choice_terms([collectives[i] for i in index], links[index]) for kind, index in kinds.items()}
    log_seconds = np.log(seconds)
    stds = PRIOR_STD if start else PRIOR_STD / CLUSTERS**0.5
    known = start or UNFITTED
    factors, errors, support = dict(known.factors), {}, dict(known.support)
    for route in dict.fromkeys(COLLECTIVE_KINDS[kind].route for kind in kinds):
        own = [kind for kind in kinds if COLLECTIVE_KINDS[kind].route == route]
        prior = np.log(known.factors_of(own[0]))
        both = _fit([(terms[k], log_seconds[kinds[k]], noises[k]) for k in own], prior, stds)
        factors[route] = np.exp(both)
        for kind in own:
            around = np.log(known.factors_of(kind)) + both - prior if start else both
            rows = (terms[kind], log_seconds[kinds[kind]], noises[kind])
            factors[kind] = np.exp(_fit([rows], around, KIND_STD * stds))
            places = np.array([place(collectives[i]) for i in kinds[kind]])
            support[kind] = Support.of(places)
            off = []  # log-errors of each layout, held out of the fit
            for layout in np.unique(places[:, 1:], axis=0):
                held = (places[:, 1:] == layout).all(axis=1)
                fitted = _fit([(rows[0][~held], rows[1][~held], rows[2])], around, KIND_STD * stds)
                off.append(np.abs(np.log(_cheapest(rows[0][held], np.exp(fitted)).sum(axis=1)) - rows[1][held]))
            errors[kind] = float(np.concatenate(off).mean())
    return BetweenNodes(factors, support, errors)


def fit_site(start: BetweenNodes, collectives: Sequence[Collective], fabric: Fabric, seconds: Array) -> BetweenNodes:
    """Fit the factors and what they leave to one cluster's own measurements; ``start``: factors from elsewhere.

    Layouts that are left out in turn tell how much of it carries over, for each kind and size on its own.  Kinds that
    were not measured stay as they were: the sums of public logs tell little of a cluster's other kinds.
    """
    fitted = _site_factors(start, collectives, fabric, seconds)
    before = np.log(start.seconds(collectives, fabric))
    change = np.log(left_out_seconds(partial(_site_factors, start), collectives, fabric, seconds)) - before
    agreed = change * np.clip(np.log(seconds) - before, -MOST, MOST)
    residuals = {}
    for kind, index in rows_by(collective.kind for collective in collectives).items():
        alike = _alike(collectives, index)
        shares = (alike @ agreed[index] + CARRIED**2) / (alike @ change[index] ** 2 + CARRIED**2)
        residuals[kind] = replace(fitted.residuals[kind], shares=np.clip(shares, 0.0, 1.0))
    factors = {**start.factors, **{kind: fitted.factors[kind] for kind in residuals}}
    return replace(fitted, factors=factors, residuals=residuals)


def keep_better(
    start: BetweenNodes, fitted: BetweenNodes, collectives: Sequence[Collective], fabric: Fabric, seconds: Array
) -> BetweenNodes:
    """The fitted model without its corrections of the kinds and sizes that ``start`` predicts better."""
    before, after = (np.abs(each.seconds(collectives, fabric) / seconds - 1) for each in (start, fitted))
    residuals = dict(fitted.residuals)
    for kind, index in rows_by(collective.kind for collective in collectives).items():
        if kind in residuals:
            better = _alike(collectives, index) @ (before - after)[index] > 0
            kept = replace(residuals[kind], shares=residuals[kind].shares * better)
            own = replace(fitted, residuals={kind: kept}).seconds([collectives[each] for each in index], fabric)
            gains = np.abs(own / seconds[index] - 1).mean() < before[index].mean()  # sizes bound each other
            residuals[kind] = replace(kept, shares=kept.shares * gains)
    return replace(fitted, residuals=residuals)


def _alike(collectives: Sequence[Collective], index: NDArray[np.int64]) -> Array:
    """How alike in size some collectives are to each of ``KNOTS``, ``(knots, index)``."""
    sizes = np.log([max(collectives[each].num_bytes, 1) for each in index.tolist()])
    return np.asarray(np.exp(-0.5 * ((LOG_KNOTS[:, None] - sizes) / SHARE_WIDTH) ** 2))


def _site_factors(
    start: BetweenNodes, collectives: Sequence[Collective], fabric: Fabric, seconds: Array
) -> BetweenNodes:
    """Factors of a cluster, and for each kind what they leave, all of which carries over."""
    layouts = len({(c.group_size, c.ranks_per_node) for c in collectives})
    fabrics, noise, independent = [fabric] * len(collectives), SITE_NOISE, SITE_INDEPENDENT * layouts
    # rows of one layout share its peculiarities
    fitted = fit_between_nodes(collectives, fabrics, seconds, start=start, noise=noise, independent=independent)
    off, places, found = np.log(seconds / fitted.seconds(collectives, fabric)), _scaled(collectives), {}
    for kind, index in rows_by(collective.kind for collective in collectives).items():
        near = fit_neighbours(places[index], off[index], 1.0, noise=SITE_NOISE)
        found[kind] = SiteResidual(near, start.factors_of(kind), np.ones(len(KNOTS)))
        if COLLECTIVE_KINDS[kind].trees and len({collectives[each].num_nodes for each in index}) > 1:
            depth = _fit_depth(start, [collectives[each] for each in index], fabric, seconds[index])
            found[kind] = replace(found[kind], depth=depth)
    return replace(fitted, residuals=found)


def _fit_depth(start: BetweenNodes, sums: Sequence[Collective], fabric: Fabric, seconds: Array) -> Array:
    """``SiteResidual.depth``: a Gaussian process over sizes for each factor, by linear fits in turn.

    A row that the last fit missed by more than its noise counts less in the next one.
    """
    two = start.parts([replace(each, group_size=2 * each.ranks_per_node) for each in sums], fabric).sum(axis=1)
    parts = np.array([two, np.maximum(start.parts(sums, fabric).sum(axis=1) - two, 0.0)])
    sizes = np.log([max(each.num_bytes, 1) for each in sums]) / WIDTHS[0]
    alike = DEPTH_STD**2 * np.exp(-0.5 * (sizes[:, None] - np.append(sizes, LOG_KNOTS / WIDTHS[0])) ** 2)
    rows, logs, trust = len(sums), np.zeros((2, len(sums))), np.ones(len(sums))
    for _ in range(DEPTH_STEPS):
        grown = np.exp(logs) * parts
        slopes = grown / grown.sum(axis=0)
        off = np.log(seconds / grown.sum(axis=0)) + (slopes * logs).sum(axis=0)
        covariance = (slopes.T @ slopes) * alike[:, :rows]
        weights = GaussianProcess(covariance + np.diag(SITE_NOISE**2 / trust), off).weights
        found = np.clip((slopes * weights) @ alike, -2 * MOST, 2 * MOST)
        logs, missed = found[:, :rows], np.abs(off - covariance @ weights)
        trust = 1 / np.maximum(1.0, missed / (1.5 * SITE_NOISE))
    return np.asarray(found[:, rows:])


def left_out_seconds(
    fit: Callable[[Sequence[Collective], Fabric, Array], BetweenNodes],
    collectives: Sequence[Collective],
    fabric: Fabric,
    seconds: Array,
) -> Array:
    """Seconds by fits that did not see the layout, ``(collectives,)``; of a single layout, not the size."""
    keys = np.array([(c.group_size, c.ranks_per_node, c.num_bytes) for c in collectives])
    several = (keys[:, :2] != keys[0, :2]).any()
    distinct, which = np.unique(keys[:, :2] if several else keys[:, 2:], axis=0, return_inverse=True)
    folds, predicted = which.reshape(-1) % SITE_FOLDS, np.empty(len(collectives))
    for fold in range(min(SITE_FOLDS, len(distinct))):
        held = folds == fold
        seen = ~held if len(distinct) > 1 else held  # nothing can be left out of a single size
        known, asked = ([collectives[i] for i in np.flatnonzero(rows).tolist()] for rows in (seen, held))
        predicted[held] = fit(known, fabric, seconds[seen]).seconds(asked, fabric)
    return predicted


def _cheapest(terms: Array, factors: Array) -> Array:
    """Seconds of each term in the cheapest choice, ``(rows, terms)``; their sum is the predicted time."""
    parts = terms * factors
    near, far = (parts[..., column] for column in OVERLAPPING)
    longest = np.maximum(near, far) + 1e-30
    with np.errstate(invalid="ignore"):  # of choices that do not exist
        powers = (near / longest) ** SHARPNESS, (far / longest) ** SHARPNESS
        both = longest * (powers[0] + powers[1]) ** (1 / SHARPNESS)
        totals = parts[..., : OVERLAPPING[0]].sum(axis=-1) + both
    best = np.argmin(np.where(np.isnan(totals), np.inf, totals), axis=1)
    rows = np.arange(len(terms))
    chosen = parts[rows, best]
    sums = powers[0][rows, best] + powers[1][rows, best] + 1e-300
    for column, power in zip(OVERLAPPING, powers, strict=True):
        chosen[:, column] = both[rows, best] * power[rows, best] / sums
    return np.asarray(chosen)


def _fit(blocks: Sequence[Rows], prior: Array, stds: Array) -> Array:
    """Logarithms of the factors, robust maximum a posteriori by projected Levenberg-Marquardt."""

    def residuals(theta: Array) -> tuple[Array, Array]:
        off, slopes = [], []
        for terms, measured, noise in blocks:
            parts = _cheapest(terms, np.exp(theta))
            seconds = parts.sum(axis=1)
            off.append((np.log(seconds) - measured) / noise)
            slopes.append(parts / seconds[:, None] / noise)
        return np.concatenate(off), np.concatenate(slopes)

    low, high = np.log(FACTORS.low), np.log(FACTORS.high)
    return minimise(robust_loss(residuals, prior, stds), prior, low, high, longest=LONGEST_STEP, steps=STEPS)


SLOWER, FASTER = 3.0, 1 / 1.5  # share of the stated bandwidth below which the statement is doubted
LATER = 5.0  # the same for latencies
BOUND_SHARE = 0.7  # share of its time from which a collective counts as bound by one resource
FEWEST, ENOUGH = 3, 200  # fewest rows for a doubt, and rows that are examined
ALIKE = 0.05  # log units of error that are ignored
SCALES = sorted((10.0 ** np.linspace(-1, 3, 81)).tolist(), key=lambda scale: abs(np.log(scale)))  # slower bandwidths
_LATENCIES = (1, 2)  # of ``CHOICE_TERMS``; the transfers are ``OVERLAPPING``


def link_doubts(collectives: Sequence[Collective], fabric: Fabric, seconds: Array) -> tuple[str, ...]:
    """Links between nodes that would explain the measurements better than the stated ones; empty: none would."""
    across = [index for index, collective in enumerate(collectives) if collective.num_nodes > 1]
    across = across[:: max(1, len(across) // ENOUGH)]
    works, measured = [collectives[index] for index in across], np.asarray(seconds)[across]
    parts, link, found = UNFITTED.parts(works, fabric), fabric.inter_node, []
    bound = BOUND_SHARE * parts.sum(axis=1)
    long, short = (parts[:, terms].sum(axis=1) > bound for terms in (OVERLAPPING, _LATENCIES))
    if long.sum() >= FEWEST:  # the smallest change of the bandwidth that explains their times
        those, off = [works[index] for index in np.flatnonzero(long).tolist()], []
        for scale in SCALES:
            paces = link.bandwidth_bytes_per_s / scale, link.adapter_bytes_per_s / scale
            slower = replace(link, bandwidth_bytes_per_s=paces[0], adapter_bytes_per_s=paces[1])
            predicted = UNFITTED.seconds(those, replace(fabric, inter_node=slower))
            off.append(float(np.median(np.abs(np.log(predicted / measured[long])))))
        scale = next(scale for scale, error in zip(SCALES, off, strict=True) if error <= min(off) + ALIKE)
        stated = link.bandwidth_bytes_per_s / 1e9
        if scale > SLOWER:
            found.append(
                f"the links between nodes behave {scale:.0f} times slower than stated (about {stated / scale:.2g} of "
                f"{stated:g} GB/s per device): does NCCL use the sockets transport (NCCL_DEBUG=INFO prints "
                "NET/Socket), is GPUDirect RDMA off, or is the bandwidth that of a node? State what the links reach"
            )
        elif scale < FASTER:
            told = f"the links between nodes are {1 / scale:.1f} times faster than stated ({stated:g} GB/s per device)"
            found.append(f"{told}: is the bandwidth that of fewer adapters than a node has?")
    later = float(np.median(measured[short] / parts[short].sum(axis=1))) if short.sum() >= FEWEST else 1.0
    if later > LATER:
        told = f"short messages between nodes take {later:.0f} times longer than the stated latency implies"
        found.append(f"{told} ({1e6 * link.latency_s:g} us): does NCCL use the sockets transport?")
    return tuple(found)
