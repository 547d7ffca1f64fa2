"""Seconds of collectives, learned from event profiles: physics of links first, residual within the measured range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Fabric
from stepsight.dataset.op import COLLECTIVE_KINDS, Collective
from stepsight.dataset.physics import alpha_beta_seconds
from stepsight.features.collectives import (
    COLLECTIVE_FEATURES,
    COLLECTIVE_TERMS,
    OVERLAPPING,
    collective_features,
    collective_position,
    collective_terms,
)
from stepsight.training.physics import Bounds
from stepsight.training.regressor import Regressor, Rows, fit_regressor

Array = NDArray[np.float64]

OUTSIDE = 0.7  # log units, as for ops

# Seconds per call, step, byte of the buffer, second that the link's facts say, and message that a shared host handles;
# from NVLink to a loopback socket.
BOUNDS = Bounds(
    prior=np.array([2e-5, 5e-5, 2e-10, 1.1, 2e-6]),
    low=np.array([1e-7, 1e-7, 1e-14, 0.3, 1e-9]),
    high=np.array([5e-2, 1e-2, 1e-8, 30.0, 2e-3]),
    overlapping=OVERLAPPING,
)


def _label(collective: Collective) -> str:
    """Kind and whether nodes are crossed: the two differ in every constant."""
    return f"{collective.kind}/{'inter' if collective.num_nodes > 1 else 'intra'}"


def collective_rows(collectives: Sequence[Collective], fabrics: Sequence[Fabric]) -> Rows:
    """Collectives, each on its fabric, as the regressor's rows."""
    pairs = list(zip(collectives, fabrics, strict=True))
    labels = tuple(_label(c) for c in collectives)
    return Rows(
        labels,
        labels,
        np.array([collective_terms(c, f) for c, f in pairs], float).reshape(len(pairs), len(COLLECTIVE_TERMS)),
        np.ones(len(collectives)),
        tuple(collective_position(c, f) for c, f in pairs),
        collective_features(collectives, fabrics),
    )


@dataclass(frozen=True)
class CollectiveModel:
    """Collectives on one hardware's links.

    Attributes:
        regressor: Physics, trees and neighbours by kind and layout.
        left_out: Answer as if the collectives asked about had not been measured (for honest intervals).
    """

    regressor: Regressor
    left_out: bool = False

    def seconds(self, collectives: Sequence[Collective], fabric: Fabric) -> Array:
        """Seconds of each collective alone; by the fabric's facts where kind and layout were never measured."""
        if not collectives:
            return np.zeros(0)
        rows = collective_rows(collectives, [fabric] * len(collectives))
        seconds = self.regressor.seconds_left_out(rows) if self.left_out else self.regressor.seconds(rows)
        for index in np.flatnonzero(np.isnan(seconds)).tolist():
            seconds[index] = alpha_beta_seconds(collectives[index], fabric)
        return seconds

    def unsupported(self, collective: Collective, fabric: Fabric) -> str:
        """Why a collective lies outside what was measured; empty if it does not."""
        label = _label(collective)
        if label not in self.regressor.physics:
            where = "across nodes" if collective.num_nodes > 1 else "within a node"
            return f"{collective}: no {collective.kind} {where} was measured"
        low, high = self.regressor.support[label]
        if not low[1] - 1e-9 <= np.log(collective.group_size) <= high[1] + 1e-9:
            return f"{collective}: measured for groups of {np.exp(low[1]):.0f} to {np.exp(high[1]):.0f} ranks"
        excess = self.regressor.excess(label, collective_position(collective, fabric))
        return f"{collective}: {np.exp(excess):.1f} x outside the measured sizes" if excess > OUTSIDE else ""


def fit_collectives(
    collectives: Sequence[Collective], fabrics: Sequence[Fabric], seconds: Array, *, seed: int = 0
) -> CollectiveModel:
    """Fit from measured collectives, each on its fabric."""
    bounds = {f"{kind}/{where}": BOUNDS for kind in COLLECTIVE_KINDS for where in ("intra", "inter")}
    return CollectiveModel(
        fit_regressor(collective_rows(collectives, fabrics), seconds, bounds, COLLECTIVE_FEATURES, seed)
    )
