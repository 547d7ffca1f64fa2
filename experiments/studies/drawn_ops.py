"""Ops to measure alone, drawn from sizes of real models and split into training and held-out ops.

A held-out op has the (n, k) of a product, the head size and length of an attention, or the width of what works on rows
that no op which teaches has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.study import cases

HELDOUT_PART = 0.15  # share of all ops, and of the (n, k), widths and lengths of each family
VARIANT_FAMILIES = ("norm", "elementwise", "loss")  # if compiled kernels may replace eager ones
_TRIES = 200  # draws for each op: most are too long, too large or repeated


@dataclass(frozen=True)
class OpSpace:
    """The distributions of ops."""

    models: Sequence[Sequence[int]]  # hidden, heads, kv heads, feed-forward, and 2 if gated, else 1
    tps: Sequence[int]  # tensor-parallel degrees that shard products
    tokens: Sequence[int]  # rows of an op
    lengths: Sequence[int]  # tokens of a sequence
    batches: Sequence[int]  # sequences
    head_dims: Sequence[int]
    heads: Sequence[int]  # of attention
    vocabs: Sequence[int]
    dtypes: Mapping[str, float]  # of products, with their parts
    dtype: str  # of all else
    numels: Sequence[int]  # least and most elements of an optimizer's step
    most_s: float  # by the roofline
    most_bytes: float  # that an op reads and writes


def op_space(device: str) -> OpSpace:
    """The ops of ``cuda`` or ``cpu``."""
    return OpSpace(**cases("ops")[device])


def _product(space: OpSpace, rng: random.Random) -> Op:
    hidden, heads, kv_heads, ffn, gates = rng.choice(space.models)
    tp, vocab, each = rng.choice(space.tps), rng.choice(space.vocabs), hidden // heads
    sizes = rng.choice(
        (
            ((heads + 2 * kv_heads) * each // tp, hidden),
            (hidden, hidden // tp),
            (ffn * gates // tp, hidden),
            (hidden, ffn // tp),
            (vocab // tp, hidden),
        )
    )
    kind = rng.choice(("linear", "linear", "linear_dgrad", "linear_wgrad"))
    (dtype,) = rng.choices(list(space.dtypes), list(space.dtypes.values()))
    return Op(kind, (rng.choice(space.tokens), *sizes), dtype)


def _attention(space: OpSpace, rng: random.Random) -> Op:
    heads, length, causal = rng.choice(space.heads), rng.choice(space.lengths), int(rng.random() < 0.8)
    kv_heads = rng.choice([kv for kv in {heads, heads // 2, heads // 4} if kv and heads % kv == 0])
    dims = (rng.choice(space.batches), heads, kv_heads, length, length, rng.choice(space.head_dims), causal)
    return Op(rng.choice(("attention", "attention_backward")), dims, space.dtype)


def _norm(space: OpSpace, rng: random.Random) -> Op:
    kind = rng.choice(("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"))
    return Op(kind, (rng.choice(space.tokens), rng.choice(space.models)[0]), space.dtype)


def _elementwise(space: OpSpace, rng: random.Random) -> Op:
    hidden, heads, kv_heads, ffn, gates = rng.choice(space.models)
    activation = ("swiglu", "swiglu_backward") if gates == 2 else ("gelu", "gelu_backward")
    kind, width = rng.choice(
        (
            *((kind, ffn) for kind in activation),
            *((kind, (heads + kv_heads) * (hidden // heads)) for kind in ("rope", "rope_backward")),
            *((kind, hidden) for kind in ("add", "copy", "reduce")),
        )
    )
    return Op(kind, (rng.choice(space.tokens) * width,), space.dtype)


def _loss(space: OpSpace, rng: random.Random) -> Op:
    kind = rng.choice(("cross_entropy", "cross_entropy_backward"))
    return Op(kind, (rng.choice(space.tokens), rng.choice(space.vocabs)), space.dtype)


def _embedding(space: OpSpace, rng: random.Random) -> Op:
    dims = (rng.choice(space.tokens), rng.choice(space.models)[0], rng.choice(space.vocabs))
    return Op(rng.choice(("embedding", "embedding_backward")), dims, space.dtype)


def _optimizer(space: OpSpace, rng: random.Random) -> Op:
    least, most = space.numels
    numel = int(least * (most / least) ** rng.random()) // 64 * 64
    return Op("adamw", (numel, rng.choice((8, 24, 48, 80, 120, 200))), space.dtype)


def _reduce(space: OpSpace, rng: random.Random) -> Op:
    hidden, heads, kv_heads, ffn, _ = rng.choice(space.models)
    width = rng.choice((hidden, ffn, (heads + 2 * kv_heads) * (hidden // heads)))
    return Op("bias_grad", (rng.choice(space.tokens), width), space.dtype)


# By family: how an op is drawn, and the family's share.
_FAMILIES: Mapping[str, tuple[Callable[[OpSpace, random.Random], Op], float]] = MappingProxyType(
    {
        "gemm": (_product, 0.46),
        "attention": (_attention, 0.2),
        "norm": (_norm, 0.09),
        "elementwise": (_elementwise, 0.12),
        "loss": (_loss, 0.04),
        "embedding": (_embedding, 0.04),
        "optimizer": (_optimizer, 0.03),
        "reduce": (_reduce, 0.02),
    }
)


def draw(space: OpSpace, count: int, hardware: Hardware, seed: int, families: Collection[str] = ()) -> list[Op]:
    """About ``count`` distinct ops of some families (empty: of all); fewer if a space has fewer.

    ``hardware`` says what is too long.
    """
    rng, found = random.Random(seed), dict[Op, None]()
    chosen = {name: of for name, of in _FAMILIES.items() if not families or name in families}
    whole = sum(part for _, part in chosen.values())
    for make, part in chosen.values():
        wanted, tries = len(found) + round(count * part / whole), 0
        while len(found) < wanted and tries < _TRIES * count:
            op = make(space, rng)
            tries += 1
            if op.num_bytes <= space.most_bytes and roofline_seconds(op, hardware) <= space.most_s:
                found[op] = None
    return list(found)


def likeness(op: Op) -> tuple[Hashable, ...]:
    """The properties of a held-out op that no training op has: see the module."""
    if op.family == "gemm":
        return (op.family, *op.dims[1:])
    if op.family == "attention":
        return (op.family, op.dims[5], op.dims[3])
    if op.family in ("norm", "embedding", "loss", "reduce"):
        return (op.family, op.dims[1])
    return (op.family, *op.dims)


def split(drawn: Sequence[Op], needed: Iterable[Op], unseen: Iterable[Op], seed: int) -> tuple[list[Op], list[Op]]:
    """Training ops and held-out ops.

    Args:
        drawn: Distinct ops.
        needed: What training runs do: all of it teaches.
        unseen: What held-out runs do: nothing like it teaches, unless training runs do it too.
        seed: Of the choice.
    """
    teaching = dict.fromkeys(needed)
    known = {likeness(op) for op in teaching}
    judging = {likeness(op) for op in unseen} - known
    families: dict[str, dict[tuple[Hashable, ...], None]] = {}
    for op in drawn:
        if likeness(op) not in known | judging:
            families.setdefault(op.family, {})[likeness(op)] = None
    rng = random.Random(seed)
    for alike in families.values():
        judging |= set(rng.sample(list(alike), max(1, round(HELDOUT_PART * len(alike)))))
    heldout = [op for op in drawn if likeness(op) in judging]
    most = max(1, round(HELDOUT_PART * len(drawn)))
    teaching.update((op, None) for op in drawn if likeness(op) not in judging)
    return list(teaching), rng.sample(heldout, most) if len(heldout) > most else heldout
