"""Llama 3 of torchtitan with its own FSDP2 and tensor parallelism; needs ``torchtitan`` and ``triton``."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

BATCH, STEPS = 1, 4


def main() -> None:
    """Train; attention is causal over the whole sequence, where torchtitan masks documents."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="debugmodel", choices=list(llama3_configs))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallelism = ParallelismConfig(
        tensor_parallel_degree=options.tp, data_parallel_shard_degree=-1, spmd_backend="partial_dtensor"
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    config = llama3_configs[options.flavor](attn_backend="flex")
    set_llama3_sharding_config(config, enable_sp=options.tp > 1)
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = config.build()
    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=options.seq_len),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        tokens = torch.randint(config.vocab_size, (BATCH, options.seq_len + 1), device=device)
        with loss_parallel() if options.tp > 1 else nullcontext():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
