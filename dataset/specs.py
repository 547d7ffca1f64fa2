"""The tables of a job: model, parallel, batch, optimizer, cluster, execution.

They hold plain values; ``rules`` says which go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepsight.dataset.hashed_once import hashed_once as hashed_once
from stepsight.dataset.model_spec import ModelSpec as ModelSpec
from stepsight.dataset.parallel_spec import ParallelSpec as ParallelSpec
from stepsight.dataset.registry import Registry

# Families of models; None stands for those of the package, whose blocks ``simulator.blocks.family`` has.
FAMILIES: Registry[Any] = Registry(
    "model family", dict.fromkeys(("gpt", "llama", "bert", "t5", "vit")), group="stepsight.families"
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
ENGINES = ("eager-pytorch", "megatron")  # what each does: ``execution.ENGINE_SEMANTICS``
REENTRANT, EARLY_STOP = "reentrant", "early-stop"  # checkpoints of Megatron and DeepSpeed, and PyTorch's own
CHECKPOINTS = (REENTRANT, EARLY_STOP)
AXES = ("tp", "cp", "dp", "pp")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSpec:
    """What executes a job.

    Attributes:
        engine: One of ``ENGINES``; empty: the default of the precision (``execution.default_engine``).
        checkpoint: How recomputation of a layer ends: ``reentrant`` runs all of it again, ``early-stop`` stops when the
            last tensor that backward needs is there; empty: as the engine does.
    """

    engine: str = ""
    checkpoint: str = ""


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
