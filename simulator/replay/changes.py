"""Changes to traced graphs for what-if questions: faster kernels, no host, another fabric, batch or device.

The idea is that of Daydream (Zhu et al. 2020, arXiv:2006.03318) and dPRO (Hu et al. 2022, arXiv:2205.02473): change
durations and dependencies of what was measured, and simulate.  A duration is multiplied by a ratio that a latency
model predicts for its signature, so what the model gets wrong of both cancels; where the signature is not known, it is
scaled by a plain factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import eq

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.graph.columns import merge
from stepsight.dataset.graph.program import COLLECTIVE, OP, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import meetings
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS, Collective, Op
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.replay.replay import replay

Floats = NDArray[np.float64]
Graphs = Sequence[Program]

DEVICES_PER_NODE = 8  # nodes whose phase the trace does not show
COMMUNICATION, ANY_HOST = "communication", "host"
_OPTIMIZER = 2  # index of the phase


@dataclass
class Tally:
    """How much device time was changed: by model predictions, or by a constant factor."""

    predicted_s: float = 0.0
    scaled_s: float = 0.0

    def add(self, seconds: float, predicted: bool) -> None:
        """Count the device time of the unchanged graph."""
        self.predicted_s += seconds * predicted
        self.scaled_s += seconds * (not predicted)


def faster(graphs: Graphs, tally: Tally, what: str, factor: float) -> list[Program]:
    """Divide the durations of the named ops by a factor above 0.

    ``what``: a kind or family of ops, a kind of collective, ``communication``, ``host``, or a part of kernels' names.
    """
    if not factor > 0:
        raise StepsightError(f"a factor must be > 0, got {what}={factor:g}")
    if what == ANY_HOST:
        return [host_scaled(graph, 1.0 / factor) for graph in graphs]
    named = [_named(graph, what) for graph in graphs]
    if not any(chosen.any() for chosen in named):
        kinds = sorted({work.kind for graph in graphs for work in graph.works})
        rule = "--faster names a kind or family of the trace, communication, host or a part of a kernel's name"
        raise StepsightError(f"{rule}, got {what!r:.80}: the trace has {', '.join(kinds)}")
    tally.add(sum(float(graph.duration_s[chosen].sum()) for graph, chosen in zip(graphs, named, strict=True)), False)
    factors = [np.where(chosen, factor, 1.0) for chosen in named]
    return [graph.replace(duration_s=graph.duration_s / each) for graph, each in zip(graphs, factors, strict=True)]


def _named(graph: Program, what: str) -> NDArray[np.bool_]:
    if what == COMMUNICATION:
        return np.asarray(graph.columns["kind"] == COLLECTIVE)
    kinds = [work.kind for work in graph.works]
    named = [what == kind or (kind in OP_KINDS and what == OP_KINDS[kind].family) for kind in kinds]
    chosen = np.array([*named, False], dtype=np.bool_)[graph.columns["work"]]
    if not (chosen & graph.on_device).any() and what not in OP_KINDS and what not in COLLECTIVE_KINDS:
        chosen = np.array([what in name for name in graph.names], dtype=np.bool_)[graph.columns["name"]]
    return np.asarray(chosen & graph.on_device)


def host_scaled(graph: Program, factor: float, loading: float | None = None) -> Program:
    """Multiply the host's time by ``factor``; the time of loading data by ``loading``, None: by ``factor``."""
    factors, why = np.full(len(graph), factor), graph.edge_columns["why"]
    for begin, end in graph.loading_s.tolist() if loading is not None else ():
        factors[(graph.start_s >= begin) & (graph.start_s <= end)] = loading
    duration = np.where(graph.on_device, graph.duration_s, graph.duration_s * factors)
    ordered = why == WHY_NUMBER[Dependency.HOST_ORDER]
    delay = np.where(ordered, graph.delay_s * factors[graph.edge_columns["target"]], graph.delay_s)
    launch = (why == WHY_NUMBER[Dependency.LAUNCH]) & (delay < 0)
    delay = np.where(launch, delay * factor, delay)  # before the call returns: at most the duration of the call
    return graph.replace(duration_s=duration, delay_s=delay)


def without_host(graphs: Graphs, _: Tally) -> list[Program]:
    """Set the host's time to zero."""
    return _host_free(graphs, "--no-host", 0.0)


def as_device_graph(graphs: Graphs, _: Tally) -> list[Program]:
    """Set the time of launches to zero, as with a CUDA graph that is launched once a step; loading of data remains."""
    return _host_free(graphs, "--cuda-graph", 1.0)


def _host_free(graphs: Graphs, option: str, loading: float) -> list[Program]:
    if any(graph.device == "cpu" for graph in graphs):
        raise StepsightError(f"{option} needs a trace of a device, got one of a host that computes itself")
    return [host_scaled(graph, 0.0, loading) for graph in graphs]


