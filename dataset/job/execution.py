"""Execution semantics: how an execution engine runs a job, as plain values for the simulator.

A job names its engine in ``[execution]``, or the profile of its ``framework`` does (``presets/frameworks.toml``), or
``default_engine`` chooses one.  ``semantics_of`` joins the engine with what the job's other tables state.  The
simulator asks a data type for its bytes and its kernels alone; all else that it does follows from these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from stepsight.dataset.base.caching import Memo, cached, hashed_once
from stepsight.dataset.base.files import preset
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import PROJECTIONS, PURE, QUANTIZED, REENTRANT

T = TypeVar("T")
COMPUTE_DTYPE: Mapping[str, str] = MappingProxyType(
    {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "nvfp4": "bf16", **PURE}
)  # by precision: of activations and weights, in all ops except matrix products
CORE_DTYPE: Mapping[str, str] = MappingProxyType(
    {**COMPUTE_DTYPE, "tf32": "tf32"}
)  # by precision: of the products of unfused attention, which fp8 does not change and tf32 rounds


@hashed_once
@dataclass(frozen=True, kw_only=True)
class KernelSemantics:
    """How one pass through a block of the model runs."""

    main_dtype: str = "fp32"  # of what training keeps most exactly: main parameters, moments, sums of gradients, loss
    separate_kernels: bool = False  # norms, rotary positions, gated activations, loss: one for each of their operations
    separate_linears: bool = False  # as in ModelSpec
    norms_again: bool = False  # norms work on copies in main_dtype and run again in backward
    token_metrics: bool = False  # accuracy and perplexity of every token are computed from the logits
    joins_heads: bool = True  # unfused attention copies what the heads found to where each token has all of them
    # Whether a column-parallel linear keeps its input as it was gathered, rather than the rank's own part, which it
    # gathers again.
    keeps_gathered_input: bool = False
    # Whether full recomputation repeats all of a layer, rather than stop after the last step that keeps something.
    # FSDP always stops.
    whole_layers_again: bool = True
    # Whether full recomputation repeats a product that ends a layer.  PyTorch's non-reentrant checkpoint stops when the
    # last tensor is kept, and a product keeps its inputs before it runs.
    last_product_again: bool = True
    # Whether full recomputation keeps what the products around attention return, and repeats nothing else that backward
    # does not need: policies such as save_qkv_proj of recipes for XLA, which drops dead code.
    keeps_projections: bool = False
    # How gradients of several micro-batches are summed: autograd (one add for each parameter tensor), product (within
    # the product that computes them, at no cost), buffer (the product or a kernel of its own adds to a buffer), read
    # (the product reads a buffer of the type that it writes), or cast (one kernel casts, another one adds).
    accumulation: str = "product"
    # Whether parameters and logits of another type are cast where they are used, and their gradients back, as autocast
    # does; FSDP casts its shards before it gathers them.
    casts_parameters: bool = False
    # Whether one kernel finds the largest value of an operand, by which another one scales and casts it.
    finds_scales: bool = False
    fp8_dynamic: bool = False  # weights too are cast where they are used, and inputs again in backward
    fp8_gathers: bool = True  # tensor-parallel ranks gather these operands in 8 bits
    fp8_weights: bool = False  # the weights of linears are gathered in 8 bits (fp8_parameters)
    fp8_attention: bool = False  # fused attention computes in 8 bits
    fp8_activations: bool = False  # the input of the MLP's activation is kept in 8 bits
    casts_by_group: bool = False  # the operands of grouped products are cast by a kernel for each group


@hashed_once
@dataclass(frozen=True, kw_only=True)
class StateSemantics:
    """Owners and types of parameters and gradients."""

    # Whether the optimizer steps main parameters of its own and casts the result, where the model's are of another
    # type; False: the model's parameters are the main ones.
    main_copy: bool = True
    gradient_dtype: str = "fp32"  # of gradients that replicas exchange
    gradient_buffers: bool = True  # all gradients have a place from the beginning; else each is made in backward
    bucket_copies: bool = False  # gradients are copied into buckets; if reduced after backward, back too (DDP)
    scales_loss: bool = False  # gradients are divided by a scale and searched for overflows before the step
    main_gradients: bool = False  # the optimizer makes copies of gradients in main_dtype for its step
    scatters_sums: bool = True  # ZeRO 1: a rank is sent the sums of its own share alone, rather than all sums
    narrow_parameters: bool = False  # the model's parameters exist in the type of products alone (fp8_parameters)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class OverlapSemantics:
    """Which ops overlap, and which wait for each other."""

    gradients: bool = True  # gradients travel while backward runs
    parameters: bool = False  # as overlap_param_gather
    prefetch: int = 1
    reshard: bool = True  # as reshard_after_forward
    bucket_bytes: float = 25.0 * 2**20  # a gradient bucket is sent when it holds at least this much
    runtime: str = "asynchronous"  # one of RUNTIMES: who passes messages between stages, and how these wait
    # Whether the host reads the norm of all gradients: it then launches the step when the norm is there, and no stage
    # steps before all have it.
    reads_norm: bool = False
    # FSDP: whether each tensor is gathered into a list of the ranks' parts, which the host cuts and copies one by one
    # while the device waits; full recomputation then gathers for itself, and backward again.
    gathers_lists: bool = False
    by_rank: bool = False  # as zero_by_rank


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ExecutionSemantics:
    """Complete semantics of an execution engine."""

    kernels: KernelSemantics = KernelSemantics()  # in forward and backward
    states: StateSemantics = StateSemantics()  # of parameters, gradients and the optimizer
    overlap: OverlapSemantics = OverlapSemantics()  # of communication and launches
    optimizer: str = "fused"  # one kernel; foreach: one for each operation over all tensors; host: there, with states


ENGINE_SEMANTICS: Mapping[str, ExecutionSemantics] = MappingProxyType(
    {
        name: ExecutionSemantics(
            kernels=KernelSemantics(**told.get("kernels", {})),
            states=StateSemantics(**told.get("states", {})),
            overlap=OverlapSemantics(**told.get("overlap", {})),
        )
        for name, told in preset("engines.toml").items()
    }
)


def default_engine(precision: str) -> str:
    """The default engine of a job that states none, itself or through its framework: the only place that decides by
    precision.

    What is trained with one type for everything (fp32, or pure 16 bits) is what the harness runs: eager PyTorch.  Mixed
    precision is Megatron's, which most published runs in it use or follow.
    """
    return "eager-pytorch" if COMPUTE_DTYPE[precision] == "fp32" or precision in PURE else "megatron"


@cached(4096)
def _shared(value: T) -> T:
    """The first of equal semantics: they are keys many times, hashed once and compared by identity."""
    return value


def semantics_of(job: Job, device_kind: str = "gpu") -> ExecutionSemantics:
    """The semantics of a job on devices of a kind (``cpu`` or another, as in ``Hardware.kind``).

    On CPUs the runtime that is not stated is PyTorch's own, and gradients of a pipeline's replicas without ZeRO are
    reduced when the schedule is over: so does the harness.
    """
    p, on_cpu = job.parallel, device_kind == "cpu"
    unsummed = on_cpu and p.pp > 1 and p.zero_stage == 0  # until the end of the schedule
    key = _RELEVANT(job), on_cpu, p.zero_stage < 3, p.shards * p.cp > 1, unsummed
    if (found := _KNOWN.get(key)) is None:
        found = _KNOWN[key] = _semantics(job, on_cpu, unsummed)
    return found


# What semantics depend on, besides the kind of device and the ZeRO stage; few strategies of a search differ in these.
_RELEVANT = attrgetter(
    *("execution.engine", "execution.checkpoint", "batch.precision", "batch.fp8_scaling", "batch.fp8_parameters"),
    *("batch.fp8_attention", "batch.fp8_activations"),
    *("optimizer.clip_grad_norm", "optimizer.offload", "optimizer.fused"),
    *("model.eager_kernels", "model.separate_linears", "model.norms_again", "model.token_metrics"),
    *("parallel.gradient_dtype", "parallel.reduce_scatter", "parallel.overlap_grad_reduce", "parallel.overlap_tp"),
    *("parallel.overlap_param_gather", "parallel.prefetch", "parallel.reshard_after_forward", "parallel.bucket_mbytes"),
    *("parallel.runtime", "parallel.zero_by_rank"),
)
_KNOWN: Memo[Any, ExecutionSemantics] = Memo("semantics of jobs", 1024)


def _semantics(job: Job, on_cpu: bool, unsummed: bool) -> ExecutionSemantics:
    m, p, batch = job.model, job.parallel, job.batch
    precision, stated, checkpoint = batch.precision, p.gradient_dtype, job.execution.checkpoint
    semantics = ENGINE_SEMANTICS[job.execution.engine or default_engine(precision)]
    shares = p.zero_stage == 3 and p.shards * p.cp > 1  # parameters
    dynamic = precision == "fp8" and batch.fp8_scaling in ("dynamic", "rowwise")
    # Megatron's optimizer gathers 16 bits of MXFP8, whose two layouts differ (reuse_grad_buf_for_mxfp8_param_ag).
    narrow = ("dynamic", "mxfp8", "delayed", "current") if shares else ("delayed", "current")
    kernels, states, main = semantics.kernels, semantics.states, PURE.get(precision, "fp32")
    if checkpoint:
        repeats = checkpoint == REENTRANT
        kernels = replace(kernels, whole_layers_again=repeats, last_product_again=repeats)
        kernels = replace(kernels, keeps_projections=checkpoint == PROJECTIONS)
    modules = kernels.accumulation == "autograd"  # these are measured as a whole, as their autograd is
    whole = p.zero_stage < 3  # a rank has whole gradients
    sums = {"": "product", "fp32-cast": "cast", "model-fused": "read"}.get(stated if whole else "", "buffer")
    kernels = replace(
        kernels,
        main_dtype=main,
        separate_kernels=m.eager_kernels and not modules,
        separate_linears=m.separate_linears,
        norms_again=m.norms_again and not modules,
        token_metrics=m.token_metrics,
        accumulation=kernels.accumulation if modules else sums,
        casts_parameters=kernels.casts_parameters and COMPUTE_DTYPE[precision] != main,
        finds_scales=precision == "nvfp4" or (precision == "fp8" and batch.fp8_scaling not in ("delayed", "mxfp8")),
        fp8_dynamic=dynamic,
        fp8_gathers=batch.fp8_scaling != "rowwise",
        fp8_weights=precision == "fp8" and batch.fp8_parameters and batch.fp8_scaling in narrow,
        fp8_attention=batch.fp8_attention and precision in QUANTIZED,
        fp8_activations=batch.fp8_activations and precision in QUANTIZED,
        casts_by_group=precision == "fp8" and batch.fp8_scaling == "mxfp8",
    )
    scales = precision == "fp16"  # by default gradients are summed in the main type, but Megatron's of fp16 in fp16
    in_model = stated in ("model", "model-fused") or (not stated and states.main_copy and scales and whole)
    states = replace(
        states,
        gradient_dtype=COMPUTE_DTYPE[precision] if in_model else main,
        scales_loss=scales,
        main_gradients=scales and states.main_copy,
        scatters_sums=p.reduce_scatter,
        narrow_parameters=states.main_copy and batch.fp8_parameters and precision in QUANTIZED and not dynamic,
    )
    overlap = OverlapSemantics(
        gradients=p.overlap_grad_reduce and not unsummed,
        parameters=p.overlap_param_gather,
        prefetch=p.prefetch,
        reshard=p.reshard_after_forward,
        bucket_bytes=p.bucket_mbytes * 2**20,
        runtime=p.runtime or ("torch" if on_cpu else "asynchronous"),
        reads_norm=job.optimizer.clip_grad_norm,
        gathers_lists=semantics.overlap.gathers_lists,
        by_rank=p.zero_by_rank,
    )
    step = "host" if job.optimizer.offload else "fused" if job.optimizer.fused else "foreach"
    kernels, states, overlap = _shared(kernels), _shared(states), _shared(overlap)
    return _shared(ExecutionSemantics(kernels=kernels, states=states, overlap=overlap, optimizer=step))
