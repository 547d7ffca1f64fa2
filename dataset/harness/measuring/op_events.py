"""Event profiling: every op and collective signature of a plan once, warm, on all ranks at the same time.

Ranks meet before each op and agree on how often to repeat it, so that all of them compute while any is timed
(``busy`` ranks share caches and memory bandwidth, as they will in training).  The budget is shared out as it goes: each
signature gets an equal part of what is left.  What cannot run here (a kernel that does not exist, inputs that no memory
holds) is skipped, with the reason.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import cores
from ..base.collective_calls import Buffers, CollectiveCall, all_gather, barrier, buffers, collective_call, gather
from ..base.errors import HarnessError
from ..ops.callables import is_replayed, op_call, replayed_call
from ..ops.input_pool import DTYPES, NARROW, Call, Pool
from ..ops.op_makers import precision, scaled_product
from .device import free_memory, memory_bytes, out_of_memory
from .timing import Clock

_OP_REPEATS, _COLLECTIVE_REPEATS = (3, 25), (8, 40)  # per visit
_PAUSE_S = 5e-3
_HELD_BYTES = 2**28  # of collectives that take turns
_MOST_SECONDS = {"cpu": 0.06, "cuda": 0.08}  # longest time for one signature, with any budget


def measure_events(
    event: dict[str, Any], device: torch.device, say: Callable[..., None], *, asleep: bool = False
) -> dict[str, Any]:
    """Records of all ops and collectives of one entry of a plan, plus measured hardware facts.

    ``say`` is told what has begun, and ``done`` units (one per signature).  ``asleep``: the ranks of a box do not
    compute, so there are no facts to measure.
    """
    began = time.monotonic()
    ops, collectives = list(event.get("ops", ())), list(event.get("collectives", ()))
    dtypes = {op["dtype"] for op in ops}
    hardware = {} if asleep else measure_facts(device, Clock(device), dtypes)
    took = {"facts": time.monotonic() - began}
    random.Random(0).shuffle(ops)  # ops of similar sizes are measured at different times
    # Collectives are measured before and after the ops, because their times drift more within seconds.
    known = {*DTYPES, *(name for name in hardware.get("peak_flops", ()) if name in NARROW)}
    items, pause_s = len(ops) + 2 * len(collectives), _PAUSE_S if asleep else 0.0
    visits = _Visits(device, event["seconds"], items, sorted(dtypes & known), pause_s)
    records, skipped = list[dict[str, Any]](), list[dict[str, Any]]()
    earlier = visits.collectives(collectives)
    for op in ops:
        try:
            records.append({"op": op, **visits.op(op)})
        except HarnessError as error:
            skipped.append({"op": op, "reason": str(error)})
        say(f"events {event['name']}: {op['kind']}", done=1)
    for collective, first, again in zip(collectives, earlier, visits.collectives(collectives), strict=True):
        if isinstance(first, list) and isinstance(again, list):
            records.append({"collective": collective, "samples": first + again})
        else:
            skipped.append({"collective": collective, "reason": first if isinstance(first, str) else again})
        say(f"events {event['name']}: {collective['kind']}", done=1)
    took["signatures"] = time.monotonic() - began - took["facts"]
    return {"records": _merge(records), "skipped": skipped, "hardware": hardware, "took_seconds": took}


class _Visits:
    """Times one signature after the other, on all ranks; the time that is left is divided among those that are left.

    ``pause_s`` between samples of a collective lets links rest, as computation does in training.
    """

    def __init__(self, device: torch.device, seconds: float, items: int, dtypes: Iterable[str], pause_s: float) -> None:
        self._device, self._clock, self._pause_s = device, Clock(device), pause_s
        self._end, self._left = time.perf_counter() + seconds, items
        self._pools = {name: Pool(device, name) for name in dtypes}

    def _share(self, items: int = 1) -> float:
        left = max(0.0, self._end - time.perf_counter()) / max(1, self._left)
        self._left -= items
        return min(left, _MOST_SECONDS[self._device.type])

    def op(self, op: dict[str, Any]) -> dict[str, Any]:
        """``samples``, ``host_samples`` (none but on CUDA), and ``fresh_samples`` (of some calls on a CPU)."""
        share, dtype = self._share(), op["dtype"]
        if dtype not in self._pools:
            raise HarnessError(f"dtype must be one of {', '.join(sorted({*DTYPES, *self._pools}))}, got {dtype!r}")
        with torch.no_grad(), precision(dtype):
            call, first, reason = self._warm(op)
            count = _repeats(first, share, _OP_REPEATS)
            if call is None or not count:
                raise HarnessError(reason or "another rank could not run it")
            found = self._clock.samples(call, count, share)
            fresh = self._clock.fresh_samples(call, count) if call.fresh else []
        return {"samples": found.device, "host_samples": found.host, "fresh_samples": fresh}

    def _warm(self, op: dict[str, Any]) -> tuple[Call | None, float, str]:
        """The op once it has run twice, the second time's seconds, and what kept it from running, if there is no call.

        Where memory runs out, all pools make room and it is tried once more.
        """
        pool, clock, reason = self._pools[op["dtype"]], self._clock, ""
        for _ in range(2):
            try:
                if "call" in op and is_replayed(op["call"][0]):
                    call = replayed_call(op["call"], self._device)
                else:
                    call = op_call(op["kind"], op["dims"], pool)
                clock(call.run, *call.inputs())
                return call, clock(call.run, *call.inputs()), ""
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if not out_of_memory(error):  # no kernel of this device or version does it
                    break
            for each in self._pools.values():
                each.clear()
            free_memory()
        clock(lambda: None)  # what a kernel did wrong for good shows here, and ends the collection
        return None, float("inf"), reason

    def collectives(self, wanted: Sequence[dict[str, Any]]) -> list[list[float] | str]:
        """Samples of each collective, none on ranks that are left over; or why it cannot run here.

        Those of one group take turns: one that follows itself finds its buffers in caches, and on a CPU takes two
        thirds of the time that it takes among others.
        """
        found = dict[int, list[float] | str]()
        order = sorted(range(len(wanted)), key=lambda at: _layout(wanted[at]))
        for _, places in groupby(order, key=lambda at: _layout(wanted[at])):
            turns, held = list[int](), 0
            for at in places:
                held += wanted[at]["num_bytes"]
                if turns and held > _HELD_BYTES:
                    found |= self._in_turn(turns, wanted)
                    turns, held = [], wanted[at]["num_bytes"]
                turns.append(at)
            found |= self._in_turn(turns, wanted)
        return [found[at] for at in range(len(wanted))]

    def _in_turn(self, places: Sequence[int], wanted: Sequence[dict[str, Any]]) -> dict[int, list[float] | str]:
        share, found = self._share(len(places)), dict[int, list[float] | str]()
        ready = dict[int, tuple[CollectiveCall, Buffers, int]]()
        for at in places:
            try:
                how, data, first = self._first(wanted[at])
            except (HarnessError, RuntimeError) as error:  # RuntimeError: this backend has no such collective
                found[at] = str(error).splitlines()[0]
                continue
            found[at], ready[at] = [], (how, data, _repeats(first, share, _COLLECTIVE_REPEATS))
        for turn in range(max((count for *_, count in ready.values()), default=0)):
            for at, (how, data, count) in ready.items():
                if turn >= count:
                    continue
                time.sleep(self._pause_s)
                if dist.get_rank() in data.ranks:
                    cast(list[float], found[at]).append(self._clock(how.run, data) / max(how.messages, 1))
        return found

    def _first(self, collective: dict[str, Any]) -> tuple[CollectiveCall, Buffers, float]:
        """A collective, what it works on, and the seconds that its third run took, 0 on ranks that are left over."""
        size, how = collective["group_size"], collective_call(collective["kind"], collective["group_size"])
        ranks, group = _group(size, collective["ranks_per_node"], how.messages > 0)
        data, first = buffers(collective["num_bytes"], ranks, group, size, self._device), 0.0
        for _ in range(3):
            barrier()
            first = self._clock(how.run, data) if dist.get_rank() in ranks else 0.0
        return how, data, first


def _layout(collective: dict[str, Any]) -> tuple[int, int]:
    return collective["group_size"], collective["ranks_per_node"]


def _repeats(first: float, share: float, limits: tuple[int, int]) -> int:
    """How often all ranks, which meet here, repeat what took this one ``first`` seconds; 0 if one cannot run it."""
    wanted = -1 if first == float("inf") else int(share / max(first, 1e-6))
    if (size := dist.get_world_size()) > 1:  # faster than ``gather``
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        everyone = torch.empty(size, device=device, dtype=torch.int64)
        all_gather(everyone, torch.tensor([wanted], device=device, dtype=torch.int64), None)
        wanted = min(everyone.tolist())
    return max(limits[0], min(limits[1], wanted)) if wanted >= 0 else 0


@lru_cache(maxsize=1024)  # process groups of this worker; all of its ranks ask alike
def _group(group_size: int, ranks_per_node: int, messages: bool) -> tuple[list[int], Any]:
    """Ranks of this rank's group that lies on nodes as asked for, and its process group; none if it is left over.

    All ranks must ask alike.  ``messages``: whether they send point to point.
    """
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes, there = -(-group_size // ranks_per_node), dist.get_world_size() // local_size
    if ranks_per_node > local_size or nodes > there:
        got = f"{ranks_per_node} of {group_size} ranks per node on {there} nodes of {local_size}"
        raise HarnessError(f"a group must fit on the nodes, got {got}")
    # All ranks that can, in groups of their own: neighbours share links in training too.
    mine: tuple[list[int], Any] = ([], None)
    with cores.any_core(messages=messages):
        for first in range(0, there - nodes + 1, nodes):
            for at in range(0, local_size - ranks_per_node + 1, ranks_per_node):
                places = [(first + node) * local_size + at + i for node in range(nodes) for i in range(ranks_per_node)]
                group = dist.new_group(places[:group_size])
                if dist.get_rank() in places[:group_size]:
                    mine = (places[:group_size], group)
    return mine


def _merge(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One duration from all ranks' samples: ranks compute the same, and a collective ends with its last rank."""
    merged = []
    for versions in zip(*gather(records), strict=True):
        record = {key: value for key, value in versions[0].items() if key in ("op", "collective")}
        sampled = [version["samples"] for version in versions if version["samples"]]
        if "op" in record:
            samples = [sample for rank in sampled for sample in rank]
        else:
            samples = [max(column) for column in zip(*sampled, strict=True)]
        record |= {"seconds": statistics.median(samples), "min_seconds": min(samples), "repeats": len(samples)}
        for kind in ("host", "fresh"):
            if others := [sample for version in versions for sample in version.get(f"{kind}_samples", ())]:
                record[f"{kind}_seconds"] = statistics.median(others)
        merged.append(record)
    return merged


