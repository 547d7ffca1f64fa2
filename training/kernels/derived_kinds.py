"""Kinds that were not measured on a device: the efficiency of a measured kind, times a ratio measured elsewhere.

``seconds(op) = seconds(base) * roofline(op) / roofline(base) * exp(log_ratio)``: physics carries what differs in FLOP
and bytes.  The base is in the kind's record (``OpKind.base``); what streams through memory is an addition of as many
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds import STREAMED
from stepsight.dataset.kinds.op import DTYPE_BYTES, OP_KINDS, Op

# Kernels with less than half of their base's efficiency are ignored, and so are those faster than their base.
MIN_LOG_RATIO, MAX_LOG_RATIO = -0.05, 0.7
CACHED_BYTES = 100e6  # second-level caches have 40 MB (A100) to 126 MB (B200); operands may stay in them
BEST_STREAM = 0.93  # share of the stated bandwidth that a long copy reaches (a rule of thumb)
ONE_LAYOUT = ("gemm", "linear")  # family and base of the products for gradients that are forward's kernels in 8 bits
HEAD_DIM_STEP = 32  # FlashAttention-2 has kernels for these head sizes and pads others (its README, 2023)


@dataclass(frozen=True)
class Ratio:
    """The slowdown of a kind relative to its base's efficiency.

    Attributes:
        log_ratio: What was measured elsewhere, from ``MIN_LOG_RATIO`` to ``MAX_LOG_RATIO``.
        evidence: Where it was measured, for people.
    """

    log_ratio: float
    evidence: str

    def __post_init__(self) -> None:
        if not MIN_LOG_RATIO <= self.log_ratio <= MAX_LOG_RATIO:
            raise ValueError(f"log_ratio must lie from {MIN_LOG_RATIO} to {MAX_LOG_RATIO}, got {self.log_ratio}")

    def to_dict(self) -> dict[str, Any]:
        return {"log_ratio": self.log_ratio, "evidence": self.evidence}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Ratio:
        return cls(float(value["log_ratio"]), str(value["evidence"]))


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


def base_in_precision(op: Op, hardware: Hardware) -> Op | None:
    """The base of a product with kernels of its precision's own, in that precision; None: it has none."""
    kind = op.record
    if not kind.base or kind.base == STREAMED or not dtype_class(op, hardware):
        return None
    return Op(kind.base, kind.base_dims(*op.dims), op.dtype)


def as_run(op: Op, hardware: Hardware) -> Op:
    """The op that a GPU's library runs: an attention with its head size padded."""
    kind = op.record
    if not kind.padded or hardware.kind != "gpu":
        return op
    dims = list(op.dims)
    padded = kind.dim_names.index(kind.padded)
    if dims[padded] % HEAD_DIM_STEP == 0:
        return op
    dims[padded] += -dims[padded] % HEAD_DIM_STEP
    return Op(op.kind, tuple(dims), op.dtype)


def least_seconds(op: Op, hardware: Hardware) -> float:
    """Lower bound of an op's time on a GPU whose memory must move everything that exceeds the caches."""
    if hardware.kind != "gpu" or op.record.bound in ("host_memory", "host_link", "host"):
        return 0.0
    return (op.num_bytes - CACHED_BYTES) / (BEST_STREAM * hardware.memory_bandwidth_bytes_per_s)
