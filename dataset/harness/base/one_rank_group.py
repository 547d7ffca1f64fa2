"""A process group with one rank: torch's calls as collectives, for captured and for emulated scripts.

Of each collective it says the kind, the tensors whose bytes count, what is read and written, and its effect on this
rank's tensors: an all-gather repeats the rank's own part, a reduce-scatter keeps it, an all-to-all returns what is
sent, and what is received is small random numbers.  Subclasses say what becomes of a collective; one in which other
ranks take part replaces the effects (the methods whose names begin with ``_on_``, and those that they call).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Effect = Callable[[], object] | None
LISTS = "gather"  # the kind of an all-gather of lists of tensors, which torch's own classes use before the first step
_Base: Any = dist.ProcessGroup  # each of its methods has several signatures; torch calls one of them


@dataclass(frozen=True, eq=False)
class Call:
    """A collective as this rank calls it."""

    kind: str  # of a collective, or ``gather``
    full: Sequence[Tensor]  # tensors whose bytes count
    reads: Sequence[Tensor]  # this rank's tensors
    writes: Sequence[Tensor]  # this rank's tensors
    effect: Effect = None  # what it does with them
    waits: bool = False  # whether it runs on the stream that issues it
    direction: str = ""  # of a message: ``send`` or ``recv``
    peer: int = -1  # of a message: a rank of the group
    exchanged: Sequence[int] = ()  # bytes of each rank's parts, where they may differ

    @property
    def num_bytes(self) -> int:
        return total_bytes(self.full)


class OneRankGroup(_Base):  # type: ignore[misc]
    """A process group with only this rank; ``rank`` is one of the group, whose ``ranks`` are those of the job."""

    def __init__(self, rank: int, ranks: list[int], name: str) -> None:
        super().__init__(rank, len(ranks))
        self._ranks, self._name = tuple(ranks), name
        self._filled: set[int] = set()

    @property
    def group_name(self) -> str:
        return self._name

    @abstractmethod
    def _issue(self, call: Call) -> Any:
        """Start a collective; returns its ``Work``."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._in_place("all_reduce", tensors, self._on_sum, opts)

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        return self._in_place("broadcast", tensors, self._on_broadcast, opts)

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:  # a broadcast, the same way back
        return self._in_place("broadcast", tensors, self._on_reduce, opts)

    def _in_place(self, kind: str, tensors: Any, on_each: Callable[..., None] | None, opts: Any) -> Any:
        tensors = listed(tensors)
        effect = on_each and _each(partial(on_each, opts=opts), tensors)
        return self._issue(Call(kind, tensors, tensors, tensors, effect, blocking(opts)))

    def all_gather_single(self, outputs: Any, shards: Any, opts: Any = None) -> Any:
        outputs, shards = listed(outputs), listed(shards)
        effect = _each(self._repeat, outputs, shards)
        return self._issue(Call("all_gather", outputs, shards, outputs, effect, blocking(opts)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        given, lists = listed(inputs), outputs if isinstance(outputs[0], list) else [outputs]
        flat = [part for parts in lists for part in parts]
        call = Call(LISTS, flat, given, flat, _each(self._gather, lists, given), blocking(opts))
        return self._issue(replace(call, exchanged=by_rank(*map(part_bytes, lists))))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if outputs:
            return self.allgather(outputs, inputs, opts)
        own = listed(inputs)
        return self._issue(Call("all_gather", own * self.size(), own, [], waits=blocking(opts)))

    def reduce_scatter_single(self, shards: Any, fulls: Any, opts: Any = None) -> Any:
        shards, fulls = listed(shards), listed(fulls)
        effect = _each(lambda shard, full: self._take(shard, full.view(self.size(), -1), opts), shards, fulls)
        return self._issue(Call("reduce_scatter", fulls, fulls, shards, effect, blocking(opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        got, lists = listed(outputs), inputs if isinstance(inputs[0], list) else [inputs]
        flat = [part for parts in lists for part in parts]
        effect = _each(partial(self._take, opts=opts), got, lists)
        call = Call("reduce_scatter", flat, flat, got, effect, blocking(opts))
        return self._issue(replace(call, exchanged=by_rank(*map(part_bytes, lists))))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        got = listed(outputs)
        parts = listed(inputs[0] if isinstance(inputs[0], list) else inputs) if inputs else []
        effect = partial(self._on_scatter, got[0], parts, opts)
        return self._issue(Call("reduce_scatter", got * self.size(), parts, got, effect, blocking(opts)))

    def all_to_all_single(self, output: Tensor, given: Tensor, *rest: Any) -> Any:
        splits = rest[:2] if len(rest) >= 2 else ([], [])
        effect = partial(self._swap_rows, output, given, splits)
        exchanged = by_rank(*map(row_bytes, (output, given), splits))
        return self._to_all([output], [given], effect, rest[-1] if rest else None, exchanged)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        parts = by_rank(*map(part_bytes, (outputs, inputs)))
        return self._to_all(outputs, inputs, partial(self._swap, outputs, inputs), opts, parts)

    def _to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], effect: Effect, opts: Any, exchanged: Sequence[int]
    ) -> Any:
        """Where parts are uneven, the larger of what is sent and what is received counts."""
        full = max(inputs, outputs, key=total_bytes)
        call = Call("all_to_all", full, inputs, outputs, effect, blocking(opts))
        return self._issue(replace(call, exchanged=exchanged))

    allreduce_coalesced, allgather_coalesced = allreduce, allgather
    all_gather_single_coalesced, reduce_scatter_single_coalesced = all_gather_single, reduce_scatter_single
    # Names until torch 2.12
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced, reduce_scatter_tensor_coalesced = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        effect = self._on_message("send", own := listed(tensors), peer)
        return self._issue(Call("send_recv", own, own, [], effect, direction="send", peer=peer))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        effect = self._on_message("recv", own := listed(tensors), peer)
        return self._issue(Call("send_recv", own, [], own, effect, direction="recv", peer=peer))

    _on_sum: Any = None  # what becomes of each tensor, with the options of the call
    _on_reduce = _on_broadcast = _on_sum

    def _on_scatter(self, got: Tensor, parts: list[Tensor], opts: Any) -> None:
        """Keep this rank's own part, if this rank has the parts."""
        self._take(got, parts, opts) if parts else self._fill(got)

    def _on_message(self, direction: str, tensors: list[Tensor], peer: int) -> Effect:
        return _each(self._fill, tensors) if direction == "recv" else None

    def _repeat(self, output: Tensor, shard: Tensor) -> None:
        """Fill every rank's part of the output with this rank's values."""
        rows, rank = output.view(self.size(), -1), self.rank()
        if rows[rank].data_ptr() != shard.data_ptr():
            rows[rank].copy_(shard.reshape(-1))
        rows[:rank].copy_(rows[rank])
        rows[rank + 1 :].copy_(rows[rank])

    def _gather(self, parts: Sequence[Tensor], own: Tensor) -> None:
        """Give every rank's part this rank's values."""
        for part in parts:
            tile(part, own)

    def _take(self, shard: Tensor, parts: Tensor | Sequence[Tensor], opts: Any) -> None:
        """Keep this rank's part, unreduced."""
        shard.copy_(parts[self.rank()].view_as(shard))

    def _swap(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Receive from each rank what is sent to it."""
        for output, own in zip(outputs, inputs, strict=True):
            tile(output, own)

    def _swap_rows(self, output: Tensor, given: Tensor, splits: Sequence[Sequence[int]]) -> None:
        """As ``_swap``, of rows: the splits are how many each rank sends and gets, or empty where all are equal."""
        tile(output, given)

    def _fill(self, tensor: Tensor) -> None:
        """Whole numbers are votes of stages on what all of them know: for."""
        if tensor.data_ptr() not in self._filled:
            self._filled.add(tensor.data_ptr())
            tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.fill_(1)


class LateFuture(torch.futures.Future[list[Tensor]]):
    """The future of a collective in flight: reading its value waits first, as ``wait`` does."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self) -> list[Tensor]:
        self._wait()
        return super().wait()


def _each(function: Callable[..., object], *columns: Sequence[Any]) -> Effect:
    """The effect of calling a function for every row."""
    return lambda: [function(*row) for row in zip(*columns, strict=True)]


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of all elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def by_rank(*sides: Sequence[int]) -> list[int]:
    """Bytes of each rank's parts, of all sides together."""
    return list(map(sum, zip_longest(*sides, fillvalue=0)))


def part_bytes(parts: Sequence[Tensor]) -> list[int]:
    """Bytes of each part."""
    return [total_bytes([part]) for part in parts]


def row_bytes(tensor: Tensor, rows: Sequence[int] | None) -> list[int]:
    """Bytes of the rows of each rank; none if all have the same number."""
    return [int(count) * (total_bytes([tensor]) // max(len(tensor), 1)) for count in rows or ()]


def blocking(opts: Any) -> bool:
    """Whether the caller of a collective waits for it."""
    return getattr(opts, "asyncOp", True) is False


def listed(tensors: Any) -> list[Tensor]:
    """One tensor or several as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def tile(output: Tensor, own: Tensor) -> None:
    """Fill a tensor with this rank's own values, repeated."""
    if not own.numel():
        output.zero_()
    elif output.numel():
        times = -(-output.numel() // own.numel())
        output.copy_(own.reshape(-1).repeat(times)[: output.numel()].view(output.shape))
