"""The tables of a job: model, parallel, batch, optimizer, cluster.  Plain values; ``rules`` says which go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

FAMILIES = ["gpt", "llama", "bert", "t5", "vit"]  # ``simulator.blocks.register_family`` adds to them
# Virtual stages (chunks of the model on each rank) that a schedule allows: fewest, most.
SCHEDULES: MappingProxyType[str, tuple[int, int]] = MappingProxyType(
    {
        "gpipe": (1, 1),
        "1f1b": (1, 1024),  # more than one: interleaved
        "looped-bfs": (1, 1024),
        "zb-h1": (1, 1),
        "interleaved-zb": (2, 1024),
        "zbv": (2, 2),
        "dualpipev": (2, 2),
    }
)
RECOMPUTE = ("none", "selective", "full")
MIXED = ("fp32", "bf16", "fp16", "fp8")  # with parameters' masters, moments and the loss in fp32
PURE: Mapping[str, str] = MappingProxyType({"pure-bf16": "bf16", "pure-fp16": "fp16"})  # with nothing in fp32
PRECISIONS = (*MIXED, *PURE)
FP8_SCALING = ("delayed", "dynamic")
ATTENTIONS = ("mha", "mla")
CONTEXT_PARALLEL = ("ring", "all_gather")
ATTENTION_KERNELS = ("", "flash-1", "flash-2", "flash-3")
GRADIENT_DTYPES = ("", "model", "fp32", "fp32-cast")
OVERLAP_TP = ("", "backward", "split")
RUNTIMES = ("asynchronous", "torch", "deepspeed")
OPTIMIZERS = ("adam", "adamw")
AXES = ("tp", "cp", "dp", "pp")


T = TypeVar("T", bound=type)


def hashed_once(cls: T) -> T:
    """Let a frozen dataclass, which must not have slots, remember its hash: it is a key thousands of times a second."""
    compute: Any = cls.__hash__

    def remembered(self: Any) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = compute(self)
        return known

    cls.__hash__ = remembered  # type: ignore[assignment]
    return cls


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


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Parallel degrees and how each is done.

    Attributes:
        tp, cp, pp, ep: Tensor-, context-, pipeline- and expert-parallel degree.  Expert-parallel groups lie within the
            data- and context-parallel ones (and the tensor-parallel ones where ``expert_tp`` is 1).
        dp: Replicas; 0: what remains of the cluster.
        order: Ranks' order on the nodes, fastest axis first.
        sequence_parallel: Norms and residuals hold ``1 / tp`` of the tokens.
        vocab_parallel: Whether tensor-parallel ranks share embedding, logits and loss.
        expert_tp: Tensor-parallel degree of experts, 0: ``tp``.
        context_parallel: ``ring`` passes keys and values around beside the computation, ``all_gather`` fetches all.
        zero_stage: 0 all-reduces gradients; 1 shards the optimizer, 2 gradients too, 3 parameters too (FSDP).
        dp_shard: Replicas over which ``zero_stage`` shards; 0: all (fewer: hybrid sharding, HSDP).
        overlap_tp: Which tensor-parallel collectives run beside the products: none; those of the ``backward`` of
            column-parallel linears (Megatron's asynchronous ones: the input is gathered again beside the gradient of
            the input, whose sum travels beside that of the weights); or also all others, ``split`` so that a product
            begins with the first part (Transformer Engine's user buffers, PyTorch's asynchronous tensor parallelism).
        overlap_grad_reduce: Whether gradients travel while backward runs.
        overlap_param_gather: ZeRO 1 and 2: whether parameters are gathered while the next forward runs.
        prefetch: FSDP: layers that are gathered ahead of their use.
        reshard_after_forward: FSDP: whether backward gathers parameters again.
        bucket_mbytes: Size of a gradient bucket.
        gradient_dtype: Of the buffers in which gradients of micro-batches are summed, and of what replicas exchange:
            ``model`` (that of the weights), ``fp32``, or ``fp32-cast`` (as ``fp32``, but kernels of their own cast and
            add what products write); empty: fp32 but for fp16, summed where products write them.
        reduce_scatter: ZeRO 1: whether a rank is sent the sums of its own share alone, rather than all sums.
        schedule: A key of ``SCHEDULES``, or a ``.csv`` file of actions.
        virtual_stages: Chunks of the model on each rank.
        stage_layers: Layers of every part of the model in its order; empty: even.
        scatter_p2p: Whether each tensor-parallel rank passes on its part of an activation alone, which is gathered
            where it arrives (with ``sequence_parallel`` nothing else is there; FSDP passes all on).
        runtime: ``asynchronous``, ``torch`` or ``deepspeed``: how pipeline messages wait; empty: as the device's kind
            has it.
        recompute: ``none``, ``selective`` (the attention core) or ``full`` layers again in backward.
        recompute_every: With ``full``: only every n-th layer.
        offload_activations: Whether kept activations wait in the host's memory.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 0
    order: str = "tp-cp-dp-pp"
    sequence_parallel: bool = False
    vocab_parallel: bool = True
    expert_tp: int = 0
    context_parallel: str = "ring"
    zero_stage: int = 0
    dp_shard: int = 0
    overlap_tp: str = ""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    prefetch: int = 1
    reshard_after_forward: bool = True
    bucket_mbytes: float = 25.0
    gradient_dtype: str = ""
    reduce_scatter: bool = True
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    scatter_p2p: bool = False
    runtime: str = ""
    recompute: str = "none"
    recompute_every: int = 1
    offload_activations: bool = False

    @property
    def shards(self) -> int:
        """Replicas over which ``zero_stage`` shards."""
        return self.dp_shard or self.dp

    @property
    def experts_tp(self) -> int:
        """Tensor-parallel degree of experts."""
        return self.expert_tp or self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Sizes in sequences; ``global_batch`` is split over dp replicas and their micro-batches.

    Attributes:
        precision: One of ``MIXED``, or of ``PURE``: parameters, gradients, moments and loss all in 16 bits.
        fp8_scaling: With ``fp8``: ``delayed`` (scales of earlier iterations, weights cast once an iteration:
            Transformer Engine) or ``dynamic`` (the largest value of each operand is looked for first, and operands are
            cast where they are used, weights too: torchao).
    """

    micro_batch: int
    global_batch: int
    precision: str = "bf16"
    fp8_scaling: str = "delayed"

    @property
    def dtype(self) -> str:
        """Of matrix products."""
        return PURE.get(self.precision, self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """What follows the backward pass.

    Attributes:
        kind: ``adam`` or ``adamw``.
        fused: One kernel; else one per operation over all tensors (foreach).
        clip_grad_norm: Whether the norm of all gradients is computed, and they are scaled.
        offload: Whether states and step are on the host.
    """

    kind: str = "adamw"
    fused: bool = True
    clip_grad_norm: bool = False
    offload: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank whose computation takes ``slowdown`` times as long."""

    rank: int
    slowdown: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A node whose way to other nodes has ``1 / slowdown`` of the bandwidth."""

    node: int
    slowdown: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDevices:
    """Nodes that have another device than the rest.

    What collectives take of the computation beside them stays that of the cluster's own devices.
    """

    nodes: tuple[int, ...]
    hardware: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Devices and how they are joined.

    Attributes:
        hardware: A preset's or a predictor's.
        nodes, devices_per_node: Sizes.
        fabric: A preset's name or a table of links; empty: as its vendor's own systems with this hardware have it.
        stragglers, slow_links, mixed: What is not alike.
    """

    hardware: str
    nodes: int = 1
    devices_per_node: int
    fabric: Any = ""
    stragglers: tuple[Straggler, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    mixed: tuple[OtherDevices, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


SECTIONS: MappingProxyType[str, type] = MappingProxyType(
    {
        "model": ModelSpec,
        "parallel": ParallelSpec,
        "batch": BatchSpec,
        "optimizer": OptimizerSpec,
        "cluster": ClusterSpec,
    }
)
OPTIONAL = ("parallel", "optimizer")  # tables that may be left out
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def spec_from_table(section: str, spec: type, table: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """One table as its dataclass (None if that is not possible), and everything that is wrong with it."""
    known = {f.name: f for f in fields(spec)}
    problems = [
        f"unknown key {section}.{key!s:.80} (known: {', '.join(sorted(known))})".replace("\n", "\\n")
        for key in sorted(map(str, table))
        if key not in known
    ]
    missing = [name for name, f in known.items() if f.default is f.default_factory and name not in table]
    problems += [f"missing key {section}.{name}" for name in missing]
    if problems:
        return None, problems
    hints = get_type_hints(spec)
    values = {}
    for name, value in table.items():
        values[name], wrong = _converted(f"{section}.{name}", hints[name], value)
        problems += wrong
    built = spec(**values)
    return built, problems or type_problems(section, built)


def _converted(name: str, hint: Any, value: Any) -> tuple[Any, list[str]]:
    """Lists as tuples, tables in them as their dataclasses."""
    if get_origin(hint) is not tuple or not isinstance(value, list | tuple):
        return value, []
    of = get_args(hint)[0]
    if of in _WORDS:
        return tuple(value), []
    out, problems = [], []
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            problems += [] if isinstance(item, of) else [f"{name}[{index}] must be a table, got {item!r:.80}"]
            out.append(item)
            continue
        built, wrong = spec_from_table(f"{name}[{index}]", of, item)
        out.append(built)
        problems += wrong
    return tuple(out), problems


def type_problems(section: str, spec: object) -> list[str]:
    """Fields of a dataclass that do not hold what they must."""
    problems = []
    for name, hint in get_type_hints(type(spec)).items():
        value = getattr(spec, name)
        if hint is Any:
            if not isinstance(value, str | Mapping):
                problems.append(f"{section}.{name} must be a preset's name or a table, got {value!r:.80}")
        elif get_origin(hint) is tuple:
            of = get_args(hint)[0]
            if not isinstance(value, tuple):
                problems.append(f"{section}.{name} must be a list, got {value!r:.80}")
            elif of in _WORDS:
                wrong = [item for item in value if isinstance(item, bool) or not isinstance(item, of)]
                problems += [f"{section}.{name} must hold {_WORDS[of]} each, got {item!r:.80}" for item in wrong[:1]]
            else:
                for index, item in enumerate(value):
                    problems += type_problems(f"{section}.{name}[{index}]", item)
        else:
            allowed = get_args(hint) or (hint,)
            accepted = (*allowed, int) if float in allowed else allowed
            mistaken_bool = isinstance(value, bool) and bool not in allowed  # bool is a subclass of int
            if mistaken_bool or not isinstance(value, accepted):
                words = " or ".join(_WORDS[kind] for kind in allowed if kind in _WORDS)
                problems.append(f"{section}.{name} must be {words}, got {value!r:.80}")
            elif isinstance(value, str) and not value.isprintable():
                problems.append(f"{section}.{name} must be printable, got {value!a:.80}")
    return problems
