"""The step of a job as programs: one rank of each pipeline stage, in the form of captured and traced ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.capture.captured import Captured, CapturedRank, read_captured
from stepsight.dataset.graph.program import COLLECTIVE, HOST, PHASES, Dependency, Node, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.graph.relations import positions
from stepsight.dataset.hardware.hardware import Hardware, find_hardware, unknown_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.trace_graphs.call_segments import UnmeasuredRun, call_segments
from stepsight.simulator.clock.engine import COMPUTE
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.data_flow import ENTERS, kept_activations
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.programs.sizes import layout_of
from stepsight.simulator.replay.captured_step import PASS
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.simulator.schedules.order import COMPUTE as COMPUTED
from stepsight.simulator.schedules.order import POST, RECEIVE

Ints = NDArray[np.int32]
Pairs = NDArray[np.int64]
_WAIT = Program([Node(Op("host_calls", (1,), "fp32"), "host", PASS)])
_HOST_WAIT = _WAIT.replace(works=(), columns={**_WAIT.columns, "kind": np.array([HOST]), "work": np.array([-1])})


def captured_job(job: Job) -> Captured:
    """The step of a job as if its ranks had been captured: the first rank of each stage, and its peak memory."""
    hardware = _hardware(job)
    stages = zip(job_programs(job, hardware), estimate_memory(job, hardware).stages, strict=True)
    ranks = [CapturedRank(graph, np.full(len(graph), int(memory.tensors))) for graph, memory in stages]
    return Captured(job.name, job.cluster.num_devices, job.cluster.devices_per_node, "", tuple(ranks))


def unmeasured_run(path: Path) -> UnmeasuredRun:
    """The graphs of a job file, or of the folder of a captured script, for a dataset."""
    if not path.is_dir():
        return unmeasured_job(Job.from_file(path))
    captured = read_captured(path)
    graphs = [graph.replace(steps_s=np.zeros((1, 2))) for graph in captured.graphs]
    return UnmeasuredRun(captured.script, None, graphs, call_segments(graphs, captured.script))


def unmeasured_job(job: Job) -> UnmeasuredRun:
    """The graphs of a job for a dataset: the step of each stage, and each distinct segment of each stage once."""
    hardware = _hardware(job)
    low, layout = lower(job, hardware), layout_of(job)
    track, busy = low.track, min(job.cluster.devices_per_node, job.cluster.num_devices)
    first: dict[tuple[int, int], int] = {}  # micro-batch of the first pass by stage and segment
    for stage, segment, micro in np.stack([track.stage, low.segment, track.micro_batch], axis=1).tolist():
        first.setdefault((stage, segment), micro)
    first |= {(stage, segment): 0 for stage, segment in enumerate(low.optimizer[: low.num_stages].tolist())}
    segments = []
    for (stage, number), micro in sorted(first.items()):
        program, rank = low.segments[number].program, int(layout.ranks_of_stage(stage)[0])
        none = np.full(len(program), np.nan)
        segments.append(TracedSegment(program, none, program.label, rank, busy, job.name, 0, micro, stage))
    return UnmeasuredRun(job.name, job, job_programs(job, hardware), segments)


def _hardware(job: Job) -> Hardware:
    found = find_hardware(job.cluster.hardware)
    if found is None:
        raise JobError(f"to become a program, cluster.{unknown_hardware(job.cluster.hardware)}: name a file of facts")
    return found


def job_programs(job: Job, hardware: Hardware) -> tuple[Program, ...]:
    """Programs of the first rank of each stage: all passes of one step in the order of the schedule, and the optimizer.

    Messages between stages are collectives of two ranks that meet.  What a collective on its own stream takes from the
    computation is no node: timing a program adds it.  Nor is the host's time between passes.
    """
    lowered = lower(job, replace(hardware, comm_compute_share=0.0))
    layout = layout_of(job)
    ranks = [int(layout.ranks_of_stage(stage)[0]) for stage in range(lowered.num_stages)]
    facts = {"world_size": job.cluster.num_devices, "device_name": job.cluster.hardware, "label": job.name}
    facts |= {"steps_s": np.zeros((1, 2)), "op_calls": job.execution.op_calls}
    facts |= {"dispatch_calls": job.execution.dispatch_calls}
    return tuple(
        _Stage(lowered, stage, ranks).program().replace(rank=rank, **facts) for stage, rank in enumerate(ranks)
    )


class _Stage:
    """The parts of one stage's program, and the edges between them."""

    def __init__(self, lowered: Lowered, stage: int, ranks: list[int]) -> None:
        self._lowered, self._stage, self._ranks = lowered, stage, ranks
        self._parts: list[Program] = []
        self._phases: list[int] = []  # of each node
        self._edges: list[tuple[int, int]] = []
        self._messages: list[tuple[int, int, int]] = []  # node, number of the message, and the other stage
        self._wires: dict[tuple[Collective, str], Program] = {}
        self._posted: dict[int, int] = {}  # node of each message
        self._newest: dict[str, int] = {}  # node on each stream, those of messages left out
        self._reached: list[int] = []  # nodes that the next pass waits for
        self._data: list[Pairs] = []  # (e, 2) each: who made what a node reads, across passes and messages
        self._arrived: list[int] = []  # messages that the next pass reads
        self._leaving: list[int] = []  # nodes that made what the next message sends
        self._gradients: dict[int, list[int]] = {}  # nodes that made gradients of parameters, by part
        self._kept: dict[tuple[int, int], Pairs] = {}  # by segments: activations that one keeps for the other
        self._forward: dict[tuple[int, int], tuple[int, Segment]] = {}  # by micro-batch and part: first node of a pass

    def program(self) -> Program:
        """All passes and messages, and the optimizer."""
        low, stage = self._lowered, self._stage
        entries, phase = low.track.entries, 0
        self._append(Program().replace(streams=("compute",)), phase)  # the first stream
        rows = np.stack([entries.op, entries.item, entries.side], axis=1)[entries.stage == stage]
        for op, item, side in rows.tolist():
            if op == COMPUTED:
                segment = low.segments[int(low.segment[item])]
                phase = PHASES.index("forward" if segment.label == "forward" else "backward")
                key = int(low.track.micro_batch[item]), int(low.track.part[item])
                if segment.label == "forward":
                    self._forward[key] = len(self._phases) + (low.num_stages > 1), segment
                self._pass(segment, phase, self._forward.get(key) if segment.label != "forward" else None, key[1])
            elif op == POST:
                self._post(item, phase, arrives=side == RECEIVE)
            else:
                self._reached.append(self._posted[item])
                if side == RECEIVE:
                    self._arrived.append(self._posted[item])
        self._reached = sorted({*self._reached, *self._newest.values()})  # no gradient is on its way any more
        optimizer = low.segments[int(low.optimizer[stage])]
        if not optimizer.program.nodes[:1] or not optimizer.program.nodes[0].name.startswith("replicated"):
            self._arrived = [node for part in self._gradients.values() for node in part]
        self._pass(optimizer, PHASES.index("optimizer"))
        joined = Program.of_parts(self._parts)
        columns = {**joined.columns, "phase": np.array(self._phases)}
        group = np.where(columns["kind"] == COLLECTIVE, columns["stream"], -1)
        seq = np.where(group >= 0, positions(group), -1)
        names = [f"{stream}_stage{stage}".replace(" ", "_") for stream in joined.streams]
        groups: list[tuple[str, tuple[int, ...]]] = [(name, ()) for name in names]
        for node, message, other in self._messages:
            one, two = sorted((stage, other))
            pair = (f"pp_stage{one}_stage{two}", (self._ranks[one], self._ranks[two]))
            if pair not in groups:
                groups.append(pair)
            group[node], seq[node] = groups.index(pair), message
        columns |= {"group": group, "seq": seq}
        source, target = np.array(self._edges, dtype=np.int64).reshape(-1, 2).T
        joined = joined.replace(columns=columns, groups=tuple(groups))
        joined = joined.with_edges(source, target, Dependency.SYNCHRONISATION, 0.0)
        source, target = np.concatenate([np.zeros((0, 2), np.int64), *self._data]).T
        return joined.with_edges(source, target, Dependency.DATA, 0.0)

    def _pass(self, segment: Segment, phase: int, forward: tuple[int, Segment] | None = None, part: int = 0) -> None:
        """A pass, and in a pipeline its host, starts when the one before has ended on the computation's stream."""
        graph = segment.graph
        if self._lowered.num_stages > 1:
            self._edges += [(before, len(self._phases)) for before in self._reached]
            self._append(_HOST_WAIT, phase)
            self._reached.append(self._newest.pop(_HOST_WAIT.streams[0]))
        first = len(self._phases)
        entries = np.flatnonzero((np.diff(graph.pointer) == 0) & ~graph.early) + first
        held = (graph.clock == COMPUTE) | graph.blocks | segment.joined
        last, inside = held.copy(), held[np.repeat(np.arange(len(held)), np.diff(graph.pointer))]
        last[graph.before[inside]] = False  # another clock's node after it does not hold the next pass
        self._edges += [(before, entry) for entry in entries.tolist() for before in self._reached]
        written = segment.written
        self._data.append(_all_pairs(self._arrived, [node + first for node in written.entering]))
        for before, made in ((first, segment), *([forward] if forward is not None else [])):
            key = id(made), id(segment)
            if key not in self._kept:
                self._kept[key] = kept_activations(made.program, segment.program)
            self._data.append(self._kept[key] + np.array([before, first]))
        self._arrived, self._leaving = [], [node + first for node in written.made.newest if node != ENTERS]
        if segment.label != "forward":
            self._gradients[part] = [node + first for node in written.made.gradients]
        self._append(segment.program, phase)
        self._reached = (np.flatnonzero(last) + first).tolist() or self._reached

    def _append(self, part: Program, phase: int) -> None:
        streams, count = part.columns["stream"], len(self._phases)
        lasts = {name: np.flatnonzero(streams == number)[-1:].tolist() for number, name in enumerate(part.streams)}
        self._newest |= {name: count + place for name, places in lasts.items() for place in places}
        self._parts.append(part)
        self._phases += [phase] * len(part)

    def _post(self, message: int, phase: int, *, arrives: bool) -> None:
        """Add this stage's side of a message, which begins when both sides have come to it."""
        low, track = self._lowered, self._lowered.track
        source, target = int(track.source[message]), int(track.target[message])
        other = int(track.stage[source if arrives else target])
        name = f"{KIND_NAMES[int(track.kind[source])]}{int(track.part[source])}"
        key = (low.messages[int(low.message[message])], f"pp {name} {'from' if arrives else 'to'} stage {other}")
        self._messages.append((len(self._phases), message, other))
        self._append(self._wires.setdefault(key, Program([Node(*key)])), phase)
        self._posted[message] = self._newest.pop(key[1])
        self._edges += [(before, self._posted[message]) for before in self._reached]
        if not arrives:
            self._data.append(_all_pairs(self._leaving, [self._posted[message]]))


def _all_pairs(sources: list[int], targets: list[int]) -> Pairs:
    return np.array([(source, target) for target in targets for source in sources], dtype=np.int64).reshape(-1, 2)
