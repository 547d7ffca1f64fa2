"""One rank of a world of any size, alone: torch.distributed as the script sees it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from .collectives import WHOLE, Collectives
from .groups import BACKEND, Group
from .patching import patch


def set_environment(rank: int, world_size: int, local_size: int) -> None:
    """Set what torchrun sets."""
    nodes = -(-world_size // local_size)
    values = {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local_size, "GROUP_RANK": rank // local_size,
        "LOCAL_WORLD_SIZE": min(local_size, world_size), "GROUP_WORLD_SIZE": nodes, "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "none",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": 1,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in values.items()})


def install(rank: int, world_size: int, collectives: Collectives) -> None:
    """Let every process group be one of the fake world."""

    def make(options: Any, _: Any = None) -> Group:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return Group(options.group_rank, ranks, options.group_id, collectives)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu", "cuda"])
    helper, initialise, mesh_made = c10d._new_process_group_helper, dist.init_process_group, DeviceMesh.__init__

    def new_group(size: int, of: int, ranks: Any, backend: Any, store: Any, *args: Any, **named: Any) -> Any:
        named = {**named, "backend_options": None, "device_id": None}
        group, store = helper(size, of, ranks, BACKEND, store, *args, **named)
        if isinstance(group, Group):
            group._set_group_desc(named.get("group_desc") or "")
        return group, store

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            store: Any = torch._C._distributed_c10d.HashStore()
            initialise(BACKEND, store=store, rank=rank, world_size=world_size)

    def init_mesh(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh_made(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)
        whole: Any = dist.group.WORLD
        is_part = kwargs.get("_root_mesh") is not None
        if self.mesh_dim_names and self.shape == (world_size,) and not is_part and whole.group_desc == WHOLE:
            whole._set_group_desc(f"mesh_{self.mesh_dim_names[0]}")  # such a mesh takes the group of all ranks

    patch(c10d, _new_process_group_helper=new_group, init_process_group=init_process_group)
    patch(dist, init_process_group=init_process_group)
    patch(DeviceMesh, __init__=init_mesh)
    for name in ("is_nccl_available", "is_gloo_available"):
        for module in (c10d, dist):
            setattr(module, name, lambda: True)
    _install_objects(world_size)


def _install_objects(world_size: int) -> None:
    """Collectives of Python objects: every rank has what this rank has."""

    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    def gather_object(value: Any, found: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if found is not None:
            found[:] = [value] * len(found)

    def broadcast_object_list(values: list[Any], *args: Any, **kwargs: Any) -> None:
        return None

    def scatter_object_list(found: list[Any], values: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if values:
            found[0] = values[0]

    def send_object_list(values: list[Any], *args: Any, **kwargs: Any) -> None:
        return None

    def recv_object_list(values: list[Any], *args: Any, **kwargs: Any) -> int:
        raise RuntimeError("an object from another rank cannot be captured: no other rank runs")

    for function in (
        send_object_list,
        recv_object_list,
        all_gather_object,
        gather_object,
        broadcast_object_list,
        scatter_object_list,
    ):
        for module in (c10d, dist):
            setattr(module, function.__name__, function)
