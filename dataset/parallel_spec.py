"""The table ``[parallel]`` of a job."""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.hashed_once import hashed_once


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
            add what products write); empty: as the execution engine does by default (``execution``).
        reduce_scatter: ZeRO 1: whether a rank is sent the sums of its own share alone, rather than all sums.
        schedule: A key of ``schedules.SCHEDULES``, or a ``.csv`` file of actions.
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