_SECONDS = 0.1  # for one fact, on CUDA


def measure_facts(device: torch.device, clock: Clock, dtypes: Collection[str] = ()) -> dict[str, Any]:
    """Facts of one device while all ranks measure at the same time: the mean over ranks.

    ``peak_flops`` in FLOP/s by dtype (on a CPU fp32, and others only of ``dtypes``), ``memory_bandwidth_bytes_per_s``
    (read plus written), ``memory_bytes`` (the node's share of one rank on CPU), ``op_latency_s`` of an op that does
    nothing, and with at least two ranks ``comm_compute_share``.
    """
    on_cpu = device.type == "cpu"
    peaks = {name: _peak_flops(device, name, clock) for name in DTYPES if not on_cpu or name in ("fp32", *dtypes)}
    for name, since in (("tf32", (8, 0)), ("fp8", (8, 9))):
        if not on_cpu and torch.cuda.get_device_capability(device) >= since:
            with suppress(RuntimeError):
                peaks[name] = _peak_flops(device, name, clock)
    numel = 2**24 if on_cpu else 2**28
    source, target = torch.rand(numel, device=device), torch.empty(numel, device=device)
    barrier()
    clock(target.copy_, source)
    copying = statistics.median(clock.samples(Call(lambda: target.copy_(source)), 7, _SECONDS).device)
    found = {
        **{f"peak_flops.{name}": peak for name, peak in peaks.items()},
        "memory_bandwidth_bytes_per_s": 8.0 * numel / copying,
        "op_latency_s": _op_latency(device, clock),
    }
    everyone = gather(found)
    mean = {key: statistics.fmean(each[key] for each in everyone) for key in found}
    result: dict[str, Any] = {"peak_flops": {name: mean.pop(f"peak_flops.{name}") for name in peaks}, **mean}
    result["memory_bytes"] = memory_bytes(device)
    if on_cpu:
        result["memory_bytes"] //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.get_world_size() > 1:
        result["comm_compute_share"] = comm_compute_share(device, clock)
    return result


