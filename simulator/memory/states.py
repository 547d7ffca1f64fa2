r"""Parameters, gradients and optimizer states: bytes per element, and what of it a rank holds.

=============  ====  ====  ====  ====  ====  ======================================================================
\               fp32  fp16  bf16  fp8   FSDP
=============  ====  ====  ====  ====  ====  ======================================================================
parameters      4     2     2     4     4     fp8: bf16, and casts of both layouts; FSDP: shards are the fp32 masters
gradients       4     2     4     4     4     in mixed precision there is a place for all from the beginning
optimizer       8     16    12    12    8     moments; an fp32 master copy; fp16: the gradients in fp32
=============  ====  ====  ====  ====  ====  ======================================================================

These are Megatron's (the table of its distributed optimizer: ``4 + 16 / d``, ``6 + 12 / d`` and ``8 + 8 / d`` bytes)
and PyTorch's.  ZeRO stage 1 divides the optimizer's by the replicas that share states, 2 the gradients' too, 3 the
parameters' too (Rajbhandari et al. 2019, arXiv:1910.02054); experts have fewer replicas.  In fp32, gradients come into
being in the first backward after each step, unless DDP's buckets hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.caching import cached
from stepsight.dataset.op import DTYPE_BYTES
from stepsight.dataset.specs import OptimizerSpec, ParallelSpec
from stepsight.simulator.blocks.shape import COMPUTE_DTYPE
from stepsight.simulator.lowering.sizes import Groups
from stepsight.simulator.memory.block import Gradients
from stepsight.simulator.memory.part import Gathered, Keeping

MASTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class States:
    """Bytes per element on one rank, of ordinary parameters and of experts'.

    Attributes:
        parameters, gradients, optimizer: Of each kind.
        workspace: Of the optimizer's step, for a moment.
        bucket_bytes: Of gradients on their way while backward runs.
        flat_bytes: The same after it: eager pipelines reduce copies, a bucket at a time.
        keeping: What this means for parts of the model.
    """

    parameters: tuple[float, float]
    gradients: tuple[float, float]
    optimizer: tuple[float, float]
    workspace: tuple[float, float]
    bucket_bytes: float
    flat_bytes: float
    keeping: Keeping


@cached(4096)
def states_of(p: ParallelSpec, optimizer: OptimizerSpec, precision: str, groups: Groups) -> States:
    """How many bytes an element costs in a parallel strategy."""
    shards = (groups.shard.size, groups.experts.size)
    sharded = p.zero_stage == 3 and groups.shard.size > 1
    eager = precision == "fp32"
    whole = eager or sharded
    own = 4.0 if whole or precision == "fp8" else 2.0
    parts = [shards if p.zero_stage >= stage else (1, 1) for stage in (3, 2, 1)]
    half = precision == "fp16" and not whole
    moments = 0.0 if optimizer.offload else 8.0 if whole else 16.0 if half else 12.0

    def each(size: float, divisors: tuple[int, int]) -> tuple[float, float]:
        return size / divisors[0], size / divisors[1]

    in_buckets = eager and not sharded and p.pp == 1 and groups.replicas.size > 1
    grows = whole and not in_buckets
    gradients = each(2.0 if half else 4.0, parts[1])
    pipelined = sharded and p.pp > 1
    gathered = Gathered()
    fresh = 4.0 if eager else 0.0
    if sharded:
        size = DTYPE_BYTES[COMPUTE_DTYPE[precision]]
        gathered = Gathered(size, p.prefetch, not p.reshard_after_forward, pipelined)
        fresh = 0.0 if pipelined else float(size)
    stay = each(4.0, (1, 1)) if pipelined else gradients if grows else (0.0, 0.0)
    growing = Gradients(*stay, fresh, whole_blocks=sharded and not pipelined)
    return States(
        parameters=each(own, parts[0]),
        gradients=gradients,
        optimizer=each(moments, parts[2]),
        workspace=(0.0, 0.0) if optimizer.fused or optimizer.offload else each(MASTER_BYTES, parts[2]),
        bucket_bytes=2 * p.bucket_mbytes * 2**20 if p.zero_stage == 2 and groups.shard.size > 1 else 0.0,
        flat_bytes=p.bucket_mbytes * 2**20 if eager and not sharded and p.pp > 1 and groups.replicas.size > 1 else 0.0,
        keeping=Keeping(
            p.recompute,
            p.recompute_every,
            growing,
            gathered,
            placeholder_bytes=0 if whole else 2,
            loss_bytes=0 if eager or not sharded else 6 if p.tp == 1 else 14,  # torch's own, and its loss_parallel
        ),
    )