def without_straggler(graphs: Graphs, _: Tally) -> list[Program]:
    """Let the rank whose ops take longest compute like the median of the others."""
    if len(graphs) < 2:
        raise StepsightError(f"--remove-straggler needs traces of at least two ranks, got {len(graphs)}")
    ordered = [graph.edge_columns["why"] == WHY_NUMBER[Dependency.HOST_ORDER] for graph in graphs]
    host = [float(np.maximum(g.delay_s[own], 0.0).sum()) for g, own in zip(graphs, ordered, strict=True)]
    own = [float(graph.duration_s[graph.columns["kind"] == OP].sum()) for graph in graphs]
    slowest = int(np.argmax(np.add(own, host)))
    graph, duration = graphs[slowest], graphs[slowest].duration_s.copy()
    usual = [_mean_by_kind(other) for other in graphs if other is not graph]
    for kind, seconds in _mean_by_kind(graph).items():
        like = [each[kind] for each in usual if kind in each]
        if like and seconds > 0:
            chosen = _named(graph, kind) & (graph.columns["kind"] == OP)
            duration[chosen] *= min(float(np.median(like)) / seconds, 1.0)
    ratio = min(float(np.median(host[:slowest] + host[slowest + 1 :])) / host[slowest], 1.0) if host[slowest] else 1.0
    changed = host_scaled(graph.replace(duration_s=duration), ratio)
    return [changed if each is graph else each for each in graphs]


def _mean_by_kind(graph: Program) -> dict[str, float]:
    """Mean seconds of an op by kind."""
    kinds = list(dict.fromkeys(work.kind for work in graph.works))
    ops = graph.columns["kind"] == OP
    number = np.array([kinds.index(work.kind) for work in graph.works], dtype=np.int64)[graph.columns["work"][ops]]
    counts, sums = np.bincount(number), np.bincount(number, graph.duration_s[ops])
    return {kinds[each]: float(sums[each] / counts[each]) for each in np.flatnonzero(counts).tolist()}


def on_latencies(graphs: Graphs, tally: Tally, before: LatencyModel, after: LatencyModel) -> list[Program]:
    """Scale durations by the ratio of two latency models: another device, or another fabric.

    Ops of unknown sizes change as the memory bandwidths of the devices differ.
    """
    plain = before.hardware.memory_bandwidth_bytes_per_s / after.hardware.memory_bandwidth_bytes_per_s
    return [_scaled(graph, graph.works, (before, after), plain, tally) for graph in graphs]


def with_batch(graphs: Graphs, tally: Tally, factor: float, latency: LatencyModel) -> list[Program]:
    """Multiply the size of every micro-batch; the optimizer, gradients and the host do not change."""
    if not factor > 0:
        raise StepsightError(f"--batch must be a factor > 0, got {factor:g}")
    out = []
    for graph in graphs:
        # gradients and parameters, whose sizes do not depend on the batch, are sent in backward and in the optimizer
        sent = (graph.columns["kind"] == COLLECTIVE) & (graph.columns["phase"] != 0)
        changed = _scaled(graph, [_larger(work, factor) for work in graph.works], (latency, latency), factor, tally)
        fixed = (graph.columns["phase"] == _OPTIMIZER) | sent
        out.append(graph.replace(duration_s=np.where(fixed, graph.duration_s, changed.duration_s)))
    return out


def with_replicas(graphs: Graphs, tally: Tally, factor: int, latency: LatencyModel) -> list[Program]:
    """Multiply the number of ranks: groups of all ranks grow with it, other groups do not.

    A node holds as many ranks as the trace says, at most ``DEVICES_PER_NODE`` of a group that is said to share one.
    Waiting for ranks that come late is not scaled.
    """
    world, out = graphs[0].world_size, []
    for graph in graphs:
        grown = list(graph.works)
        for place, work in enumerate(graph.works):
            if isinstance(work, Collective) and work.group_size == world and work.record.route != "message":
                per_node = work.ranks_per_node if work.ranks_per_node < world else DEVICES_PER_NODE
                size = world * factor
                grown[place] = replace(work, group_size=size, ranks_per_node=min(per_node, size))
        same = np.array([*map(eq, graph.works, grown), True], dtype=np.bool_)
        if same.all():
            raise StepsightError(f"--replicas needs collectives of all {world} ranks, got none in rank {graph.rank}")
        same, changed = same[graph.columns["work"]], _scaled(graph, grown, (latency, latency), 1.0, tally)
        out.append(graph.replace(duration_s=np.where(same, graph.duration_s, changed.duration_s)))
    return out


def _larger(work: Op | Collective, factor: float) -> Op | Collective:
    """The signature with ``factor`` times as many samples: its first dim counts rows, tokens, samples or elements."""
    if isinstance(work, Collective):
        return replace(work, num_bytes=max(int(work.num_bytes * factor), 0))
    first = max(round(work.dims[0] * factor), 1) if work.dims[0] else 0
    return replace(work, dims=(first, *work.dims[1:]))


