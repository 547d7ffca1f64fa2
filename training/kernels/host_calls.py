"""Seconds of framework calls that run on a host, and of the gaps between them: learned from steps of scripts.

Three layers.  *Physics*: seconds are a weighted sum of a call's FLOP, bytes and fresh memory.  The constants of a label
are shrunk to those of its family, and these to those of all calls: a label of which few shapes were seen says little.
*Trees* correct what physics leaves, by family.  *Known* calls take what was measured: in steps, or on their own.
A call that was measured on its own, with reused and with fresh memory for its results, lies between the two: which of
both a step gives it depends on what was freed before.  Between calls the framework takes time, by phase.

A kind such as ``elementwise`` holds calls that differ by a factor of ten on a CPU, so the call's name counts beside its
op in the terms of its time and in the features of the trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.files import OPTIONAL, UNSAVED, Saved
from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.features.node_features import op_terms
from stepsight.training.corrections.corrector import Corrector, corrected, rows_by
from stepsight.training.regression.regressor import Bounds, Physics, fit_physics
from stepsight.training.regression.trees import Trees, fit_trees

Array = NDArray[np.float64]

CALL_TERMS = ("calls", "flop", "bytes", "units", "fresh_bytes")
NUM_DIMS = 9  # of the kind with the most of them
CALL_FEATURES = (
    "kind", "phase", "dtype_bytes", "log_flops", "log_bytes", "log_intensity", "log_physics_s", "log_lanes",
    "log_made_bytes", "log_share", "log_growth", *(f"log_dim{place}" for place in range(NUM_DIMS)),
)  # fmt: skip

# From about this size on the C library gives memory back and takes it anew, and each fresh page costs a fault.
FRESH_BYTES = 750_000
_LANES = 16  # numbers of 4 bytes in the widest vector of a CPU; channels and columns are padded to it
_ROWS = 4  # rows of a product that a kernel processes together
_NAMES: dict[str, Any] = read_toml(Path(__file__).with_name("host_calls.toml"))
SEVERAL = frozenset(_NAMES["several"])  # kinds which hold calls that differ
_SAME: dict[str, str] = _NAMES["same"]  # one call by its name in traces, and by its name under autograd


def call_label(call: str, op: Op) -> str:
    """The unit of fitting: the op's kind, or the call if its kind has several that differ."""
    if op.family == "conv":
        ins, groups, positions, inside = op.dims[1], op.dims[5], op.dims[3], op.dims[6]
        form = "depthwise" if groups > 1 and ins == 1 else "grouped" if groups > 1 else ""
        form = form or ("transposed" if inside < positions else "")
        return f"{op.kind}/{form}" if form else op.kind
    if op.kind not in SEVERAL:
        return op.kind
    name = call.removeprefix("aten::")
    return f"{op.kind}/{_SAME.get(name, name)}"


def call_terms(call: str, op: Op) -> tuple[float, ...]:
    """Quantities whose weighted sum is a call's time, in the order of ``CALL_TERMS``."""
    compute = op.record.bound == "compute"
    made = made_bytes(call, op)
    fresh = float(made) if made > FRESH_BYTES else 0.0
    return (1.0, padded_flops(op) if compute else 0.0, op.num_bytes, op_terms(op)[-1], fresh)


def call_features(calls: Sequence[str], ops: Sequence[Op], phases: Sequence[int], physics: Array) -> Array:
    """Features for trees, shape ``(calls, len(CALL_FEATURES))``; ``physics``: seconds by the terms alone."""
    rows = np.full((len(ops), len(CALL_FEATURES)), np.nan)
    for row, call, op, phase, seconds in zip(rows, calls, ops, phases, physics.tolist(), strict=True):
        flops, moved = max(op.flops, 1.0), max(op.num_bytes, 1.0)
        row[:11] = (
            op.record.code % 1000, phase, DTYPE_BYTES[op.dtype], math.log(flops), math.log(moved),
            math.log(flops / moved), math.log(seconds), math.log(max(padded_flops(op), 1.0) / flops),
            math.log1p(made_bytes(call, op)), *_shape(op),
        )  # fmt: skip
        row[11 : 11 + len(op.dims)] = np.log1p(op.dims[:NUM_DIMS])
    return rows


