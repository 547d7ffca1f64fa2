"""Seconds of ops alone, learned from event profiles.

A kind that was not measured on a device has the efficiency of a measured kind, times a ratio measured elsewhere:
``seconds(op) = seconds(base) * roofline(op) / roofline(base) * exp(log_ratio)``, so that physics carries what differs
in FLOP and bytes.  The base is in the kind's record (``OpKind.base``); what streams through memory is an addition of as
many bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import IF_SET, UNSAVED, Saved
from stepsight.dataset.hardware.hardware import BOX, Hardware, exponential_seconds, roofline_seconds
from stepsight.dataset.kinds import STREAMED
from stepsight.dataset.kinds.op import DTYPE_BYTES, OP_KINDS, Op, OpKind
from stepsight.features.node_features import OP_TERMS, op_feature_names, op_features, op_position, op_terms
from stepsight.training.corrections.corrector import Corrector, TracedKind, rows_by
from stepsight.training.regression.regressor import Bounds, Regressor, SignatureRows, fit_regressor

# Kernels with less than half of their base's efficiency are ignored, and so are those faster than their base.
MIN_LOG_RATIO, MAX_LOG_RATIO = -0.05, 0.7
CACHED_BYTES = 100e6  # second-level caches have 40 MB (A100) to 126 MB (B200); operands may stay in them
BEST_STREAM = 0.93  # share of the stated bandwidth that a long copy reaches (a rule of thumb)
ONE_LAYOUT = ("gemm", "linear")  # family and base of the products for gradients that are forward's kernels in 8 bits
HEAD_DIM_STEP = 32  # FlashAttention-2 has kernels for these head sizes and pads others (its README, 2023)


@dataclass(frozen=True)
class Ratio(Saved, Corrector[Sequence[Op]]):
    """The slowdown of a kind relative to its base's efficiency."""

    log_ratio: float  # what was measured elsewhere, from MIN_LOG_RATIO to MAX_LOG_RATIO
    evidence: str  # where it was measured, for people

    prior_std_log = 0.3  # of the ratio of two kinds' efficiencies

    def log_factor(self, asked: Sequence[Op]) -> Array:
        """Logarithm of the factor of each op of the kind, ``(asked,)``."""
        return np.full(len(asked), self.log_ratio)

    def __post_init__(self) -> None:
        if not MIN_LOG_RATIO <= self.log_ratio <= MAX_LOG_RATIO:
            raise ValueError(f"log_ratio must lie from {MIN_LOG_RATIO} to {MAX_LOG_RATIO}, got {self.log_ratio}")


def dtype_class(op: Op, hardware: Hardware) -> str:
    """The part of a GPU op's precision that changes its kernels: empty except for products that are not in 16 bits."""
    products = op.record.bound == "compute"
    return op.dtype if products and hardware.kind == "gpu" and DTYPE_BYTES[op.dtype] != 2 else ""


def label(name: str, op: Op, hardware: Hardware) -> str:
    """Kind or family, with the precision if it has its own kernels."""
    precision = dtype_class(op, hardware)
    return f"{name}/{precision}" if precision else name


def base_of(op: Op, hardware: Hardware) -> Op | None:
    """The op whose efficiency replaces that of an op whose kind was not measured; None: only the roofline is known.

    In 8 bits cuBLAS has kernels for one layout alone (its documentation, ``cublasLtMatmul``: FP8 kernels are TN), so
    Transformer Engine runs the products for gradients by the same kernels as forward's, on transposed copies.
    """
    kind = op.record
    if dtype_class(op, hardware):
        if op.dtype == "fp8" and (kind.family, kind.base) == ONE_LAYOUT:
            return Op(kind.base, kind.base_dims(*op.dims), op.dtype)
        return Op(op.kind, op.dims, "fp8" if op.dtype == "nvfp4" else "bf16")
    if not kind.base:
        return None
    if kind.base != STREAMED:
        return Op(kind.base, kind.base_dims(*op.dims), op.dtype)
    dtype = "bf16"
    per_element = OP_KINDS[STREAMED].elements(1) * DTYPE_BYTES[dtype]
    return Op(STREAMED, (max(round(op.num_bytes / per_element), 1),), dtype)


