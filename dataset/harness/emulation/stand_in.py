"""One process that replaces one rank of a job: no other rank runs, and its collectives only take time.

``world`` makes this process rank ``r`` of the job's world, of a backend that is ours.  DDP, FSDP2, tensor parallel and
pipelines then run as they are.  Of a collective only what concerns this rank is done: an all-gather repeats its own
shard, a reduce-scatter keeps its own part, an all-reduce changes nothing, and what is received is small random
numbers.  All values are finite and none means anything.

A collective is over a delay after its issue (``clocks``), within a group one after the other as on a link; messages to
one peer and from it are links of their own.  Who issues does not wait.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..base import annotate
from ..base.collective_calls import STAND_IN
from ..base.errors import HarnessError
from ..base.one_rank_group import LISTS, Call, Effect, OneRankGroup, listed
from ..models.parallel import end_groups
from ..plan.plan_checks import world_size
from .clocks import DeviceLine, HostClock, HostLine, Peers, SharedLine, Spinner, ended

Delay = Callable[[str, int, int, int], float]  # seconds of a collective by kind, bytes, group size and ranks per node


def table_of_delays(rows: list[dict[str, Any]]) -> Delay:
    """Seconds of collectives from a plan (``plan.plan_checks``).

    Between two sizes of a kind and group seconds are log-linear in bytes, beyond the ends in proportion to them.
    """
    known: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (row["num_bytes"], row["seconds"])):
        key = (row["kind"], row["group_size"], row["ranks_per_node"])
        known.setdefault(key, []).append((row["num_bytes"], row["seconds"]))

    def seconds(kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
        sizes = known.get((kind, group_size, ranks_per_node))
        if sizes is None:
            got = f"got no {kind} of {group_size} ranks, {ranks_per_node} on each node"
            raise HarnessError(f"stand_in.collectives must list every collective of the job, {got}")
        after = bisect_left(sizes, num_bytes, key=lambda row: row[0])
        if after in (0, len(sizes)):
            size, found = sizes[min(after, len(sizes) - 1)]
            return found * num_bytes / size
        (small, short), (large, long) = sizes[after - 1 : after + 1]
        return short * (long / short) ** (math.log(num_bytes / small) / math.log(large / small))

    return seconds


def asked_delays(questions: BinaryIO, answers: BinaryIO) -> Delay:
    """Seconds of collectives that another process tells, each signature once.

    A question is a line of JSON with kind, bytes, group size and ranks per node; an answer is a line with the seconds,
    or ``{"error": ...}``, which is raised.
    """
    known: dict[tuple[str, int, int, int], float] = {}
    lock = threading.Lock()

    def seconds(*key: Any) -> float:
        with lock:
            if key in known:
                return known[key]
            questions.write(json.dumps(key).encode() + b"\n")
            questions.flush()
            told = json.loads(answers.readline() or b'{"error": "who tells delays has ended"}')
            if isinstance(told, dict):
                raise HarnessError(told["error"])
            return known.setdefault(key, float(told))

    return seconds


@dataclass(frozen=True)
class World:
    """What the groups of an emulated rank need."""

    delay: Delay
    devices_per_node: int
    device: torch.device
    clock: HostClock  # of what is on a CPU
    spinner: Spinner | None = None  # lets time pass on a GPU; None on a CPU
    free: Collection[str] = ()  # kinds that take no time: what torch's own classes do before the first step only
    real: Sequence[int] = ()  # ranks of the job that run, where there are several; they find each other in ``store``
    store: Any = None


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
        return self._line.future(self._end, self._result)


class Group(OneRankGroup):
    """A process group of an emulated rank; the arguments are those of ``OneRankGroup``."""

    def __init__(self, rank: int, ranks: list[int], name: str, world: World) -> None:
        super().__init__(rank, ranks, name)
        self._world = world
        # What collectives, or messages of a direction and peer, pass on: ranks of the job that it joins, how many of
        # them are on a node, and the line, which knows when it is free.
        self._links: dict[tuple[str, int], tuple[list[int], int, Any]] = {}

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> StandInWork:
        peer = (self.rank() + 1) % self.size()
        work: StandInWork = self.recv(tensors, peer, tag)
        work._source_rank = lambda: peer  # type: ignore[method-assign]  # torch asks who has sent
        return work

    def barrier(self, opts: Any = None) -> StandInWork:
        return StandInWork(HostLine(self._world.clock), ended(0.0), (), [])

    def _issue(self, call: Call) -> StandInWork:
        world, held, result = self._world, [*call.writes, *call.reads], list(call.writes)
        if self.size() == 1 or call.kind in world.free:
            if call.effect is not None:
                with torch.no_grad():
                    call.effect()
            return StandInWork(HostLine(world.clock), ended(0.0), held, result)
        key = call.direction, call.peer
        if key not in self._links:
            ranks = list(self._ranks) if call.peer < 0 else [self._ranks[self.rank()], self._ranks[call.peer]]
            nodes = len({rank // world.devices_per_node for rank in ranks})
            self._links[key] = ranks, -(-len(ranks) // nodes), self._line(*key)
        (ranks, per_node, line), num_bytes = self._links[key], call.num_bytes
        kind = "all_gather" if call.kind == LISTS else call.kind
        size = "" if kind == "all_to_all" else f" of {num_bytes} bytes"  # each rank has its own number of these
        seconds = world.delay(kind, num_bytes, len(ranks), per_node)
        with annotate.stood_in(kind, num_bytes, ranks, self._name, seconds), torch.no_grad():
            end = line.issue(seconds, call.effect, f"{kind}{size} in a group of {len(ranks)}")
            return StandInWork(line, end, held, result)

    def _line(self, direction: str, peer: int) -> Any:
        world = self._world
        return HostLine(world.clock) if world.spinner is None else DeviceLine(world.device, world.spinner)


class RealRanksGroup(Group):
    """A process group with several real ranks: they exchange values, and no other rank contributes any.

    A sum is one over the real ranks, a mean is their mean.  Parts of other ranks are as in a group with one real rank.
    """

    def __init__(self, rank: int, ranks: list[int], name: str, world: World) -> None:
        super().__init__(rank, ranks, name, world)
        self._places = [at for at, each in enumerate(ranks) if each in world.real]
        self._met = self._line_among(self._places, name)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        own = listed(inputs)
        return self.allgather(outputs or [[torch.empty_like(own[0]) for _ in self._ranks]], own, opts)

    def _on_sum(self, tensor: Tensor, opts: Any) -> None:
        """Reduce a tensor over the real ranks, in place; gloo has no mean."""
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None or mean else opts.reduceOp
        self._gloo.allreduce([tensor], options).wait()
        if mean:
            tensor.div_(len(self._places))

    def _on_reduce(self, tensor: Tensor, opts: Any) -> None:
        total = tensor.clone()
        self._on_sum(total, opts)
        if self.rank() == opts.rootRank:
            tensor.copy_(total)

    def _on_broadcast(self, tensor: Tensor, opts: Any) -> None:
        if opts.rootRank in self._places:
            options = dist.BroadcastOptions()
            options.rootRank = self._places.index(opts.rootRank)
            self._gloo.broadcast([tensor], options).wait()

    def _on_scatter(self, got: Tensor, parts: list[Tensor], opts: Any) -> None:
        if opts.rootRank not in self._places:
            self._fill(got)
            return
        options = dist.ScatterOptions()
        options.rootRank = self._places.index(opts.rootRank)
        given = [[parts[place] for place in self._places]] if parts else []
        self._gloo.scatter([got], given, options).wait()

    def _on_message(self, direction: str, tensors: list[Tensor], peer: int) -> Effect:
        def effect() -> None:
            line = self._links[direction, peer][2]
            for tensor in tensors:
                getattr(line.peers.gloo, direction)([tensor], 1 - line.peers.index, 0).wait()

        return effect if peer in self._places else super()._on_message(direction, tensors, peer)

    def barrier(self, opts: Any = None) -> Any:
        return StandInWork(self._met, self._met.issue(0.0, None, "barrier"), (), [])

    @property
    def _gloo(self) -> Any:
        return self._met.peers.gloo

    def _line_among(self, places: Sequence[int], name: str) -> SharedLine:
        me = self._ranks[self.rank()]
        return SharedLine(self._world.clock, Peers([self._ranks[at] for at in places], me, name, self._world.store))

    def _line(self, direction: str, peer: int) -> Any:
        if peer < 0:
            return self._met
        if peer not in self._places:
            return super()._line(direction, peer)
        one, other = (self.rank(), peer) if direction == "send" else (peer, self.rank())
        return self._line_among(sorted((one, other)), f"{self._name}:{one}>{other}")

    def _repeat(self, output: Tensor, shard: Tensor) -> None:
        self._gather(list(output.view(self.size(), -1)), shard.reshape(-1))

    def _gather(self, parts: Sequence[Tensor], own: Tensor) -> None:
        own = own.clone()  # it may be a part
        super()._gather(parts, own)
        self._gloo.allgather([[parts[place] for place in self._places]], [own]).wait()

    def _take(self, shard: Tensor, parts: Tensor | Sequence[Tensor], opts: Any) -> None:
        total = torch.stack([parts[place].reshape(-1) for place in self._places])
        self._on_sum(total, opts)
        shard.copy_(total[self._met.peers.index].view_as(shard))

    def _swap(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super()._swap(outputs, inputs)
        self._exchange(outputs, inputs)

    def _swap_rows(self, output: Tensor, given: Tensor, splits: Sequence[Sequence[int]]) -> None:
        super()._swap_rows(output, given, splits)
        sides = zip((output, given), splits, strict=True)
        self._exchange(*(rows.split(list(sizes)) if sizes else rows.chunk(self.size()) for rows, sizes in sides))

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Send each real rank its part, and put what it sends into its place."""
        got, given = ([side[place] for place in self._places] for side in (outputs, inputs))
        sizes, sent = ([part.numel() for part in side] for side in (got, given))
        into = torch.empty(sum(sizes), dtype=got[0].dtype)
        self._gloo.alltoall_base(into, torch.cat([part.reshape(-1) for part in given]), sizes, sent).wait()
        for part, flat in zip(got, into.split(sizes), strict=True):
            part.copy_(flat.view_as(part))


