"""Jobs drawn at random, for properties of the search."""

from __future__ import annotations

from random import Random
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job

CLUSTERS = ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "a100-pcie-40gb", "v100-sxm-32gb")
LINKS = {
    "intra_node": {"bandwidth_gbytes_per_s": 100.0, "latency_us": 5.0},
    "inter_node": {"bandwidth_gbytes_per_s": 10.0, "latency_us": 15.0},
}


def random_job(random: Random, most_nodes: int = 8) -> Job:
    """A legal job: a model of any family on a cluster of any kind."""
    while True:
        try:
            return Job.from_dict(_tables(random, most_nodes))
        except JobError:
            continue


def _tables(random: Random, most_nodes: int) -> dict[str, Any]:
    family = random.choice(["gpt", "llama", "bert", "vit", "t5", "mixture", "deepseek"])
    hidden, heads = random.choice([(512, 8), (1024, 16), (2048, 16), (4096, 32), (8192, 64)])
    model: dict[str, Any] = {
        "family": {"mixture": "llama", "deepseek": "llama"}.get(family, family),
        "layers": random.choice([4, 6, 8, 12]),
        "hidden": hidden,
        "heads": heads,
        "vocab": 1024 * random.choice([1, 8, 32]),
        "seq_len": random.choice([512, 2048, 8192]),
        "tied_embeddings": random.random() < 0.3,
        "fused_attention": random.random() < 0.8,
    }
    if family in ("mixture", "deepseek"):
        model |= {"experts": 8, "experts_per_token": 2, "expert_ffn": hidden, "moe_every": random.choice([1, 2])}
        model |= {"dense_layers": random.choice([0, 1]), "shared_experts": random.choice([0, 1])}
    if family == "deepseek":
        model |= {"attention": "mla", "head_dim": 64, "q_lora_rank": 256, "kv_lora_rank": 256}
        model |= {"rope_head_dim": 32, "v_head_dim": 64}
    if family == "t5":
        model |= {"encoder_layers": model["layers"], "encoder_seq_len": 512}
    if family == "vit":
        model |= {"patch_dim": 768, "vocab": 1000}
    parallel: dict[str, Any] = {
        "overlap_grad_reduce": random.random() < 0.7,
        "overlap_param_gather": random.random() < 0.3,
        "reshard_after_forward": random.random() < 0.8,
        "prefetch": random.choice([0, 1, 2]),
        "overlap_tp": random.choice(["", "", "backward", "split"]),
        "scatter_p2p": random.random() < 0.3,
        "context_parallel": random.choice(["ring", "all_gather", "torch"]),
        "gradient_dtype": random.choice(["", "model", "fp32"]),
        "runtime": random.choice(["", "", "torch"]),
        "vocab_parallel": random.random() < 0.8,
    }
    cluster: dict[str, Any] = {
        "hardware": random.choice(CLUSTERS),
        "nodes": random.randint(1, most_nodes),
        "devices_per_node": random.choice([4, 8]),
        "fabric": random.choice(["dgx-a100", "dgx-h100", {"name": "own", **LINKS}]),
    }
    if random.random() < 0.2:
        cluster["stragglers"] = [{"rank": 1, "slowdown": 1.3}]
    if random.random() < 0.2:
        cluster["slow_links"] = [{"node": 0, "slowdown": 2.0}]
    precision = random.choice(["bf16", "bf16", "fp16", "fp32"])
    batch = {"micro_batch": 1, "global_batch": random.choice([8, 32, 64, 96, 256]), "precision": precision}
    tables = {"model": model, "parallel": parallel, "batch": batch, "cluster": cluster}
    if random.random() < 0.3:
        tables["execution"] = {"engine": random.choice(["megatron", "eager-pytorch"])}
    if random.random() < 0.3:
        tables["optimizer"] = {"clip_grad_norm": False, "fused": False}
    return tables
