"""One captured training step with times: durations of a latency model on the graphs of captured ranks.

The graphs are those that traces become, without times, and the engine is that of replays.  As for a job, an overlapped
collective takes a part of its time from the computation, and a host that launches ops is a clock of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import CaptureError, TraceError
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, PHASES, Dependency, Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.hardware.hardware_facts import LaunchCalls
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.durations.latency_model import HostTimes, LatencyModel, host_times
from stepsight.simulator.durations.segment_timing import timer_of
from stepsight.simulator.replay.replay import ReplayTimes, find_times, join
from stepsight.simulator.replay.step_timeline import StepWriter

Floats = NDArray[np.float64]
COMPUTE = 0  # number of the stream on which a script computes
PASS = "pass"  # name of the host's waits between passes of a job

# axes of groups, by words in their names; all others are replicas
_AXES = (("tp", "tp"), ("tensor", "tp"), ("cp", "cp"), ("context", "cp"), ("ep", "ep"), ("expert", "ep"))
CAUSES = (
    "compute", "tp_communication", "cp_communication", "ep_communication", "dp_communication", "pp_communication",
    "bubble", "host", "optimizer",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A timed step of some ranks."""

    walked: ReplayTimes  # when each node starts and ends, the graphs one after the other
    graphs: tuple[Program, ...]  # of the ranks, with durations
    alone: tuple[Floats, ...]  # seconds of each distinct signature of each rank, without what overlap and context add
    lost: tuple[Floats, ...]  # (n,) of each rank: seconds, within the durations, that replicas' collectives take

    @cached_property
    def iteration_time_s(self) -> float:
        """Seconds until the last rank has finished."""
        return float(self.walked.end_s.max(initial=0.0))

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds by what the computation stream does or waits for, mean over ranks; they add up to the step."""
        ranks = [_rank_causes(self, place) for place in range(len(self.graphs))]
        return {cause: sum(rank[cause] / len(ranks) for rank in ranks) for cause in CAUSES}

    @cached_property
    def critical(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Nodes of the critical path from its end: index of the rank, and node."""
        first = np.array(self.walked.joined.first)
        nodes = np.array(list(self.walked.path(int(np.argmax(self.walked.end_s)))), dtype=np.int64)
        nodes = nodes[nodes < first[-1]]
        places = np.searchsorted(first, nodes, "right") - 1
        return places, nodes - first[places]


def time_captured(graphs: Sequence[Program], latency: LatencyModel) -> CapturedStep:
    """Time one captured step of some ranks; raises ``CaptureError`` if they deadlock."""
    alone = tuple(timer_of(latency).work_seconds(graph.works) for graph in graphs)
    host = host_times(latency)
    found = [
        _timed(graph, s, latency) if host is None or graph.device != "cpu" else _timed_on_host(graph, s, host)
        for graph, s in zip(graphs, alone, strict=True)
    ]
    timed, lost = zip(*found, strict=True)
    joined = join(timed)
    for graph, first in zip(timed if latency.hardware.has_host else (), joined.first, strict=False):
        done = np.cumsum(_launches(graph, latency.hardware))  # no node starts before all nodes up to it are launched
        waits = np.flatnonzero(graph.columns["kind"] == HOST)
        nodes = first + np.arange(int(waits[0]) + 1 if len(waits) else len(graph))
        targets = np.where(joined.meeting[nodes] >= 0, joined.meeting[nodes], nodes)
        np.maximum.at(joined.ready, targets, done[: len(nodes)])
    try:
        return CapturedStep(find_times(joined), timed, alone, lost)
    except TraceError:
        told = "they issue their collectives in different orders, or are from different scripts"
        raise CaptureError(f"the captured ranks deadlock: {told}") from None


def _of_works(graph: Program, values: Floats) -> Floats:
    """The value of each node's work; 0 for calls of the host."""
    return np.append(values, 0.0)[graph.columns["work"]]


