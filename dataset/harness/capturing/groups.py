"""Process groups of the fake world: no other rank is there, and every collective is over at once.

Values mean nothing: an all-gather repeats this rank's shard where it is real (meshes, object collectives), and what is
received is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .collectives import Collectives, people_name

BACKEND = "captured"


class Done(dist.Work):
    """A collective that was issued; ``wait`` lets the current stream wait for it."""

    def __init__(self, collectives: Collectives, mark: Any, result: list[Tensor]) -> None:
        super().__init__()
        self._collectives, self._mark, self._result = collectives, mark, result

    def wait(self, timeout: Any = None) -> bool:
        self._collectives.wait(self._mark)
        return True

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return Awaited(self)


class Awaited(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a collective: asking for its value lets the current stream wait."""

    def __new__(cls, done: Done) -> Any:
        return super().__new__(cls)

    def __init__(self, done: Done) -> None:
        super().__init__()
        self._done = done
        self.set_result(done.result())

    def wait(self) -> Any:
        self._done.wait()
        return super().wait()


_Base: Any = dist.ProcessGroup  # each of its methods has several signatures; torch calls one of them


class Group(_Base):  # type: ignore[misc]
    """A process group of which only this rank is there.

    Args:
        rank: In the group.
        ranks: Of the world, in the order of the group.
        name: torch's.
        collectives: Where they are written down.
    """

    def __init__(self, rank: int, ranks: list[int], name: str, collectives: Collectives) -> None:
        super().__init__(rank, len(ranks))
        self._ranks, self._name, self._collectives = tuple(ranks), name, collectives
        self._batch: list[Done] | None = None
        self._description = ""

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def name(self) -> str:
        return BACKEND

    @property
    def where(self) -> tuple[str, str, tuple[int, ...]]:
        """torch's name of the group, its name for people, and its ranks."""
        return self._name, people_name(self._description, self._ranks), self._ranks

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        tensors = _listed(tensors)
        return self._issue("all_reduce", tensors, (tensors, tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Done:
        return self._issue("all_reduce", tensors, (tensors, tensors), opts)

    def reduce(self, tensors: Any, root: int = 0, op: Any = None, *rest: Any) -> Done:
        tensors = _listed(tensors)
        return self._issue("all_reduce", tensors, (tensors, tensors), root)

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any) -> Done:
        tensors = _listed(tensors)
        return self._issue("broadcast", tensors, (tensors, tensors), opts)

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> Done:
        _repeat(list(output.view(self.size(), -1)), shard)
        return self._issue("all_gather", [output], ([shard], [output]), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        parts = outputs[0] if isinstance(outputs[0], list) else outputs
        own = inputs[0] if isinstance(inputs, list) else inputs
        _repeat(parts, own)
        return self._issue("all_gather", parts, ([own], parts), opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Done:
        return self._issue("all_gather", outputs, (inputs, outputs), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Done:
        flat = [part for parts in outputs for part in parts]
        return self._issue("all_gather", flat, (inputs, flat), opts)

    def reduce_scatter_single(self, shard: Tensor, full: Tensor, opts: Any = None) -> Done:
        return self._issue("reduce_scatter", [full], ([full], [shard]), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        full = inputs[0] if isinstance(inputs[0], list) else inputs
        return self._issue("reduce_scatter", full, (full, _listed(outputs)), opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Done:
        return self._issue("reduce_scatter", inputs, (inputs, outputs), opts)

    def all_to_all_single(self, output: Tensor, given: Tensor, *rest: Any) -> Done:
        return self._issue("all_to_all", [given], ([given], [output]), rest[-1] if rest else None)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Done:
        return self._issue("all_to_all", inputs, (inputs, outputs), opts)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        own, parts = _listed(inputs), [part for each in outputs or [] for part in _listed(each)]
        _repeat(parts, own[0])
        return self._issue("all_gather", parts or own * self.size(), (own, parts), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        got = _listed(outputs)
        return self._issue("broadcast", got, (got, got), opts)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Done:
        return self._message("send", _listed(tensors), peer)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Done:
        return self._message("recv", _listed(tensors), peer)

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

    @property
    def supports_coalescing(self) -> bool:
        return False

    def shutdown(self) -> None:
        return None

    abort = shutdown

    def _issue(self, kind: str, full: Any, tensors: Any, opts: Any) -> Done:
        is_async = getattr(opts, "asyncOp", True) is not False
        mark = self._collectives.issue(kind, full, tensors, self.where, is_async=is_async)
        return self._done(mark, tensors[1])

    def _message(self, direction: str, tensors: list[Tensor], peer: int) -> Done:
        own, other = self._ranks[self.rank()], self._ranks[peer]
        name, people, _ = self.where
        line = (own, other) if direction == "send" else (other, own)
        where = (f"{name} {line}", people, line)
        reads, writes = (tensors, []) if direction == "send" else ([], tensors)
        both = reads, writes
        mark = self._collectives.issue("send_recv", tensors, both, where, is_async=True, direction=direction)
        return self._done(mark, tensors)

    def _done(self, mark: Any, result: Any) -> Done:
        done = Done(self._collectives, mark, list(result))
        if self._batch is not None:
            self._batch.append(done)
        return done


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _repeat(parts: list[Tensor], own: Tensor) -> None:
    """Give every rank's place this rank's values, where they are real."""
    if any(isinstance(each, FakeTensor) for each in (*parts, own)):
        return
    with unset_fake_temporarily(), torch.no_grad():
        for part in parts:
            if part.numel() == own.numel():
                part.view(-1).copy_(own.reshape(-1))
