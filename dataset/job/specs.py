"""The tables of a job: model, parallel, batch, optimizer, cluster, execution."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.dataset.base.errors import shorten
from stepsight.dataset.base.files import preset
from stepsight.dataset.base.registry import Registry, did_you_mean
from stepsight.dataset.hardware.hardware_facts import LaunchCalls
from stepsight.dataset.job.model_spec import ModelSpec as ModelSpec
from stepsight.dataset.job.sharding import LOCATIONS, RULES, SPARSE_OPTIMIZERS
from stepsight.dataset.job.sharding import ShardingSpec as ShardingSpec


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Parallel degrees, and how each kind of parallelism works.

    Attributes:
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        pp: Pipeline-parallel degree.
        ep: Expert-parallel degree.  Expert-parallel groups lie within the data- and context-parallel groups, and with
            ``expert_tp`` of 1 also within the tensor-parallel groups.
        dp: Replicas; 0: what remains of the cluster.
        order: Order of ranks on the nodes, fastest axis first.
        sequence_parallel: Whether norms and residuals hold ``1 / tp`` of the tokens on each tensor-parallel rank.
        vocab_parallel: Whether embedding, logits and loss are split over the tensor-parallel ranks.
        expert_tp: Tensor-parallel degree of experts; 0: ``tp``.
        context_parallel: ``ring`` (keys and values travel beside the computation), ``all_gather``, or ``torch`` (the
            ring of compiled PyTorch, which gathers them first and waits for each message).
        zero_stage: 0: gradients are all-reduced; 1: the optimizer is sharded; 2: gradients too; 3: parameters too
            (FSDP).
        dp_shard: Replicas over which ``zero_stage`` shards; 0: all; fewer: hybrid sharding (HSDP).
        overlap_tp: Which tensor-parallel collectives overlap with matrix products.  Empty: none.  ``backward``: those
            of the backward of column-parallel linears (Megatron: the input is gathered again beside the gradient of the
            input, and that gradient is summed beside the gradient of the weights).  ``split``: also all others, in
            parts, so that a product begins with the first part (Transformer Engine's user buffers).  ``torch-async``:
            as ``split``, and a kernel of its own sums what the ranks send (PyTorch's asynchronous tensor parallelism).
            ``torch``: none, and with sequence parallelism all that is gathered or scattered is copied (DTensor).
        overlap_ep: Whether all-to-alls of experts run beside the computation of another micro-batch (Megatron's
            ``overlap_moe_expert_parallel_comm``, the point of DualPipe).
        dispatcher: How tokens travel to their experts: ``alltoall`` (a copy for each expert, sorted before and after),
            ``deepep`` or ``hybridep`` (once to each rank that has one of their experts, and once to each node;
            ``hybridep`` also pads them for products in 8 bits).
        overlap_grad_reduce: Whether gradients are reduced while backward runs.
        overlap_param_gather: ZeRO 1 and 2: whether parameters are gathered while the next forward runs.
        prefetch: FSDP: number of layers that are gathered ahead of their use.
        reshard_after_forward: FSDP: whether backward gathers parameters again.
        bucket_mbytes: Size of a gradient bucket in megabytes.
        gradient_dtype: Type of the buffers that sum gradients of micro-batches and that replicas exchange: ``model``
            (that of the weights), ``model-fused`` (the same, summed within the products), ``fp32``, or ``fp32-cast``
            (fp32, but separate kernels cast and add the gradients); empty: the default of the execution engine.
        reduce_scatter: ZeRO 1: whether gradients are reduce-scattered; otherwise they are all-reduced.
        zero_by_rank: ZeRO 1 and 2: whether each rank's share is a message of its own, a reduction to the rank and a
            broadcast from it, rather than part of a reduce-scatter and an all-gather.
        schedule: ``gpipe``, ``1f1b`` (with ``virtual_stages`` interleaved), ``looped-bfs``, ``zb-h1``,
            ``interleaved-zb``, ``zbv``, ``dualpipev``, one that you registered, or a ``.csv`` file of actions.
        virtual_stages: Parts of the model on each pipeline rank.
        stage_layers: Number of layers of each part of the model, in order; empty: evenly split.
        scatter_p2p: Whether each tensor-parallel rank sends only its part of an activation to the next stage, where it
            is gathered.  With ``sequence_parallel`` this is always so; with FSDP never.
        runtime: How pipeline messages wait: ``asynchronous``, ``torch`` or ``deepspeed``; empty: the default of the
            kind of device.
        recompute: What backward recomputes: ``none``, ``selective`` (some modules) or ``full`` (whole layers).
        recompute_modules: With ``selective``: which modules, by Megatron-Core's names: ``core_attn``, ``layernorm``,
            ``moe_act``, ``mla_up_proj``, ``mlp``, ``shared_experts``, ``moe``; empty: the attention core.
        recompute_every: With ``full``: recompute only every n-th layer.
        offload_activations: Whether activations that are kept for backward are moved to host memory.
        offload_layers: With ``offload_activations``: of how many of the model's layers; 0: of all.  The copies are
            spread over all layers, as Transformer Engine does.
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
    overlap_ep: bool = False
    dispatcher: str = "alltoall"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    prefetch: int = 1
    reshard_after_forward: bool = True
    bucket_mbytes: float = 25.0
    gradient_dtype: str = ""
    reduce_scatter: bool = True
    zero_by_rank: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    scatter_p2p: bool = False
    runtime: str = ""
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_every: int = 1
    offload_activations: bool = False
    offload_layers: int = 0

    @property
    def shards(self) -> int:
        """Replicas over which ``zero_stage`` shards."""
        return self.dp_shard or self.dp

    @property
    def recomputes(self) -> str:
        """``recompute``, where ``selective`` is for the attention core alone; other modules are part of blocks."""
        others = self.recompute == "selective" and self.recompute_modules and "core_attn" not in self.recompute_modules
        return "none" if others else self.recompute

    @property
    def experts_tp(self) -> int:
        """Tensor-parallel degree of experts."""
        return self.expert_tp or self.tp


# Families of models; ``simulator.blocks.family`` puts the blocks of the package's own in the place of None.
FAMILIES: Registry[Any] = Registry(
    "model family", dict.fromkeys(("gpt", "llama", "bert", "t5", "vit", "dlrm")), group="stepsight.families"
)
RECOMPUTE = ("none", "selective", "full")
# Linears that may have an adapter, and what each holds whose parts have adapters of their own.
LORA_TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv": ("q", "k", "v"), "fc1": ("gate", "up"), **dict.fromkeys(("proj", "fc2", "q", "k", "v", "gate", "up"), ())}
)
RECOMPUTE_MODULES = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts", "moe")
DISPATCHERS = ("alltoall", "deepep", "hybridep")
# With main parameters, moments and the loss in fp32.  ``tf32``: all is fp32, and products round their operands.
MIXED = ("fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4")
# Operands of products are converted by kernels of their own; bytes of an element in both layouts (rows, columns).
QUANTIZED: Mapping[str, int] = MappingProxyType({"fp8": 2, "nvfp4": 1})
PURE: Mapping[str, str] = MappingProxyType({"pure-bf16": "bf16", "pure-fp16": "fp16"})  # with nothing in fp32
PRECISIONS = (*MIXED, *PURE)
OVERLAP_TP = ("", "torch", "backward", "split", "torch-async")
SPLIT_TP = OVERLAP_TP[3:]  # in parts, beside the products that use or make them
RUNTIMES = ("asynchronous", "torch", "deepspeed")
ENGINES = tuple(preset("engines.toml"))
OTHER_OPTIMIZERS = ("sgd", "adagrad")  # of recommendation models' dense part
# Checkpoints of Megatron and DeepSpeed, PyTorch's own, and those of recipes for XLA.
REENTRANT, EARLY_STOP, PROJECTIONS = "reentrant", "early-stop", "projections"
AXES = ("tp", "cp", "dp", "pp")
# Words that a field may hold, and each word of a field that holds several: those that no code asks for are facts.
CHOICES: Mapping[str, Collection[Any]] = MappingProxyType(
    {
        **{key: tuple(words) for key, words in preset("job_facts.toml")["choices"].items()},
        "model.family": FAMILIES,
        "model.lora_targets": tuple(LORA_TARGETS),
        "sharding.rule": RULES,
        "sharding.location": LOCATIONS,
        "sharding.optimizer": SPARSE_OPTIMIZERS,
        "parallel.overlap_tp": OVERLAP_TP,
        "parallel.recompute": RECOMPUTE,
        "parallel.recompute_modules": RECOMPUTE_MODULES,
        "parallel.dispatcher": DISPATCHERS,
        "parallel.runtime": ("", *RUNTIMES),
        "batch.precision": PRECISIONS,
        "optimizer.kind": ("adam", "adamw", *OTHER_OPTIMIZERS),
        "execution.engine": ("", *ENGINES),
        "execution.checkpoint": ("", REENTRANT, EARLY_STOP, PROJECTIONS),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Batch sizes and precision.

    Attributes:
        micro_batch: Sequences of one micro-batch on one replica.
        global_batch: Sequences of one optimizer step on all replicas; a multiple of ``micro_batch * dp``.
        flushes: How many times an iteration empties the pipeline: gradient accumulation around it, each time with an
            equal part of a replica's micro-batches.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8`` or ``nvfp4`` (mixed precision: main parameters,
            moments and loss in fp32), or ``pure-bf16`` or ``pure-fp16`` (parameters, gradients, moments and loss in 16
            bits).
        fp8_scaling: With ``fp8``: ``delayed`` (scales of earlier iterations, weights cast once an iteration:
            Transformer Engine), ``current`` (as ``delayed``, with a scale by the operand's largest value: likewise),
            ``dynamic`` (as ``current``, with weights cast where they are used: torchao), ``rowwise`` (as ``dynamic``,
            with a scale for each row and other kernels) or ``mxfp8`` (a scale for every 32 values, so that nothing is
            searched for; experts are cast one by one).
        fp8_parameters: With ``fp8`` or ``nvfp4``: whether the model's parameters exist in the narrow type alone, beside
            the optimizer's main ones (``fp8_param_gather`` of Transformer Engine and Megatron); else in 16 bits too.
            They are gathered as they exist, but ``mxfp8`` only by FSDP and ``nvfp4`` in 16 bits. With ``dynamic``
            scaling: whether FSDP casts the weights of linears before it gathers them, in 8 bits (torchao's
            ``enable_fsdp_float8_all_gather``); no effect with ``rowwise`` scaling, which gathers 16 bits.
        fp8_attention: With ``fp8`` or ``nvfp4``: whether fused attention computes in 8 bits
            (``fp8_dot_product_attention``).
        fp8_activations: With ``fp8`` or ``nvfp4``: whether the input of the MLP's activation is kept in 8 bits
            (``activation_func_fp8_input_store``).
    """

    micro_batch: int
    global_batch: int
    flushes: int = 1
    precision: str = "bf16"
    fp8_scaling: str = "delayed"
    fp8_parameters: bool = False
    fp8_attention: bool = False
    fp8_activations: bool = False

    @property
    def dtype(self) -> str:
        """Type of matrix products."""
        return PURE.get(self.precision, self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer step.

    Attributes:
        kind: ``adam`` or ``adamw``; of ``dlrm``'s dense part also ``sgd`` or ``adagrad``.
        fused: Whether the step is one fused kernel; otherwise one kernel for each operation over all tensors (foreach).
        clip_grad_norm: Whether gradients are clipped by their global norm.
        offload: Whether optimizer states and step are on the host.
    """

    kind: str = "adamw"
    fused: bool = True
    clip_grad_norm: bool = False
    offload: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A slow rank.

    Attributes:
        rank: The rank.
        slowdown: Its computation takes this many times as long.
    """

    rank: int
    slowdown: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A node with a slow link to the other nodes.

    Attributes:
        node: The node.
        slowdown: Its bandwidth is ``1 / slowdown`` of the fabric's.
    """

    node: int
    slowdown: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDevices:
    """Nodes with another device than the rest.

    How much a collective slows the computation beside it is taken from the cluster's own devices.

    Attributes:
        nodes: The nodes.
        hardware: Their device: a preset's name or a file.
    """

    nodes: tuple[int, ...]
    hardware: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Devices and the links between them.

    Attributes:
        hardware: The device: a preset's name, a file, a table of facts, or the name that a predictor was trained for.
        nodes: Number of nodes.
        devices_per_node: Devices of each node.
        fabric: The links: a preset's name, a file, or a table of links; empty: those of the vendor's own systems with
            this hardware.
        stragglers: Slow ranks.
        slow_links: Nodes with a slow link.
        mixed: Nodes with another device.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSpec:
    """The engine that executes the job.

    Attributes:
        engine: ``megatron`` (fused kernels, main parameters and gradients in fp32) or ``eager-pytorch`` (autograd's own
            kernels); empty: ``eager-pytorch`` for fp32 and pure 16 bits, ``megatron`` for mixed precision.
        checkpoint: How recomputation of a layer ends: ``reentrant`` runs all of it again, ``early-stop`` stops when the
            last tensor that backward needs is there, ``projections`` does as well and keeps what the products around
            attention return; empty: as the engine does.
        kernels: The software whose kernels run the ops: a part of a name that ``stepsight show PREDICTOR`` lists;
            empty: the software that the predictor is made for.
        dispatch_calls: Launches' time that the host takes for each permutation of a mixture without capacity limits,
            whose dispatcher asks the device where tokens go; then it also launches each expert's product apart.
            Megatron takes about 195; 0: it only launches kernels, or a CUDA graph.
        op_calls: Launches' time that the host takes for each op: modules, autograd and the allocator beside the launch.
        launch_blocking: Whether the device waits for every launch, as with ``CUDA_LAUNCH_BLOCKING=1``.
        container: The image that the job runs in, as ``nvcr.io/nvidia/nemo:24.07``: its name and release choose among
            profiles of frameworks.
        date: When the software was released, as ``2024-07`` or ``2024``: it chooses among profiles of a framework;
            empty: the month in the container's tag.
        cuda, cublas: Versions, as ``12.4``.  They do not change the answer, which says so.
        nccl: Its version, as ``2.27.3``.  It does not change the answer; a warning says if the model of collectives
            does not describe that version.
    """

    engine: str = ""
    checkpoint: str = ""
    kernels: str = ""
    dispatch_calls: float = 0.0
    op_calls: float = 1.0
    launch_blocking: bool = False
    container: str = ""
    date: str = ""
    cuda: str = ""
    cublas: str = ""
    nccl: str = ""

    @property
    def launches(self) -> LaunchCalls:
        return LaunchCalls(self.op_calls, self.dispatch_calls, self.launch_blocking)


SECTIONS: MappingProxyType[str, type] = MappingProxyType(
    {
        "model": ModelSpec,
        "parallel": ParallelSpec,
        "batch": BatchSpec,
        "optimizer": OptimizerSpec,
        "cluster": ClusterSpec,
        "execution": ExecutionSpec,
        "sharding": ShardingSpec,
    }
)
OPTIONAL = ("parallel", "optimizer", "execution", "sharding")  # tables that may be left out
# A small catalogue of published models, by name: ``[model] name = "gpt3-175b"``.
MODELS: Mapping[str, dict[str, Any]] = MappingProxyType(preset("models.toml"))
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_hints = cached(64)(get_type_hints)  # evaluating them costs more than checking them
_fields = cached(64)(lambda spec: {f.name: f for f in fields(spec)})


@cached(64)
def _plain_types(spec: type) -> dict[str, tuple[type, ...]]:
    """Types of values that need no other check than that a text is printable, by field."""
    more = {name: get_args(hint) or (hint,) for name, hint in _hints(spec).items() if get_origin(hint) is not tuple}
    return {name: (*kinds, int) if float in kinds else kinds for name, kinds in more.items()}


def spec_from_table(section: str, spec: type, table: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """One table as its dataclass (None if that is not possible), and everything that is wrong with it."""
    known, hints = _fields(spec), _hints(spec)
    unknown = [key for key in sorted(map(str, table)) if key not in known]
    problems = [f"unknown key {section}.{shorten(key)}" for key in unknown]
    if unknown:
        problems[0] += f" (known: {', '.join(sorted(known))}){did_you_mean(unknown[0], known)}"
    missing = [name for name, f in known.items() if f.default is f.default_factory and name not in table]
    problems += [f"missing key {section}.{name}" for name in missing]
    values = dict(table) if not problems else {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and get_origin(hints[name]) is tuple:
            of, items = get_args(hints[name])[0], list(value)
            for at, item in enumerate(value) if of not in _WORDS else ():
                if isinstance(item, Mapping):
                    items[at], wrong = spec_from_table(f"{section}.{name}[{at}]", of, item)
                    problems += wrong
            values[name] = tuple(items)
    problems = problems or type_problems(section, spec, values)
    return None if problems else spec(**values), problems


def type_problems(section: str, spec: type, held: object) -> list[str]:
    """Fields of a dataclass that do not hold what they must: of an instance, or by name."""
    problems, values, plain = [], held if isinstance(held, Mapping) else None, _plain_types(spec)
    for name, hint in ((name, hint) for name, hint in _hints(spec).items() if values is None or name in values):
        value = getattr(held, name) if values is None else values[name]
        if type(value) in plain.get(name, ()) and (type(value) is not str or value.isprintable()):
            continue
        kinds, where = get_args(hint) or (hint,), f"{section}.{name}"
        if get_origin(hint) is tuple and isinstance(value, tuple):
            if kinds[0] in _WORDS:
                wrong = [item for item in value if not _is_one(item, kinds[:1])]
                problems += [f"{where} must hold {_WORDS[kinds[0]]} each, got {item!r:.80}" for item in wrong[:1]]
            for at, item in enumerate(value) if kinds[0] not in _WORDS else ():
                one = [] if isinstance(item, kinds[0]) else [f"{where}[{at}] must be a table, got {item!r:.80}"]
                problems += one or type_problems(f"{where}[{at}]", kinds[0], item)
        elif not _is_one(value, (str, Mapping) if hint is Any else () if get_origin(hint) is tuple else kinds):
            words = " or ".join(_WORDS[kind] for kind in kinds if kind in _WORDS)
            words = "a list" if get_origin(hint) is tuple else words or "a preset's name or a table"
            problems.append(f"{where} must be {words}, got {value!r:.80}")
        elif isinstance(value, str) and not value.isprintable():
            problems.append(f"{where} must be printable, got {value!a:.80}")
    return problems


def _is_one(value: object, kinds: tuple[Any, ...]) -> bool:
    """Whether a value has one of some types: a whole number is a number, true and false are none."""
    right = isinstance(value, (*kinds, int) if float in kinds else kinds)
    return right and (bool in kinds or not isinstance(value, bool))
