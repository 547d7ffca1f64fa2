"""Read one rank's Kineto file: as a graph, and as the program that the graph holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.caching import without_collection
from stepsight.dataset.base.errors import TraceError, shorten
from stepsight.dataset.graph.columns import Floats, HostRecord, Ints, covered
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import Placement, RankTrace, rank_trace
from stepsight.dataset.kinds.op import check_sizes
from stepsight.dataset.traces import data_edges
from stepsight.dataset.traces.assembly import MICROSECOND, Assembly
from stepsight.dataset.traces.device_graph import Parts, launch_rows, tie, with_assumed_launches, with_stand_ins
from stepsight.dataset.traces.event_columns import RankEvents, picked
from stepsight.dataset.traces.host_calls import CallTree, Steps, call_tree, find_steps, observed_steps, segment_spans
from stepsight.dataset.traces.host_graph import host_call_starts, host_graph
from stepsight.dataset.traces.kernel_kinds import CollectiveNodes, KernelKinds, launches, mask_of
from stepsight.dataset.traces.stream_waits import StreamWaits

MOST_RANKS = 2**20
_LOADING = "enumerate(DataLoader)"  # prefix of annotations of PyTorch's data loader
_MOST_OF_A_LAUNCH = 4  # most kernels of one launch, except of a graph
_TIED_SHARE = 0.5  # of the kernels
_JUMP_US = 1000.0  # clock error by which a kernel may start before its launch
_SAMPLED_GAP_US, _SAMPLED_SHARE = 5.0, 0.3  # unexplained gaps that indicate missing kernels
_IDLE_GAP_US, _IDLE_SHARE = 150.0, 0.5  # gaps, and part of them, in which a device with launched work does nothing


@without_collection()
def read_rank(path: Path, placement: Placement | None = None, execution: Path | None = None) -> Program:
    """Read one rank's Kineto trace as a graph, with data dependencies from PyTorch's execution trace of the same steps.

    Raises ``TraceError`` if it is no whole trace or holds no node, or if the execution trace is of another run.
    """
    events = RankEvents(path)
    with parsing(f"{path} must hold well-formed events", TraceError):
        placement = placement or Placement()
        rank, world_size = _identity(events, placement)
        if len(events.device):
            events = with_stand_ins(with_assumed_launches(events.with_calls(("stepsight::op ",))))
        tree = call_tree(events)
        if len(events.device):
            graph = _device_graph(events, tree, world_size, placement)
        else:
            graph = host_graph(events, tree, world_size, placement, rank)
        check_sizes(graph.works, "a trace")
        if execution is not None:
            graph = data_edges.with_tensor_edges(graph, events, tree.parent, execution)
        observed = observed_steps(events, graph.steps_s / MICROSECOND + graph.origin_us)
        graph = data_edges.with_sequence_edges(data_edges.without_observed_steps(graph, observed), tree.sequence)
        warnings = [*graph.warnings]
        optimizer = any(each.name.startswith("Optimizer.step") for each in events.annotations)
        if len(events.ops) and not optimizer and not (tree.phase == 1).any():
            warnings.append("no backward pass and no optimizer: this looks like inference")
        loading = [(each.start, each.end) for each in events.annotations if each.name.startswith(_LOADING)]
        graph.loading_s = (np.array(loading).reshape(-1, 2) - graph.origin_us) * MICROSECOND
        return graph.replace(rank=rank, world_size=world_size, warnings=tuple(dict.fromkeys(warnings)))


def read_kineto(path: Path, placement: Placement | None = None) -> RankTrace:
    """Read one rank's file as its program with times."""
    return rank_trace(read_rank(path, placement))


def _device_graph(events: RankEvents, tree: CallTree, world_size: int, placement: Placement) -> Program:
    rows = launch_rows(events)
    issued = picked(events.runtime.start, rows, events.device.start)
    steps = find_steps(events, tree, issued)
    warnings = [*events.warnings, *steps.warnings, *_check_launches(events, tree, rows)]
    parts = tie(events, steps, rows)
    StreamWaits(events, parts, mask_of(events), picked(tree.call_phase, rows, -1)).add()
    built = _assembly(events, tree, steps, parts)
    _set_works(built, events, tree, parts, CollectiveNodes(events, world_size, placement))
    properties = events.header.get("deviceProperties")
    devices = [each for each in properties if isinstance(each, dict)] if isinstance(properties, list) else []
    used = [each for each in devices if each.get("id") in {device for device, _ in events.streams}]
    graph = built.graph("cuda", shorten(str([*used, *devices, {}][0].get("name", ""))), events.num_events)
    record = HostRecord(
        spans=segment_spans(events, graph.origin_us),
        calls_s=(host_call_starts(events, None) - graph.origin_us) * MICROSECOND,
    )
    return _with_unrecorded(graph.replace(record=record, warnings=tuple(warnings)))


