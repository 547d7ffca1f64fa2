"""One rank of a world of any size, alone: torch.distributed as the script sees it.

Collectives are recorded with their group, its ranks and their bytes, on NCCL's streams.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import add
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import stage as _stage
from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta, _StageForwardMeta, _TensorMeta

from ..base.one_rank_group import LISTS, Call, LateFuture, OneRankGroup, by_rank, listed, row_bytes, total_bytes
from ..base.patching import always, patch
from .recorder import COLLECTIVE, SYNCHRONISATION, Recorder, storage_of

c10d: Any = dist.distributed_c10d
_stages: Any = _stage
WHOLE = "default_pg"  # torch's description of the group of all ranks
BACKEND = "captured"
NO_SPARSE = "NCCL sums no sparse gradients: a module within DDP or FSDP must have sparse=False, or be left out of it"

# The kind of each functional collective, in one call or coalesced, and the side whose bytes count ("": the larger one).
_KINDS = {
    "all_reduce": ("all_reduce", "in"), "all_gather_into_tensor": ("all_gather", "out"),
    "reduce_scatter_tensor": ("reduce_scatter", "in"), "all_to_all_single": ("all_to_all", ""),
    "broadcast": ("broadcast", "in"),
}  # fmt: skip


class Collectives:
    """Records collectives; ``scope`` tells phase, evaluation and sequence number, ``script`` is the user's."""

    def __init__(self, recorder: Recorder, scope: Callable[[], tuple[int, int, int]], script: Path) -> None:
        self._recorder, self._scope, self._script = recorder, scope, script
        self.issued: list[tuple[int, str, str, int, str]] = []  # group, torch's name of it, kind, bytes, script's line
        self.groups: dict[tuple[int, ...], tuple[int, str]] = {}  # numbers and names for people, by their ranks
        self.exchanged: dict[int, list[int]] = {}  # by group: bytes of each of its ranks' parts
        self._streams: dict[str, str] = {}  # of NCCL, by torch's name of the group
        self._numbers = Counter[tuple[int, ...]]()
        self._newest: dict[str, int] = {}  # node by torch's name of the group
        self._marks: dict[int, Any] = {}  # of ops by storage, until it is waited for

    def issue(self, call: Call, where: tuple[str, str, tuple[int, ...]]) -> Any:
        """Record a collective, on the current stream or on NCCL's own; return what a wait needs.

        ``where`` are torch's name of the group, its name for people, and its ranks.
        """
        recorder, (name, people, ranks) = self._recorder, where
        refuse_sparse(call.reads)
        if not recorder.active or len(ranks) < 2:
            return None
        kind = "all_gather" if call.kind == LISTS else call.kind
        current = recorder.stream
        if not call.waits:
            title, taken = f"{people} {call.direction}".strip(), self._streams.values()
            title = f"{title} {len(taken)}" if title in taken else title
            recorder.stream = self._streams.setdefault(name, title)
            recorder.wait(recorder.stream, recorder.mark(current))
        try:
            group, _ = self.groups.setdefault(ranks, (len(self.groups), people))
            work = recorder.work(("collective", kind, call.num_bytes, group))
            reads, writes = (map(storage_of, part) for part in (call.reads, call.writes))
            if call.exchanged:
                before = self.exchanged.get(group, [0] * len(ranks))
                self.exchanged[group] = list(map(add, before, call.exchanged))
            node = recorder.add((COLLECTIVE, work, self._numbers[ranks], kind), reads, writes, self._scope())
            self._numbers[ranks] += 1
            if not call.direction:  # NCCL runs what a communicator is given one after the other, whatever the streams
                if name in self._newest:
                    recorder.edges.setdefault((self._newest[name], node), SYNCHRONISATION)
                self._newest[name] = node
                path, frames = str(self._script), traceback.walk_stack(None)
                lines = (line for frame, line in frames if frame.f_code.co_filename == path)
                line = next((f"{self._script.name}:{line}" for line in lines), "")
                self.issued.append((group, name, kind, call.num_bytes, line))
            return recorder.mark(recorder.stream)
        finally:
            recorder.stream = current

    def wait(self, mark: Any) -> None:
        """Make the current stream wait for a collective."""
        if mark is not None and self._recorder.active:
            self._recorder.wait(self._recorder.stream, mark)

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record one call of an op (``_c10d_functional``), as DTensor issues them; it runs until it is waited for."""
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            self.wait(self._marks.pop(storage_of(args[0])._cdata, None))
            return
        plain = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
        if plain not in _KINDS:
            raise RuntimeError(f"the functional collective {name} is not supported")
        kind, side = _KINDS[plain]
        inputs, outputs = listed(args[0]), listed(out)
        names = (argument.name for argument in func._schema.arguments)
        group: Any = {**dict(zip(names, args, strict=False)), **kwargs}["group_name"]
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)
        full = {"in": inputs, "out": outputs}.get(side) or max(inputs, outputs, key=total_bytes)
        splits = args[1:3] if kind == "all_to_all" else ()
        exchanged = by_rank(*map(row_bytes, (outputs[0], inputs[0]), splits))
        mark = self.issue(Call(kind, full, inputs, outputs, exchanged=exchanged), group.where)
        if mark is not None:
            self._marks.update({storage_of(tensor)._cdata: mark for tensor in outputs})

    def barrier(self) -> None:
        """Make the host wait for all streams."""
        self._recorder.wait_on_host(None, "barrier", self._scope()[0])


def refuse_sparse(tensors: Iterable[Tensor]) -> None:
    """Raise if a tensor is sparse: NCCL sums none, and the bytes of gloo's sums depend on values."""
    if any(each.layout is torch.sparse_coo for each in tensors):
        raise RuntimeError(NO_SPARSE)


