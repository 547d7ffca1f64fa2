"""The tables of a job: model, parallel, batch, optimizer, cluster, execution.

They hold plain values; ``rules`` says which go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.hashed_once import hashed_once as hashed_once
from stepsight.dataset.base.registry import Registry
from stepsight.dataset.job.model_spec import ModelSpec as ModelSpec
from stepsight.dataset.job.parallel_spec import ParallelSpec as ParallelSpec

# Families of models; None stands for those of the package, whose blocks ``simulator.blocks.family`` has.
FAMILIES: Registry[Any] = Registry(
    "model family", dict.fromkeys(("gpt", "llama", "bert", "t5", "vit")), group="stepsight.families"
)
RECOMPUTE = ("none", "selective", "full")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts", "moe")
DISPATCHERS = ("alltoall", "deepep", "hybridep")
# With main parameters, moments and the loss in fp32.  ``tf32``: all is fp32, and products round their operands.
MIXED = ("fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4")
# Operands of products are converted by kernels of their own; bytes of an element in both layouts (rows, columns).
QUANTIZED: Mapping[str, int] = MappingProxyType({"fp8": 2, "nvfp4": 1})
PURE: Mapping[str, str] = MappingProxyType({"pure-bf16": "bf16", "pure-fp16": "fp16"})  # with nothing in fp32
PRECISIONS = (*MIXED, *PURE)
FP8_SCALING = ("delayed", "dynamic", "rowwise", "mxfp8")
ATTENTIONS = ("mha", "mla")
CONTEXT_PARALLEL = ("ring", "all_gather")
ATTENTION_KERNELS = ("", "flash-1", "flash-2", "flash-3")
GRADIENT_DTYPES = ("", "model", "model-fused", "fp32", "fp32-cast")
OVERLAP_TP = ("", "backward", "split", "torch-async")
SPLIT_TP = OVERLAP_TP[2:]  # in parts, beside the products that use or make them
RUNTIMES = ("asynchronous", "torch", "deepspeed")
OPTIMIZERS = ("adam", "adamw")
ENGINES = ("eager-pytorch", "megatron", "deepspeed-0.3")  # what each does: ``execution.ENGINE_SEMANTICS``
# Checkpoints of Megatron and DeepSpeed, PyTorch's own, and those of recipes for XLA.
REENTRANT, EARLY_STOP, PROJECTIONS = "reentrant", "early-stop", "projections"
CHECKPOINTS = (REENTRANT, EARLY_STOP, PROJECTIONS)
AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Batch sizes and precision.

    Attributes:
        micro_batch: Sequences of one micro-batch on one replica.
        global_batch: Sequences of one optimizer step on all replicas; a multiple of ``micro_batch * dp``.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8`` or ``nvfp4`` (mixed precision: main parameters,
            moments and loss in fp32), or ``pure-bf16`` or ``pure-fp16`` (parameters, gradients, moments and loss in 16
            bits).
        fp8_scaling: With ``fp8``: ``delayed`` (scales of earlier iterations, weights cast once an iteration:
            Transformer Engine), ``dynamic`` (each operand is scaled by its largest value and cast where it is used,
            weights too: torchao), ``rowwise`` (as ``dynamic``, with a scale for each row and other kernels) or
            ``mxfp8`` (a scale for every 32 values, so that nothing is searched for; experts are cast one by one).
    """

    micro_batch: int
    global_batch: int
    precision: str = "bf16"
    fp8_scaling: str = "delayed"

    @property
    def dtype(self) -> str:
        """Type of matrix products."""
        return PURE.get(self.precision, self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer step.

    Attributes:
        kind: ``adam`` or ``adamw``.
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
    container: str = ""
    date: str = ""
    cuda: str = ""
    cublas: str = ""
    nccl: str = ""


SECTIONS: MappingProxyType[str, type] = MappingProxyType(
    {
        "model": ModelSpec,
        "parallel": ParallelSpec,
        "batch": BatchSpec,
        "optimizer": OptimizerSpec,
        "cluster": ClusterSpec,
        "execution": ExecutionSpec,
    }
)
OPTIONAL = ("parallel", "optimizer", "execution")  # tables that may be left out