def _identity(events: RankEvents, placement: Placement) -> tuple[int, int]:
    info = events.header.get("distributedInfo") or {}
    try:
        rank, world_size = int(info.get("rank", placement.rank or 0)), int(info.get("world_size", 1))
    except (TypeError, ValueError, AttributeError):
        raise TraceError(f"distributedInfo must hold rank and world_size, got {info!r:.80} in {events.path}") from None
    if not (1 <= world_size <= MOST_RANKS and 0 <= rank < MOST_RANKS):
        rule = f"rank and world_size must be below {MOST_RANKS}"
        raise TraceError(f"{rule}, got {rank} and {world_size} in {events.path}")
    if placement.rank not in (None, rank) and "rank" in info:
        raise TraceError(f"the trace of rank {placement.rank} must be its own, got that of rank {rank}: {events.path}")
    return rank, world_size


def _check_launches(events: RankEvents, tree: CallTree, rows: Ints) -> list[str]:
    """Warnings about clocks, and about launches that are missing, shared by many kernels, or not of the framework."""
    found, known = [], rows[rows >= 0]
    early = events.runtime.start[known] - events.device.start[rows >= 0]
    if jumped := int((early > _JUMP_US).sum()):
        found.append(f"clocks that jump: {jumped} kernels begin up to {early.max():.0f} us before their launch")
    if tree.crossed:
        found.append(f"calls that overlap without nesting: {tree.crossed}")
    if missing := len(rows) - len(known):
        found.append(f"kernels without a launch: {missing} of {len(rows)}; they start when their stream is free")
    _, counts = np.unique(known, return_counts=True)
    shared = int(counts[counts > _MOST_OF_A_LAUNCH].sum())
    # one launch of a whole graph launches thousands of kernels
    graphed = any("GraphLaunch" in events.names[name] for name in np.unique(events.runtime["name"][known]).tolist())
    if shared > _TIED_SHARE * len(known) and not graphed:
        found.append(f"correlation ids repeat: {shared} of {len(known)} kernels share the launches of others")
    alone = int((tree.owner[known] < 0).sum())
    if len(events.ops) and alone > _TIED_SHARE * len(known):
        why = "another library launched them, or the clocks of calls and launches differ"
        told = f"no framework call encloses the launches of {alone} of {len(known)} kernels"
        found.append(f"{told}: their kinds come from their names ({why})")
    return found


def _set_works(built: Assembly, events: RankEvents, tree: CallTree, parts: Parts, collectives: CollectiveNodes) -> None:
    """Set what each device event does: its signature, its call and, of a collective, its rendezvous."""
    device, runtime, base = events.device, events.runtime, len(parts.calls)
    nodes = {name: values[base:] for name, values in built.columns.items()}
    nodes["kind"][:], nodes["phase"][:] = OP, picked(tree.call_phase, parts.row, -1)
    kinds, configs, mask = KernelKinds(events, tree), launches(events), mask_of(events)
    owners, kernels = picked(tree.owner, parts.row, -1).tolist(), device["kernel"].tolist()
    moved = device["bytes"].tolist()
    for row in np.flatnonzero(~mask).tolist():
        op, nodes["call"][row], nodes["known"][row] = kinds.find(configs[kernels[row]], owners[row], moved[row])
        nodes["work"][row] = built.works[op]
    issued, threads = picked(runtime.start, parts.row, device.start), picked(runtime["thread"], parts.row, -1)
    for row in np.flatnonzero(mask)[np.argsort(issued[mask], kind="stable")].tolist():
        work, meets = collectives.find(row, configs[kernels[row]], float(issued[row]), int(threads[row]))
        nodes["work"][row], nodes["known"][row], nodes["call"][row] = built.works[work], 1, owners[row]
        if meets is not None:
            nodes["kind"][row] = COLLECTIVE
            built.meet(base + row, meets)
    for name in ("blocks", "threads", "registers", "shared_bytes"):
        values = np.array([getattr(config, name) for config in configs], dtype=np.int64)
        nodes[name][:] = values[device["kernel"]]


