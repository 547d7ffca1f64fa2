"""Seconds of collectives, learned from event profiles: physics of links first, a residual within the measured range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo
from stepsight.dataset.base.files import IF_SET, OPTIONAL, UNSAVED, Saved
from stepsight.dataset.hardware.hardware import Fabric, Link, alpha_beta_seconds
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective
from stepsight.features import collective_features as features
from stepsight.training.collectives.between_nodes import KNOTS, BetweenNodes, never_falling, place, read_curve
from stepsight.training.regression.regressor import Bounds, Regressor, SignatureRows, fit_regressor

Array = NDArray[np.float64]

OUTSIDE = 0.7  # log units, as for ops
MAX_CURVES = 512  # entries of a model's cache

# Seconds per call, step, byte of the buffer, second by the link's facts, and message that a shared host handles;
# from NVLink to a loopback socket.
BOUNDS = Bounds(
    prior=np.array([2e-5, 5e-5, 2e-10, 1.1, 2e-6]),
    low=np.array([1e-7, 1e-7, 1e-14, 0.3, 1e-9]),
    high=np.array([5e-2, 1e-2, 1e-8, 30.0, 2e-3]),
    overlapping=features.OVERLAPPING,
)

# The same of NCCL on GPUs, where the last two are the seconds that the facts of the links say: rings reach 0.75 to 0.8
# of what NVLink states, and nearly all of a network adapter; sums within a switch reach more.
NCCL_BOUNDS = Bounds(
    prior=np.array([8e-6, 3e-6, 1e-13, 1.05, 1.25]),
    low=np.array([1e-6, 3e-7, 1e-15, 1.0, 0.9]),
    high=np.array([2e-4, 5e-5, 2e-13, 3.0, 4.0]),
    overlapping=features.OVERLAPPING,
)
TREE_SHARE = 0.92  # of a ring's bandwidth, which NCCL's own tuning credits its trees with (graph/tuning.cc, 2.18)

SHORTEST_S = 1e-8  # on links; positions of shorter collectives may be rounded up
_UNIT = Fabric("1 GB/s", Link(1e9, 0.0), Link(1e9, 0.0))


def label_of(collective: Collective) -> str:
    """Kind and whether nodes are crossed; all constants depend on both."""
    return f"{collective.kind}/{'inter' if collective.num_nodes > 1 else 'intra'}"


def collective_rows(
    collectives: Sequence[Collective],
    fabrics: Sequence[Fabric],
    *,
    nccl: bool = False,
    measured: Mapping[str, float] = MappingProxyType({}),
) -> SignatureRows:
    """Collectives, each with its fabric, as rows of the regressor.

    ``collectives, fabrics``: one row each.  ``nccl``: see ``CollectiveModel.nccl``.  ``measured``: bandwidth of the
    links within a node by label, where what was learned knows a single one.  Physics alone then says what another
    bandwidth changes: trees would make a step of it, up or down.
    """
    pairs = list(zip(collectives, fabrics, strict=True))
    labels = tuple(label_of(c) for c in collectives)
    learned = []
    for label, fabric in zip(labels, fabrics, strict=True):
        bandwidth, near = measured.get(label), fabric.intra_node
        if bandwidth not in (None, near.bandwidth_bytes_per_s):
            fabric = replace(fabric, intra_node=replace(near, bandwidth_bytes_per_s=bandwidth))
        learned.append(fabric)
    terms_of = features.nccl_terms if nccl else features.collective_terms
    return SignatureRows(
        labels,
        labels,
        np.array([terms_of(c, f) for c, f in pairs], float).reshape(len(pairs), len(features.COLLECTIVE_TERMS)),
        np.ones(len(collectives)),
        tuple(features.collective_position(c, f, nccl=nccl) for c, f in zip(collectives, learned, strict=True)),
        features.collective_features(collectives, learned, nccl=nccl),
        features.COLLECTIVE_FEATURES,
    )


@dataclass(frozen=True)
class CollectiveModel(Saved):
    """Collectives on one hardware's links."""

    regressor: Regressor = field(metadata=UNSAVED)  # physics, trees and neighbours by kind and layout
    # answer as if the collectives asked about had not been measured (for honest intervals)
    left_out: bool = field(default=False, metadata=UNSAVED)
    # whether this is NCCL on GPUs: its rings and trees (nccl_terms), not one host's messages
    nccl: bool = field(default=False, metadata=OPTIONAL)
    # labels that were measured on another device's links alone
    carried: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    # NCCL between nodes by its own choices; None: by regressor, as in predictors of earlier versions
    between: BetweenNodes | None = field(default=None, metadata=IF_SET)
    _curves: Memo[Any, Array] = field(
        default_factory=lambda: Memo("collectives: curves over sizes", MAX_CURVES),
        init=False,
        compare=False,
        repr=False,
    )

    def seconds(self, collectives: Sequence[Collective], fabric: Fabric) -> Array:
        """Seconds of each collective alone; from the fabric's facts if its kind and layout were not measured."""
        if self.between is None:
            return self._by_regressor(collectives, fabric)
        num_bytes = np.array([c.num_bytes for c in collectives], dtype=np.float64)
        across = np.array([c.group_size > c.ranks_per_node for c in collectives], dtype=np.bool_)
        seconds = np.zeros(len(collectives))
        beyond = np.flatnonzero(across)
        seconds[beyond] = self.between.seconds([collectives[index] for index in beyond.tolist()], fabric)
        layouts: dict[tuple[str, int], list[int]] = {}
        for index, collective in enumerate(collectives):
            near = collective.ranks_per_node
            if not across[index] or (near > 1 and collective.record.route == "ring"):
                layouts.setdefault((collective.kind, near), []).append(index)
        for (kind, near), members in layouts.items():  # a collective over several nodes is never faster than within one
            within = read_curve(self._curve(kind, near, fabric), num_bytes[members])
            seconds[members] = np.maximum(seconds[members], within)
        return seconds

    def _curve(self, kind: str, near: int, fabric: Fabric) -> Array:
        """Logarithm of the seconds of a kind within a node, at ``KNOTS``: flat below the smallest measured size.

        Sizes that were not measured must not pull those that were: a curve that never falls pools them.
        """
        key = (kind, near, fabric)
        known = self._curves.get(key)
        if known is None:
            support = self.regressor.support.get(f"{kind}/intra")
            smallest = 1 if support is None else round(float(np.exp(support[0][0])))
            sizes = np.maximum(KNOTS, min(smallest, int(KNOTS[-1])))
            alone = self._by_regressor([Collective(kind, size, near, near) for size in sizes.tolist()], fabric)
            self._curves[key] = known = never_falling(np.log(alone))
        return known

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that were measured."""
        inter = () if self.between is None else (f"{kind}/inter" for kind in self.between.support)
        return tuple(sorted({*self.regressor.physics, *inter}))

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute log-error on rows left out in turn, by label."""
        inter = {} if self.between is None else {f"{kind}/inter": e for kind, e in self.between.errors.items()}
        return {**self.regressor.errors, **inter}

    def _by_regressor(self, collectives: Sequence[Collective], fabric: Fabric) -> Array:
        if not collectives:
            return np.zeros(0)
        asked, longer = zip(*map(self._within_sizes, collectives), strict=True)
        rows = collective_rows(asked, [fabric] * len(collectives), nccl=self.nccl, measured=self._bandwidths)
        seconds = self.regressor.seconds_left_out(rows) if self.left_out else self.regressor.seconds(rows)
        for index in np.flatnonzero(np.isnan(seconds)).tolist():
            seconds[index] = alpha_beta_seconds(asked[index], fabric)
        seconds *= np.array(longer)
        if self.nccl:
            for index, collective in enumerate(collectives):
                label = label_of(collective)
                physics = self.regressor.physics.get(label)
                if physics is None or not collective.record.trees or collective.num_nodes == 1:
                    continue
                if np.log(collective.group_size) > self.regressor.support[label].high[1] + 1e-9:
                    # An all-reduce over more ranks than were measured goes by NCCL's trees.
                    terms = np.array([features.tree_terms(collective, fabric)])
                    seconds[index] = min(seconds[index], physics.seconds(terms, np.ones(1))[0] / TREE_SHARE)
        return seconds

    @cached_property
    def _bandwidths(self) -> dict[str, float]:
        """Bandwidth of the links within a node that NCCL was measured on, by label; labels with several have none.

        A neighbour's position holds how long a collective is on its links, which tells their bandwidth.
        """
        found = {}
        for label, near in self.regressor.neighbours.items():
            kind, _, where = label.partition("/")
            if not self.nccl or where != "intra":
                continue
            sizes = np.exp(near.positions)
            known = sizes[sizes[:, 3] > SHORTEST_S]
            sent = [
                1e9 * features.seconds_within(Collective(kind, round(n), round(g), round(g)), _UNIT) / seconds
                for n, g, _, seconds, _ in known.tolist()
            ]
            if sent and max(sent) < 1.01 * min(sent):
                found[label] = float(f"{np.median(sent):.5g}")
        return found

    def _within_sizes(self, collective: Collective) -> tuple[Collective, float]:
        """Extrapolate with NCCL's bandwidth at the largest measured size: that size, and how often it fits."""
        support = self.regressor.support.get(label_of(collective)) if self.nccl else None
        most = max(int(np.exp(support.high[0])), 1) if support is not None else collective.num_bytes
        if collective.num_bytes <= most:
            return collective, 1.0
        return replace(collective, num_bytes=most), collective.num_bytes / most

    def unsupported(self, collective: Collective, fabric: Fabric) -> str:
        """Why a collective lies outside the measured range; empty if it lies within."""
        label, across = label_of(collective), collective.num_nodes > 1
        support, key, slack = self.regressor.support, label, OUTSIDE if self.nccl else 1e-9
        if self.between is not None and across:
            support, key, slack = self.between.support, collective.kind, OUTSIDE
            position = place(collective)
        else:
            position = features.collective_position(collective, fabric, nccl=self.nccl)
        if key not in support:
            return f"{collective}: no {collective.kind} {'across nodes' if across else 'within a node'} was measured"
        low, high = support[key]
        beyond = support[key].beyond(position)
        if beyond[1] > slack:  # rings of NCCL behave alike up to twice the ranks
            return f"{collective}: measured for groups of {np.exp(low[1]):.0f} to {np.exp(high[1]):.0f} ranks"
        if beyond.sum() > OUTSIDE:
            return f"{collective}: {np.exp(beyond.sum()):.1f} x outside the measured sizes"
        return f"{collective}: {label} was measured on other devices' links alone" if label in self.carried else ""


def fit_collectives(
    collectives: Sequence[Collective], fabrics: Sequence[Fabric], seconds: Array, *, seed: int = 0, nccl: bool = False
) -> CollectiveModel:
    """Fit on measured collectives, each with its fabric."""
    own = NCCL_BOUNDS if nccl else BOUNDS
    bounds = {f"{kind}/{where}": own for kind in COLLECTIVE_KINDS for where in ("intra", "inter")}
    rows = collective_rows(collectives, fabrics, nccl=nccl)
    return CollectiveModel(fit_regressor(rows, seconds, bounds, seed), nccl=nccl)
