"""The mode in which a captured script runs: tensors have shapes and no values, and every kernel is recorded.

Small tensors of integers and booleans that depend on no fake tensor stay real, so that meshes, indices and token ids
work as they are.  Where a script reads a value of a fake tensor it is told 1.0, 1 or False.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..base.errors import own_place
from ..base.patching import always, cpu_of
from .distributed import Collectives, refuse_sparse
from .recorder import OP, Recorder, signature_of, storage_of
from .value_estimates import RESULTS, follow, selects_unknown, spread_of

MOST_REAL = 2**20  # elements of a tensor that may stay real
FORWARD, BACKWARD, OPTIMIZER = range(3)
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_REAL_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_aten = torch.ops.aten
_WRITES_INPUTS = ("fsdp::all_gather_copy_in",)  # and return parts of them, which their schemas do not say
_NO_KERNEL = ("aten::_indices", "aten::_values", "aten::_sparse_coo_tensor_unsafe", "aten::empty", "aten::new_empty",
              "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided", "aten::set_", "aten::resize_",
              "aten::detach_", "aten::lift_fresh", "aten::lift", "prim::device", "aten::_assert_async",
              "aten::record_stream")  # fmt: skip


class FakeWorld(TorchDispatchMode):
    """Runs ops under fake tensors and records kernels."""

    def __init__(self, recorder: Recorder, script: Path) -> None:
        super().__init__()
        self._script = script
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = recorder
        self.in_optimizer = 0
        self.composite: tuple[list[Any], list[Any], list[Any]] | None = None  # one op's reads, writes and scopes
        self.collectives = Collectives(recorder, self.scope, script)
        self._evaluations: dict[tuple[int, int], int] = {}

    is_infra_mode = always(True)  # ``torch.compile`` may trace while the mode is on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in _PLAIN or issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        kwargs, args = on_cpu(kwargs or {}), on_cpu(args)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_fake:
            if self._stays_real(func, tensors, args, kwargs):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
        elif func in _VALUES:
            return self._value(func, tensors[0])
        if func.namespace == "fsdp":
            refuse_sparse(tensors)
        if is_fake and selects_unknown(func, tensors):
            self.note("selects rows by values: all were selected, since nothing is computed")
        out = RESULTS[func](*args, **kwargs) if is_fake and func in RESULTS else None
        if out is None:
            out = FAKE.get(func, func)(*args, **kwargs)
            follow(func, args, out)
        if func.namespace == "_c10d_functional":
            self.collectives.record(func, args, kwargs, out)
        else:
            self._record(func, args, kwargs, tensors, out)
        return out

    def _stays_real(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        if func in _VALUES or (tensors and all(tensor.dim() == 0 for tensor in tensors)):
            return True
        small = lambda each: each.dtype in _REAL_TYPES and each.numel() <= MOST_REAL
        if not all(map(small, tensors)) or kwargs.get("dtype") not in (None, *_REAL_TYPES):
            return False
        try:
            outputs = tree_leaves(func(*args, **kwargs)) if not func._schema.is_mutable else tensors
        except (DynamicOutputShapeException, DataDependentOutputException):
            return True
        return all(small(out) and out.device.type == "cpu" for out in outputs if isinstance(out, Tensor))

    def _value(self, func: Any, tensor: Tensor) -> Any:
        """The value that a script gets if the real one is unknown."""
        compiles = CompileContext.try_get() is not None  # dynamo tries functions out
        if self.recorder.active and not compiles:
            self.recorder.wait_on_host(self.recorder.stream, "item", self.scope()[0])
        if func is _aten.equal.default:
            return True
        mean = spread_of(tensor).mean
        if tensor.dtype is torch.bool and mean is not None:
            return mean > 0.5
        if not compiles:
            self.note("reads a value of a tensor: it was given 1 or False, since nothing is computed")
        return False if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def note(self, what: str) -> None:
        """Note once that a line of the script does something, if one is running."""
        if line := own_place(traceback.extract_stack(), self._script):
            self.recorder.note(f"{line} {what}")

    def scope(self) -> tuple[int, int, int]:
        """Phase, evaluation of autograd (-1: forward) and autograd's sequence number."""
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            sequence = min(node._sequence_nr(), 2**62)  # the largest number: it has none
            return BACKWARD, self._evaluations.setdefault((id(node), sequence), len(self._evaluations)), sequence
        phase = OPTIMIZER if self.in_optimizer else FORWARD if torch._C._current_graph_task_id() < 0 else BACKWARD
        return phase, -1, torch._C._autograd._get_sequence_nr() - 1

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        outputs, name = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], func._schema.name
        for tensor in outputs:
            if isinstance(tensor, FakeTensor):
                self.recorder.follow(storage_of(tensor))
        if not self.recorder.active or name in _NO_KERNEL:
            return
        reads = [storage_of(tensor) for tensor in tensors]
        held = set() if name in _WRITES_INPUTS else {storage._cdata for storage in reads}
        writes = [storage for storage in map(storage_of, outputs) if storage._cdata not in held]
        for place, each in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if each.alias_info is not None and each.alias_info.is_write:
                changed = tree_leaves(args[place] if place < len(args) else kwargs.get(each.name))
                writes += [storage_of(leaf) for leaf in changed if isinstance(leaf, Tensor)]
        if not writes:
            return  # a view
        if func is _aten._embedding_bag_backward.default and outputs[0].layout is torch.sparse_coo:
            outputs = [outputs[0]._values()]  # what the kernel makes: of every index, the row of its bag
            func, args, kwargs, name = _aten.index_select.default, (args[0], 0, args[1]), {}, "aten::index_select"
        scope = self.scope()
        if self.composite is not None:
            for kept, more in zip(self.composite, (reads, writes, [scope]), strict=True):
                kept.extend(more)
            return
        work = self.recorder.work(signature_of(func, args, kwargs, outputs))
        self.recorder.add((OP, work, -1, name), reads, writes, scope)