def _timed(graph: Program, alone: Floats, latency: LatencyModel) -> tuple[Program, Floats]:
    """The graph with durations, and with launches after waits of the host; what its nodes lose to overlap."""
    seconds = _of_works(graph, alone)
    if latency.knows_context:
        passes, programs = _passes(graph)
        for own, inside in zip(passes, latency.in_context(programs, [seconds[own] for own in passes]), strict=True):
            seconds[own] = inside
        if graph.device == "cpu":  # seconds in context hold the time of the host before an op
            into = graph.columns["kind"][graph.edge_columns["target"]] == OP
            graph = graph.replace(delay_s=np.where(into, 0.0, graph.delay_s))
    lost = _lost_to_overlap(graph, seconds, latency.hardware.comm_compute_share)
    graph = graph.replace(duration_s=seconds + lost)
    waits = np.flatnonzero(graph.columns["kind"] == HOST)
    if not latency.hardware.has_host or not len(waits):
        return graph, lost
    done = np.cumsum(_launches(graph, latency.hardware))
    since = np.searchsorted(waits, np.arange(len(graph)), "left") - 1  # the last wait of the host before each node
    if graph.names[graph.columns["name"][waits[0]]] == PASS:  # what waits for nothing was issued before its pass
        since[np.setdiff1d(np.arange(len(graph)), [after for _, after, _ in graph.edges])] = -1
    after = np.flatnonzero(since >= 0)
    launched = done[after] - done[waits[since[after]]]
    return graph.with_edges(waits[since[after]], after, Dependency.LAUNCH, launched), lost


def _passes(graph: Program) -> tuple[list[NDArray[np.int64]], list[Program]]:
    """Nodes of each pass, and the pass as a program, as predictions of jobs and training know them: ops and collectives
    of one phase up to a message between stages.  Equal passes are one program.
    """
    nodes, shared = graph.columns, dict[object, Program]()
    message = _of_works(graph, np.array([float(work.kind == "send_recv") for work in graph.works])) > 0
    own = np.flatnonzero(graph.on_device & ~message)
    key = np.stack([nodes["phase"], np.cumsum(message)])[:, own]
    passes = [each for each in np.split(own, np.flatnonzero((np.diff(key) != 0).any(axis=0)) + 1) if len(each)]
    programs = [graph.part(each, (*PHASES, "step")[nodes["phase"][each[0]]]) for each in passes]
    return passes, [shared.setdefault(program.digest_key, program) for program in programs]


def _timed_on_host(graph: Program, alone: Floats, host: HostTimes) -> tuple[Program, Floats]:
    """The graph of a rank whose host runs its ops: durations, and the host's time between ops."""
    nodes, edges, seconds, gaps = graph.columns, graph.edge_columns, _of_works(graph, alone), np.zeros(len(graph))
    chosen = np.flatnonzero((nodes["kind"] == OP) & (nodes["work"] >= 0))
    ops = [work for number in nodes["work"][chosen].tolist() if isinstance(work := graph.works[number], Op)]
    calls = [graph.names[name] for name in nodes["name"][chosen].tolist()]
    phases = np.maximum(nodes["phase"][chosen], 0)
    seconds[chosen], gaps[chosen] = host.seconds(calls, ops, phases.tolist()), np.array(host.gaps_s)[phases]
    delay = np.where(nodes["kind"][edges["source"]] == OP, gaps[edges["target"]], graph.delay_s)
    seconds[chosen[:1]] += host.step_s  # time that no op follows is before the first op
    return graph.replace(duration_s=seconds, delay_s=delay), np.zeros(len(graph))


def _lost_to_overlap(graph: Program, seconds: Floats, share: float) -> Floats:
    """Seconds that ops lose to the replicas' collectives beside them, as in jobs: the next op after each issue, if
    neither it nor the host waits before.
    """
    lost, nodes = np.zeros(len(graph)), graph.columns
    ops = np.flatnonzero((nodes["kind"] == OP) & (nodes["stream"] == COMPUTE))
    sent = np.flatnonzero((nodes["kind"] == COLLECTIVE) & (nodes["stream"] != COMPUTE) & (share > 0))
    waits = set(zip(graph.edge_columns["source"].tolist(), graph.edge_columns["target"].tolist(), strict=True))
    held = np.cumsum(nodes["kind"] == HOST)
    for node, after in zip(sent.tolist(), np.searchsorted(ops, sent).tolist(), strict=True):
        follows = after < len(ops) and held[node] == held[ops[after]] and (node, int(ops[after])) not in waits
        if follows and axis_of(graph, node) == "dp_communication":
            lost[ops[after]] += share * seconds[node]
    return lost


