"""Fused attention: ordinary, with earlier generations of kernels, and latent (keys wider than values)."""

from __future__ import annotations

from typing import Any

from stepsight.dataset.kinds.call_dims import attention as call_dims
from stepsight.dataset.kinds.kind_table import OpKind

_ATTENTION = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
_LATENT = ("batch", "heads", "q_len", "kv_len", "qk_dim", "v_dim", "causal")  # as many keys as queries

# PyTorch's calls and the place of their argument ``causal``.
_FORWARD_CALLS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_attention_math": 5,
    "aten::_scaled_dot_product_fused_attention_overrideable": 5,
}
_BACKWARD_CALLS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
}


def _pairs(q_len: int, kv_len: int, causal: int) -> float:
    """Number of query-key pairs that are computed: a causal mask halves a square score matrix."""
    return q_len * kv_len * (0.5 if causal else 1.0)


def _elements(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int) -> float:
    return batch * head_dim * (2.0 * heads * q_len + 2.0 * kv_heads * kv_len)


def _latent_elements(batch: int, heads: int, q_len: int, kv_len: int, qk_dim: int, v_dim: int) -> float:
    return float(batch * heads * (qk_dim + v_dim) * (q_len + kv_len))


_FUSED: dict[str, Any] = {"bound": "compute", "flags": ("causal",), "keeps_second_operand": True}


def _attention(name: str, code: int, flops: float, passes: float, **more: Any) -> OpKind:
    """Ordinary attention; ``flops`` for each pair and element of a head, ``passes`` over what it reads and writes."""
    return OpKind(
        name=name,
        family="attention",
        dim_names=_ATTENTION,
        flops=lambda b, h, g, q, k, d, c: flops * b * h * d * _pairs(q, k, c),
        elements=lambda b, h, g, q, k, d, c: passes * _elements(b, h, g, q, k, d),
        code=code,
        units=lambda b, h, g, q, k, d, c: b * h,
        operands=lambda b, h, g, q, k, d, c: (passes * _elements(b, h, g, q, k, d), b * h * q * k, 0.0),
        grid=lambda b, h, g, q, k, d, c: (b * h, q, 1),  # tiled by queries alone
        padded="head_dim",
        **_FUSED,
        **more,
    )


def _latent(name: str, code: int, widths: tuple[int, int], passes: float, **more: Any) -> OpKind:
    """Latent attention; ``widths``: number of passes of each pair over the width of keys and of values."""
    keys, values = widths
    return OpKind(
        name=name,
        family="latent_attention",
        dim_names=_LATENT,
        flops=lambda b, h, q, k, d, v, c: 2.0 * b * h * (keys * d + values * v) * _pairs(q, k, c),
        elements=lambda b, h, q, k, d, v, c: passes * _latent_elements(b, h, q, k, d, v),
        code=code,
        units=lambda b, h, q, k, d, v, c: b * h,
        operands=lambda b, h, q, k, d, v, c: (passes * _latent_elements(b, h, q, k, d, v), b * h * q * k, 0.0),
        grid=lambda b, h, q, k, d, v, c: (b * h, q, 1),
        **_FUSED,
        **more,
    )


KINDS = (
    _attention(
        "attention",
        4,
        4.0,
        1.0,
        calls={
            **{name: call_dims(0, causal_at) for name, causal_at in _FORWARD_CALLS.items()},
            "flash_attn::_flash_attn_forward": call_dims(0, 5, heads_first=False),
        },
    ),
    _attention(
        "attention_backward",
        5,
        10.0,
        2.0,
        base="attention",
        calls={
            **{name: call_dims(1, causal_at) for name, causal_at in _BACKWARD_CALLS.items()},
            "flash_attn::_flash_attn_backward": call_dims(1, 11, heads_first=False),
        },
    ),
    _latent(
        "mla_attention",
        30,
        (1, 1),
        1.0,
        base="attention",
        base_dims=lambda b, h, q, k, d, v, c: (b, h, h, q, k, (d + v) // 2, c),
    ),
    _latent("mla_attention_backward", 31, (3, 2), 2.0, base="mla_attention"),
    # Earlier generations, for software that is known to run them.  torch only has the last one.
    _attention("flash1_attention", 47, 4.0, 1.0, base="flash2_attention", in_harness=False),
    _attention("flash1_attention_backward", 48, 10.0, 2.0, base="flash2_attention_backward", in_harness=False),
    _attention("flash2_attention", 49, 4.0, 1.0, base="attention", in_harness=False),
    _attention("flash2_attention_backward", 50, 10.0, 2.0, base="attention_backward", in_harness=False),
)
