"""Run by two ranks: the example scripts' sharded models give the loss and the gradients of the plain ones.

    reference_check.py FOLDER RANK

The ranks meet in the folder; what is off is printed, and the exit status tells.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/scripts"))
train_llama: Any = importlib.import_module("train_llama")
train_moe: Any = importlib.import_module("train_moe")

CPU = torch.device("cpu")


def options(module: Any, *arguments: str) -> argparse.Namespace:
    """The script's options as its command line gives them."""
    sys.argv = [module.__name__, "--layers", "2", "--hidden", "64", "--vocab", "256", "--seq-len", "32", *arguments]
    found: argparse.Namespace = module.options()
    return found


def full(gradient: Any) -> Tensor:
    """A gradient as all ranks hold it together."""
    whole: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.detach()


def check(name: str, ours: tuple[Tensor, nn.Module], plain: tuple[Tensor, nn.Module]) -> list[str]:
    """What is off: the loss, or gradients by the names of their parameters."""
    found = [] if torch.allclose(full(ours[0]), plain[0], rtol=1e-5) else [f"{name}: loss {ours[0]} for {plain[0]}"]
    gradients = {key: parameter.grad for key, parameter in plain[1].named_parameters()}
    for key, parameter in ours[1].named_parameters():
        mine, theirs = full(parameter.grad), gradients[key]
        assert theirs is not None
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
            found.append(
                f"{name}: gradient of {key} off by {(mine - theirs).abs().max():.3g} of {theirs.abs().max():.3g}"
            )
    return found


def llama(*arguments: str) -> tuple[Tensor, nn.Module]:
    """Loss and model of the example Llama, after a backward; all ranks have the same tokens."""
    o = options(train_llama, *arguments)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size() // o.tp, o.tp), mesh_dim_names=("pp", "shard", "tp"))
    torch.manual_seed(0)
    model = train_llama.build(o, mesh, CPU)
    tokens, labels = train_llama.batch(o, CPU, o.micro_batch)
    if not o.loss_parallel:
        loss = train_llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss.detach(), model
    with loss_parallel():
        loss = train_llama.loss_of(model(tokens), labels)
        loss.backward()
    return loss.detach(), model


def mixture(size: int) -> tuple[Tensor, nn.Module]:
    """Output's square and model of the example mixture with its experts on so many ranks, after a backward."""
    o = options(train_moe)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group: Any = dist.group.WORLD if size > 1 else groups[dist.get_rank()]
    torch.manual_seed(0)
    model = train_moe.Mixture(o, groups[dist.get_rank()])
    if size > 1:
        own = o.experts // size
        model.group = group
        for name in ("gate_up", "down"):
            whole = getattr(model.experts, name).detach()
            setattr(model.experts, name, nn.Parameter(whole[dist.get_rank() * own :][:own].clone()))
    x = torch.randn(2, 16, o.hidden)
    loss = model(x).square().sum()
    loss.backward()
    if size > 1:  # both ranks sent the same rows, so that each expert saw them twice
        for parameter in model.experts.parameters():
            parts = [torch.empty_like(parameter.grad) for _ in range(size)]
            dist.all_gather(parts, parameter.grad / size)
            parameter.grad = None
            parameter.data = torch.cat([parameter.data] * size)
            parameter.grad = torch.cat(parts)
    return loss.detach(), model


def main() -> int:
    """Check all strategies."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    plain = llama("--data", "none")
    tensor_parallel = ("--data", "none", "--tp", "2", "--sequence-parallel", "--loss-parallel")
    off = check("fsdp", llama("--data", "fsdp"), plain)
    off += check("tp 2", llama(*tensor_parallel), plain)
    off += check("recomputed", llama("--data", "fsdp", "--recompute"), plain)
    off += check("ep 2", mixture(2), mixture(1))
    print("\n".join(off))
    dist.destroy_process_group()
    return len(off)


if __name__ == "__main__":
    sys.exit(main())