def as_run(op: Op, hardware: Hardware) -> Op:
    """The op that a GPU's library runs: an attention with its head size padded."""
    kind = op.record
    if not kind.padded or hardware.kind != "gpu":
        return op
    dims = list(op.dims)
    dims[kind.dim_names.index(kind.padded)] += -dims[kind.dim_names.index(kind.padded)] % HEAD_DIM_STEP
    return op if tuple(dims) == op.dims else Op(op.kind, tuple(dims), op.dtype)


def least_seconds(op: Op, hardware: Hardware) -> float:
    """Lower bound of an op's time on a GPU whose memory must move everything that exceeds the caches."""
    if hardware.kind != "gpu" or op.record.bound in ("host_memory", "host_link", "host"):
        return 0.0
    return (op.num_bytes - CACHED_BYTES) / (BEST_STREAM * hardware.memory_bandwidth_bytes_per_s)


Array = NDArray[np.float64]

GAP = 1.4  # log units within which the nearest measured op supports another one within the measured range
OUTSIDE = 0.7  # log units beyond the measured range from which an op counts as unsupported: twice the largest size


def op_rows(
    ops: Sequence[Op],
    hardware: Hardware,
    busy: Sequence[int] | int,
    variants: Sequence[int] | NDArray[np.int64] | int = 0,
) -> SignatureRows:
    """Ops as the regressor's rows."""
    return SignatureRows(
        tuple(label(op.kind, op, hardware) for op in ops),
        tuple(label(op.family, op, hardware) for op in ops),
        np.array([op_terms(op) for op in ops], float).reshape(len(ops), len(OP_TERMS)),
        np.broadcast_to(np.asarray(busy, float), (len(ops),)).copy(),
        tuple(op_position(op) for op in ops),
        op_features(ops, hardware, busy, variants),
        op_feature_names(),
    )


def num_axes(label: str) -> int:
    """Axes of ``op_position`` of a kind."""
    return len(OP_KINDS[label.split("/")[0]].dim_names) + 2


SCORES_OF_GPU = 0.25  # share of the time to stream attention scores that a fused kernel is assumed to take for them


def op_bounds(hardware: Hardware, kind: OpKind) -> Bounds:
    """Physical bounds on this hardware, in seconds per unit of ``OP_TERMS``.

    Nothing computes faster than twice the stated peak; caches may outrun memory by fifty; an op costs between
    0.1 microseconds and 3 ms of overhead.  A GPU's fused attention keeps its scores in registers: where a single head
    size was measured, the prior says how little of its time is theirs (a rule of thumb).
    """
    fused = hardware.kind == "gpu" and kind.keeps_second_operand
    flop = 1.0 / max(hardware.peak_flops.values())
    byte = 1.0 / hardware.memory_bandwidth_bytes_per_s
    scores = SCORES_OF_GPU * byte if fused else byte
    return Bounds(
        prior=np.array([max(hardware.op_latency_s, 3e-6), 2 * flop, byte, scores, byte, 1e-9]),
        low=np.array([1e-7, 0.5 * flop, 0.02 * byte, 0.02 * byte, 0.02 * byte, 1e-12]),
        high=np.array([3e-3, 500 * flop, 100 * byte, 100 * byte, 100 * byte, 1e-4]),
    )


class OtherDevices(Protocol):
    """Ops of a device with few measurements or none, by other devices' efficiency (``transferred.Transfer``)."""

    @property
    def posteriors(self) -> Mapping[str, Corrector[Any]]: ...
    def seconds(self, ops: Sequence[Op], variants: Sequence[int] | NDArray[np.int64] | int = 0) -> Array: ...
    def unsupported(self, op: Op) -> str: ...