def padded_flops(op: Op) -> float:
    """FLOP of an op whose channels and columns are padded to a CPU's vectors."""
    if op.family == "conv":
        batch, ins, outs, positions, window, groups, inside = op.dims[:7]
        products = 1 + op.dims[8] if op.kind == "conv_backward" else 1
        if groups > 1 and ins == 1:
            channels = float(_up(outs, _LANES))
        else:
            wide = _up(ins, _LANES) if ins > 3 else ins  # kernels of images with few channels do not pad
            channels = float(groups * _up(max(outs // max(groups, 1), 1), _LANES) * wide)
        return 2.0 * products * batch * channels * window * min(positions, inside)
    if op.family in ("gemm", "batched_gemm"):
        m, n, k = op.dims[-3:]
        batch = op.dims[0] if len(op.dims) == 4 else 1
        if op.kind == "linear_wgrad":
            m, n, k = n, k, m
        elif op.kind == "linear_dgrad":
            n, k = k, n
        return 2.0 * batch * _up(m, _ROWS) * _up(n, _LANES) * k
    return op.flops


def made_bytes(call: str, op: Op) -> int:
    """Bytes of a call's result; 0 if it writes in place or the result is unknown."""
    dims, size, kind = op.dims, DTYPE_BYTES[op.dtype], op.kind
    if call.endswith("_") or kind == "reduce":
        return 0
    if op.family == "conv":
        batch, _, outs, positions = dims[:4]
        return size * (batch * outs * positions if kind == "conv" else dims[8] * batch * dims[1] * dims[5] * dims[6])
    if op.family in ("gemm", "batched_gemm") and op.record.operands is not None:
        return int(size * op.record.operands(*dims)[2])
    if op.family == "embedding_bag":
        return size * dims[1] * (dims[3] if kind == "embedding_bag_backward" else dims[2])
    if op.family == "embedding":
        return size * dims[1] * (dims[2] if kind == "embedding_backward" else dims[0])
    if op.family == "attention":
        return size * dims[0] * dims[1] * dims[3] * dims[5]
    if op.family == "pool":
        return size * dims[0] * (dims[1] if kind == "pool_backward" else dims[2])
    return size * math.prod(dims) if op.record.bound == "memory" else 0


def _shape(op: Op) -> tuple[float, float]:
    """Logarithms of the outputs of one group, or a product's rows over its columns; and of the growth in positions."""
    if op.family == "conv":
        return math.log1p(op.dims[2] / max(op.dims[5], 1)), math.log1p(op.dims[6]) - math.log1p(op.dims[3])
    if op.family == "gemm" and len(op.dims) == 3:
        m, n, k = op.dims
        return math.log1p(m) - math.log1p(n), math.log1p(n) - math.log1p(k)
    return 0.0, 0.0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


FUSED = "fused_loops"
# Seconds of one: near, middle and far byte, strided access, far strided access, cycle of gathers, of moves, of vector
# operations, of scalar operations and of slow functions, nest, and call.
USUAL_S = np.array([3e-12, 4e-12, 4e-11, 3e-11, 3e-10, 3.5e-10, 2.8e-10, 2.5e-10, 1.1e-10, 3.2e-10, 4e-8, 8e-7])
LOOP_BOUNDS = Bounds(prior=USUAL_S, low=USUAL_S / 100, high=USUAL_S * 100)
LOOP_NOISE = 0.15  # log-seconds that calls of equal dims differ by
LOOP_STD = 1.0


# Of a core with vectors of 64 bytes, a second cache of 1 MiB, and no other program beside it.
USUAL_LOOPS = Physics(np.log(USUAL_S), np.zeros(len(USUAL_S)))


def loop_terms(ops: Sequence[Op]) -> Array:
    """What is summed up, ``(n, terms)``."""
    dims = np.array([op.dims for op in ops], dtype=np.float64).reshape(len(ops), len(USUAL_S) - 1)
    return np.concatenate([dims, np.ones((len(ops), 1))], axis=1)


def loop_seconds(physics: Physics, ops: Sequence[Op]) -> Array:
    """Seconds of calls of fused loops, ``(n,)``."""
    terms = loop_terms(ops)
    return physics.seconds(terms, np.ones(len(terms)))


def fit_loops(terms: Array, seconds: Array) -> Physics:
    """Constants of a machine, from sums of ``loop_terms`` over calls that were measured together, ``(rows, terms)``."""
    return fit_physics(terms, np.ones(len(terms)), seconds, LOOP_BOUNDS, noise=LOOP_NOISE, prior_std=LOOP_STD)


Known = Mapping[tuple[str, Op], float]  # seconds by label and op
Alone = Mapping[tuple[str, Op], tuple[float, float]]  # shortest and longest seconds by label and op

FLOOR_S = 3e-6  # added to all seconds before logarithms: shorter times are ignored
BOUNDS = Bounds(  # seconds per unit of ``CALL_TERMS``
    prior=np.array([5e-6, 3e-11, 1e-10, 1e-10, 3e-10]),
    low=np.array([2e-7, 1e-13, 1e-13, 1e-12, 1e-12]),
    high=np.array([2e-3, 1e-8, 1e-7, 1e-4, 5e-9]),
)
ALL_STD, FAMILY_STD, LABEL_STD = 2.0, 1.0, 0.6  # of priors, in log units
NOISE = 0.3  # deviation of log-seconds between calls of equal terms
FEWEST_ROWS = 40  # fewest rows of a family for trees
MOST_CROWDED = 4.0  # times as long, of calls beside other ranks
MOST_TREES = 1.0  # limit of the trees' correction, in log units


@dataclass(frozen=True)
class Contention(Corrector[Sequence[Op]]):
    """How many times as long calls of a family of ops take while other ranks compute on the same host; ``""`` for all
    other families.  Empty: no longer.
    """

    factors: Mapping[str, float] = field(default_factory=dict)

    prior_std_log = 0.3

    def log_factor(self, asked: Sequence[Op]) -> Array:
        """Logarithm of the factor of each op, ``(asked,)``."""
        usual = self.factors.get("", 1.0)
        return np.log([self.factors.get(op.family, usual) for op in asked])


@dataclass(frozen=True)
class HostCalls(Saved):
    """Durations of the calls of a host."""

    everything: Physics  # physics of all calls
    families: Mapping[str, Physics]  # of ops
    labels: Mapping[str, Physics]  # of calls
    trees: Mapping[str, Trees] = field(default_factory=dict, metadata=UNSAVED)  # by family
    # seconds of calls that were measured within steps, by label and op
    known: Known = field(default_factory=dict, metadata=UNSAVED)
    # shortest and longest seconds of calls that were measured alone
    alone: Alone = field(default_factory=dict, metadata=UNSAVED)
    scale: float = 1.0  # of all calls' seconds within a step
    gaps_s: tuple[float, ...] = (0.0, 0.0, 0.0)  # between calls, by phase, (3,)
    step_s: float = 0.0  # of every step besides
    loops: Physics = field(default=USUAL_LOOPS, metadata=OPTIONAL)  # physics of loops that a compiler fused
    contention: Contention = field(default_factory=Contention, metadata=UNSAVED)  # what calls lose beside other ranks
    shared: bool = field(default=False, metadata=UNSAVED)  # whether other ranks compute on the host

    def seconds(self, calls: Sequence[str], ops: Sequence[Op], phases: Sequence[int]) -> Array:
        """Seconds of each call within a step, without the gaps between calls, ``(n,)``."""
        found = self.learned(calls, ops, phases)
        for place, (call, op) in enumerate(zip(calls, ops, strict=True)):
            key = call_label(call, op), op
            if key in self.known:
                found[place] = self.known[key]
            elif key in self.alone:
                found[place] = np.clip(found[place], *self.alone[key])
        if self.shared:
            found = corrected(found, ops, self.contention)
        return np.asarray(self.scale * found)

    def shared_by(self, ranks: int) -> HostCalls:
        """Durations on a host where so many ranks compute at once."""
        return replace(self, shared=ranks > 1) if self.contention.factors else self

    def is_known(self, call: str, op: Op) -> bool:
        """Whether a call was measured."""
        key = call_label(call, op), op
        return key in self.known or key in self.alone

    def learned(self, calls: Sequence[str], ops: Sequence[Op], phases: Sequence[int]) -> Array:
        """Seconds by physics and trees only."""
        physics = self._physics(calls, ops)
        log_s = np.log(physics)
        if self.trees and len(ops):
            features = call_features(calls, ops, phases, physics)
            families = np.array([op.family for op in ops])
            for family, trees in self.trees.items():
                index = np.flatnonzero(families == family)
                if len(index):
                    log_s[index] += np.clip(trees.predict(features[index], CALL_FEATURES), -MOST_TREES, MOST_TREES)
        seconds = np.maximum(np.exp(log_s) - FLOOR_S, 1e-7)
        fused = [place for place, op in enumerate(ops) if op.kind == FUSED]
        if fused:
            seconds[fused] = loop_seconds(self.loops, [ops[place] for place in fused])
        return np.asarray(seconds)

    def _physics(self, calls: Sequence[str], ops: Sequence[Op]) -> Array:
        out = np.empty(len(ops))
        for place, (call, op) in enumerate(zip(calls, ops, strict=True)):
            own = self.labels.get(call_label(call, op)) or self.families.get(op.family, self.everything)
            out[place] = own.seconds(np.array([call_terms(call, op)]), np.ones(1))[0]
        return out

    def to_dict(self) -> dict[str, Any]:
        """As of ``Saved``; calls that were measured are rows of a label, an op and seconds."""
        known, alone = (
            [[label, op.kind, list(op.dims), op.dtype, *np.atleast_1d(seconds).tolist()]
             for (label, op), seconds in of.items()] for of in (self.known, self.alone)
        )  # fmt: skip
        more = {"known": known, "alone": alone, "crowded": dict(self.contention.factors)}
        return {"terms": list(CALL_TERMS), **super().to_dict(), **more}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], **given: Any) -> Self:
        """As of ``Saved``.  Raises ``ValueError`` if a number is none that a fit finds."""
        if value["terms"] != list(CALL_TERMS):
            raise ValueError(f"terms must be {', '.join(CALL_TERMS)}, got {value['terms']!r:.80}")
        known, alone = (
            {
                (str(at), Op(kind, tuple(map(int, dims)), dtype)): seconds
                for at, kind, dims, dtype, *seconds in value[name]
            }
            for name in ("known", "alone")
        )
        given["known"] = {key: float(seconds) for key, (seconds,) in known.items()}
        given["alone"] = {key: (float(least), float(most)) for key, (least, most) in alone.items()}
        found = super().from_dict(value, **given, contention=Contention(value.get("crowded", {})))
        found.loops.check("fused loops", LOOP_BOUNDS)
        for name, physics in {"all calls": found.everything, **found.families, **found.labels}.items():
            physics.check(name, BOUNDS)
        if not all(1.0 <= factor <= MOST_CROWDED for factor in found.contention.factors.values()):
            raise ValueError(f"factors beside other ranks must be from 1 to {MOST_CROWDED:g}")
        if any(least > most for least, most in found.alone.values()):
            raise ValueError("seconds of calls alone must be the shortest, then the longest")
        numbers = [found.scale, *found.gaps_s, found.step_s, *found.known.values(), *sum(found.alone.values(), ())]
        if len(found.gaps_s) != 3 or not all(0 <= each < 1e4 for each in numbers) or not found.scale:
            raise ValueError("scale must be > 0, three gaps and all seconds from 0 to 1e4")
        return found


def fit_host_calls(rows: Iterable[tuple[str, Op, int, float]], seed: int = 0) -> HostCalls:
    """Fit physics and trees.  ``rows``: call, op, phase and seconds of each distinct one."""
    kept = [row for row in rows if row[3] > 0 and row[1].sized and row[1].kind != FUSED]
    calls, ops, phases = [row[0] for row in kept], [row[1] for row in kept], [row[2] for row in kept]
    seconds = np.array([row[3] for row in kept]) + FLOOR_S
    terms = np.array([call_terms(call, op) for call, op in zip(calls, ops, strict=True)]).reshape(-1, len(CALL_TERMS))
    everything = _fit(terms, seconds, BOUNDS, ALL_STD)
    families = {
        family: _fit(terms[index], seconds[index], _around(everything), FAMILY_STD)
        for family, index in rows_by(op.family for op in ops).items()
    }
    named = [call_label(call, op) for call, op in zip(calls, ops, strict=True)]
    labels = {
        label: _fit(terms[index], seconds[index], _around(families[ops[index[0]].family]), LABEL_STD)
        for label, index in rows_by(named).items()
    }
    found = HostCalls(everything, families, labels)
    physics = found._physics(calls, ops)
    features, residual = call_features(calls, ops, phases, physics), np.log(seconds / physics)
    trees = {
        family: fit_trees(features[index], residual[index], CALL_FEATURES, seed)
        for family, index in rows_by(op.family for op in ops).items()
        if len(index) >= FEWEST_ROWS
    }
    return HostCalls(everything, families, labels, trees)


def _fit(terms: Array, seconds: Array, bounds: Bounds, std: float) -> Physics:
    return fit_physics(terms, np.ones(len(terms)), seconds, bounds, noise=NOISE, prior_std=std)


def _around(physics: Physics) -> Bounds:
    """The same bounds, with other constants as their prior."""
    return Bounds(np.exp(physics.log_constants), BOUNDS.low, BOUNDS.high)
