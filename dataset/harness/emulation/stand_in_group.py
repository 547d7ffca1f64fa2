"""A process group of which one rank runs: it does this rank's part of each collective, and takes the modelled time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import annotate
from ..one_rank_group import LISTS, Call, OneRankGroup
from .host_clocks import HostClock, HostLine
from .spinning import DeviceLine, Spinner


class DelayModel(Protocol):
    """The durations of collectives."""

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float: ...


@dataclass(frozen=True)
class World:
    """What the groups of an emulated rank need.

    Attributes:
        delays: Of collectives.
        devices_per_node: Of the job's cluster.
        device: Where this process computes.
        clock: Of what is on a CPU.
        spinner: Lets time pass on a GPU; None on a CPU.
        free: Kinds of collectives that take no time: what torch's own parallel classes do before the first step only.
        real: Ranks of the job that run, where there are several.
        store: Where these find each other.
    """

    delays: DelayModel
    devices_per_node: int
    device: torch.device
    clock: HostClock
    spinner: Spinner | None = None
    free: Collection[str] = ()
    real: Sequence[int] = ()
    store: Any = None


@dataclass(frozen=True)
class Link:
    """What collectives of a group, or messages of a direction and peer, pass on.

    Attributes:
        ranks: Of the job, whom it joins.
        ranks_per_node: How many of them share a node.
        line: When it is free.
    """

    ranks: list[int]
    ranks_per_node: int
    line: Any


class StandInWork(dist.Work):
    """A collective in flight. It keeps its tensors, so that their memory is not reused until the wait."""

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


class Group(OneRankGroup):
    """A process group of an emulated rank.

    Args:
        rank: In the group.
        ranks: Of the job, in the order of the group.
        name: torch's.
        world: Of a stand-in.
    """

    def __init__(self, rank: int, ranks: list[int], name: str, world: World) -> None:
        super().__init__(rank, ranks, name)
        self._world = world
        self._links: dict[tuple[str, int], Link] = {}

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> StandInWork:
        peer = (self.rank() + 1) % self.size()
        work: StandInWork = self.recv(tensors, peer, tag)
        work._source_rank = lambda: peer  # type: ignore[method-assign]  # torch asks who has sent
        return work

    def barrier(self, opts: Any = None) -> StandInWork:
        return StandInWork(HostLine(self._world.clock), 0.0, (), [])

    def _issue(self, call: Call) -> StandInWork:
        held, result = [*call.writes, *call.reads], list(call.writes)
        if self.size() == 1 or call.kind in self._world.free:
            if call.effect is not None:
                with torch.no_grad():
                    call.effect()
            return StandInWork(HostLine(self._world.clock), 0.0, held, result)
        key = call.direction, call.peer
        if key not in self._links:
            self._links[key] = self._link(*key)
        link, num_bytes = self._links[key], call.num_bytes
        kind = "all_gather" if call.kind == LISTS else call.kind
        seconds = self._world.delays.seconds(kind, num_bytes, len(link.ranks), link.ranks_per_node)
        with annotate.stood_in(kind, num_bytes, link.ranks, self._name, seconds), torch.no_grad():
            return StandInWork(link.line, self._start(link, call, seconds), held, result)

    def _start(self, link: Link, call: Call, seconds: float) -> Any:
        return link.line.issue(seconds, call.effect)

    def _link(self, direction: str, peer: int) -> Link:
        world = self._world
        ranks = list(self._ranks) if peer < 0 else [self._ranks[self.rank()], self._ranks[peer]]
        nodes = len({rank // world.devices_per_node for rank in ranks})
        return Link(ranks, -(-len(ranks) // nodes), self._line(direction, peer))

    def _line(self, direction: str, peer: int) -> Any:
        world = self._world
        return HostLine(world.clock) if world.spinner is None else DeviceLine(world.device, world.spinner)
