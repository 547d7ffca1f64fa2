"""Physical factors that whole iterations may correct: one factor for each resource that bounds a duration.

Factors multiply durations of ops and collectives before the simulator adds them up, so a correction of links changes
what they hide as well as what they take.  Each has a prior around 1 and may not leave what the resource allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.kinds.op import Collective, Op

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Resource:
    """One factor.

    Attributes:
        prior_std_log: How far from 1 it is believed to be before any iteration was seen, in log units.
        low_log, high_log: What it may not leave.
    """

    prior_std_log: float
    low_log: float
    high_log: float


# Priors are what held-out measurements of the tables are off by: products 3 to 5 %, links within a node 3 to 10 %; most
# of what streams was measured as something else, and links between nodes are another cluster's.  Bounds: products reach
# 0.6 to 0.8 of a peak alone and memory 0.93 of its bandwidth, so neither can be faster by more than what is left;
# clocks under power limits and cold caches slow them down in training.
RESOURCES: Mapping[str, Resource] = {
    "products": Resource(0.05, -0.25, 0.40),
    "streaming": Resource(0.15, -0.10, 0.70),
    "host": Resource(0.50, -1.50, 1.50),
    "near_links": Resource(0.10, -0.25, 0.70),
    "far_links": Resource(0.30, -0.30, 1.50),
}
NAMES = tuple(RESOURCES)
_RESOURCE_OF_BOUND = {
    "compute": "products",
    "memory": "streaming",
    "host_memory": "host",
    "host_link": "host",
    "host": "host",
}


def resource_of(work: Op | Collective) -> int:
    """Index in ``NAMES`` of the resource that bounds a work."""
    if isinstance(work, Collective):
        return NAMES.index("far_links" if work.num_nodes > 1 else "near_links")
    return NAMES.index(_RESOURCE_OF_BOUND[work.record.bound])


def prior_stds() -> Array:
    """``prior_std_log`` of every resource, ``(len(NAMES),)``."""
    return np.array([resource.prior_std_log for resource in RESOURCES.values()])


@dataclass(frozen=True)
class Constants:
    """Factors by resource.

    Attributes:
        logs: Their logarithms in the order of ``NAMES``; 0: as measured.
    """

    logs: tuple[float, ...] = (0.0,) * len(NAMES)

    def __post_init__(self) -> None:
        if len(self.logs) != len(NAMES):
            raise ValueError(f"constants must be those of {', '.join(NAMES)}, got {len(self.logs)}")
        for name, value in zip(NAMES, self.logs, strict=True):
            low, high = RESOURCES[name].low_log, RESOURCES[name].high_log
            if not low - 1e-9 <= value <= high + 1e-9:
                raise ValueError(f"the log of {name} must lie from {low} to {high}, got {value}")

    @classmethod
    def within(cls, logs: Array) -> Constants:
        """The nearest factors within the physical bounds."""
        limits = RESOURCES.values()
        pairs = zip(logs.tolist(), limits, strict=True)
        return cls(tuple(min(max(value, limit.low_log), limit.high_log) for value, limit in pairs))

    @property
    def plain(self) -> bool:
        """Whether nothing is corrected."""
        return not any(self.logs)

    def factor(self, work: Op | Collective) -> float:
        """The factor of a work's duration."""
        return math.exp(self.logs[resource_of(work)])

    def to_dict(self) -> dict[str, float]:
        """Factors by resource."""
        return {name: math.exp(value) for name, value in zip(NAMES, self.logs, strict=True)}

    @classmethod
    def from_dict(cls, value: Mapping[str, float]) -> Constants:
        return cls(tuple(math.log(float(value[name])) for name in NAMES))
