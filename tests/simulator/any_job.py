"""Jobs of all families, strategies and schedules, for properties that hold for every one of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, OptimizerSpec, ParallelSpec
from stepsight.dataset.job.specs import AXES, OtherDevices, SlowLink, Straggler

FABRIC = Fabric("toy", Link(1e11, 3e-6), Link(2e10, 1e-5))
# Name, virtual stages, micro-batches for each stage at least.
SCHEDULES = [
    ("gpipe", 1, 0), ("1f1b", 1, 0), ("1f1b", 2, 1), ("looped-bfs", 2, 1), ("zb-h1", 1, 0), ("interleaved-zb", 2, 1),
    ("zbv", 2, 1), ("dualpipev", 2, 2),
]  # fmt: skip
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn": 32}
LATENT = {"attention": "mla", "kv_lora_rank": 16, "rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
MODELS: list[dict[str, Any]] = [
    {"family": "gpt", "tied_embeddings": True},
    {"family": "llama", "kv_heads": 4},
    {"family": "llama", **EXPERTS, "shared_experts": 1, "dense_layers": 1, "imbalance": 1.3},
    {"family": "gpt", **EXPERTS, "moe_every": 2, "capacity_factor": 1.2},
    {"family": "llama", **LATENT, "q_lora_rank": 24},
    {"family": "llama", **LATENT, **EXPERTS},
    {"family": "bert"},
    {"family": "t5", "encoder_layers": 2, "encoder_seq_len": 128},
    {"family": "vit", "patch_dim": 48},
    {"family": "gpt", "fused_attention": False, "dropout": 0.1},
    {"family": "llama", "attention_kernels": "flash-2"},
]


@st.composite
def devices(draw: st.DrawFn, comm_compute_share: float | None = None) -> Hardware:
    """GPUs and CPUs, with or without a host that launches."""
    shares = st.sampled_from([0.0, 0.1, 1.0]) if comm_compute_share is None else st.just(comm_compute_share)
    return Hardware(
        name="toy",
        kind=draw(st.sampled_from(["gpu", "cpu"])),
        peak_flops={"fp32": 20e12, "bf16": 300e12, "fp16": 300e12, "fp8": 600e12},
        memory_bandwidth_bytes_per_s=2e12,
        memory_bytes=80e9,
        op_latency_s=draw(st.sampled_from([0.0, 2e-6])),
        host_op_s=draw(st.sampled_from([0.0, 3e-6, 3e-5])),
        comm_compute_share=draw(shares),
    )


@st.composite
def jobs(draw: st.DrawFn, *, uneven_cluster: bool = False) -> Job:
    """Any job of a small model."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    sizes = {"layers": one_of(4, 8, 9), "hidden": 64, "heads": 8, "ffn": 128, "vocab": 256, "seq_len": 64}
    model: dict[str, Any] = {**sizes, **one_of(*MODELS)}
    pp, tp, cp, dp = one_of(1, 2, 3, 4), one_of(1, 2, 4), one_of(1, 1, 2), one_of(1, 2, 4)
    schedule, chunks, rounds = one_of(*SCHEDULES) if pp > 1 else ("1f1b", 1, 0)
    micro_batches = pp * (rounds + one_of(0, 1)) if rounds else one_of(1, 2, 3, 6)
    total, parts = model["layers"] + model.get("encoder_layers", 0), pp * chunks
    stage_layers: tuple[int, ...] = ()
    if total < parts or one_of(False, True):
        cuts = [0, *sorted(one_of(*range(total + 1)) for _ in range(parts - 1)), total]
        stage_layers = tuple(end - begin for begin, end in pairwise(cuts))
    offload, num_devices = one_of(False, False, True), tp * cp * pp * dp
    per_node = one_of(*(size for size in (1, 2, 4, 8) if num_devices % size == 0))
    cluster: dict[str, Any] = {
        "hardware": "toy", "nodes": num_devices // per_node, "devices_per_node": per_node, "fabric": "dgx-a100",
    }  # fmt: skip
    if uneven_cluster:
        nodes = st.integers(0, num_devices // per_node - 1)
        slow = st.sampled_from([1.0, 1.5, 4.0])
        stragglers = st.builds(Straggler, rank=st.integers(0, num_devices - 1), slowdown=slow)
        cluster["stragglers"] = tuple(draw(st.lists(stragglers, max_size=2)))
        cluster["slow_links"] = tuple(draw(st.lists(st.builds(SlowLink, node=nodes, slowdown=slow), max_size=1)))
        names = st.sampled_from(["a100-sxm-80gb", "h100-sxm-80gb", "local-cpu"])
        others = st.builds(OtherDevices, nodes=st.tuples(nodes), hardware=names)
        cluster["mixed"] = tuple(draw(st.lists(others, max_size=1)))
    precisions = ("fp32", "bf16") if cluster.get("mixed") else ("fp32", "bf16", "fp16", "fp8")
    try:
        return Job(
            model=ModelSpec(**model),
            parallel=ParallelSpec(
                tp=tp,
                cp=cp,
                pp=pp,
                dp=dp,
                ep=one_of(1, 2, 4) if "experts" in model else 1,
                order="-".join(draw(st.permutations(AXES))),
                sequence_parallel=one_of(False, True),
                vocab_parallel=one_of(True, False),
                expert_tp=one_of(0, 1),
                context_parallel=one_of("all_gather", *(["ring", "torch"] * model.get("fused_attention", True))),
                zero_stage=one_of(0, 1, 2, 3),
                dp_shard=one_of(0, 2) if dp == 4 else 0,
                overlap_tp=one_of("", "backward", "split"),
                overlap_grad_reduce=one_of(True, False),
                overlap_param_gather=one_of(False, True),
                prefetch=one_of(0, 1, 2, 3),
                reshard_after_forward=one_of(True, False),
                bucket_mbytes=one_of(0.001, 0.02, 25.0),
                gradient_dtype=one_of("", "model", "fp32"),
                scatter_p2p=one_of(False, True),
                schedule=schedule,
                virtual_stages=chunks,
                stage_layers=stage_layers,
                runtime=one_of("", "asynchronous", "torch"),
                recompute="none" if offload else one_of("none", "selective", "full"),
                recompute_every=one_of(1, 2, 3),
                offload_activations=offload,
                offload_layers=one_of(0, 1) if offload else 0,
            ),
            batch=BatchSpec(
                micro_batch=2,
                global_batch=2 * micro_batches * dp,
                precision=one_of(*precisions),
                fp8_scaling=one_of("delayed", "current", "dynamic"),
                fp8_parameters=one_of(False, True),
            ),
            optimizer=OptimizerSpec(
                kind=one_of("adam", "adamw"),
                fused=one_of(True, False),
                clip_grad_norm=one_of(False, True),
                offload=one_of(False, False, True),
            ),
            cluster=ClusterSpec(**cluster),
        )
    except JobError:  # experts over more ranks than there are
        assume(False)
        raise
