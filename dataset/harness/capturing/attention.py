"""Attention of the fake device: ``scaled_dot_product_attention`` by the kernel that CUDA's rules choose.

The rules are those of PyTorch 2.13 for GPUs of compute capability 8.0 and later.  A call that no fused kernel takes
goes the math path, as separate products and a softmax of all scores, in fp32; a note says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from .fake_tensors import replace_composite

_aten = torch.ops.aten
_ENABLED = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


class _Call(NamedTuple):
    """Arguments of a call."""

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


def install(note: Callable[[str], None]) -> None:
    """Let the device's rules choose kernels; ``note`` tells the user something about a line of the script."""

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
