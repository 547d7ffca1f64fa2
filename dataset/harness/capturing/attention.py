"""Attention of the fake device: ``scaled_dot_product_attention`` by the kernel that CUDA's rules choose.

The rules are those of PyTorch 2.13 for GPUs of compute capability 8.0 and later.  A call that no fused kernel takes
goes the math path, as separate products and a softmax of all scores, in fp32; a note says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .fake_tensors import replace_composite

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
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

    def _shared(self, backend: SDPBackend) -> dict[str, bool]:
        """Rules for all fused kernels, and whether the call keeps each."""
        (q, k, v), is_efficient = self[:3], backend == SDPBackend.EFFICIENT_ATTENTION
        heads, of_keys, of_values = (each.shape[1] for each in (q, k, v))
        is_gqa, types = self.gqa and not is_efficient, (*_HALF, *([torch.float32] if is_efficient else []))
        given = [q, k, v] if self.mask is None else [q, k, v, self.mask]
        return {
            f"queries must be of one of {', '.join(str(each)[6:] for each in types)}, got {str(q.dtype)[6:]}": q.dtype
            in types,
            "queries, keys and values must have one type": q.dtype == k.dtype == v.dtype,
            "sequences must not be empty": 0 not in (q.shape[2], k.shape[2]),
            "queries, keys and values must have one batch size": q.shape[0] == k.shape[0] == v.shape[0],
            "heads must be as many, or with enable_gqa divide evenly (flash and cuDNN only)": (
                of_keys == of_values and heads % of_keys == 0 if is_gqa else heads == of_keys == of_values
            ),
            "the last dimension must have stride 1": all(each.stride(-1) == 1 for each in given),
        }

    def _own(self, backend: SDPBackend) -> dict[str, bool]:
        """Rules for one kernel, and whether the call keeps each."""
        q, k, v, mask = self[:4]
        widths = [each.shape[-1] for each in (q, k, v)]
        if backend == SDPBackend.FLASH_ATTENTION:
            return {
                "flash attention takes no mask": mask is None,
                "head dimensions must be equal and at most 256": len({*widths}) == 1 and widths[0] <= 256,
                "is_causal needs as many keys as queries": not self.is_causal or q.shape[2] == k.shape[2],
            }
        if backend == SDPBackend.EFFICIENT_ATTENTION:
            step = 16 // q.element_size()
            parts = [*widths, *(each.storage_offset() for each in (q, k, v))]
            return {
                f"head dimensions and offsets must be multiples of {step}": not any(each % step for each in parts),
                "queries and keys must have one head dimension": widths[0] == widths[1],
            }
        return {
            "head dimensions must be multiples of 8 and at most 128": all(w % 8 == 0 and w <= 128 for w in widths),
            "a mask must need no gradient and have two or four dimensions": (
                mask is None or (not mask.requires_grad and mask.dim() in (2, 4))
            ),
            "dropout must be a multiple of 1/16": (self.dropout_p * 16).is_integer(),
            "there must be more than one key": k.shape[2] > 1,
        }

    def backend(self) -> tuple[SDPBackend, str]:
        """The kernel, in the order of PyTorch or of the script, and why the last one before it was not taken."""
        why = "all kernels are disabled"
        for each in map(SDPBackend, torch._C._get_sdp_priority_order()):
            if each in _ENABLED and _ENABLED[each]():
                if each == SDPBackend.MATH:
                    return each, why
                if any(tensor.dim() != 4 for tensor in self[:3]):
                    why = "queries, keys and values must have four dimensions"
                elif missed := [rule for rule, holds in (self._shared(each) | self._own(each)).items() if not holds]:
                    why = missed[0]
                else:
                    return each, why
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
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=q.dtype))
        if backend == SDPBackend.MATH:
            note(f"takes the math path of attention, with all scores in memory, since {why}")
            given = q, k, v, attn_mask, dropout_p, is_causal
            return _aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]
        if backend == SDPBackend.FLASH_ATTENTION:
            width, more = v.shape[-1], -q.shape[-1] % 8
            q, k, v = (torch.nn.functional.pad(each, (0, more)) if more else each for each in (q, k, v))
            out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :width] if more else out
        keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
        if backend == SDPBackend.CUDNN_ATTENTION:
            more_given = attn_mask, keeps, dropout_p, is_causal, False
            return _aten._scaled_dot_product_cudnn_attention(q, k, v, *more_given, scale=scale)[0]
        if attn_mask is not None:
            length = k.shape[2]
            if length % 8:  # the kernel takes aligned rows alone
                attn_mask = torch.nn.functional.pad(attn_mask, (0, -length % 8))[..., :length]
            attn_mask = attn_mask.expand(*q.shape[:3], length)
        return _aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )[0]

    replace_composite("scaled_dot_product_attention", attention)
