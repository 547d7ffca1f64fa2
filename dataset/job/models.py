"""A small catalogue of published models: ``[model] name = "gpt3-175b"``.

Sources:
    GPT-3: Brown et al. 2020 (arXiv:2005.14165), with Megatron's padded vocabulary.
    Llama 2 and 3: Touvron et al. 2023 (arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
    Mixtral 8x7B: Jiang et al. 2024 (arXiv:2401.04088); 8x22B: huggingface.co/mistralai/Mixtral-8x22B-v0.1.  Both with
        sequences of 4096 tokens, not the longest that they take.
    DeepSeek-V2-Lite: arXiv:2405.04434, appendix B; V3: arXiv:2412.19437, section 4.2, without the module that predicts
        a second token.
    BERT-Large: Devlin et al. 2018 (arXiv:1810.04805).
    T5: Raffel et al. 2019 (arXiv:1910.10683), with 128 tokens for the spans to predict.
    ViT: Dosovitskiy et al. 2020 (arXiv:2010.11929), on images of 224 x 224 and the 1000 classes of ImageNet.
"""

from types import MappingProxyType
from typing import Any


def _model(family: str, layers: int, hidden: int, heads: int, vocab: int, seq_len: int, **more: Any) -> dict[str, Any]:
    """The table ``[model]`` of a job."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq_len": seq_len}
    return {"family": family, **sizes, **more}


_MIXTRAL = {"kv_heads": 8, "experts": 8, "experts_per_token": 2}
_LATENT = {"head_dim": 128, "attention": "mla", "kv_lora_rank": 512, "rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_LITE = {"experts": 64, "experts_per_token": 6, "expert_ffn": 1408, "shared_experts": 2, "dense_layers": 1}
_DEEPSEEK_3 = {"experts": 256, "experts_per_token": 8, "expert_ffn": 2048, "shared_experts": 1, "dense_layers": 3}
_DEEPSEEK_3["q_lora_rank"] = 1536
_T5 = {"encoder_layers": 24, "encoder_seq_len": 512, "tied_embeddings": True}

# Family, layers, hidden, heads, vocab, seq_len; then the sizes that the family does not imply.
MODELS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "gpt2-124m": _model("gpt", 12, 768, 12, 50257, 1024, tied_embeddings=True),
        "gpt3-1.3b": _model("gpt", 24, 2048, 16, 51200, 2048),
        "gpt3-6.7b": _model("gpt", 32, 4096, 32, 51200, 2048),
        "gpt3-13b": _model("gpt", 40, 5120, 40, 51200, 2048),
        "gpt3-175b": _model("gpt", 96, 12288, 96, 51200, 2048),
        "llama2-7b": _model("llama", 32, 4096, 32, 32000, 4096, ffn=11008),
        "llama3-8b": _model("llama", 32, 4096, 32, 128256, 8192, kv_heads=8, ffn=14336),
        "llama3-70b": _model("llama", 80, 8192, 64, 128256, 8192, kv_heads=8, ffn=28672),
        "llama3-405b": _model("llama", 126, 16384, 128, 128256, 8192, kv_heads=8, ffn=53248),
        "mixtral-8x7b": _model("llama", 32, 4096, 32, 32000, 4096, ffn=14336, **_MIXTRAL),
        "mixtral-8x22b": _model("llama", 56, 6144, 48, 32000, 4096, ffn=16384, **_MIXTRAL),
        "deepseek-v2-lite": _model("llama", 27, 2048, 16, 102400, 4096, ffn=10944, **_DEEPSEEK_LITE, **_LATENT),
        "deepseek-v3": _model("llama", 61, 7168, 128, 129280, 4096, ffn=18432, **_DEEPSEEK_3, **_LATENT),
        "bert-large": _model("bert", 24, 1024, 16, 30522, 512, tied_embeddings=True),
        "t5-large": _model("t5", 24, 1024, 16, 32128, 128, head_dim=64, ffn=4096, **_T5),
        "t5-11b": _model("t5", 24, 1024, 128, 32128, 128, head_dim=128, ffn=65536, **_T5),
        "vit-l-16": _model("vit", 24, 1024, 16, 1000, 197, patch_dim=768),
        "vit-h-14": _model("vit", 32, 1280, 16, 1000, 257, patch_dim=588),
    }
)
