r"""Parameters, gradients and optimizer states: bytes per element, and the share that a rank holds.

=============  ====  ====  ====  ====  ====  ======================================================================
\               fp32  fp16  bf16  fp8   FSDP
=============  ====  ====  ====  ====  ====  ======================================================================
parameters      4     2     2     4     4     fp8: bf16, and casts of both layouts; FSDP: shards are the main ones
gradients       4     2     4     4     4     Megatron has a place for all from the beginning, of ``gradient_dtype``
optimizer       8     16    12    12    8     moments; a main copy in fp32; fp16: the gradients in fp32
=============  ====  ====  ====  ====  ====  ======================================================================

These are Megatron's (the table of its distributed optimizer: ``4 + 16 / d``, ``6 + 12 / d`` and ``8 + 8 / d`` bytes)
and PyTorch's.  ZeRO stage 1 divides the optimizer's by the replicas that share states, 2 the gradients' too, 3 the
parameters' too (Rajbhandari et al. 2019, arXiv:1910.02054); experts have fewer replicas.  In eager PyTorch, gradients
come into being in the first backward after each step, unless DDP's buckets hold them.  In pure 16 bits the main type
has 2 bytes too: half of the fp32 column.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.base.caching import cached
from stepsight.dataset.job.execution import COMPUTE_DTYPE, ExecutionSemantics
from stepsight.dataset.job.specs import QUANTIZED, ParallelSpec
from stepsight.dataset.kinds.op import DTYPE_BYTES
from stepsight.simulator.memory.part import Gathered, Gradients, PartExecution
from stepsight.simulator.programs.replicas import gathering_of
from stepsight.simulator.programs.sizes import Groups


@dataclass(frozen=True, slots=True)
class States:
    """Bytes per element on one rank, of ordinary parameters and of experts'.

    Attributes:
        parameters, gradients, optimizer: Of each kind.
        workspace: Of the optimizer's step, for a moment.
        bucket_bytes: Of gradients on their way while backward runs.
        flat_bytes: The same after it: eager pipelines reduce copies, a bucket at a time.
        execution: What this means for parts of the model.
    """

    parameters: tuple[float, float]
    gradients: tuple[float, float]
    optimizer: tuple[float, float]
    workspace: tuple[float, float]
    bucket_bytes: float
    flat_bytes: float
    execution: PartExecution


@cached(4096)
def states_of(p: ParallelSpec, semantics: ExecutionSemantics, precision: str, groups: Groups) -> States:
    """How many bytes an element costs in a parallel strategy; ``precision``: of matrix products."""
    states, kernels = semantics.states, semantics.kernels
    main, dtype = DTYPE_BYTES[kernels.main_dtype], COMPUTE_DTYPE[precision]
    size, casts = DTYPE_BYTES[dtype], dtype != kernels.main_dtype
    shards = (groups.shard.size, groups.experts.size)
    sharded, replicated = p.zero_stage == 3 and groups.shard.size > 1, groups.replicas.size > 1
    copied = states.main_copy and not sharded  # the model's parameters differ from those that the optimizer updates
    half = states.main_gradients and not sharded
    parts = [shards if p.zero_stage >= stage else (1, 1) for stage in (3, 2, 1)]

    def each(size: float, divisors: tuple[int, int]) -> tuple[float, float]:
        return size / divisors[0], size / divisors[1]

    moments = main * (2.0 + (copied and casts) + half)
    own = states.gradient_buffers and not sharded
    model = QUANTIZED.get(precision, 0) + (0 if states.narrow_parameters else size)
    gradients = each(float(size if half else DTYPE_BYTES[states.gradient_dtype] if own else main), parts[1])
    copies = states.bucket_copies and not sharded and replicated
    grows = not (states.gradient_buffers and not sharded) and not (copies and p.pp == 1)
    gathering, gathered = gathering_of((p.zero_stage, p.pp > 1), semantics), Gathered()
    fresh = float(main) if kernels.accumulation == "autograd" else 0.0
    if sharded:
        gathered = Gathered(size, main, gathering)
        fresh = 0.0 if gathering.reduce_once else float(size)
    whole = sharded and gathering.reduce_once
    stay = each(float(main), (1, 1)) if whole else gradients if grows else (0.0, 0.0)
    growing = Gradients(*stay, fresh, whole_blocks=sharded and not whole)
    bucket_bytes = semantics.overlap.bucket_bytes
    own_loss = 6 if p.tp == 1 else 14  # as in PyTorch's cross-entropy, and in its ``loss_parallel``
    return States(
        parameters=each(float(model if copied else main), parts[0]),
        gradients=gradients,
        optimizer=each(0.0 if semantics.optimizer == "host" else moments, parts[2]),
        workspace=each(float(main), parts[2]) if semantics.optimizer == "foreach" else (0.0, 0.0),
        bucket_bytes=2 * bucket_bytes if p.zero_stage == 2 and groups.shard.size > 1 else 0.0,
        flat_bytes=bucket_bytes if copies and p.pp > 1 else 0.0,
        execution=PartExecution(
            p.recomputes,
            p.recompute_every,
            growing,
            gathered,
            placeholder_bytes=size if states.gradient_buffers and not sharded else 0,
            loss_bytes=own_loss if casts and sharded else 0,
        ),
    )
