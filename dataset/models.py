"""A small catalogue of published models: ``[model] name = "gpt3-175b"``.

Sources: GPT-3 sizes, Brown et al. 2020 (arXiv:2005.14165) with Megatron's padded vocabulary; Llama 2 and 3,
Touvron et al. 2023 (arXiv:2307.09288) and Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from types import MappingProxyType
from typing import Any

MODELS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "gpt2-124m": {
            "family": "gpt",
            "layers": 12,
            "hidden": 768,
            "heads": 12,
            "vocab": 50257,
            "seq_len": 1024,
            "tied_embeddings": True,
        },
        "gpt3-1.3b": {"family": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "seq_len": 2048},
        "gpt3-6.7b": {"family": "gpt", "layers": 32, "hidden": 4096, "heads": 32, "vocab": 51200, "seq_len": 2048},
        "gpt3-13b": {"family": "gpt", "layers": 40, "hidden": 5120, "heads": 40, "vocab": 51200, "seq_len": 2048},
        "gpt3-175b": {"family": "gpt", "layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "seq_len": 2048},
        "llama2-7b": {
            "family": "llama",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "ffn": 11008,
            "vocab": 32000,
            "seq_len": 4096,
        },
        "llama3-8b": {
            "family": "llama",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 14336,
            "vocab": 128256,
            "seq_len": 8192,
        },
        "llama3-70b": {
            "family": "llama",
            "layers": 80,
            "hidden": 8192,
            "heads": 64,
            "kv_heads": 8,
            "ffn": 28672,
            "vocab": 128256,
            "seq_len": 8192,
        },
        "llama3-405b": {
            "family": "llama",
            "layers": 126,
            "hidden": 16384,
            "heads": 128,
            "kv_heads": 8,
            "ffn": 53248,
            "vocab": 128256,
            "seq_len": 8192,
        },
    }
)