def _scaled(
    graph: Program,
    works: Sequence[Op | Collective],
    models: tuple[LatencyModel, LatencyModel],
    plain: float,
    tally: Tally,
) -> Program:
    """Scale durations by what the models predict for each work before and for the one instead; else by ``plain``."""
    old, new = sized_seconds(models[0], graph.works), sized_seconds(models[1], works)
    known = np.append(~np.isnan(old + new), False)
    of_unknown = [1.0 if isinstance(work, Collective) else plain for work in works]
    ratios = np.append(np.where(known[:-1], new / np.maximum(old, 1e-12), of_unknown), plain)
    work, device = graph.columns["work"], graph.on_device
    for predicted in (True, False):
        tally.add(float(graph.duration_s[device & (known[work] == predicted)].sum()), predicted)
    return graph.replace(duration_s=np.where(device, graph.duration_s * ratios[work], graph.duration_s))


def sized_seconds(model: LatencyModel, works: Sequence[Op | Collective]) -> Floats:
    """``(n,)``: seconds of each work; NaN where its sizes are unknown, or the device does not support its dtype."""
    found, dtypes = np.full(len(works), np.nan), model.hardware.peak_flops
    sized = {place: work for place, work in enumerate(works) if work.sized}
    ops = {place: work for place, work in sized.items() if isinstance(work, Op) and work.dtype in dtypes}
    sent = {place: work for place, work in sized.items() if isinstance(work, Collective)}
    if ops:
        found[list(ops)] = model.op_seconds(list(ops.values()))
    if sent:
        found[list(sent)] = model.collective_seconds(list(sent.values()))
    return found


def with_buckets(graphs: Graphs, tally: Tally, num_bytes: float, latency: LatencyModel) -> list[Program]:
    """Merge the gradient all-reduces of a step into buckets of at least a number of bytes.

    Each bucket runs when its last part was ready on all ranks.  It takes what its parts took together, those that ran
    at once counted once, times what the latency model says one message takes beside its parts.
    """
    arrived, (met, offsets) = [graph.start_s.copy() for graph in graphs], meetings(graphs)
    for members in met:  # when the last rank reached each node, on each rank's own clock
        latest = max(float(graphs[place].start_s[node]) + offsets[place] for place, node in members.items())
        for place, node in members.items():
            arrived[place][node] = min(latest - offsets[place], float(graphs[place].end_s[node]))
    out, joined = [], False
    for graph, reached in zip(graphs, arrived, strict=True):
        duration, end = graph.duration_s.copy(), graph.end_s
        for bucket in _buckets(graph, num_bytes):
            works = [graph.works[graph.columns["work"][node]] for node in bucket]
            parts = [work for work in works if isinstance(work, Collective)]
            whole = replace(parts[-1], num_bytes=sum(part.num_bytes for part in parts))
            each = latency.collective_seconds([whole, *parts])
            busy = merge(np.stack([reached[bucket], end[bucket]], axis=1))
            seconds, waited = float(np.diff(busy).sum()), reached[bucket[-1]] - graph.start_s[bucket[-1]]
            duration[bucket] = 0.0
            duration[bucket[-1]] = waited + seconds * float(each[0] / each[1:].sum())
            tally.add(seconds, True)
            joined = True
        out.append(graph.replace(duration_s=duration))
    if not joined:
        raise StepsightError(f"--bucket-mb joins gradient all-reduces, got none smaller than {num_bytes / 1e6:g} MB")
    return out


def _buckets(graph: Program, num_bytes: float) -> list[list[int]]:
    """Groups of at least two all-reduces in backward that are merged."""
    kinds = np.array([*(work.kind == "all_reduce" for work in graph.works), False], dtype=np.bool_)
    step, work = graph.columns["step"], graph.columns["work"]
    found, size = [list[int]()], 0.0
    for node in np.flatnonzero(kinds[work] & (graph.columns["phase"] == 1) & (step >= 0)).tolist():
        if found[-1] and (size >= num_bytes or step[found[-1][-1]] != step[node]):
            found, size = [*found, []], 0.0
        found[-1].append(node)
        size += graph.works[work[node]].num_bytes
    return [bucket for bucket in found if len(bucket) > 1]


_LEAST_PACE = 0.25  # share of the profiled time: a profiler does not slow a host more than this
_HALVINGS = 12


def as_timed(graphs: Graphs, iteration_s: float) -> list[Program]:
    """Scale the host's time such that a step takes as long as without a profiler.

    All ops and the host's own work take the same part of their profiled time.  Collectives stay as they are, because a
    profiler does not slow what worker threads send.  Graphs of devices stay too: their kernels run at their own pace.
    """
    if any(graph.device != "cpu" for graph in graphs) or replay(graphs).replayed_s <= iteration_s:
        return list(graphs)

    def paced(pace: float) -> list[Program]:
        changed = [(graph.columns["kind"] == OP, host_scaled(graph, pace)) for graph in graphs]
        return [g.replace(duration_s=np.where(ops, g.duration_s * pace, g.duration_s)) for ops, g in changed]

    low, high = _LEAST_PACE, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if replay(paced(middle)).replayed_s > iteration_s else (middle, high)
    return paced(high)
