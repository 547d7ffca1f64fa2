"""The table ``[model]`` of a job."""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.hashed_once import hashed_once


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A transformer.  Zeros stand for what follows from the others.

    ``gpt``: LayerNorm, biases, GELU, learned positions.  ``llama``: RMSNorm, no biases, gated MLP with SiLU, rotary
    positions.  ``bert``: an encoder with GPT's parts after which tokens are predicted.  ``t5``: encoder and decoder
    with cross-attention.  ``vit``: an encoder over patches of an image with a classifier.  ``experts`` turns the MLPs
    of ``gpt`` and ``llama`` into mixtures.

    Attributes:
        name: For people, or of the catalogue.
        family: A key of the blocks.
        layers: Decoder layers (encoder layers of ``bert`` and ``vit``).
        hidden, heads, ffn: Sizes; ``ffn`` 0 is four times hidden.
        kv_heads: Key-value heads (grouped-query attention); 0: as many as heads.
        head_dim: 0: ``hidden / heads``.
        vocab: Tokens, or classes of ``vit``.
        seq_len: Tokens of a sequence (patches and the class token of an image; the decoder's of ``t5``).
        gated_mlp: None: as the family has it.
        tied_embeddings: Whether logits use the embedding's table.
        fused_attention: Whether attention is one kernel that keeps no score matrix.
        attention_kernels: Generation of fused attention: ``flash-1``, ``flash-2`` or ``flash-3`` (cuDNN's too); empty:
            the one that was measured on the device.
        dropout: Probability with which attention scores and what residuals take are dropped; 0: none.
        eager_kernels: Whether norms, rotary positions, gated activations and the loss are PyTorch's own, one kernel for
            each of their operations, rather than one each (Apex, Transformer Engine, a compiler).
        norms_again: Whether norms work on fp32 copies and run again in backward, with the residual before them, rather
            than keep their input.
        token_metrics: Whether accuracy and perplexity of every token are worked out from the logits.
        attention: ``mha`` (with grouped queries too), or ``mla``: DeepSeek's latent attention.
        q_lora_rank, kv_lora_rank, rope_head_dim, v_head_dim: Of ``mla``; ``head_dim`` is then the part without rotary
            positions.
        experts: Routed experts of a layer, 0: dense.
        experts_per_token: Routed experts that a token visits.
        expert_ffn: Inner size of an expert; 0: ``ffn``.
        shared_experts: Experts that every token visits.
        dense_layers: First layers without experts.
        moe_every: Every n-th of the other layers has experts.
        capacity_factor: Tokens an expert takes at most, of the mean; 0: all that come.
        imbalance: Tokens of the busiest rank, of the mean.
        encoder_layers, encoder_seq_len: Of ``t5``.
        patch_dim: Values of a patch of ``vit``.
    """

    name: str = ""
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int
    seq_len: int
    gated_mlp: bool | None = None
    tied_embeddings: bool = False
    fused_attention: bool = True
    attention_kernels: str = ""
    dropout: float = 0.0
    eager_kernels: bool = False
    norms_again: bool = False
    token_metrics: bool = False
    attention: str = "mha"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    moe_every: int = 1
    capacity_factor: float = 0.0
    imbalance: float = 1.0
    encoder_layers: int = 0
    encoder_seq_len: int = 0
    patch_dim: int = 0

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def has_bias(self) -> bool:
        return self.family != "llama" and self.family != "t5"

    @property
    def total_layers(self) -> int:
        """Encoder's and decoder's."""
        return self.layers + self.encoder_layers
