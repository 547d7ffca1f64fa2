"""One rank of a world of any size, alone: torch.distributed as the script sees it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import stage as _stage
from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta, _StageForwardMeta, _TensorMeta

from ..base.patching import always, patch
from .collectives import BACKEND, WHOLE, Collectives, Group
from .recorder import Recorder


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


def install_world(rank: int, world_size: int, collectives: Collectives) -> None:
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

    patch(c10d, _new_process_group_helper=new_group)
    for module in (c10d, dist, device_mesh):
        patch(module, init_process_group=init_process_group)
    patch(DeviceMesh, __init__=init_mesh)
    for module in (c10d, dist):
        patch(module, is_nccl_available=lambda: True, is_gloo_available=lambda: True, **_OBJECTS)


# Collectives of Python objects: every rank has what this rank has.


def _all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
    found[:] = [value] * len(found)


def _scatter_object_list(found: list[Any], values: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    found[:1] = (values or found)[:1]


def _recv_object_list(values: list[Any], *args: Any, **kwargs: Any) -> int:
    raise RuntimeError("an object from another rank cannot be captured: no other rank runs")


_OBJECTS = {
    "all_gather_object": _all_gather_object, "scatter_object_list": _scatter_object_list,
    "gather_object": lambda value, found=None, *args, **kwargs: _all_gather_object(found or [], value),
    "send_object_list": always(None), "broadcast_object_list": always(None), "recv_object_list": _recv_object_list,
}  # fmt: skip

_stages: Any = _stage

Boundary = list[dict[str, Any]]  # of each tensor that passes between stages: shape, stride, dtype, requires_grad


class NeedsBoundary(BaseException):
    """Raised if a stage needs to know the output of the first stage, which is on another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"needs what rank {rank} sends to the next stage")
        self.rank = rank


class FoundBoundary(BaseException):
    """Raised after the output of this stage, if nothing else is requested."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__("found what passes between stages")
        self.boundary = boundary


def install_pipelines(recorder: Recorder, boundary: Boundary | None, *, only_boundary: bool) -> list[Boundary]:
    """Give stages the shapes of their neighbours: ``boundary``, if it is known.

    With ``only_boundary`` the script ends as soon as it is known here.  The list is empty until then.
    """
    known: list[Boundary] = [] if boundary is None else [boundary]

    def send_meta(self: Any, meta: Any, to: int) -> None:
        if not isinstance(meta, _StageForwardMeta):
            return
        sent = [_described(each) for each in meta.forward_metas]
        if only_boundary:
            raise FoundBoundary(sent)
        if not known:
            known.append(sent)
        elif known[0] != sent:
            recorder.note(f"stage {self.stage_index} sends other shapes than stage 0: {sent} after {known[0]}")

    def receive_meta(self: Any, of: int) -> Any:
        if of > self.stage_index:
            return _StageBackwardMeta(backward_metas=_derive_grad_metas(self._stage_meta.outputs))
        if not known:
            raise NeedsBoundary(self._resolve_peer_global_rank(0))
        return _StageForwardMeta(forward_metas=tuple(map(_restored, known[0])))

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
        """Whether this stage states all shapes itself (1) or asks its neighbours (0): the others do as it does."""
        asks = _stages.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._captured_vote = torch.tensor([0 if asks else 1], dtype=torch.int32)
        return self._captured_vote

    patch(_stages.PipelineStage, _send_meta=send_meta, _recv_meta=receive_meta, _warmup_forward_vote=vote)
    patch(_stages.PipelineStage, _warmup_backward_result=lambda self, received_result=None: self._captured_vote)
    return known


def _described(meta: Any) -> dict[str, Any]:
    if type(meta) is not _TensorMeta:
        raise RuntimeError("stages that pass DTensors on cannot be captured: pass local tensors (`to_local`)")
    sent = {name: getattr(meta, name) for name in ("shape", "stride", "dtype", "requires_grad")}
    return {**sent, "shape": [*meta.shape], "stride": [*meta.stride], "dtype": str(meta.dtype).removeprefix("torch.")}


def _restored(sent: dict[str, Any]) -> _TensorMeta:
    shape, stride, dtype = torch.Size(sent["shape"]), tuple(sent["stride"]), getattr(torch, sent["dtype"])
    return _TensorMeta(shape=shape, stride=stride, dtype=dtype, requires_grad=sent["requires_grad"])


class Chunks(Sequence[Tensor]):
    """Chunks of a tensor as ``torch.chunk`` makes them, with empty ones at the end; each is made when asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._size = -(-tensor.shape[dim] // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> Tensor:  # type: ignore[override]
        if not 0 <= at < self._count:
            raise IndexError(at)
        begin, length = at * self._size, self._tensor.shape[self._dim]
        if begin >= length:
            return self._tensor.new_empty(0)
        return torch.narrow(self._tensor, self._dim, begin, min(self._size, length - begin))


def install_shards() -> None:
    """Let FSDP cut parameters and join meshes in this way."""
    patch(_fsdp_param, _chunk_with_empty=Chunks)
    join: Any = DeviceMesh._concatenate
    joined: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}  # meshes are held, so that ids stay theirs

    def joined_once(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in joined:
            joined[key] = meshes, join(meshes)
        return joined[key][1]

    patch(DeviceMesh, _concatenate=staticmethod(joined_once))
