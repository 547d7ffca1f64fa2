"""Power of matrix products by chip, learned from published runs; it lowers the clock in training.

Kernels of tables were measured alone, in calls that end before the power limit lowers the clock.  In training the clock
falls (``Hardware.power_slowdown``), by as much as the chip's products would draw more than the limit of the device.
That power is one number for each chip, for products in 16 bits and in fewer.  It is learned from published runs of
dense models with fused attention, whose software runs the kernels of the tables.  The prior is what the chip's table
shows (``TABLED``): a benchmark repeats a kernel, so that the clock falls beside long ones.  Where a source's own runs
are judged, the number is taken that the other sources gave.
``python tools/shipped_data.py power RUNS`` writes the preset again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.files import read_json
from stepsight.dataset.hardware.hardware import Hardware

PRESET = Path(__file__).with_name("product_power.json")
LEAST_SOURCES = 1  # fewest for an estimate; one source counts as much as the prior
# Power beyond idle relative to the limit's.  On B200, products of 4e11 FLOP and more take 1.36 times as long in a long
# row (SimuMax) as alone (aiconfigurator), which is 2.5 times the power; larger values were never measured.
MOST_POWER_LOG = math.log(2.5)
PRIOR_STD_LOG = 0.06  # prior deviation of the clock's reduction by a power limit, centred at the table's, or at none
SOURCE_STD_LOG = 0.04  # deviation between sources of a chip: software and networks differ from the prediction
RUN_STD_LOG = 0.08  # deviation between runs of a source
ROUNDS = 50  # iterations of reweighting

# Slowdown of long products in 16 bits in the chip's table: the rate that the best tenth of products reaches if they
# take 0.4 to 0.8 ms, over the median of those rates from 1.6 ms on (bins of a factor of two; products of at least 1024
# in multiples of 128).  aiconfigurator, SGLang 0.5.14 (H100: 797 to 721 TFLOP/s) and 0.5.10 (A100: 263 to 254).
TABLED: Mapping[str, Mapping[str, float]] = {"H100": {"bf16": 1.105}, "A100": {"bf16": 1.035}}


@dataclass(frozen=True, slots=True)
class SourceClock:
    """Power of a chip estimated from the runs of one source."""

    # median of log(measured / predicted) over how much the time follows products: the logarithm of how many times as
    # long products took as alone, at the reference limit of the chip
    slowdown_log: float
    runs: int  # how many

    @property
    def weight(self) -> float:
        """One over the variance."""
        return 1.0 / (SOURCE_STD_LOG**2 + RUN_STD_LOG**2 / self.runs)


@dataclass(frozen=True)
class ChipPower:
    """Power of a chip estimated from all sources."""

    reference_w: float  # the power limit for which sources speak: the highest of the chip's devices
    sources: Mapping[str, SourceClock]  # by name
    idle_w: float = 0.0  # hardware.idle_w of the chip's devices
    prior_log: float = 0.0  # logarithm of the slowdown that the chip's table shows; 0: none

    def slowdown_log(self, without: str = "") -> float:
        """Logarithm of the slowdown at the reference limit: Huber's mean of sources and the prior."""
        told = [source for name, source in self.sources.items() if name != without]
        weights = [*(source.weight for source in told), PRIOR_STD_LOG**-2]
        values = [*(source.slowdown_log for source in told), self.prior_log]
        mean, trust = 0.0, [1.0] * len(values)
        for _ in range(ROUNDS):
            own = [weight * part for weight, part in zip(weights, trust, strict=True)]
            mean = sum(weight * value for weight, value in zip(own, values, strict=True)) / sum(own)
            trust = [
                1.0 / max(1.0, abs(value - mean) * weight**0.5) for weight, value in zip(weights, values, strict=True)
            ]
        return mean

    def power_w(self, without: str = "") -> float:
        """Watts at the highest clock from all sources except one; 0 if there are too few, and no table shows it."""
        if len(set(self.sources) - {without}) < LEAST_SOURCES and not self.prior_log:
            return 0.0
        excess = math.exp(min(3.0 * self.slowdown_log(without), MOST_POWER_LOG))
        return self.idle_w + (self.reference_w - self.idle_w) * excess

    def to_dict(self) -> dict[str, Any]:
        told = {name: [round(source.slowdown_log, 4), source.runs] for name, source in self.sources.items()}
        facts = {"reference_w": self.reference_w, "idle_w": self.idle_w, "prior_log": round(self.prior_log, 4)}
        return {**facts, "sources": told}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ChipPower:
        told = {name: SourceClock(float(log), int(runs)) for name, (log, runs) in value["sources"].items()}
        return cls(float(value["reference_w"]), told, float(value["idle_w"]), float(value["prior_log"]))


def learn_chip(
    reference_w: float, runs: Mapping[str, Sequence[float]], idle_w: float = 0.0, prior_log: float = 0.0
) -> ChipPower:
    """Power of a chip from logarithms of its runs' slowdown of products, by source."""
    told = {name: SourceClock(median(logs), len(logs)) for name, logs in runs.items() if logs}
    return ChipPower(reference_w, told, idle_w, prior_log)


def tabled_power_w(chip: str, facts: Hardware) -> dict[str, float]:
    """Watts that the long products in a chip's table would have drawn at the highest clock, by type."""
    room = facts.power_w - facts.idle_w
    return {dtype: facts.idle_w + room * slowdown**3 for dtype, slowdown in TABLED.get(chip, {}).items()}


@cached(1)
def chip_powers() -> Mapping[str, Mapping[str, ChipPower]]:
    """The preset of the package, by chip and type of products."""
    table = read_json(PRESET)["chips"]
    return {chip: {dtype: ChipPower.from_dict(one) for dtype, one in each.items()} for chip, each in table.items()}


def product_power_w(chip: str, without: str = "") -> dict[str, float]:
    """``Hardware.product_power_w`` of a chip, without a source of published runs."""
    found = {dtype: power.power_w(without) for dtype, power in chip_powers().get(chip, {}).items()}
    return {dtype: watts for dtype, watts in found.items() if watts}
