"""One process in the place of one rank of a job: no other rank runs, and its collectives only take their time.

``world`` makes this process rank ``r`` of the job's world, of a backend that is ours.  DDP, FSDP2, tensor parallel and
pipelines then run as they are.  Of a collective only what concerns this rank is done: an all-gather repeats its own
shard, a reduce-scatter keeps its own part, an all-reduce changes nothing, and what is received is small random
numbers.  All values are finite and none means anything.

A collective is over a delay after its issue (``delays``), within a group one after the other as on a link; messages to
one peer and from it are links of their own.  Who issues does not wait.  On CUDA a delay is a kernel that spins on a
stream of its own (``spinning``), which waits for the stream that issues; the stream that waits for the collective waits
for it, and the host never does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .. import annotate
from ..models.parallel import end_groups
from ..plan import world_size
from ..ranks import STAND_IN
from .delays import Delays
from .spinning import DeviceLine, Spinner

Effect = Callable[[], object] | None


@dataclass(frozen=True)
class _World:
    """What the groups of a stand-in need to know.

    Attributes:
        delays: Of collectives.
        devices_per_node: Of the job's cluster.
        device: Where this process computes.
        spinner: Lets time pass on a GPU; None on a CPU.
    """

    delays: Delays
    devices_per_node: int
    device: torch.device
    spinner: Spinner | None


_worlds: list[_World] = []  # the one in which we are: torch makes groups and tells them no more than their ranks


@contextmanager
def world(run: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Be the rank for which a run of a checked plan stands in.

    This process must be alone in its process group, which ends, and begins again behind the block.
    """
    job, stand_in = run["job"], run["stand_in"]
    backend, store, hook = dist.get_backend(), c10d._get_default_store(), sys.excepthook
    if not hasattr(dist.Backend, STAND_IN.upper()):
        dist.Backend.register_backend(STAND_IN, _make_group, extended_api=True, devices=["cpu", "cuda"])
    spinner = Spinner() if device.type == "cuda" else None
    _worlds.append(_World(Delays(stand_in["collectives"]), job["cluster"]["devices_per_node"], device, spinner))
    dist.destroy_process_group()
    try:
        empty = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(STAND_IN, store=empty, rank=stand_in["rank"], world_size=world_size(job))
        try:
            yield
        finally:
            end_groups(None)  # of a run that failed, too
            dist.destroy_process_group()
    finally:
        _worlds.pop()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        sys.excepthook = hook  # each start of a group would prefix its rank once more


def _make_group(options: Any, _: Any) -> Group:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return Group(options.group_rank, ranks, options.group_id, _worlds[-1])


class _HostLine:
    """A link of which the host knows when it is free."""

    def __init__(self) -> None:
        self._free = 0.0

    def issue(self, seconds: float, effect: Effect) -> float:
        """When it will be over, on the performance counter."""
        begin = max(self._free, time.perf_counter())
        if effect is not None:
            effect()
        self._free = begin + seconds
        return self._free

    def wait(self, end: float) -> None:
        time.sleep(max(0.0, end - time.perf_counter()))

    def future(self, end: float, result: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        timer = threading.Timer(max(0.0, end - time.perf_counter()), future.set_result, (result,))
        timer.daemon = True
        timer.start()
        return future


@dataclass(frozen=True)
class _Link:
    """What collectives of a group, or messages of a direction and peer, pass on.

    Attributes:
        ranks: Of the job, whom it joins.
        ranks_per_node: How many of them share a node.
        line: When it is free.
    """

    ranks: list[int]
    ranks_per_node: int
    line: _HostLine | DeviceLine


class _Work(dist.Work):
    """A collective under way.  It holds its tensors, so that their memory is nobody else's until it is waited for."""

    def __init__(self, line: Any, end: Any, held: Sequence[Tensor], result: list[Tensor]) -> None:
        super().__init__()
        self._line, self._end, self._held, self._result = line, end, held, result

    def wait(self, timeout: Any = None) -> bool:
        with annotate.waiting(self):
            self._line.wait(self._end)
        self._held = ()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = self._line.future(self._end, self._result)
        return future


_Base: Any = dist.ProcessGroup  # each of its methods has several signatures; torch calls one of them


class Group(_Base):  # type: ignore[misc]
    """A process group of which only this rank is there.

    Args:
        rank: In the group.
        ranks: Of the job, in the order of the group.
        name: torch's.
        world: Of a stand-in.
    """

    def __init__(self, rank: int, ranks: list[int], name: str, world: _World) -> None:
        super().__init__(rank, len(ranks))
        self._ranks, self._name, self._world = ranks, name, world
        self._links: dict[tuple[str, int], _Link] = {}
        self._filled: set[int] = set()

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        (tensor,) = tensors
        return self._issue("all_reduce", tensor, tensors, None)

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> _Work:
        return self._issue("all_gather", output, [output, shard], lambda: self._repeat(output, shard))

    def reduce_scatter_single(self, shard: Tensor, full: Tensor, opts: Any = None) -> _Work:
        return self._issue("reduce_scatter", full, [shard, full], lambda: self._take(shard, full))

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # until torch 2.12

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        return self._issue("send_recv", tensor, tensors, None, "send", peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        (tensor,) = tensors
        return self._issue("send_recv", tensor, tensors, lambda: self._fill(tensor), "recv", peer)

    # What torch does before the first step only takes no time.
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return _Work(_HostLine(), 0.0, (), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return _Work(_HostLine(), 0.0, (), outputs[0])

    def barrier(self, opts: Any = None) -> _Work:
        return _Work(_HostLine(), 0.0, (), [])

    def _issue(
        self, kind: str, full: Tensor, held: list[Tensor], effect: Effect, direction: str = "", peer: int = -1
    ) -> _Work:
        """Start a collective whose whole buffer is ``full``; ``peer`` of a message is a rank of the group."""
        if (direction, peer) not in self._links:
            self._links[direction, peer] = self._link(peer)
        link, delays, num_bytes = self._links[direction, peer], self._world.delays, full.numel() * full.element_size()
        seconds = delays.seconds(kind, num_bytes, len(link.ranks), link.ranks_per_node)
        with annotate.stood_in(kind, num_bytes, link.ranks, self._name, seconds), torch.no_grad():
            return _Work(link.line, link.line.issue(seconds, effect), held, held[:1])

    def _link(self, peer: int) -> _Link:
        world = self._world
        ranks = self._ranks if peer < 0 else [self._ranks[self.rank()], self._ranks[peer]]
        nodes = len({rank // world.devices_per_node for rank in ranks})
        line = _HostLine() if world.spinner is None else DeviceLine(world.device, world.spinner)
        return _Link(ranks, -(-len(ranks) // nodes), line)

    def _repeat(self, output: Tensor, shard: Tensor) -> None:
        rows, rank = output.view(self.size(), -1), self.rank()
        if rows[rank].data_ptr() != shard.data_ptr():
            rows[rank].copy_(shard.view(-1))
        rows[:rank].copy_(rows[rank])
        rows[rank + 1 :].copy_(rows[rank])

    def _take(self, shard: Tensor, full: Tensor) -> None:
        shard.view(-1).copy_(full.view(self.size(), -1)[self.rank()])

    def _fill(self, tensor: Tensor) -> None:
        """Whole numbers are votes of stages on what all of them know: for."""
        if tensor.data_ptr() not in self._filled:
            self._filled.add(tensor.data_ptr())
            tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.fill_(1)
