"""Ops and collectives of one rank with their times: kernels of a device, or calls of a host and its workers."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_trace import Placement, Rendezvous
from stepsight.dataset.kinds import gloo_spans, nccl_names
from stepsight.dataset.kinds.call_dims import count
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.traces.classify import ELEMENT_BYTES
from stepsight.dataset.traces.event_columns import RankEvents
from stepsight.dataset.traces.sweep import Call, Swept, Work, orphan

StreamNames = list[str]  # by number of the stream
_MOST_GAP_US = 3.0  # that a device leaves between kernels on its own account
_SPIN = "spin_kernel"  # torch's, by which a stand-in lets the time of a collective pass


def device_work(
    events: RankEvents, swept: Swept, names: StreamNames, world_size: int, placement: Placement
) -> list[Work]:
    """What the device did, in order of issue: per call and stream one op, per NCCL kernel (of a stand-in: per spin) one
    collective.

    The short time between two kernels, the second of which was launched before the first one ended, is its own.
    """
    nodes: dict[tuple[int, str], Work] = {}
    ends: dict[str, float] = {}
    out: list[Work] = []
    numbers: dict[str, int] = {}
    device = events.device
    ids = zip(*(device[name].tolist() for name in ("kernel", "stream", "correlation", "external")), strict=True)
    for row, (kernel, number, correlation, external) in enumerate(ids):
        name, start, end = events.kernels[kernel][1], float(device.start[row]), float(device.end[row])
        launch = swept.launches.get(correlation) or swept.external.get(external)
        issue, owner, comm = launch or (start, None, None)
        modelled = comm is not None and "seconds" in comm.values
        if modelled and _SPIN not in name:
            continue  # what a stand-in's collective does in the time that its spinning takes
        if modelled or "nccl" in name[:12].lower() or row in events.collective_args:
            work = collective_of(events.collective_args.get(row, {}), comm, world_size, placement, numbers)
            if work is not None:
                work.name = work.work.kind if modelled else name.split("(")[0]
                work.issue, work.issued, work.start, work.end, work.own = issue, issue, start, end, end - start
                out.append(work)
                continue
        stream = names[number]
        last = ends.get(stream, math.inf)
        ends[stream] = end
        own = end - start + (max(start - last, 0.0) if issue < last and start - last <= _MOST_GAP_US else 0.0)
        if owner is None:
            out.append(Work(orphan(name), name[:60], issue, start, end, own, stream, known=False, issued=issue))
            continue
        node = nodes.get((id(owner), stream))
        if node is None:
            node = Work(owner.work, owner.name, issue, start, end, own, stream, owner.known, issued=issue)
            nodes[id(owner), stream] = node
            out.append(node)
        else:
            node.start, node.end, node.own = min(node.start, start), max(node.end, end), node.own + own
            node.issued = max(node.issued, issue)
    out.sort(key=lambda work: (work.issue, work.start))
    return out


def stream_names(events: RankEvents) -> StreamNames:
    """``compute`` is the stream that is busiest with what is not NCCL; others are named by their number."""
    computes = [
        category.endswith("kernel") and "nccl" not in name[:12].lower() and _SPIN not in name
        for category, name, _ in events.kernels
    ]
    device = events.device
    seconds = np.where(np.array(computes, dtype=np.bool_)[device["kernel"]], device.end - device.start, 0.0)
    busy = np.bincount(device["stream"], seconds, len(events.streams))
    several = len({place for place, _ in events.streams}) > 1
    names = [f"device{place}.stream{stream}" if several else f"stream{stream}" for place, stream in events.streams]
    names[int(busy.argmax())] = "compute"
    return names


def collective_of(
    args: dict[str, Any], comm: Call | None, world_size: int, placement: Placement, numbers: dict[str, int]
) -> Work | None:
    """A collective from what NCCL's kernel carries, else from the call that launched it; None if it joins no ranks."""
    values = {**(comm.values if comm else {}), **args}
    ours = comm is not None and "kind" in comm.values
    if ours:
        assert comm is not None
        kind, num_bytes = str(comm.values["kind"]), int(comm.values["num_bytes"])
    else:
        kind, side = nccl_names().get(str(values.get("Collective name", "")), ("", ""))
        if not kind:
            return None
        if f"{side} msg nelems" not in values:  # records of old: the shape of one side alone
            num_bytes = count(values.get("shape", [])) * ELEMENT_BYTES.get(str(values.get("type")), 4)
        else:
            elements = int(values[f"{side} msg nelems"])
            num_bytes = elements * ELEMENT_BYTES.get(str(values.get("dtype", "")), 4)
    ranks = _ranks(values)
    size = int(values.get("Group size", 0)) or len(ranks) or world_size
    if kind == "all_gather" and not ours and "Out msg nelems" not in values:
        num_bytes *= size
    if size < 2:
        return None
    if len(ranks) != size:
        ranks = ()
    names = (values.get(key) for key in ("group", "Process Group Description", "Process Group Name"))
    group = placement.axis(ranks) or str(next(filter(None, names), "nccl")).removeprefix("mesh_")
    number = numbers[group] = numbers.get(group, -1) + 1
    work = Collective(kind, num_bytes, size, placement.ranks_per_node(ranks, size))
    return Work(work, kind, 0.0, 0.0, 0.0, 0.0, group, meets=Rendezvous(group, number, ranks))


