"""Train a small Llama on random tokens, with any product of data, tensor, pipeline and context parallelism.

Run it on GPUs or CPUs, capture it without any, or emulate all other ranks:

    torchrun --nproc-per-node 8 examples/scripts/train_llama.py --tp 2
    stepsight capture --world-size 1024 --out captured examples/scripts/train_llama.py --data fsdp --tp 8
    stepsight emulate --world-size 256 --fabric dgx-h100 examples/scripts/train_llama.py --tp 8 --steps 20
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Attention(nn.Module):
    """Causal self-attention with grouped keys and rotary positions."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.head_dim = o.hidden // o.heads
        self.wq = nn.Linear(o.hidden, o.hidden, bias=False)
        self.wk = nn.Linear(o.hidden, o.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(o.hidden, o.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(o.hidden, o.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Layer(nn.Module):
    """Attention and a gated MLP, or with ``--gelu`` a plain one as GPT's."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(o.hidden), nn.RMSNorm(o.hidden)
        self.attention = Attention(o)
        self.gate = None if o.gelu else nn.Linear(o.hidden, o.ffn, bias=False)
        self.up = nn.Linear(o.hidden, o.ffn, bias=False)
        self.down = nn.Linear(o.ffn, o.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.mlp_norm(x)
        return x + self.down(F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """All layers, or those of one pipeline stage."""

    def __init__(self, o: argparse.Namespace, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        first, last = stage * o.layers // stages, (stage + 1) * o.layers // stages
        self.embedding = nn.Embedding(o.vocab, o.hidden) if stage == 0 else None
        self.layers = nn.ModuleDict({str(layer): Layer(o) for layer in range(first, last)})
        self.norm = nn.RMSNorm(o.hidden) if stage == stages - 1 else None
        self.head = nn.Linear(o.hidden, o.vocab, bias=False) if stage == stages - 1 else None
        self.recompute = o.recompute
        positions = torch.arange(o.seq_len, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(0, o.hidden // o.heads, 2, dtype=torch.float32) / (o.hidden // o.heads))
        self.register_buffer("angles", positions[:, None] * rates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = checkpoint(layer, x, self.angles, use_reentrant=False) if self.recompute else layer(x, self.angles)
        return x if self.head is None else self.head(self.norm(x))


def shard_tensors(model: Llama, mesh: DeviceMesh, o: argparse.Namespace) -> None:
    """Tensor parallelism, with sequence parallelism and a loss on sharded logits where asked for."""
    rows = Shard(1) if o.sequence_parallel else Replicate()
    plan = {}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if model.head is not None:
        logits = Shard(-1) if o.loss_parallel else Replicate()
        plan["head"] = ColwiseParallel(input_layouts=rows, output_layouts=logits, use_local_output=not o.loss_parallel)
        if o.sequence_parallel:
            plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.layers.values():
        plan = {
            "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=rows),
            "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=rows),
        }  # fmt: skip
        if o.sequence_parallel:
            plan |= {
                "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "gate": ColwiseParallel(input_layouts=Shard(1)), "up": ColwiseParallel(input_layouts=Shard(1)),
            }  # fmt: skip
        if o.gelu:
            del plan["gate"]
        parallelize_module(layer, mesh, plan)


def shard_data(model: Llama, mesh: DeviceMesh, o: argparse.Namespace) -> nn.Module:
    """Data parallelism: DDP, FSDP or hybrid-sharded FSDP."""
    dp = mesh["shard"]
    if o.data == "ddp":
        if o.tp > 1:
            _pre_dp_module_transform(model)
        own = [local_rank()] if torch.cuda.is_available() else None
        return DistributedDataParallel(model, device_ids=own, process_group=dp.get_group())
    if o.data == "fsdp1":
        return FullyShardedDataParallel(model, dp.get_group(), use_orig_params=True)
    sharded = mesh["replicate", "shard"] if o.replicas > 1 else dp
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if o.mixed else MixedPrecisionPolicy()
    for layer in model.layers.values():
        fully_shard(layer, mesh=sharded, mp_policy=policy)
    return fully_shard(model, mesh=sharded, mp_policy=policy)


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8, "ffn": 704, "vocab": 1024,
                          "seq-len": 128, "micro-batch": 2, "micro-batches": 1, "steps": 4, "tp": 1, "pp": 1,
                          "virtual": 2, "replicas": 1, "context": 1}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", choices=("none", "ddp", "zero1", "fsdp", "fsdp1"), default="ddp")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    for name in ("sequence-parallel", "loss-parallel", "recompute", "mixed", "bf16", "gelu"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def make_optimizer(model: nn.Module, o: argparse.Namespace, mesh: DeviceMesh) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if o.data == "zero1":
        group = mesh["shard"].get_group()
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, group, lr=1e-4, fused=True)
    sharded = [each for each in parameters if isinstance(each, DTensor)]
    others = [each for each in parameters if not isinstance(each, DTensor)]
    groups = [{"params": each} for each in (sharded, others) if each]  # one fused call takes either
    return torch.optim.AdamW(groups, lr=1e-4, fused=True)


def main() -> None:
    o = options()
    device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rest = dist.get_world_size() // (o.pp * o.tp * o.replicas * o.context)
    data = {"batch": rest, "cp": o.context} if o.context > 1 else {"shard": rest}
    sizes = {"pp": o.pp, "replicate": o.replicas, **data, "tp": o.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if o.context > 1:
        mesh["batch", "cp"]._flatten("shard")  # ranks with other parts of a sequence share parameters too
    torch.set_default_dtype(torch.bfloat16 if o.bf16 else torch.float32)
    train = pipelined if o.pp > 1 else plain
    train(o, mesh, device)
    dist.destroy_process_group()


def build(o: argparse.Namespace, mesh: DeviceMesh, device: torch.device, stage: int = 0, stages: int = 1) -> nn.Module:
    with device:
        model = Llama(o, stage, stages)
    if o.tp > 1:
        shard_tensors(model, mesh["tp"], o)
    if o.data == "none":
        return model
    return shard_data(model, mesh, argparse.Namespace(**{**vars(o), "data": o.data.replace("zero1", "ddp")}))


def batch(o: argparse.Namespace, device: torch.device, sequences: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, o.vocab, (sequences, o.seq_len + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain(o: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """Train without a pipeline."""
    set_rotate_method("alltoall")
    model = build(o, mesh, device)
    angles = [buffer for name, buffer in model.named_buffers() if name.endswith("angles")]
    optimizer = make_optimizer(model, o, mesh)
    for step in range(o.steps):
        for micro_batch in range(o.micro_batches):
            if o.data in ("ddp", "zero1"):
                model.require_backward_grad_sync = micro_batch == o.micro_batches - 1
            tokens, labels = batch(o, device, o.micro_batch)
            with ExitStack() as stack:
                if o.context > 1:
                    parts = [tokens, labels, *angles]
                    dims = [1, 1] + [0] * len(angles)
                    stack.enter_context(
                        context_parallel(
                            mesh["cp"], buffers=parts, buffer_seq_dims=dims, no_restore_buffers={tokens, labels}
                        )
                    )
                if o.loss_parallel:
                    stack.enter_context(loss_parallel())
                loss_of(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} is done")


def pipelined(o: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """Train with a pipeline."""
    pp = mesh["pp"]
    rank = pp.get_local_rank()
    if o.schedule == "zbv":
        chunks, places = 2, [rank, 2 * o.pp - 1 - rank]
    else:
        chunks = o.virtual if o.schedule.startswith("interleaved") else 1
        places = [chunk * o.pp + rank for chunk in range(chunks)]
    models = [build(o, mesh, device, place, chunks * o.pp) for place in places]
    stages = [
        PipelineStage(model, place, chunks * o.pp, device, group=pp.get_group())
        for model, place in zip(models, places, strict=True)
    ]
    schedule = SCHEDULES[o.schedule](stages if chunks > 1 else stages[0], o.micro_batches, loss_fn=loss_of)
    optimizer = make_optimizer(nn.ModuleList(models), o, mesh)
    for step in range(o.steps):
        tokens, labels = batch(o, device, o.micro_batch * o.micro_batches)
        first, last = places[0] == 0, places[-1] == chunks * o.pp - 1
        schedule.step(*([tokens] if first else []), **({"target": labels} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} is done")


if __name__ == "__main__":
    main()
