"""Collectives of the fake world: recorded with their group, its ranks and their bytes, on NCCL's streams."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..base.one_rank_group import LISTS, Call, OneRankGroup, listed, total_bytes
from ..base.patching import always
from .recorder import COLLECTIVE, SYNCHRONISATION, Recorder, storage_of

_c10d: Any = dist.distributed_c10d
WHOLE = "default_pg"  # torch's description of the group of all ranks

Scope = Callable[[], tuple[int, int, int]]

# The kind of each functional collective, in one call or coalesced, and the side whose bytes count ("": the larger one).
_KINDS = MappingProxyType(
    {
        "all_reduce": ("all_reduce", "in"),
        "all_gather_into_tensor": ("all_gather", "out"),
        "reduce_scatter_tensor": ("reduce_scatter", "in"),
        "all_to_all_single": ("all_to_all", ""),
        "broadcast": ("broadcast", "in"),
    }
)


class Collectives:
    """Records collectives; ``scope`` tells phase, evaluation and sequence number, ``script`` is the user's."""

    def __init__(self, recorder: Recorder, scope: Scope, script: Path) -> None:
        self._recorder, self._scope, self._script = recorder, scope, script
        self.issued: list[tuple[int, str, str, int, str]] = []  # group, torch's name of it, kind, bytes, script's line
        self.groups: dict[tuple[int, ...], tuple[int, str]] = {}  # numbers and names for people, by their ranks
        self._streams: dict[str, str] = {}  # of NCCL, by torch's name of the group
        self._numbers = Counter[tuple[int, ...]]()
        self._newest: dict[str, int] = {}  # node by torch's name of the group
        self._marks: dict[int, Any] = {}  # of ops by storage, until it is waited for

    def start(self) -> None:
        """Number the collectives of each group from 0."""
        for table in (self._numbers, self._newest, self.issued):
            table.clear()

    def issue(self, call: Call, where: tuple[str, str, tuple[int, ...]]) -> Any:
        """Record a collective, on the current stream or on NCCL's own; return the handle for a wait.

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
        group = {**dict(zip(names, args, strict=False)), **kwargs}["group_name"]
        if isinstance(group, str):
            group = _c10d._resolve_process_group(group)
        full = {"in": inputs, "out": outputs}.get(side) or max(inputs, outputs, key=total_bytes)
        mark = self.issue(Call(kind, full, inputs, outputs), group.where)
        if mark is not None:
            self._marks.update({storage_of(tensor)._cdata: mark for tensor in outputs})

    def wait_on_host(self, name: str) -> None:
        """Make the host wait for all streams, as a barrier does."""
        self._recorder.wait_on_host(None, name, self._scope()[0])


NO_SPARSE = "NCCL sums no sparse gradients: a module within DDP or FSDP must have sparse=False, or be left out of it"


def refuse_sparse(tensors: Iterable[Tensor]) -> None:
    """Raise if a tensor is sparse: NCCL sums none, and the bytes of gloo's sums depend on values."""
    if any(each.layout is torch.sparse_coo for each in tensors):
        raise RuntimeError(NO_SPARSE)


def people_name(description: str, ranks: Sequence[int]) -> str:
    """A group's name for people: the dimension of its mesh, or what torch calls it."""
    if description in (WHOLE, "undefined", ""):
        return "world" if description == WHOLE else f"group of {len(ranks)}"
    return description.removeprefix("mesh_").removeprefix("mesh")


BACKEND = "captured"


class Done(dist.Work):
    """A collective in flight; ``wait`` makes the current stream wait for it."""

    def __init__(self, collectives: Collectives, mark: Any, result: list[Tensor]) -> None:
        super().__init__()
        self._collectives, self._mark, self._result = collectives, mark, result

    def wait(self, timeout: Any = None) -> bool:
        self._collectives.wait(self._mark)
        return True

    def block_current_stream(self) -> None:
        self.wait()

    is_success = is_completed = always(True)

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return Awaited(self)


class Awaited(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a collective: reading its value makes the current stream wait."""

    def __new__(cls, done: Done) -> Any:
        return super().__new__(cls)

    def __init__(self, done: Done) -> None:
        super().__init__()
        self._done = done
        self.set_result(done.result())

    def wait(self) -> Any:
        self._done.wait()
        return super().wait()


class Group(OneRankGroup):
    """A process group of the fake world: no other rank exists, and every collective finishes at once.

    Values mean nothing: a collective has its effect on real tensors (meshes, counts, object collectives), and none on
    fake ones.
    """

    def __init__(self, rank: int, ranks: list[int], name: str, collectives: Collectives) -> None:
        super().__init__(rank, ranks, name)
        self._collectives = collectives
        self._batch: list[Done] | None = None
        self._description = ""

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def where(self) -> tuple[str, str, tuple[int, ...]]:
        """torch's name of the group, its name for people, and its ranks."""
        return self._name, people_name(self._description, self._ranks), self._ranks

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Done:
        raise RuntimeError("a receive from any rank cannot be captured: name the rank that sends")

    def barrier(self, opts: Any = None, *rest: Any) -> Done:
        self._collectives.wait_on_host("barrier")
        return Done(self._collectives, None, [])

    def monitored_barrier(self, *given: Any, **named: Any) -> None:
        self.barrier()

    def _get_backend(self, device: Any) -> Any:
        return self

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> Done:
        batch, self._batch = self._batch or [], None
        return batch[-1] if batch else Done(self._collectives, None, [])

    supports_coalescing = False
    name = always(BACKEND)
    shutdown = abort = always(None)

    def _issue(self, call: Call) -> Done:
        if call.effect is not None and not any(isinstance(each, FakeTensor) for each in (*call.reads, *call.writes)):
            with unset_fake_temporarily(), torch.no_grad():
                call.effect()
        where = name, _, ranks = self.where
        if call.direction:  # a message joins two ranks
            line = ranks[self.rank()], ranks[call.peer]
            line = line if call.direction == "send" else line[::-1]
            where = f"{name} {line}", where[1], line
        mark = self._collectives.issue(call, where)
        done = Done(self._collectives, mark, list(call.writes))
        if self._batch is not None:
            self._batch.append(done)
        return done