def _ranks(values: dict[str, Any]) -> tuple[int, ...]:
    if "ranks" in values:
        return tuple(int(part) for part in str(values["ranks"]).split(","))
    try:
        found = json.loads(values.get("Process Group Ranks", "[]"))
    except ValueError:  # cut off with an ellipsis
        found = []
    if found:
        return tuple(int(rank) for rank in found)
    start, stride, size = (values.get(k, -1) for k in ("Global rank start", "Global rank stride", "Group size"))
    return tuple(range(start, start + stride * size, stride)) if start >= 0 and stride > 0 and size > 0 else ()


def event_waits(
    events: RankEvents, swept: Swept, names: StreamNames, works: list[Work]
) -> tuple[tuple[int, int, Dependency], ...]:
    """Synchronisation: recorded waits of one stream for another, and collectives for the work issued before them."""
    edges: set[tuple[int, int]] = set()
    by_stream: dict[str, list[int]] = {}
    last_compute = -1
    for index, work in enumerate(works):
        by_stream.setdefault(work.stream, []).append(index)
        if isinstance(work.work, Collective):
            if last_compute >= 0:
                edges.add((last_compute, index))
        elif work.stream == "compute":
            last_compute = index
    named = dict(zip(events.streams, names, strict=True))
    for args in events.syncs:
        if "wait_on_stream" not in args or "stream" not in args:
            continue
        device = args.get("device", events.streams[0][0])
        source, target = named.get((device, args["wait_on_stream"])), named.get((device, args["stream"]))
        waited = swept.launches.get(args.get("wait_on_cuda_event_record_corr_id", -1))
        waiting = swept.launches.get(args.get("correlation", -1))
        if not (source and target and waited and waiting) or source == target:
            continue
        before = max((i for i in by_stream.get(source, []) if works[i].issue <= waited[0]), default=-1)
        after = min((i for i in by_stream.get(target, []) if works[i].issue >= waiting[0]), default=math.inf)
        if 0 <= before < after < math.inf:
            edges.add((before, int(after)))
    return tuple((before, after, Dependency.SYNCHRONISATION) for before, after in sorted(edges))


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch of the main thread that is spent waiting; microseconds."""

    work: Work
    start: float
    end: float


def host_collectives(
    swept: Swept, main: Any, replicas: tuple[int, ...], placement: Placement
) -> tuple[list[Work], list[Wait]]:
    """Collectives of one rank in order of issue, and when the main thread waited for them.

    Args:
        swept: What was found.
        main: The thread that computes.
        replicas: Ranks of the collectives that do not name any: DDP's.
        placement: Where ranks lie.
    """
    works: list[Work] = []
    waits: list[Wait] = []
    by_key: dict[tuple[str, str], Work] = {}
    implicit: list[Work] = []
    carriers = _Carriers(swept.workers)
    messages: dict[tuple[str, ...], int] = {}
    free: dict[tuple[str, ...], float] = {}  # when a stand-in's links are
    for call in sorted(swept.calls, key=lambda call: call.start):
        values = call.values
        ranks = replicas
        if "ranks" in values:
            ranks = tuple(int(part) for part in values["ranks"].split(","))
        group = placement.axis(ranks) or values.get("group", "dp")
        direction = values.get("direction", "")
        blocks = values.get("async", "0") == "0"
        carrier = carriers.take(direction or values["kind"], call)
        if len(ranks) < 2:
            continue
        start, end = (call.start, call.end) if blocks else carrier or (call.start, call.end)
        if "seconds" in values and not blocks:  # nobody but its annotation tells when it was over
            link = (group, direction and values["ranks"], direction)
            start = max(call.start, free.get(link, 0.0))
            end = free[link] = start + 1e6 * float(values["seconds"])
        per_node = placement.ranks_per_node(ranks, len(ranks))
        collective = Collective(values["kind"], int(values["num_bytes"]), len(ranks), per_node)
        # A message is met by its number between two ranks, everything else by its number in the group.
        key = (group, direction and values.get("ranks", ""), values["kind"] if "seq" not in values else "")
        number = messages[key] = messages.get(key, -1) + 1
        meets = Rendezvous(f"{group}:{values['ranks']}" if direction else group, number, ranks)
        name = f"{values['kind']}.{direction}" if direction else values["kind"]
        work = Work(collective, name, call.start, start, end, end - start, group, meets=meets, blocks=blocks)
        works.append(work)
        if blocks:
            waits.append(Wait(work, call.start, call.end))
        elif "seq" in values:
            by_key[values["group"], values["seq"]] = work
        else:
            implicit.append(work)
    for wait in sorted(swept.waits, key=lambda wait: wait.start):
        awaited = by_key.get((wait.values.get("group", ""), wait.values.get("seq", "")))
        if awaited is not None:
            waits.append(Wait(awaited, wait.start, wait.end))
            if awaited.end > wait.end or awaited.end == awaited.start:
                awaited.end, awaited.own = wait.end, max(wait.end - awaited.start, 0.0)
    known = {id(wait.work) for wait in waits}  # a communication hook of DDP is waited for where nothing records it
    implicit += [work for work in by_key.values() if id(work) not in known and not work.is_message]
    _end_with_segments(implicit, swept)
    waits.extend(_invisible_waits(implicit, swept.threads.get(main, [])))
    return works, waits


def _end_with_segments(works: list[Work], swept: Swept) -> None:
    """End collectives of DDP with their segment: it hands back gradients that are reduced."""
    for work in works:
        limit = min((span.end_s for span in swept.spans if span.start_s <= work.issue < span.end_s), default=work.end)
        work.end = max(min(work.end, limit), work.start)
        work.own = work.end - work.start


class _Carriers:
    """Worker spans, each taken once, first come first served within a kind."""

    def __init__(self, workers: list[tuple[str, float, float]]) -> None:
        self._queues: dict[str, list[tuple[float, float]]] = {}
        for kind, start, end in sorted(workers, key=lambda worker: -worker[1]):
            self._queues.setdefault(kind, []).append((start, end))

    def take(self, kind: str, call: Call) -> tuple[float, float] | None:
        best: list[tuple[float, float]] | None = None
        for name in gloo_spans(kind):
            queue = self._queues.get(name, [])
            while queue and queue[-1][0] < call.start:  # older than the call: it belongs to none
                queue.pop()
            if queue and (best is None or queue[-1] < best[-1]):
                best = queue
        return best.pop() if best else None


def _invisible_waits(works: list[Work], calls: list[tuple[float, float]]) -> list[Wait]:
    """Waits that nothing records: an end of a collective that falls between two calls of the main thread.

    All of a step are awaited at the same place (the end of DDP's backward), so each synchronises there: where the next
    wait that can be seen ends.
    """
    if not works or not calls:
        return []
    starts, ends = np.array(calls).T
    out: list[Wait] = []
    for work in works:
        at = int(np.searchsorted(starts, work.end, "right")) - 1
        if at >= 0 and ends[at] < work.end:
            begin = max(float(ends[at]), work.issue)
            out.append(Wait(work, begin, max(begin, work.end)))
    until = sorted(wait.end for wait in out)
    seen = {id(wait.work) for wait in out}
    for work in works:
        place = bisect_left(until, work.end)
        if id(work) not in seen and place < len(until):
            out.append(Wait(work, until[place], until[place]))
    return out