def _launches(graph: Program, hardware: Hardware) -> Floats:
    """The host's time to launch each node."""
    calls = LaunchCalls(graph.op_calls, graph.dispatch_calls)
    return _of_works(graph, np.array([hardware.launch_s(work, calls) for work in graph.works]))


def _rank_causes(step: CapturedStep, place: int) -> dict[str, float]:
    """Seconds of one rank by cause."""
    graph, lost = step.graphs[place], step.lost[place]
    own = slice(*step.walked.joined.first[place : place + 2])
    start, end = step.walked.start_s[own], step.walked.end_s[own]
    found = dict.fromkeys(CAUSES, 0.0)
    nodes = np.flatnonzero((graph.columns["stream"] == COMPUTE) & graph.on_device)
    now = 0.0
    for node in nodes.tolist():
        _count_gap(step, place, node, now, found)
        is_op = graph.columns["kind"][node] == OP
        optimizer = int(graph.columns["phase"][node]) == PHASES.index("optimizer")
        cause = axis_of(graph, node) if not is_op else "optimizer" if optimizer else "compute"
        busy = float(end[node]) - max(now, float(start[node]))
        taken = min(float(lost[node]), busy)
        found[cause] += busy - taken
        found["dp_communication"] += taken
        now = max(now, float(end[node]))
    mine = float(end.max(initial=0.0))
    if mine > now:
        found[axis_of(graph, int(np.argmax(end)))] += mine - now
    found["bubble"] += max(0.0, step.iteration_time_s - max(mine, now))
    return found


def _count_gap(step: CapturedStep, place: int, node: int, now: float, found: dict[str, float]) -> None:
    """Attribute the idle time since ``now`` to what the path to a node did in it: collectives of this rank, other
    ranks (a bubble), or the host.
    """
    walked, graph = step.walked, step.graphs[place]
    first, end = walked.joined.first[place : place + 2]
    until, others = float(walked.start_s[first + node]), "host"
    for before in walked.path(walked.before(first + node)):
        if until <= now:
            return
        begin, mine = max(now, float(walked.start_s[before])), first <= before < end
        others = others if mine else "bubble"
        ran = min(until, float(walked.end_s[before]))
        if mine and graph.columns["kind"][before - first] == COLLECTIVE and ran > begin:
            found[axis_of(graph, before - first)] += ran - begin
            found[others] += until - ran
            until = begin
    found[others] += max(until - now, 0.0)


def axis_of(graph: Program, node: int) -> str:
    """The entry of ``CAUSES`` that a collective's time counts as; for an op, ``dp_communication``."""
    if graph.columns["kind"][node] != COLLECTIVE:
        return "dp_communication"
    if graph.kind_of(node) == "send_recv":
        return "pp_communication"
    group = int(graph.columns["group"][node])
    name = (graph.groups[group][0] if group >= 0 else graph.streams[graph.columns["stream"][node]]).lower()
    axis = next((axis for word, axis in _AXES if word in name.replace("-", "_").split("_")), "dp")
    return f"{axis}_communication"


_LEAST_CHANGE = 0.002  # share of the peak: smaller changes of memory are not drawn


def step_timeline(step: CapturedStep, memory: Sequence[NDArray[np.int64]], name: str) -> Iterator[bytes]:
    """A timeline as pieces of JSON: a process for each rank, a thread for each stream.

    ``memory``: bytes of tensors when each node of each rank is issued, drawn where the computation changes it visibly.
    """
    writer, first = StepWriter(step.walked.joined, step.walked.start_s, step.walked.end_s), step.walked.joined.first

    def tensors() -> Iterator[bytes]:
        for graph, live, begin in zip(step.graphs, memory, first, strict=False):
            drawn, least = -np.inf, _LEAST_CHANGE * float(live.max(initial=0))
            for node in np.flatnonzero(graph.on_device & (graph.columns["stream"] == COMPUTE)).tolist():
                if abs(live[node] - drawn) > least:
                    drawn = float(live[node])
                    yield writer.counter("memory (GB)", graph.rank, step.walked.start_s[begin + node], drawn / 1e9)

    return writer.whole({"job": name, "iteration_time_s": step.iteration_time_s}, chain(writer.nodes(), tensors()))
