"""Ops and collectives: work by its signature.

Two ops with the same signature are the same event: they are measured once and predicted once
(the saving of DistSim, arXiv:2306.08423).  A kind says what its dimensions mean and how many FLOP and
elements it moves; nothing here knows any hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

DTYPE_BYTES = MappingProxyType({"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1})
MOST_SIZE = 2**48  # elements and bytes that anybody measured: beyond, a number is a slip of the pen
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


@dataclass(frozen=True, slots=True)
class OpKind:
    """What the dimensions of one kind of op mean, and what they cost.

    Attributes:
        name: Kind, as in ``Op.kind``.
        family: Ops of a family share a regressor (``gemm``, ``attention``, ``norm``, …).
        dim_names: Names of ``Op.dims``, in order.
        flops: FLOP of one call from its dims (one multiply-add is two).
        elements: Elements read plus written by one call from its dims.
    """

    name: str
    family: str
    dim_names: tuple[str, ...]
    flops: Callable[..., float]
    elements: Callable[..., float]


def _attention_pairs(q_len: int, kv_len: int, causal: int) -> float:
    """Number of query-key pairs that count: a causal mask halves a square score matrix."""
    return q_len * kv_len * (0.5 if causal else 1.0)


def _attention_elements(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int) -> float:
    return batch * head_dim * (2.0 * heads * q_len + 2.0 * kv_heads * kv_len)


_GEMM = ("m", "n", "k")  # y[m, n] = x[m, k] @ w[n, k].T
_ATTENTION = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
_ROWS = ("rows", "hidden")
_NUMEL = ("numel",)
_MLA_ATTENTION = ("batch", "heads", "q_len", "kv_len", "qk_dim", "v_dim", "causal")
_SCORES = ("rows", "columns")
_COPIES = ("copies", "tokens", "hidden")


def _gemm_flops(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k


def _gemm_elements(m: int, n: int, k: int) -> float:
    return float(m * n + m * k + n * k)


def _kinds() -> dict[str, OpKind]:
    kinds = [
        OpKind("linear", "gemm", _GEMM, _gemm_flops, _gemm_elements),
        OpKind("linear_dgrad", "gemm", _GEMM, _gemm_flops, _gemm_elements),
        OpKind("linear_wgrad", "gemm", _GEMM, _gemm_flops, _gemm_elements),
        OpKind("bias_grad", "reduce", _ROWS, lambda r, h: float(r * h), lambda r, h: float(r * h + h)),
        OpKind(
            "attention",
            "attention",
            _ATTENTION,
            lambda b, h, g, q, k, d, c: 4.0 * b * h * d * _attention_pairs(q, k, c),
            lambda b, h, g, q, k, d, c: _attention_elements(b, h, g, q, k, d),
        ),
        OpKind(
            "attention_backward",
            "attention",
            _ATTENTION,
            lambda b, h, g, q, k, d, c: 10.0 * b * h * d * _attention_pairs(q, k, c),
            lambda b, h, g, q, k, d, c: 2.0 * _attention_elements(b, h, g, q, k, d),
        ),
        OpKind(
            "embedding", "embedding", ("tokens", "hidden", "vocab"), lambda t, h, v: 0.0, lambda t, h, v: 2.0 * t * h
        ),
        OpKind(
            "embedding_backward",
            "embedding",
            ("tokens", "hidden", "vocab"),
            lambda t, h, v: float(t * h),
            lambda t, h, v: 3.0 * t * h + v * h,
        ),
        OpKind("cross_entropy", "loss", ("rows", "vocab"), lambda r, v: 5.0 * r * v, lambda r, v: 2.0 * r * v),
        OpKind("cross_entropy_backward", "loss", ("rows", "vocab"), lambda r, v: 3.0 * r * v, lambda r, v: 2.0 * r * v),
        OpKind("adamw", "optimizer", ("numel", "tensors"), lambda n, t: 12.0 * n, lambda n, t: 7.0 * n),
        OpKind("grad_norm", "optimizer", ("numel", "tensors"), lambda n, t: 2.0 * n, lambda n, t: float(n)),
    ]
    for name, flops, moved in (
        ("layer_norm", 8.0, 2.0),
        ("layer_norm_backward", 14.0, 3.0),
        ("rms_norm", 5.0, 2.0),
        ("rms_norm_backward", 10.0, 3.0),
    ):
        kinds.append(OpKind(name, "norm", _ROWS, lambda r, h, f=flops: f * r * h, lambda r, h, e=moved: e * r * h))
    # Element-wise kinds: dims are the elements of one operand; (FLOP, operands read and written) per element.
    for name, flops, moved in (
        ("gelu", 10.0, 2.0),
        ("gelu_backward", 15.0, 3.0),
        ("swiglu", 6.0, 3.0),
        ("swiglu_backward", 12.0, 5.0),
        ("rope", 4.0, 2.0),
        ("rope_backward", 4.0, 2.0),
        ("dropout", 2.0, 2.5),  # the mask takes a byte, half of an element in 16 bits
        ("dropout_backward", 1.0, 2.5),
        ("add", 1.0, 3.0),
        ("copy", 0.0, 2.0),
        ("fill", 0.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("elementwise", 1.0, 2.0),
    ):
        kinds.append(OpKind(name, "elementwise", _NUMEL, lambda n, f=flops: f * n, lambda n, e=moved: e * n))
    kinds += _later_kinds({kind.name: kind for kind in kinds})
    return {kind.name: kind for kind in kinds}


def _later_kinds(kinds_of: Mapping[str, OpKind]) -> list[OpKind]:
    """Kinds of larger models; their place after the others keeps the numbers that features give those.

    ``kinds_of``: the earlier ones by name.
    """
    kinds = [
        # Many small matrix products of one shape: a product for every pair of matrices.
        OpKind(
            "batched_matmul",
            "batched_gemm",
            ("batch", *_GEMM),
            lambda b, m, n, k: b * _gemm_flops(m, n, k),
            lambda b, m, n, k: b * _gemm_elements(m, n, k),
        ),
        # Keys wider than values, as many of them as queries (multi-head latent attention).
        OpKind(
            "mla_attention",
            "latent_attention",
            _MLA_ATTENTION,
            lambda b, h, q, k, d, v, c: 2.0 * b * h * (d + v) * _attention_pairs(q, k, c),
            lambda b, h, q, k, d, v, c: float(b * h * (d + v) * (q + k)),
        ),
        OpKind(
            "mla_attention_backward",
            "latent_attention",
            _MLA_ATTENTION,
            lambda b, h, q, k, d, v, c: 2.0 * b * h * (3 * d + 2 * v) * _attention_pairs(q, k, c),
            lambda b, h, q, k, d, v, c: 2.0 * b * h * (d + v) * (q + k),
        ),
        OpKind("softmax", "softmax", _SCORES, lambda r, c: 5.0 * r * c, lambda r, c: 2.0 * r * c),
        OpKind("softmax_backward", "softmax", _SCORES, lambda r, c: 4.0 * r * c, lambda r, c: 3.0 * r * c),
        # Rows to their experts' order, and the copies of a row weighted and summed.
        OpKind("permute", "permute", _COPIES, lambda c, t, h: 0.0, lambda c, t, h: float((c + t) * h)),
        OpKind("unpermute", "permute", _COPIES, lambda c, t, h: 2.0 * c * h, lambda c, t, h: float((c + t) * h)),
        OpKind(
            "unpermute_backward",
            "permute",
            _COPIES,
            lambda c, t, h: 4.0 * c * h,
            lambda c, t, h: float((3 * c + t) * h),
        ),
        # Between device and host.
        OpKind("to_host", "transfer", _NUMEL, lambda n: 0.0, lambda n: float(n)),
        OpKind("from_host", "transfer", _NUMEL, lambda n: 0.0, lambda n: float(n)),
    ]
    for name in ("grouped_linear", "grouped_linear_dgrad", "grouped_linear_wgrad"):
        # A product for every group of the rows; m: rows of all groups.
        kinds.append(
            OpKind(
                name,
                "grouped_gemm",
                ("groups", *_GEMM),
                lambda g, m, n, k: _gemm_flops(m, n, k),
                lambda g, m, n, k: float(m * n + m * k + g * n * k),
            )
        )
    for name, flops, moved in (
        ("relu", 1.0, 2.0),
        ("relu_backward", 1.0, 3.0),
        ("geglu", 11.0, 3.0),
        ("geglu_backward", 17.0, 5.0),
    ):
        kinds.append(OpKind(name, "elementwise", _NUMEL, lambda n, f=flops: f * n, lambda n, e=moved: e * n))
    # The optimizer's step on the host.
    kinds.append(OpKind("adamw_host", "host", ("numel", "tensors"), lambda n, t: 12.0 * n, lambda n, t: 7.0 * n))
    # Earlier generations of fused attention, where it is known which one runs.
    for generation in ("flash1", "flash2"):
        kinds += [replace(kinds_of[name], name=f"{generation}_{name}") for name in ("attention", "attention_backward")]
    # From the 16 bits that an op's dtype says to fp32, or back.
    kinds.append(OpKind("cast", "elementwise", _NUMEL, lambda n: 0.0, lambda n: 3.0 * n))
    return kinds


OP_KINDS = MappingProxyType(_kinds())


@dataclass(frozen=True, slots=True)
class Op:
    """One compute kernel call by its signature.

    Attributes:
        kind: A key of ``OP_KINDS``.
        dims: Sizes, in the order of the kind's ``dim_names``.
        dtype: A key of ``DTYPE_BYTES``.
    """

    kind: str
    dims: tuple[int, ...]
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        kind = OP_KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"op kind must be one of {', '.join(OP_KINDS)}, got {self.kind!r:.80}")
        if len(self.dims) != len(kind.dim_names) or min(self.dims) < 0:
            raise ValueError(f"{self.kind} takes non-negative dims {kind.dim_names}, got {self.dims}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r:.80}")

    @property
    def family(self) -> str:
        return OP_KINDS[self.kind].family

    @property
    def flops(self) -> float:
        """FLOP of one call."""
        return OP_KINDS[self.kind].flops(*self.dims)

    @property
    def num_bytes(self) -> float:
        """Bytes read plus written by one call."""
        return OP_KINDS[self.kind].elements(*self.dims) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.kind}[{'x'.join(map(str, self.dims))}]{self.dtype}"


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication by its signature.

    Attributes:
        kind: One of ``COLLECTIVE_KINDS``.
        num_bytes: Bytes of the full buffer: the reduced buffer of an all-reduce, the gathered output of
            an all-gather, the whole input of a reduce-scatter, the input of one rank of an all-to-all, the
            message of a send/recv.
        group_size: Ranks that take part.
        ranks_per_node: How many of them share a node (``group_size`` when all do).
    """

    kind: str
    num_bytes: int
    group_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVE_KINDS:
            raise ValueError(f"collective kind must be one of {', '.join(COLLECTIVE_KINDS)}, got {self.kind!r:.80}")
        if self.group_size < 2 or not 1 <= self.ranks_per_node <= self.group_size or self.num_bytes < 0:
            raise ValueError(
                "a collective needs num_bytes >= 0, group_size >= 2 and 1 <= ranks_per_node <= group_size, got "
                f"{self.num_bytes}, {self.group_size}, {self.ranks_per_node}"
            )

    @property
    def num_nodes(self) -> int:
        return -(-self.group_size // self.ranks_per_node)

    def __str__(self) -> str:
        return f"{self.kind}[{self.num_bytes}B over {self.group_size} ranks, {self.ranks_per_node} per node]"
