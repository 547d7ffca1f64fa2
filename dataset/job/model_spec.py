"""The model of a job: transformers, and recommendation models with their embedding tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepsight.dataset.base.caching import hashed_once


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """An embedding table of a recommendation model.

    Attributes:
        rows: Rows of the table.
        dim: Elements of a row.
        pooling: Mean number of indices of a sample; their rows are summed.
        zipf: Exponent of the frequencies of rows: the row of rank ``i`` has a share of lookups in proportion to
            ``i ** -zipf``; 0: all rows have the same.
        reuse: Instead of ``zipf``: shares of the lookups by how often their row is looked up in a batch, in 17 bins:
            once, twice, 3 to 4, 5 to 8 and so on, as in the public data sets of FBGEMM.
        precision: Type of its elements: ``fp32``, ``fp16``, ``bf16`` or ``fp8``.
        name: For plans and messages; empty: ``t_cat_`` and the number of the table.
    """

    rows: int
    dim: int
    pooling: float = 1.0
    zipf: float = 0.0
    reuse: tuple[float, ...] = ()
    precision: str = "fp32"
    name: str = ""


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A transformer, or a recommendation model.  Zero means: derived from the other sizes.

    Families: ``gpt`` (LayerNorm, biases, GELU, learned positions), ``llama`` (RMSNorm, no biases, gated MLP with SiLU,
    rotary positions), ``bert`` (an encoder with GPT's parts, which predicts tokens), ``t5`` (encoder and decoder with
    cross-attention), ``vit`` (an encoder over patches of an image, with a classifier), ``dlrm`` (embedding tables
    beside an MLP, their interaction, and an MLP).  ``experts`` turns the MLPs of ``gpt`` and ``llama`` into mixtures of
    experts.  A ``dlrm`` needs its tables alone; its layers are derived.

    Attributes:
        name: A model of the catalogue (``dataset/presets/models.toml``), or any name for people to read.
        family: One of the families above, or one that you registered.
        layers: Decoder layers; of ``bert`` and ``vit`` encoder layers.
        hidden: Size of the hidden state.
        heads: Attention heads.
        ffn: Inner size of the MLP; 0: four times ``hidden``.
        kv_heads: Key-value heads (grouped-query attention); 0: as many as ``heads``.
        head_dim: Size of a head; 0: ``hidden / heads``.
        vocab: Size of the vocabulary; of ``vit`` number of classes.
        seq_len: Tokens of a sequence; of ``t5`` those of the decoder, of ``vit`` patches and the class token.
        gated_mlp: Whether the MLP is gated; unset: as the family has it.
        tied_embeddings: Whether logits use the table of the embedding.
        fused_attention: Whether attention is one kernel that keeps no score matrix.
        attention_kernels: Generation of fused attention: ``flash-1``, ``flash-2`` or ``flash-3`` (cuDNN's too); empty:
            the one that was measured on the device.
        dropout: Dropout probability of attention scores and of residual branches; 0: no dropout.
        eager_kernels: Whether norms, rotary positions, gated activations and the loss run as PyTorch's own kernels, one
            for each operation; otherwise each is one fused kernel (Apex, Transformer Engine, a compiler).
        separate_linears: Whether queries, keys, values, and a gate and what it gates are products of their own, rather
            than one product each.
        norms_again: Whether norms work on fp32 copies and are recomputed in backward, with the residual before them;
            otherwise their input is kept.
        token_metrics: Whether accuracy and perplexity of every token are computed from the logits.
        metric_losses: How many times PyTorch's own loss is computed again from the logits of a micro-batch for metrics,
            without a gradient.
        fused_loss: Whether the loss is one kernel that reads the logits and overwrites them with their gradient.
        loss_share: Share of the tokens that ``bert`` predicts: only those reach its head.
        unpadded_len: Mean number of tokens of a ``bert`` sequence that are computed when padding is left out; 0: all.
        attention: ``mha`` (multi-head, also with grouped queries) or ``mla`` (DeepSeek's latent attention).
        q_lora_rank, kv_lora_rank, rope_head_dim, v_head_dim: Sizes of ``mla``; with it ``head_dim`` is the part without
            rotary positions.
        qk_norm: With ``mha``: whether each head's queries and keys have a norm, as in Qwen3.
        experts: Routed experts of a layer; 0: a dense MLP.
        experts_per_token: Routed experts that process each token.
        expert_ffn: Inner size of an expert; 0: ``ffn``.
        expert_bias: Whether experts have biases and clamped gates, as in GPT-OSS.
        fused_experts: Whether the activation of experts, its casts and biases are part of their products where these
            are in 8 or 4 bits (Transformer Engine's fused grouped MLP of 2026).
        shared_experts: Experts that process every token.
        dense_layers: Number of first layers without experts.
        moe_every: Every n-th of the remaining layers has experts.
        capacity_factor: Most tokens that an expert takes, as a multiple of the mean; 0: no limit.
        imbalance: Tokens of the busiest rank, as a multiple of the mean.
        encoder_layers, encoder_seq_len: Layers and sequence length of the encoder of ``t5``.
        patch_dim: Values of one patch of ``vit``.
        tables: Embedding tables of ``dlrm``; in a job file also the name of a model of the catalogue or a file.
        dense_features: Numbers of a sample beside the indices, the input of the bottom MLP.
        bottom_mlp, top_mlp: Output sizes of the layers of both MLPs of ``dlrm``.
        interaction: Of ``dlrm``: ``dot`` (products of all pairs of vectors) or ``dcn-v2`` (cross layers of low rank).
        cross_layers, cross_rank: Number of cross layers, and their rank.
        lora_rank: Rank of LoRA's adapters, which are then all that is trained; 0: the whole model is trained.
        lora_targets: Linears that have an adapter: ``qkv``, ``proj`` (after attention), ``fc1`` and ``fc2`` (of MLPs;
            a gate and what it gates have one adapter), as Megatron names them; or ``q``, ``k``, ``v``, ``gate`` and
            ``up``, which have one each, as Hugging Face does.
        lora_dropout: Dropout probability of the adapters' input.
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
    separate_linears: bool = False
    norms_again: bool = False
    token_metrics: bool = False
    metric_losses: int = 0
    fused_loss: bool = False
    loss_share: float = 1.0
    unpadded_len: int = 0
    attention: str = "mha"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    expert_bias: bool = False
    fused_experts: bool = False
    shared_experts: int = 0
    dense_layers: int = 0
    moe_every: int = 1
    capacity_factor: float = 0.0
    imbalance: float = 1.0
    encoder_layers: int = 0
    encoder_seq_len: int = 0
    patch_dim: int = 0
    tables: tuple[TableSpec, ...] = field(default=(), repr=False)
    dense_features: int = field(default=13, repr=False)
    bottom_mlp: tuple[int, ...] = field(default=(512, 256), repr=False)
    top_mlp: tuple[int, ...] = field(default=(1024, 1024, 512, 256, 1), repr=False)
    interaction: str = field(default="", repr=False)
    cross_layers: int = field(default=3, repr=False)
    cross_rank: int = field(default=512, repr=False)
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def shared_ffn(self) -> int:
        """Inner size of all experts that process every token; tables of frameworks' keys read it."""
        return self.shared_experts * self.expert_ffn

    @property
    def has_bias(self) -> bool:
        return self.family != "llama" and self.family != "t5"

    @property
    def total_layers(self) -> int:
        """Encoder's and decoder's."""
        return self.layers + self.encoder_layers
