"""Seconds of ops on their own, learned from event profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.op import OP_KINDS, Op
from stepsight.dataset.physics import roofline_seconds
from stepsight.features.ops import OP_FEATURES, OP_TERMS, op_features, op_position, op_terms
from stepsight.training.physics import Bounds
from stepsight.training.regressor import Regressor, Rows, fit_regressor

Array = NDArray[np.float64]

OUTSIDE = 0.7  # log units beyond the measured range from which an op counts as unsupported: twice the largest size


def op_rows(ops: Sequence[Op], hardware: Hardware, busy: Sequence[int] | int) -> Rows:
    """Ops as the regressor's rows."""
    return Rows(
        tuple(op.kind for op in ops),
        tuple(op.family for op in ops),
        np.array([op_terms(op) for op in ops], float).reshape(len(ops), len(OP_TERMS)),
        np.broadcast_to(np.asarray(busy, float), (len(ops),)).copy(),
        tuple(op_position(op) for op in ops),
        op_features(ops, hardware, busy),
    )


def op_bounds(hardware: Hardware) -> Bounds:
    """What physics allows on this hardware, in seconds per unit of ``OP_TERMS``.

    Nothing computes faster than twice the stated peak; caches may outrun memory by fifty; an op costs between
    0.1 microseconds and 3 ms of overhead.
    """
    flop = 1.0 / max(hardware.peak_flops.values())
    byte = 1.0 / hardware.memory_bandwidth_bytes_per_s
    return Bounds(
        prior=np.array([max(hardware.op_latency_s, 3e-6), 2 * flop, byte, byte, byte, 1e-9]),
        low=np.array([1e-7, 0.5 * flop, 0.02 * byte, 0.02 * byte, 0.02 * byte, 1e-12]),
        high=np.array([3e-3, 500 * flop, 100 * byte, 100 * byte, 100 * byte, 1e-4]),
    )


@dataclass(frozen=True)
class KernelModel:
    """Ops of one hardware.

    Attributes:
        hardware: What was measured.
        regressor: Physics, trees and neighbours by kind.
        left_out: Answer as if the ops asked about had not been measured (for honest intervals).
    """

    hardware: Hardware
    regressor: Regressor
    left_out: bool = False

    def seconds(self, ops: Sequence[Op], busy: int) -> Array:
        """Seconds of each op alone, shape ``(len(ops),)``; roofline for kinds that were never measured."""
        if not ops:
            return np.zeros(0)
        rows = op_rows(ops, self.hardware, busy)
        seconds = self.regressor.seconds_left_out(rows) if self.left_out else self.regressor.seconds(rows)
        for index in np.flatnonzero(np.isnan(seconds)).tolist():
            seconds[index] = roofline_seconds(ops[index], self.hardware)
        return seconds

    def crowded(self, busy: int) -> str:
        """Why so many busy devices of a node lie outside what was measured; empty if they do not."""
        low, high = self.regressor.busy
        if low <= busy <= high:
            return ""
        return f"{busy} devices of a node compute at once: measured with {low:.0f} to {high:.0f}"

    def unsupported(self, op: Op) -> str:
        """Why an op lies outside what was measured; empty if it does not."""
        if op.kind not in self.regressor.physics:
            return f"{op}: no {op.kind} was measured"
        excess = self.regressor.excess(op.kind, op_position(op))
        return f"{op}: {np.exp(excess):.1f} x outside the measured range" if excess > OUTSIDE else ""


def fit_kernels(
    ops: Sequence[Op], busy: Sequence[int], seconds: Array, hardware: Hardware, *, seed: int = 0
) -> KernelModel:
    """Fit from measured ops; the same op may be given for several numbers of busy devices."""
    bounds = op_bounds(hardware)
    rows = op_rows(ops, hardware, busy)
    return KernelModel(hardware, fit_regressor(rows, seconds, dict.fromkeys(OP_KINDS, bounds), OP_FEATURES, seed))