@dataclass(frozen=True)
class KernelModel(Saved):
    """Ops of one hardware."""

    hardware: Hardware = field(metadata=UNSAVED)  # what was measured
    regressor: Regressor = field(metadata=UNSAVED)  # physics, trees and neighbours by kind
    # answer as if the ops asked about had not been measured (for honest intervals)
    left_out: bool = field(default=False, metadata=UNSAVED)
    # whether this comes from tables of a device on its own: then kinds that were not measured take the efficiency of
    # others (see derived) instead of the roofline, and busy neighbours do not count
    derives: bool = False
    # by kind that was not measured here, what others measured of it against its base
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    # by kind, what traces of real steps add
    traced: Mapping[str, TracedKind] = field(default_factory=dict, metadata=IF_SET)
    # another device with the same chip that is asked about: ops take as much longer as its roofline says
    serves: Hardware | None = field(default=None, metadata=UNSAVED)
    # answers for ops that the regressor says nothing of; None: they run at the roofline
    transfer: OtherDevices | None = field(default=None, metadata=UNSAVED)
    # what ran the measured ops, by label, the one to predict for first
    software: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata=IF_SET)

    def seconds(self, ops: Sequence[Op], busy: int, software: Sequence[str | int] = ()) -> Array:
        """Seconds of each op alone, shape ``(len(ops),)``; see ``derives`` for kinds that were not measured.

        ``busy``: devices of the node that compute at the same time.  ``software``: what runs each op, as a part of its
        name or its index; if it is unknown or empty: the one to predict for.
        """
        if not ops:
            return np.zeros(0)
        named = zip(ops, software, strict=bool(software))
        variants = np.array([self.variant(op, of) if isinstance(of, str) else of for op, of in named] or [0])
        variants = np.broadcast_to(variants, (len(ops),))
        if self.transfer is None:
            seconds = self._by_regressor(ops, busy, variants)
        else:
            own = np.array([self._measured(self._traced(op)[0]) for op in ops])
            seconds = np.empty(len(ops))
            if own.any():
                measured = [op for op, mine in zip(ops, own, strict=True) if mine]
                seconds[own] = self._by_regressor(measured, busy, variants[own])
            if not own.all():
                others = [op for op, mine in zip(ops, own, strict=True) if not mine]
                seconds[~own] = self.transfer.seconds(others, variants[~own])
        for name, index in rows_by(label(op.kind, op, self.hardware) for op in ops).items() if self.traced else ():
            if name in self.traced:
                factors = self.traced[name].log_factor(np.array([op_position(ops[i]) for i in index]))
                seconds[index] *= np.exp(factors)
        return seconds

    def variant(self, op: Op, software: str) -> int:
        """Index of a software among those that ran similar ops; 0, the one to predict for, if it ran none."""
        known = self.software.get(label(op.family, op, self.hardware), ())
        wanted = software.lower()
        return next((number for number, name in enumerate(known) if wanted in name.lower()), 0) if wanted else 0

    def check_software(self, software: str) -> None:
        """Check that ops were measured with some software.  Raises ``PredictorError`` if none of them were."""
        known = sorted({name for names in self.software.values() for name in names})
        if software and not any(software.lower() in name.lower() for name in known):
            told = f"({', '.join(known) or 'it knows one alone'}), got {software!r:.80}"
            rule = "execution.kernels must be a part of the name of software that this predictor knows"
            raise PredictorError(f"{rule} {told}; model.attention_kernels chooses attention kernels")

    def _by_regressor(self, ops: Sequence[Op], busy: int, variants: NDArray[np.int64]) -> Array:
        traced = [self._traced(op, number) for op, number in zip(ops, variants.tolist(), strict=True)]
        asked, longer = zip(*[self._within_length(base) for base, _, _ in traced], strict=True)
        rows = op_rows(asked, self.hardware, 1 if self.derives else busy, variants)
        seconds = self.regressor.seconds_left_out(rows) if self.left_out else self.regressor.seconds(rows)
        seconds *= np.array(longer)
        for index, (op, (base, log_ratio, _)) in enumerate(zip(ops, traced, strict=True)):
            if np.isnan(seconds[index]):  # no measurement covers it
                seconds[index] = roofline_seconds(op, self.hardware)
            elif base is not op:
                run = as_run(op, self.hardware) if self.derives else op
                physics = roofline_seconds(run, self.hardware) / roofline_seconds(base, self.hardware)
                seconds[index] *= physics * np.exp(log_ratio)
            if self.derives:
                seconds[index] = max(seconds[index], least_seconds(op, self.hardware))
            if self.serves is not None:
                facts = self.serves, self.hardware
                there, here = (roofline_seconds(op, each) + exponential_seconds(op, each) for each in facts)
                seconds[index] *= there / here
        return seconds

    def _measured(self, op: Op) -> bool:
        return label(op.kind, op, self.hardware) in self.regressor.physics

    def _traced(self, op: Op, variant: int = 0) -> tuple[Op, float, bool]:
        """The measured op that represents this one (itself if there is none), the log-ratio between them, and whether
        each step of that ratio was measured somewhere.

        ``variant``: of the software asked for.  Its products of an op's precision stand for what it was not measured
        with, such as gradients in 8 bits; without one, those of 16 bits do.  In 32 bits no others stand for them.
        """
        if not self.derives:
            return op, 0.0, True
        at: Op | None = as_run(op, self.hardware)
        log_ratio, evident = 0.0, True
        while at is not None and not self._measured(at):
            ratio = self.ratios.get(at.kind)
            log_ratio += ratio.log_ratio if ratio is not None else 0.0
            evident &= ratio is not None
            kind, own = at.record, None
            if (variant or DTYPE_BYTES[at.dtype] > 2) and dtype_class(at, self.hardware) and kind.base != STREAMED:
                own = Op(kind.base, kind.base_dims(*at.dims), at.dtype) if kind.base else None
            at = own if own is not None and self._measured(own) else base_of(at, self.hardware)
        return (op, 0.0, True) if at is None else (at, log_ratio, evident)

    def _within_length(self, op: Op) -> tuple[Op, float]:
        """A streaming op no longer than the longest measured one of its kind, and the factor to this op."""
        support = self.regressor.support.get(label(op.kind, op, self.hardware))
        if not self.derives or not op.record.streams or support is None:
            return op, 1.0
        most = max(round(float(np.exp(support.high[0]))), 1)
        return (op, 1.0) if op.dims[0] <= most else (Op(op.kind, (most, *op.dims[1:]), op.dtype), op.dims[0] / most)

    def crowded(self, busy: int) -> str:
        """Why a number of busy devices of a node lies outside the measured range; empty if it lies within."""
        low, high = self.regressor.busy
        if low <= busy <= high or self.derives or self.hardware.name == BOX:
            return ""
        return f"{busy} devices of a node compute at once: measured with {low:.0f} to {high:.0f}"

    def unsupported(self, op: Op) -> str:
        """Why an op lies outside the measured range; empty if it lies within.

        A kind with a ratio that was measured elsewhere counts as measured; so does what a box's ranks sleep.
        """
        own = self.traced.get(label(op.kind, op, self.hardware))
        if self.hardware.name == BOX or op.record.bound == "host" or (own is not None and own.holds(op)):
            return ""
        base, _, evident = self._traced(op)
        if not self._measured(base):
            return f"{op}: no {op.kind} was measured" if self.transfer is None else self.transfer.unsupported(op)
        kind, position = label(base.kind, base, self.hardware), op_position(base)
        excess = self.regressor.excess(kind, position)
        far = f"{np.exp(excess):.1f} x outside the measured range" if excess > OUTSIDE else ""
        gap = 0.0 if far else self.regressor.gap(kind, position[: len(base.dims)])
        if gap > GAP:
            far = f"within the measured range, but {np.exp(gap):.1f} x from the nearest measured {base.kind}"
        if evident:
            return f"{op}: {far}" if far else ""
        return f"{op}: no {label(op.kind, op, self.hardware)} was measured; predicted from {base.kind} and physics"


def same_chip(hardware: Hardware, measured: Hardware) -> Hardware:
    """A device for ``KernelModel.serves``: its products are as efficient as on the measured one with the same chip."""
    return replace(hardware, compute_efficiency=measured.compute_efficiency)


def fit_kernels(
    ops: Sequence[Op],
    busy: Sequence[int] | int,
    seconds: Array,
    hardware: Hardware,
    *,
    variants: Sequence[int] | NDArray[np.int64] | int = 0,
    seed: int = 0,
    judged: bool = True,
) -> KernelModel:
    """Fit on measured ops; the same op may be measured with several numbers of busy devices and in several variants.

    ``judged``: whether errors are wanted where nothing depends on them; see ``fit_regressor``.
    """
    rows = op_rows(ops, hardware, busy, variants)
    bounds = {kind: op_bounds(hardware, op.record) for kind, op in zip(rows.kinds, ops, strict=True)}
    return KernelModel(hardware, fit_regressor(rows, seconds, bounds, seed, judged=judged))
