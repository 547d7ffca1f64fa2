"""A process group of which one rank runs: of each collective it does what concerns this rank, and takes its time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import annotate
from .host_clocks import Effect, HostClock, HostLine
from .spinning import DeviceLine, Spinner


class DelayModel(Protocol):
    """How long collectives take."""

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float: ...


@dataclass(frozen=True)
class World:
    """What the groups of a stand-in need to know.

    Attributes:
        delays: Of collectives.
        devices_per_node: Of the job's cluster.
        device: Where this process computes.
        clock: Of what is on a CPU.
        spinner: Lets time pass on a GPU; None on a CPU.
        free: Kinds of collectives that take no time: what torch's own parallel classes do before the first step only.
    """

    delays: DelayModel
    devices_per_node: int
    device: torch.device
    clock: HostClock
    spinner: Spinner | None = None
    free: Collection[str] = ()


_AS = {"gather": "all_gather"}  # of lists of tensors


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
    line: HostLine | DeviceLine


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

    def __init__(self, rank: int, ranks: list[int], name: str, world: World) -> None:
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

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> _Work:
        return self.recv(tensors, (self.rank() + 1) % self.size(), tag)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._issue("broadcast", tensors[0], tensors, None)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._issue("broadcast", tensors[0], tensors, None)  # the same way back

    def alltoall_base(self, output: Tensor, own: Tensor, *sizes: Any) -> _Work:
        return self._issue("all_to_all", own, [output, own], lambda: _tile(output, own))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        def effect() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                _tile(output, own)

        return self._issue("all_to_all", inputs, [*outputs, *inputs], effect)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        def effect() -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(own)

        parts = [part for each in outputs for part in each]
        return self._issue("gather", parts, [*parts, *inputs], effect)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self.allgather(outputs, inputs) if outputs else self._issue("all_gather", inputs, inputs, None)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        def effect() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self.rank()])

        parts = [part for each in inputs for part in each]
        return self._issue("reduce_scatter", parts, [*outputs, *parts], effect)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        if inputs:
            return self.reduce_scatter(outputs, inputs)
        return self._issue("reduce_scatter", outputs, outputs, lambda: self._fill(outputs[0]))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._issue("all_reduce", tensors, tensors, None)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], shards: list[Tensor], opts: Any = None) -> _Work:
        def effect() -> None:
            for output, shard in zip(outputs, shards, strict=True):
                self._repeat(output, shard)

        return self._issue("all_gather", outputs, [*outputs, *shards], effect)

    def reduce_scatter_tensor_coalesced(self, shards: list[Tensor], fulls: list[Tensor], opts: Any = None) -> _Work:
        def effect() -> None:
            for shard, full in zip(shards, fulls, strict=True):
                self._take(shard, full)

        return self._issue("reduce_scatter", fulls, [*shards, *fulls], effect)

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> _Work:
        return _Work(HostLine(self._world.clock), 0.0, (), [])

    def _issue(
        self,
        kind: str,
        full: Tensor | list[Tensor],
        held: list[Tensor],
        effect: Effect,
        direction: str = "",
        peer: int = -1,
    ) -> _Work:
        """Start a collective whose whole buffer is ``full``; ``peer`` of a message is a rank of the group."""
        if self.size() == 1 or kind in self._world.free:
            if effect is not None:
                with torch.no_grad():
                    effect()
            return _Work(HostLine(self._world.clock), 0.0, held, held[:1])
        if (direction, peer) not in self._links:
            self._links[direction, peer] = self._link(peer)
        whole = [full] if isinstance(full, Tensor) else full
        link, num_bytes = self._links[direction, peer], sum(each.numel() * each.element_size() for each in whole)
        kind = _AS.get(kind, kind)
        seconds = self._world.delays.seconds(kind, num_bytes, len(link.ranks), link.ranks_per_node)
        with annotate.stood_in(kind, num_bytes, link.ranks, self._name, seconds), torch.no_grad():
            return _Work(link.line, link.line.issue(seconds, effect), held, held[:1])

    def _link(self, peer: int) -> _Link:
        world = self._world
        ranks = self._ranks if peer < 0 else [self._ranks[self.rank()], self._ranks[peer]]
        nodes = len({rank // world.devices_per_node for rank in ranks})
        line = HostLine(world.clock) if world.spinner is None else DeviceLine(world.device, world.spinner)
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


def _tile(output: Tensor, own: Tensor) -> None:
    """Fill with this rank's own values, again and again."""
    if not output.numel():
        return
    flat = own.reshape(-1)
    if not flat.numel():
        output.zero_()
        return
    times = -(-output.numel() // flat.numel())
    output.copy_(flat.repeat(times)[: output.numel()].view(output.shape))