def _assembly(events: RankEvents, tree: CallTree, steps: Steps, parts: Parts) -> Assembly:
    """Host calls and device events as one list, ordered such that every edge leads forward.

    No kernel comes before its launch or before the previous kernel.
    """
    calls, device, base = parts.calls, events.device, len(parts.calls)
    key = np.maximum(device.start, picked(calls.start, parts.launch, -np.inf))
    order = np.argsort(device["stream"], kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(device["stream"][order])) + 1):
        key[rows] = np.maximum.accumulate(key[rows])
    built = Assembly(
        start=np.concatenate([calls.start, device.start]),
        end=np.concatenate([calls.end, device.end]),
        key=np.concatenate([calls.start, key]),
        issued=np.concatenate([calls.start, picked(calls.start, parts.launch, device.start)]),
        edges=parts.edges,
        steps=steps,
        names=parts.names,
    )
    nodes = built.columns
    nodes["kind"][:base], nodes["known"][:base] = HOST, 1
    nodes["phase"][:base] = picked(tree.call_phase, calls["row"], -1)
    several = len({device for device, _ in events.streams}) > 1
    streams = [f"device{place}.stream{stream}" if several else f"stream{stream}" for place, stream in events.streams]
    threads = {thread: f"host{index}" for index, thread in enumerate(dict.fromkeys(calls["thread"].tolist()))}
    names = [built.streams[name] for name in streams]
    nodes["stream"][base:] = np.array(names, dtype=np.int64)[device["stream"]]
    nodes["stream"][:base] = [built.streams[threads[thread]] for thread in calls["thread"].tolist()]
    kernels = np.array([built.names[name] for _, name, _ in events.kernels], dtype=np.int64)
    nodes["name"][:base], nodes["name"][base:] = calls["name"], kernels[device["kernel"]]
    return built


def lateness(graph: Program) -> Floats:
    """``(n,)``: seconds by which each node starts later than its dependencies explain; 0 for nodes without any."""
    earliest = np.full(len(graph), -np.inf)
    ready = graph.end_s[graph.edge_columns["source"]] + graph.delay_s
    np.maximum.at(earliest, graph.edge_columns["target"], ready)
    return np.where(np.isinf(earliest), 0.0, np.maximum(graph.start_s - earliest, 0.0))


def _with_unrecorded(graph: Program) -> Program:
    """Treat gaps of a trace with missing kernels as unrecorded work."""
    late = lateness(graph)
    inner = np.zeros(len(graph), dtype=np.bool_)
    inner[graph.edge_columns["target"][graph.edge_columns["why"] == WHY_NUMBER[Dependency.STREAM_ORDER]]] = True
    inner &= graph.columns["kind"] != HOST
    gaps = late > _SAMPLED_GAP_US * MICROSECOND
    least = _SAMPLED_SHARE * inner.sum() * (graph.edge_columns["why"] == WHY_NUMBER[Dependency.LAUNCH]).any()
    if (count := int((gaps & inner).sum())) and count >= least:
        some = f"{count} of {int(inner.sum())} kernels start later than anything recorded explains"
        told = f"kernels are missing: {some}; the trace was trimmed, and the gaps count as work that was not recorded"
        return graph.replace(unrecorded_s=np.where(gaps & inner, late, 0.0), warnings=(*graph.warnings, told))
    idle = np.where(graph.on_device, late, 0.0)
    chosen = idle > _IDLE_GAP_US * MICROSECOND
    copies = np.array([*(work.kind in ("from_host", "to_host") for work in graph.works), True], dtype=np.bool_)
    busy = np.flatnonzero(graph.on_device & ~copies[graph.columns["work"]])  # with what is no copy from or to the host
    begin = graph.start_s[chosen] - late[chosen]
    idle[chosen] -= covered(graph.start_s[busy], graph.end_s[busy], begin, graph.start_s[chosen])
    idle[(idle < _IDLE_GAP_US * MICROSECOND) | (idle < _IDLE_SHARE * late)] = 0.0
    gaps_told = f"{int((idle > 0).sum())} gaps of {1e3 * idle.sum():.1f} ms in all, although work was launched"
    told = f"work is missing: the device computes nothing in {gaps_told}; they count as work that was not recorded"
    return graph.replace(unrecorded_s=idle, warnings=(*graph.warnings, *([told] if idle.any() else [])))
