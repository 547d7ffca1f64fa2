"""Sizes of torchtitan's models by name and flavor, which its configurations name and its code holds.

Source: torchtitan ``models/*/__init__.py`` and ``model/args.py``, 2024-07 to 2026-02.  ``ffn`` is what
``ffn_dim_multiplier`` and ``multiple_of`` give.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stepsight.dataset.job.job import ModelSpec

_Sizes = tuple[int, ...]


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {"family": "llama", "vocab": 128256, **sizes, **more}


def _latent(
    layers: int, hidden: int, heads: int, ffn: int, q_rank: int, experts: _Sizes, **more: Any
) -> dict[str, Any]:
    count, used, inner, shared, dense = experts
    return {
        **_llama(layers, hidden, heads, heads, ffn),
        **{"attention": "mla", "head_dim": 128, "q_lora_rank": q_rank, "kv_lora_rank": 512, "rope_head_dim": 64},
        **{"v_head_dim": 128, "experts": count, "experts_per_token": used, "expert_ffn": inner},
        **{"shared_experts": shared, "dense_layers": dense, "vocab": 102400},
        **more,
    }


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return _llama(layers, hidden, heads, kv_heads, ffn, head_dim=128, **{"vocab": 151936, **more})


def _experts(count: int, used: int, inner: int, shared: int = 0) -> dict[str, Any]:
    return {"experts": count, "experts_per_token": used, "expert_ffn": inner, "shared_experts": shared}


_TIED = {"tied_embeddings": True}
_DEBUG = {"vocab": 2048}
FLAVORS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama2": {
            "debugmodel": _llama(8, 256, 16, 16, 768, vocab=32000),
            "7B": _llama(32, 4096, 32, 32, 11008, vocab=32000),
            "13B": _llama(40, 5120, 40, 40, 13824, vocab=32000),
            "26B": _llama(80, 5120, 40, 40, 13824, vocab=32000),
            "70B": _llama(80, 8192, 64, 8, 28672, vocab=32000),
        },
        "llama3": {
            "debugmodel": _llama(6, 256, 16, 16, 768, **_DEBUG),
            "1B": _llama(16, 2048, 32, 8, 8192, **_TIED),
            "3B": _llama(28, 3072, 24, 8, 8192, **_TIED),
            "8B": _llama(32, 4096, 32, 8, 14336),
            "70B": _llama(80, 8192, 64, 8, 28672),
            "405B": _llama(126, 16384, 128, 8, 53248),
        },
        "llama4": {
            "debugmodel": _llama(6, 256, 16, 16, 768, moe_every=2, **_experts(8, 1, 512, 1), **_DEBUG),
            "17bx16e": _llama(48, 5120, 40, 8, 16384, vocab=202048, **_experts(16, 1, 8192, 1)),
            "17bx128e": _llama(48, 5120, 40, 8, 16384, vocab=202048, moe_every=2, **_experts(128, 1, 8192, 1)),
        },
        "deepseek_v3": {
            "debugmodel": _latent(6, 256, 16, 1024, 0, (8, 3, 256, 2, 1), **_DEBUG),
            "16B": _latent(27, 2048, 16, 10944, 0, (64, 6, 1408, 2, 1)),
            "236B": _latent(60, 5120, 128, 12288, 1536, (160, 6, 1536, 2, 1)),
            "671B": _latent(61, 7168, 128, 18432, 1536, (256, 8, 2048, 1, 3), vocab=129280),
        },
        "qwen3": {
            "debugmodel": _qwen(8, 256, 16, 8, 3072, **_DEBUG, **_TIED),
            "debugmodel_moe": _qwen(8, 256, 16, 8, 3072, **_DEBUG, **_experts(64, 8, 768)),
            "0.6B": _qwen(28, 1024, 16, 8, 3072, **_TIED),
            "1.7B": _qwen(28, 2048, 16, 8, 6144, **_TIED),
            "4B": _qwen(36, 2560, 32, 8, 9728, **_TIED),
            "8B": _qwen(36, 4096, 32, 8, 12288),
            "14B": _qwen(40, 5120, 40, 8, 17408),
            "32B": _qwen(64, 5120, 64, 8, 25600),
            "30B-A3B": _qwen(48, 2048, 32, 4, 6144, **_experts(128, 8, 768)),
            "235B-A22B": _qwen(94, 4096, 64, 4, 12288, **_experts(128, 8, 1536)),
        },
        "gpt_oss": {
            "debugmodel": _llama(4, 256, 64, 8, 2880, head_dim=64, vocab=201088, **_experts(8, 4, 2880)),
            "20b": _llama(24, 2880, 64, 8, 2880, head_dim=64, vocab=201088, **_experts(32, 4, 2880)),
            "120b": _llama(36, 2880, 64, 8, 2880, head_dim=64, vocab=201088, **_experts(128, 4, 2880)),
        },
    }
)
_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope")  # of flavors that differ in attention alone


def flavor_sizes(name: str, flavor: str) -> dict[str, Any] | None:
    """Sizes of a flavor, as keys of a job's model; None if it is not known."""
    longest = max((family for family in FLAVORS if family in name), key=len, default="")
    name = longest or name  # experiments name theirs simple_fsdp.llama3, llama3_ft ...
    for suffix in _SUFFIXES:
        flavor = flavor.removesuffix(suffix)
    found = FLAVORS.get(name, {}).get(flavor)
    return None if found is None else dict(found)


def flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """Name and flavor whose sizes a model has; its vocabulary may be padded."""
    for name, flavors in FLAVORS.items():
        for flavor, sizes in flavors.items():
            exact = {key: value for key, value in sizes.items() if key != "vocab"}
            same = all(getattr(model, key) == value for key, value in exact.items())
            others = {key for key in ("experts", "attention", "tied_embeddings") if key not in exact}
            plain = all(getattr(model, key) in (0, "mha", False) for key in others)
            if same and plain and 0 <= model.vocab - sizes["vocab"] < 1024 and model.gated_mlp:
                return name, flavor
    return None
