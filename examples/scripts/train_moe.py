"""Train a small mixture of experts on random tokens, with expert parallelism and sharded data parallelism.

Every expert-parallel group holds all experts once.  Each rank sends copies of its tokens to the ranks of their experts
with ``all_to_all_single`` and gets them back.  Run it on GPUs, or capture it without one:

    torchrun --nproc-per-node 8 examples/scripts/train_moe.py --expert-parallel 4
    stepsight capture --world-size 256 --out captured examples/scripts/train_moe.py --expert-parallel 8
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


class Exchange(torch.autograd.Function):
    """Rows to other ranks of a group; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        out = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), sent, received, group=group)
        return out, None, None, None


class Experts(nn.Module):
    """The gated MLPs of this rank, one after the other."""

    def __init__(self, o: argparse.Namespace, count: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, o.hidden, 2 * o.ffn) * 0.02)
        self.down = nn.Parameter(torch.randn(count, o.ffn, o.hidden) * 0.02)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        found = []
        for part, gate_up, down in zip(rows.split(counts), self.gate_up, self.down, strict=True):
            gate, up = (part @ gate_up).chunk(2, -1)
            found.append((F.silu(gate) * up) @ down)
        return torch.cat(found)


class Mixture(nn.Module):
    """A router and experts, of which each rank of a group holds some."""

    def __init__(self, o: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.top, self.experts_of_all, self.group = o.top, o.experts, group
        self.router = nn.Linear(o.hidden, o.experts, bias=False)
        self.experts = Experts(o, o.experts // group.size())

    def forward(self, x: Tensor) -> Tensor:
        rows, size = x.flatten(0, -2), self.group.size()
        weights, chosen = self.router(rows).softmax(-1).topk(self.top, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts_of_all)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_sender = arriving.view(size, -1)
        sent, received = counts.view(size, -1).sum(1).tolist(), by_sender.sum(1).tolist()
        copies = Exchange.apply(rows[order // self.top], sent, received, self.group)
        expert = torch.arange(by_sender.shape[1], device=x.device).repeat(size)
        by_expert = torch.repeat_interleave(expert, by_sender.flatten()).argsort(stable=True)
        found = self.experts(copies[by_expert], by_sender.sum(0).tolist())
        back = torch.empty_like(found).index_copy(0, by_expert, found)
        copies = Exchange.apply(back, received, sent, self.group)
        mixed = torch.zeros_like(rows).index_add(0, order // self.top, copies * weights.flatten()[order, None])
        return mixed.view_as(x)


class Layer(nn.Module):
    """Attention and a mixture."""

    def __init__(self, o: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.heads = o.heads
        self.norm, self.mixture_norm = nn.RMSNorm(o.hidden), nn.RMSNorm(o.hidden)
        self.qkv = nn.Linear(o.hidden, 3 * o.hidden, bias=False)
        self.out = nn.Linear(o.hidden, o.hidden, bias=False)
        self.mixture = Mixture(o, group)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mixture(self.mixture_norm(x))


class Model(nn.Module):
    """Embedding, layers and logits."""

    def __init__(self, o: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(o.vocab, o.hidden)
        self.layers = nn.ModuleList(Layer(o, group) for _ in range(o.layers))
        self.norm = nn.RMSNorm(o.hidden)
        self.head = nn.Linear(o.hidden, o.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Shard experts over the ranks that hold the same ones, and all else over all ranks."""
    everyone = mesh._flatten("dp")
    for layer in model.layers:
        fully_shard(layer.mixture.experts, mesh=mesh["replicate"])
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in {"layers": 4, "hidden": 256, "heads": 8, "ffn": 512, "experts": 8, "top": 2, "vocab": 1024,
                          "seq-len": 128, "micro-batch": 2, "steps": 4, "expert-parallel": 4}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    o = options()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.set_default_dtype(torch.bfloat16)
    shape = (dist.get_world_size() // o.expert_parallel, o.expert_parallel)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "expert"))
    with device:
        model = Model(o, mesh["expert"].get_group())
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for step in range(o.steps):
        tokens = torch.randint(0, o.vocab, (o.micro_batch, o.seq_len + 1), device=device)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
