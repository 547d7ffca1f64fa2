"""Names and shapes of framework calls to op signatures.

One table from a call's name to what it is.  A call that is in the table stands for everything it calls; a call that is
not stands aside for classified calls within it, and counts as ``elementwise`` if there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepsight.dataset.caching import Memo
from stepsight.dataset.op import OP_KINDS, Op

Args = Mapping[str, Any]
Signature = tuple[str, tuple[int, ...]]  # kind, dims

# What the profiler calls a dtype -> ours, and how many of ours one element weighs.
DTYPES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "float": ("fp32", 1.0),
        "c10::BFloat16": ("bf16", 1.0),
        "c10::Half": ("fp16", 1.0),
        "double": ("fp32", 2.0),
        "long int": ("fp32", 2.0),
        "long": ("fp32", 2.0),
        "int": ("fp32", 1.0),
        "short": ("fp16", 1.0),
        "bool": ("fp8", 1.0),
        "unsigned char": ("fp8", 1.0),
        "signed char": ("fp8", 1.0),
        "c10::Float8_e4m3fn": ("fp8", 1.0),
        "c10::Float8_e5m2": ("fp8", 1.0),
    }
)

# Bytes of an element, by the profiler's names and by those that NCCL records carry.
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float": 4, "int": 4, "double": 8, "long": 8, "long int": 8, "short": 2, "c10::BFloat16": 2, "c10::Half": 2,
        "bool": 1, "unsigned char": 1, "signed char": 1, "Float": 4, "Int": 4, "Double": 8, "Long": 8, "Short": 2,
        "BFloat16": 2, "Half": 2, "Bool": 1, "Byte": 1, "Char": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
    }
)  # fmt: skip


@dataclass(slots=True)
class Scope:
    """What encloses a call.

    Attributes:
        backward: Name of the autograd node being evaluated, "" in forward.
        forward_dims: ``(m, n, k)`` of the forward product that this backward belongs to, if known.
        products: Matrix products seen so far in this backward.
    """

    backward: str = ""
    forward_dims: tuple[int, ...] = ()
    products: int = 0


def _dims(args: Args) -> list[Any]:
    return args.get("Input Dims") or []


def _shape(args: Args, index: int) -> list[int]:
    dims = _dims(args)
    shape = dims[index] if index < len(dims) else []
    return shape if not shape or not isinstance(shape[0], list) else []


def _literal(args: Args, index: int) -> str:
    values = args.get("Concrete Inputs") or []
    return str(values[index]) if index < len(values) else ""


def count(shape: Sequence[Any]) -> int:
    """Elements of a shape; of a list of shapes, their sum; 0 if it is not known."""
    if shape and isinstance(shape[0], list):
        return sum(math.prod(part) for part in shape)
    return math.prod(shape) if shape else 0


def _largest(args: Args) -> int:
    return max((count(shape) for shape in _dims(args) if shape), default=0)


def _rows(kind: str, index: int) -> Callable[[Args, Scope], Signature]:
    """Kinds of (rows, last dimension) by the shape of one input."""

    def classify(args: Args, scope: Scope) -> Signature:
        shape = _shape(args, index)
        last = shape[-1] if shape else 0
        return kind, (count(shape) // last if last else 0, last)

    return classify


def _flat(kind: str) -> Callable[[Args, Scope], Signature]:
    return lambda args, scope: (kind, (_largest(args),))


def _first(kind: str) -> Callable[[Args, Scope], Signature]:
    return lambda args, scope: (kind, (count(_dims(args)[0]) if _dims(args) else 0,))


def _norm(kind: str, index: int, weight: int) -> Callable[[Args, Scope], Signature]:
    """Norms over the trailing dimensions that the weight has."""

    def classify(args: Args, scope: Scope) -> Signature:
        shape, hidden = _shape(args, index), count(_shape(args, weight))
        hidden = hidden or (shape[-1] if shape else 0)
        return kind, (count(shape) // hidden if hidden else 0, hidden)

    return classify


def _embedding(args: Args, scope: Scope) -> Signature:
    weight, indices = _shape(args, 0), _shape(args, 1)
    vocab, hidden = weight if len(weight) == 2 else (0, 0)
    return "embedding", (count(indices), hidden, vocab)


def _embedding_backward(args: Args, scope: Scope) -> Signature:
    grad, literal = _shape(args, 0), _literal(args, 2)
    hidden = grad[-1] if grad else 0
    return "embedding_backward", (count(grad) // max(hidden, 1), hidden, int(literal) if literal.isdigit() else 0)


def _attention(kind: str, q_at: int, causal_at: int, heads_first: bool = True) -> Callable[[Args, Scope], Signature]:
    def classify(args: Args, scope: Scope) -> Signature:
        q, k = _shape(args, q_at), _shape(args, q_at + 1)
        if len(q) != 4 or len(k) != 4:
            return kind, (0,) * 7
        if not heads_first:
            q, k = [q[0], q[2], q[1], q[3]], [k[0], k[2], k[1], k[3]]
        literal = _literal(args, causal_at)
        causal = int(literal == "True") if literal else int(q[2] == k[2])
        return kind, (q[0], q[1], k[1], q[2], k[2], q[3], causal)

    return classify


def _product(first: int) -> Callable[[Args, Scope], Signature]:
    """A matrix product whose left operand is input ``first``: forward, gradient of the input or of the weight."""

    def classify(args: Args, scope: Scope) -> Signature:
        left, right = _shape(args, first), _shape(args, first + 1)
        if len(left) < 2 or len(right) < 2:
            return "linear", (0, 0, 0)
        batch = math.prod(left[:-2])
        rows, inner, columns = left[-2], left[-1], right[-1]
        if not scope.backward:
            return "linear", (batch * rows, columns, inner)
        scope.products += 1
        if _is_weight_gradient(args, scope, first, (rows, inner, columns)):
            # (n, R) x (R, k); a weight stored as (k, n) swaps the outer two
            out, into = rows, columns
            if len(scope.forward_dims) == 3 and scope.forward_dims[1:] == (columns, rows) and rows != columns:
                out, into = columns, rows
            return "linear_wgrad", (batch * inner, out, into)
        return "linear_dgrad", (batch * rows, inner, columns)

    return classify


def _is_weight_gradient(args: Args, scope: Scope, first: int, sizes: tuple[int, int, int]) -> bool:
    rows, inner, columns = sizes
    if len(scope.forward_dims) == 3:
        m, n, k = scope.forward_dims
        is_weight, is_input = inner == m and {rows, columns} == {n, k}, (rows, inner, columns) == (m, n, k)
        if is_weight != is_input:
            return is_weight
    strides = args.get("Input Strides") or []
    left = strides[first] if first < len(strides) else []
    if len(left) >= 2 and rows > 1 and inner > 1:
        return bool(left[-2] == 1)
    return scope.products == 2


def _sum(args: Args, scope: Scope) -> Signature:
    """In backward, a sum over all dimensions but the last is the gradient of a bias."""
    shape, over = _shape(args, 0), _literal(args, 1)
    if scope.backward and len(shape) >= 2 and over == str(list(range(len(shape) - 1))):
        return "bias_grad", (math.prod(shape[:-1]), shape[-1])
    return "reduce", (count(shape),)


def _tensors(kind: str) -> Callable[[Args, Scope], Signature]:
    def classify(args: Args, scope: Scope) -> Signature:
        dims = _dims(args)
        shapes = dims[0] if dims and isinstance(dims[0], list) else []
        return kind, (sum(math.prod(shape) for shape in shapes if isinstance(shape, list)), len(shapes))

    return classify


def _dropout(args: Args, scope: Scope) -> Signature | None:
    return None if _literal(args, 1) in ("0.", "0") or _literal(args, 2) == "False" else ("dropout", (_largest(args),))


def _table() -> dict[str, Callable[[Args, Scope], Signature | None]]:
    table: dict[str, Callable[[Args, Scope], Signature | None]] = {
        "aten::mm": _product(0),
        "aten::bmm": _product(0),
        "aten::addmm": _product(1),
        "aten::baddbmm": _product(1),
        "aten::native_layer_norm": _norm("layer_norm", 0, 2),
        "aten::native_layer_norm_backward": _norm("layer_norm_backward", 1, 5),
        "aten::_fused_rms_norm": _norm("rms_norm", 0, 2),
        "aten::_fused_rms_norm_backward": _norm("rms_norm_backward", 1, 4),
        "aten::rms_norm": _norm("rms_norm", 0, 2),
        "fsdp::all_gather_copy_in": _first("copy"),
        "fsdp::chunk_cat": _first("copy"),
        "aten::_chunk_cat": _first("copy"),
        "torch::distributed::reducer::mul_out": _flat("copy"),
        "aten::gelu": _first("gelu"),
        "aten::gelu_backward": _first("gelu_backward"),
        "aten::embedding": _embedding,
        "aten::embedding_dense_backward": _embedding_backward,
        "aten::cross_entropy_loss": _rows("cross_entropy", 0),
        "aten::log_softmax": _rows("cross_entropy", 0),
        "aten::_log_softmax": _rows("cross_entropy", 0),
        "aten::nll_loss_nd": _rows("cross_entropy", 0),
        "aten::nll_loss": _rows("cross_entropy", 0),
        "aten::nll_loss_forward": _rows("cross_entropy", 0),
        "aten::nll_loss_backward": _rows("cross_entropy_backward", 1),
        "aten::_log_softmax_backward_data": _rows("cross_entropy_backward", 0),
        "aten::_fused_adamw_": _tensors("adamw"),
        "aten::_fused_adam_": _tensors("adamw"),
        "aten::_foreach_norm": _tensors("grad_norm"),
        "aten::native_dropout": _flat("dropout"),
        "aten::native_dropout_backward": _flat("dropout_backward"),
        "aten::dropout": _dropout,
        "aten::sum": _sum,
    }
    for name, causal_at in (
        ("_scaled_dot_product_flash_attention_for_cpu", 4),
        ("_scaled_dot_product_flash_attention", 4),
        ("_scaled_dot_product_efficient_attention", 6),
        ("_scaled_dot_product_cudnn_attention", 6),
        ("_scaled_dot_product_attention_math", 5),
        ("_scaled_dot_product_fused_attention_overrideable", 5),
    ):
        table[f"aten::{name}"] = _attention("attention", 0, causal_at)
    for name, causal_at in (
        ("_scaled_dot_product_flash_attention_for_cpu_backward", 7),
        ("_scaled_dot_product_flash_attention_backward", 11),
        ("_scaled_dot_product_efficient_attention_backward", 11),
        ("_scaled_dot_product_cudnn_attention_backward", 14),
    ):
        table[f"aten::{name}"] = _attention("attention_backward", 1, causal_at)
    table["flash_attn::_flash_attn_forward"] = _attention("attention", 0, 5, heads_first=False)
    table["flash_attn::_flash_attn_backward"] = _attention("attention_backward", 1, 11, heads_first=False)
    for kind, names in _ELEMENTWISE.items():
        for name in names.split():
            table[name if "::" in name else f"aten::{name}"] = _flat(kind)
    return table


_ELEMENTWISE = {
    "add": "add add_ sub sub_ rsub _foreach_add_ _foreach_add",
    "copy": "copy_ clone _to_copy cat stack split_with_sizes_copy index_select gather index repeat "
    "repeat_interleave flip roll _foreach_copy_ fsdp::split_with_sizes_copy "
    "slice_backward select_backward constant_pad_nd",
    "fill": "fill_ zero_ _foreach_zero_",
    "reduce": "mean max amax min amin any all argmax argmin logsumexp norm linalg_vector_norm prod var std var_mean "
    "cumsum count_nonzero",
    "elementwise": "mul mul_ div div_ exp log log2 neg abs sqrt rsqrt reciprocal pow where sigmoid sigmoid_ "
    "sigmoid_backward silu silu_ silu_backward tanh tanh_backward relu relu_ threshold_backward softplus masked_fill "
    "masked_fill_ eq ne lt gt le ge logical_not logical_and logical_or bitwise_and bitwise_or bitwise_not "
    "clamp clamp_ clamp_min maximum minimum sin cos erf isnan isfinite isinf addcmul addcmul_ addcdiv "
    "addcdiv_ lerp lerp_ square sign floor ceil round remainder _softmax _softmax_backward_data tril triu "
    "tril_ triu_ scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_put_ _index_put_impl_ "
    "arange random_ normal_ uniform_ bernoulli_ exponential_ _foreach_mul_ _foreach_mul _foreach_div_ "
    "_foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_ _foreach_sqrt "
    "_amp_foreach_non_finite_check_and_unscale_",
}

TABLE = MappingProxyType(_table())

_JOINS = ("aten::cat", "aten::stack")
# Kinds whose calls come in parts that belong together: a following call of equal signature joins the one before.
MERGED = frozenset({"cross_entropy", "cross_entropy_backward"})

_interned: Memo[tuple[str, tuple[int, ...], str], Op] = Memo("ops of traces", 100_000)


def intern_op(kind: str, dims: tuple[int, ...], dtype: str) -> Op:
    """The op of that signature; equal signatures share one object."""
    key = (kind, dims, dtype)
    op = _interned.get(key)
    if op is None:
        op = _interned[key] = Op(kind, dims, dtype)
    return op


def _dtype(args: Args, of_list: str = "fp32") -> tuple[str, float]:
    for name in args.get("Input type") or ():
        if name in DTYPES:
            return DTYPES[name]
        if name == "TensorList":
            break
    return of_list, 1.0


def classify(name: str, args: Args, scope: Scope, before: str = "fp32") -> Op | None:
    """Signature of a call that is in ``TABLE``; None if it moves at most one element or is no work.

    ``before``: dtype of the op before it.  Traces do not tell that of a list of tensors; those that are joined come
    from just there.
    """
    signature = TABLE[name](args, scope)
    if signature is None:
        return None
    return _weigh(signature, args, before if name in _JOINS else "fp32")


def classify_unknown(args: Args) -> Op | None:
    """A call of no known kind: ``elementwise`` over its largest input, or None if that is a scalar."""
    return _weigh(("elementwise", (_largest(args),)), args)


def _weigh(signature: Signature, args: Args, of_list: str = "fp32") -> Op | None:
    kind, dims = signature
    dtype, weight = _dtype(args, of_list)
    if len(dims) == 1:
        if dims[0] <= 1 and _dims(args):
            return None
        dims = (int(dims[0] * weight),)
    return intern_op(kind, dims, dtype)


def annotated_op(values: Mapping[str, str]) -> Op:
    """The op that ``stepsight::op kind=… dims=4x8 dtype=…`` names.

    Raises:
        ValueError: If there is no such kind, or its dims are wrong.
    """
    kind, dims = values["kind"], tuple(int(part) for part in values["dims"].split("x"))
    if kind not in OP_KINDS:
        raise ValueError(f"op kind must be one of {', '.join(OP_KINDS)}, got {kind!r:.80}")
    return intern_op(kind, dims, values.get("dtype", "fp32"))