class Done(dist.Work):
    """A collective in flight; ``wait`` makes the current stream wait for it."""

    def __init__(self, collectives: Collectives, mark: Any = None, result: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._collectives, self._mark, self._result = collectives, mark, list(result)

    def wait(self, timeout: Any = None) -> bool:
        self._collectives.wait(self._mark)
        return True

    def block_current_stream(self) -> None:
        self.wait()

    is_success = is_completed = always(True)

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future = LateFuture(self.wait)
        future.set_result(self._result)
        return future


class Group(OneRankGroup):
    """A process group of the fake world: no other rank exists, and every collective finishes at once.

    Values mean nothing: a collective has its effect on real tensors (meshes, counts, object collectives), and none on
    fake ones.
    """

    supports_coalescing, group_desc = False, ""
    name, shutdown, abort = always(BACKEND), always(None), always(None)

    def __init__(self, rank: int, ranks: list[int], name: str, collectives: Collectives) -> None:
        super().__init__(rank, ranks, name)
        self._collectives = collectives
        self._batch: list[Done] | None = None

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    @property
    def where(self) -> tuple[str, str, tuple[int, ...]]:
        """torch's name of the group, its name for people (the dimension of its mesh), and its ranks."""
        people = self.group_desc.removeprefix("mesh_").removeprefix("mesh")
        if self.group_desc in (WHOLE, "undefined", ""):
            people = "world" if self.group_desc == WHOLE else f"group of {len(self._ranks)}"
        return self._name, people, self._ranks

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Done:
        raise RuntimeError("a receive from any rank cannot be captured: name the rank that sends")

    def barrier(self, *given: Any, **named: Any) -> Done:
        self._collectives.barrier()
        return Done(self._collectives)

    monitored_barrier = barrier

    def _get_backend(self, device: Any) -> Any:
        return self

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> Done:
        batch, self._batch = self._batch or [], None
        return batch[-1] if batch else Done(self._collectives)

    def _issue(self, call: Call) -> Done:
        if call.effect is not None and not any(isinstance(each, FakeTensor) for each in (*call.reads, *call.writes)):
            with unset_fake_temporarily(), torch.no_grad():
                call.effect()
        where = name, _, ranks = self.where
        if call.direction:  # a message joins two ranks
            line = ranks[self.rank()], ranks[call.peer]
            line = line if call.direction == "send" else line[::-1]
            where = f"{name} {line}", where[1], line
        done = Done(self._collectives, self._collectives.issue(call, where), call.writes)
        if self._batch is not None:
            self._batch.append(done)
        return done


def set_environment(rank: int, world_size: int, local_size: int) -> None:
    """Set what torchrun sets."""
    values = {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local_size, "GROUP_RANK": rank // local_size,
        "LOCAL_WORLD_SIZE": min(local_size, world_size), "GROUP_WORLD_SIZE": -(-world_size // local_size),
        "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": 1,
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

Boundary = list[dict[str, Any]]  # of each tensor that passes between stages: shape, stride, dtype, requires_grad


class Found(BaseException):
    """Raised to end a script whose ``record`` is known: what stages send, or which rank must be asked for it."""

    def __init__(self, **record: Any) -> None:
        super().__init__("the script need not go on")
        self.record = record


def install_pipelines(recorder: Recorder, boundary: Boundary | None, *, only_boundary: bool) -> list[Boundary]:
    """Give stages the shapes of their neighbours: ``boundary``, if it is known.

    With ``only_boundary`` the script ends as soon as it is known here.  The list is empty until then.
    """
    known: list[Boundary] = [] if boundary is None else [boundary]

    def send_meta(self: Any, meta: Any, to: int) -> None:
        if not isinstance(meta, _StageForwardMeta):
            return
        if any(type(each) is not _TensorMeta for each in meta.forward_metas):
            raise RuntimeError("stages that pass DTensors on cannot be captured: pass local tensors (`to_local`)")
        sent = [
            {"shape": [*each.shape], "stride": [*each.stride], "dtype": str(each.dtype)[6:],
             "requires_grad": each.requires_grad} for each in meta.forward_metas
        ]  # fmt: skip
        if only_boundary:
            raise Found(boundary=sent)
        if not known:
            known.append(sent)
        elif known[0] != sent:
            recorder.note(f"stage {self.stage_index} sends other shapes than stage 0: {sent} after {known[0]}")

    def receive_meta(self: Any, of: int) -> Any:
        if of > self.stage_index:
            return _StageBackwardMeta(backward_metas=_derive_grad_metas(self._stage_meta.outputs))
        if not known:
            raise Found(needs_boundary_of=self._resolve_peer_global_rank(0))
        sizes = [(torch.Size(each["shape"]), tuple(each["stride"])) for each in known[0]]
        kinds = [(getattr(torch, each["dtype"]), each["requires_grad"]) for each in known[0]]
        metas = (_TensorMeta(*size, *kind) for size, kind in zip(sizes, kinds, strict=True))
        return _StageForwardMeta(forward_metas=tuple(metas))

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
        """Whether this stage states all shapes itself (1) or asks its neighbours (0): the others do as it does."""
        asks = _stages.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._captured_vote = torch.tensor([0 if asks else 1], dtype=torch.int32)
        return self._captured_vote

    patch(_stages.PipelineStage, _send_meta=send_meta, _recv_meta=receive_meta, _warmup_forward_vote=vote)
    patch(_stages.PipelineStage, _warmup_backward_result=lambda self, received_result=None: self._captured_vote)
    return known


class Chunks(Sequence[Tensor]):
    """Chunks of a tensor as ``torch.chunk`` makes them, with empty ones at the end; each is made when asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> Tensor:  # type: ignore[override]
        if not 0 <= at < self._count:
            raise IndexError(at)
        length = self._tensor.shape[self._dim]
        size = -(-length // self._count)
        if at * size >= length:
            return self._tensor.new_empty(0)
        return torch.narrow(self._tensor, self._dim, at * size, min(size, length - at * size))


def install_shards() -> None:
    """Let FSDP cut parameters in this way, and join the same meshes once."""
    join: Any = DeviceMesh._concatenate
    joined: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}  # meshes are held, so that ids stay theirs

    def joined_once(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in joined:
            joined[key] = meshes, join(meshes)
        return joined[key][1]

    patch(_fsdp_param, _chunk_with_empty=Chunks)
    patch(DeviceMesh, _concatenate=staticmethod(joined_once))