SETUP = ("gather", "broadcast")  # what training does before its first step only
_worlds: list[World] = []  # the one in which we are: torch makes groups and tells them no more than their ranks


@contextmanager
def world(run: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Act as the emulated rank of a run of a checked plan.

    This process must be alone in its process group, which ends, and begins again behind the block.
    """
    job, stand_in = run["job"], run["stand_in"]
    backend, store, hook = dist.get_backend(), c10d._get_default_store(), sys.excepthook
    spinner = Spinner() if device.type == "cuda" else None
    delay = table_of_delays(stand_in["collectives"])
    enter(World(delay, job["cluster"]["devices_per_node"], device, HostClock(), spinner, SETUP))
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


def enter(world: World) -> None:
    """Make process groups of the backend ``STAND_IN`` belong to a world, from now on."""

    def make_group(options: Any, _: Any) -> Group:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        several = len({*_worlds[-1].real}.intersection(ranks)) > 1
        if several and _worlds[-1].spinner is not None:
            remedy = "hide the GPU (CUDA_VISIBLE_DEVICES=''), or run one"
            raise HarnessError(f"several real ranks must compute on CPUs: {remedy}")
        return (RealRanksGroup if several else Group)(options.group_rank, ranks, options.group_id, _worlds[-1])

    if not hasattr(dist.Backend, STAND_IN.upper()):
        dist.Backend.register_backend(STAND_IN, make_group, extended_api=True, devices=["cpu", "cuda"])
    _worlds.append(world)
