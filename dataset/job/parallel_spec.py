"""The table ``[parallel]`` of a job."""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.base.hashed_once import hashed_once


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
        context_parallel: ``ring`` (keys and values travel beside the computation) or ``all_gather``.
        zero_stage: 0: gradients are all-reduced; 1: the optimizer is sharded; 2: gradients too; 3: parameters too
            (FSDP).
        dp_shard: Replicas over which ``zero_stage`` shards; 0: all; fewer: hybrid sharding (HSDP).
        overlap_tp: Which tensor-parallel collectives overlap with matrix products.  Empty: none.  ``backward``: those
            of the backward of column-parallel linears (Megatron: the input is gathered again beside the gradient of the
            input, and that gradient is summed beside the gradient of the weights).  ``split``: also all others, in
            parts, so that a product begins with the first part (Transformer Engine's user buffers).  ``torch-async``:
            as ``split``, and a kernel of its own sums what the ranks send (PyTorch's asynchronous tensor parallelism).
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
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    scatter_p2p: bool = False
    runtime: str = ""
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_every: int = 1
    offload_activations: bool = False

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