_VALUES = (_aten._local_scalar_dense.default, _aten.equal.default)


def on_cpu(values: Any) -> Any:
    """Arguments of a call with every CUDA device replaced by the CPU, whose kernels represent the device's."""
    if isinstance(values, dict):
        device = values.get("device")
        return {**values, "device": cpu_of(device)} if device is not None else values
    if any(isinstance(value, torch.device) for value in values):
        return type(values)(cpu_of(value) if isinstance(value, torch.device) else value for value in values)
    return values


library = torch.library.Library("aten", "IMPL")


class _RMSNorm(torch.autograd.Function):
    """``_fused_rms_norm`` with its backward, as autograd has it for CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = _aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        dx, dweight = _aten._fused_rms_norm_backward.default(gradient.contiguous(), x, ctx.shape, rstd, weight, needed)
        return dx, None, dweight, None


def _fake_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    sizes = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(sizes, dtype=torch.float32)


def _fake_rms_norm_backward(gradient: Any, x: Tensor, shape: Any, rstd: Any, weight: Any, needed: list[bool]) -> Any:
    dweight = torch.empty_like(weight) if weight is not None and needed[1] else None
    return torch.empty_like(x) if needed[0] else None, dweight


def _fake_grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Of any type, as the kernels take them; PyTorch's own rule of shapes refuses all but bf16."""
    rows, columns = a.shape[-2], b.shape[-1]
    groups = [offs.shape[0]] if offs is not None and a.dim() == b.dim() == 2 else list(a.shape[:1])
    shape = [*groups, rows, columns] if a.dim() == b.dim() else [rows, columns]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _sparse_bag_gradient(gradient: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    """The rows of ``EmbeddingBag(sparse=True)``: of every index, its bag's gradient; of dense ones the table's."""
    rows, sparse = rest[4], rest[7]
    if not sparse:
        return _aten._embedding_bag_backward.default(gradient, indices, *rest)
    values = gradient.new_empty((indices.numel(), gradient.shape[1]))
    return torch.sparse_coo_tensor(indices.reshape(1, -1), values, (rows, gradient.shape[1]), check_invariants=False)


def _sparse_like(sparse: Tensor, *, coalesced: bool = True) -> Tensor:
    """A copy with as many values, which fake kernels forget; coalescing finds no index twice."""
    indices, values = torch.empty_like(sparse._indices()), torch.empty_like(sparse._values())
    return torch.sparse_coo_tensor(indices, values, sparse.shape, check_invariants=False, is_coalesced=coalesced)


# Shapes of what they return, asked for within the mode.
FAKE: dict[Any, Any] = {
    _aten._coalesce.default: _sparse_like,
    _aten.clone.default: lambda x, **kwargs: (
        _sparse_like(x, coalesced=False) if x.layout is torch.sparse_coo else _aten.clone.default(x, **kwargs)
    ),
    _aten.sparse_mask.default: lambda dense, mask: _sparse_like(mask),
    _aten._embedding_bag_backward.default: _sparse_bag_gradient,
    _aten._grouped_mm.default: _fake_grouped_mm,
    _aten._fused_rms_norm.default: _fake_rms_norm,
    _aten._fused_rms_norm_backward.default: _fake_rms_norm_backward,
}


def install_fused_kernels() -> None:
    """Let the device's fused kernels compute norms and dropout, with autograd."""
    warnings.filterwarnings("ignore", "Warning only once for all operators")
    norm, dropout = _aten._fused_rms_norm.default, torch.native_dropout
    library.impl(
        "_fused_rms_norm", lambda x, shape, weight=None, eps=None: _RMSNorm.apply(x, shape, weight, eps), "AutogradCPU"
    )
    replace_composite("rms_norm", lambda x, shape, weight=None, eps=None: norm(x, list(shape), weight, eps)[0])
    replace_composite("dropout", lambda x, p, train: dropout(x, p, True)[0] if train and p > 0 else x)


def replace_composite(name: str, function: Any) -> None:
    """Compute an op that consists of others by a function, wherever it is called, also while it is compiled."""
    library.impl(name, function, "CompositeImplicitAutograd", allow_override=True)


_ENABLED = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


class _Call(NamedTuple):
    """Arguments of ``scaled_dot_product_attention``; the rules are PyTorch 2.13's, from compute capability 8.0 on."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    gqa: bool

    def _rules(self, backend: SDPBackend) -> Iterator[tuple[bool, str]]:
        """Rules of a fused kernel, and whether the call keeps each; a rule may need those before it."""
        (q, k, v), mask, efficient = self[:3], self.mask, backend == SDPBackend.EFFICIENT_ATTENTION
        yield q.dim() == k.dim() == v.dim() == 4, "queries, keys and values must have four dimensions"
        types = (torch.float16, torch.bfloat16, *([torch.float32] if efficient else []))
        named = ", ".join(str(each)[6:] for each in types)
        yield q.dtype in types, f"queries must be of one of {named}, got {str(q.dtype)[6:]}"
        yield q.dtype == k.dtype == v.dtype, "queries, keys and values must have one type"
        yield 0 not in (q.shape[2], k.shape[2]), "sequences must not be empty"
        yield q.shape[0] == k.shape[0] == v.shape[0], "queries, keys and values must have one batch size"
        heads, of_keys, of_values = (each.shape[1] for each in (q, k, v))
        fits = heads % of_keys == 0 if self.gqa and not efficient else heads == of_keys
        rule = "heads must be as many, or with enable_gqa divide evenly (flash and cuDNN only)"
        yield fits and of_keys == of_values, rule
        given = (q, k, v) if mask is None else (q, k, v, mask)
        yield all(each.stride(-1) == 1 for each in given), "the last dimension must have stride 1"
        widths = [each.shape[-1] for each in (q, k, v)]
        if backend == SDPBackend.FLASH_ATTENTION:
            yield mask is None, "flash attention takes no mask"
            yield len({*widths}) == 1 and widths[0] <= 256, "head dimensions must be equal and at most 256"
            yield not self.is_causal or q.shape[2] == k.shape[2], "is_causal needs as many keys as queries"
        elif efficient:
            step, parts = 16 // q.element_size(), [*widths, *(each.storage_offset() for each in (q, k, v))]
            yield not any(each % step for each in parts), f"head dimensions and offsets must be multiples of {step}"
            yield widths[0] == widths[1], "queries and keys must have one head dimension"
        else:
            rule = "head dimensions must be multiples of 8 and at most 128"
            yield all(each % 8 == 0 and each <= 128 for each in widths), rule
            rule = "a mask must need no gradient and have two or four dimensions"
            yield mask is None or (not mask.requires_grad and mask.dim() in (2, 4)), rule
            yield (self.dropout_p * 16).is_integer(), "dropout must be a multiple of 1/16"
            yield k.shape[2] > 1, "there must be more than one key"

    def backend(self) -> tuple[SDPBackend, str]:
        """The kernel, in the order of PyTorch or of the script, and why the last one before it was not taken."""
        why = "all kernels are disabled"
        for each in map(SDPBackend, torch._C._get_sdp_priority_order()):
            if each in _ENABLED and _ENABLED[each]():
                rules = iter(()) if each == SDPBackend.MATH else self._rules(each)
                missed = next((rule for holds, rule in rules if not holds), "")
                if not missed:
                    return each, why
                why = missed
        raise RuntimeError(f"no kernel that the script allows takes this attention: {why}")


def install_attention(note: Callable[[str], None]) -> None:
    """Let CUDA's rules choose the kernel of ``scaled_dot_product_attention``.

    A call that no fused kernel takes goes the math path, as separate products and a softmax of all scores, in fp32;
    ``note`` tells the user why.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None and is_causal:
            raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, got both")
        backend, why = _Call(q, k, v, attn_mask, float(dropout_p), is_causal, enable_gqa).backend()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=q.dtype))
        if backend == SDPBackend.MATH:
            note(f"takes the math path of attention, with all scores in memory, since {why}")
            given = q, k, v, mask, dropout_p, is_causal
            return _aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]
        if backend == SDPBackend.FLASH_ATTENTION:
            width, more = v.shape[-1], -q.shape[-1] % 8
            q, k, v = (pad(each, (0, more)) if more else each for each in (q, k, v))
            out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :width] if more else out
        keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
        if backend == SDPBackend.CUDNN_ATTENTION:
            rest: tuple[Any, ...] = mask, keeps, dropout_p, is_causal, False
            return _aten._scaled_dot_product_cudnn_attention(q, k, v, *rest, scale=scale)[0]
        if mask is not None:
            length = k.shape[2]
            if length % 8:  # the kernel takes aligned rows alone
                mask = pad(mask, (0, -length % 8))[..., :length]
            mask = mask.expand(*q.shape[:3], length)
        rest = mask, keeps, dropout_p, is_causal
        return _aten._scaled_dot_product_efficient_attention(q, k, v, *rest, scale=scale)[0]

    replace_composite("scaled_dot_product_attention", attention)