def _peak_flops(device: torch.device, dtype: str, clock: Clock) -> float:
    best = 0.0
    for size in (512, 1024) if device.type == "cpu" else (4096, 8192):
        product: Callable[..., Tensor] = torch.matmul
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        if dtype == "fp8":
            product, a, b = scaled_product(device, fast=True), a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        elif dtype != "tf32":
            a, b = a.to(DTYPES[dtype]), b.to(DTYPES[dtype])
        call = Call(partial(product, a, b))
        barrier()
        with torch.no_grad(), precision(dtype):
            clock(call.run)
            seconds = min(clock.samples(call, 5, _SECONDS).device)
        best = max(best, 2.0 * size**3 / seconds)
    return best


def _op_latency(device: torch.device, clock: Clock) -> float:
    """Measure the latency of an op on the device alone, if the device is not the host."""
    x, calls = torch.zeros(1, device=device), 200
    if device.type == "cuda":
        return statistics.median(clock.samples(Call(lambda: x.add_(1.0)), 1, _SECONDS).device)

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    clock(many)
    return clock(many) / calls


def comm_compute_share(device: torch.device, clock: Clock, num_bytes: int = 2**22, repeats: int = 7) -> float:
    """Part of an all-reduce's time by which it slows compute that runs beside it, between 0 and 1.

    ``(t_both - t_compute) / t_comm`` with about three times as much compute as communication, medians over
    interleaved repeats, the slowest rank of each.
    """
    message = torch.zeros(num_bytes // 4, device=device)
    size = 256 if device.type == "cpu" else 2048
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    t_comm, one = (
        statistics.median(_together(call, clock) for _ in range(repeats))
        for call in (lambda: dist.all_reduce(message), lambda: a @ b)
    )
    count = max(1, int(3 * t_comm / one))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    pairs = [(_together(compute, clock), _together(both, clock)) for _ in range(repeats)]
    t_compute, t_both = (statistics.median(column) for column in zip(*pairs, strict=True))
    return float(min(1.0, max(0.0, (t_both - t_compute) / t_comm)))


def _together(call: Any, clock: Clock) -> float:
    """The slowest rank's seconds of a call that all ranks start together."""
    barrier()
    return float(max(gather(clock(call))))
