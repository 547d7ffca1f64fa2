"""A simulated iteration as a Chrome trace, which Perfetto (ui.perfetto.dev) opens, or as PyTorch's profiler writes it.

Events are written as JSON from templates, one for each distinct segment: millions a second.  Arrows (flow events) join
an action, its message and the action that needs it, at level ``segment``; counters show each stage's memory and the
messages that it sends at once.

A trace for HTA, TensorBoard and other readers has the form of Kineto's files: kernels on the streams of a device, the
call that launches each, the operator around the call, and one profiler step.  A timeline has no host, so each launch
takes a microsecond and is just before its kernel.  Annotations tell forward from backward, and an operator of backward
has the sequence number of its forward, as autograd writes it: an import then finds phases and data dependencies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.kinds import COLLECTIVE_KINDS
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock.engine import NUM_CLOCKS, Floats
from stepsight.simulator.clock.trace_writer import TraceWriter, micros, whole_ns
from stepsight.simulator.iteration.simulate import PipelineRun, Simulation
from stepsight.simulator.memory import estimate_moments
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.programs.op_level import CLOCK_STREAMS
from stepsight.simulator.programs.sizes import layout_of
from stepsight.simulator.schedules import KIND_NAMES

LEVELS = ("segment", "op")
_ACTION, _PROCESS = b"\x01", b"\x02"  # fields that a template leaves open, besides the times


def timeline_json(
    simulation: Simulation, level: str = "segment", scale: float = 1.0, stages: Collection[int] | None = None
) -> Iterator[bytes]:
    """Trace events as pieces of JSON.

    Args:
        simulation: Of the job.
        level: One of ``LEVELS``.
        scale: Multiplies all times.
        stages: Stages of the first pipeline; None: all stages of all pipelines.

    Raises:
        StepsightError: If the level is unknown.
    """
    if level not in LEVELS:
        raise StepsightError(f"timeline level must be one of {', '.join(LEVELS)}, got {level!r:.80}")
    writer, count = _JobWriter(simulation, level, scale), simulation.lowered.num_stages
    chosen = simulation.pipeline_runs if stages is None else simulation.pipeline_runs[:1]
    wanted = frozenset(range(count) if stages is None else stages)
    events = (writer.pipeline(each, number * count, wanted) for number, each in enumerate(chosen))
    told = {"job": simulation.job.name, "iteration_time_s": simulation.iteration_time_s * scale}
    return writer.whole(told, chain.from_iterable(events))


def timeline(simulation: Simulation, level: str = "segment", scale: float = 1.0) -> dict[str, Any]:
    """Trace events as plain values; arguments as in ``timeline_json``."""
    events: dict[str, Any] = json.loads(b"".join(timeline_json(simulation, level, scale)))
    return events


class _JobWriter(TraceWriter):
    def __init__(self, simulation: Simulation, level: str, scale: float) -> None:
        super().__init__(scale)
        self._simulation = simulation
        self._by_op = level == "op"
        self._templates: dict[tuple[int, Any], tuple[bytes, tuple[str, ...]]] = {}

    def pipeline(self, pipeline_run: PipelineRun, first: int, wanted: Collection[int]) -> Iterator[bytes]:
        """Events of some stages of one pipeline; its stages are processes from ``first`` on."""
        low, run = self._simulation.lowered, pipeline_run.run
        for stage in range(low.num_stages):
            name = f"stage {stage}" if low.num_stages > 1 else "rank"
            replicas = pipeline_run.pipeline.replicas
            if len(self._simulation.pipeline_runs) > 1:
                name += f", replica {replicas[0]}" + (f", {len(replicas)} alike" if len(replicas) > 1 else "")
            self.processes[first + stage] = name
        names = action_names(low)
        for action, (name, stage) in enumerate(zip(names, low.track.stage.tolist(), strict=True)):
            if stage not in wanted:
                continue
            row = int(pipeline_run.rows[action])
            of = (int(pipeline_run.segments[row]), pipeline_run.condition(row))
            yield from self._action(name, first + stage, of, run.log.start[action], run.log.finish[action])
        yield from self._messages(pipeline_run, first, names, wanted)
        for stage, begins, moments in memory_moments(self._simulation, pipeline_run):
            for begin, size in zip(begins.tolist(), moments.tolist(), strict=True):
                yield self.counter("memory (GB)", first + stage, begin, size / 1e9)
        entry = self._simulation.entry
        for stage in sorted(wanted):
            of = (int(low.optimizer[stage]), self._simulation.optimizer_condition(stage))
            yield from self._action("optimizer", first + stage, of, entry[stage], self._simulation.finish[stage])

    def _action(self, name: str, process: int, of: tuple[int, Any], start: Floats, finish: Floats) -> Iterator[bytes]:
        label = self._simulation.lowered.segments[of[0]].label
        if not self._by_op:
            yield self.span(name, (process, "compute"), (float(start[0]), float(finish[0])), label)
            for clock in range(1, NUM_CLOCKS):
                begin, stream = max(finish[0], start[clock]), CLOCK_STREAMS[clock]
                if finish[clock] > begin:
                    yield self.span(f"{name} tail", (process, stream), (float(begin), float(finish[clock])), "dp")
            return
        times = self._simulation.ops_of(*of)
        template, streams = self._template(of)
        for stream in streams:
            self.thread(stream, process)
        ends = (start[:, None] + times.finish).max(axis=0)
        begins = np.ceil((ends - times.seconds) * self.unit * 1e3).astype(np.int64)
        parts = np.stack(np.divmod(begins, 1000), axis=1).ravel()
        filled = template.replace(_ACTION, name.encode()).replace(_PROCESS, str(process).encode())
        yield filled % tuple(parts.tolist())

    def _template(self, of: tuple[int, Any]) -> tuple[bytes, tuple[str, ...]]:
        """Events of a segment with open action, process and times, and the streams that they are on."""
        known = self._templates.get(of)
        if known is None:
            times = self._simulation.ops_of(*of)
            program = self._simulation.lowered.segments[of[0]].program
            parts, action, process = [], _ACTION.decode(), _PROCESS.decode()
            durations = whole_ns(times.seconds * self.unit * 1e3)
            for node, duration in zip(program.nodes, durations.tolist(), strict=True):
                title = json.dumps(f"{node.name} {node.work.kind}")[1:-1].replace("%", "%%")
                parts.append(
                    f'{{"ph":"X","name":"{action} {title}","cat":"{program.label}","pid":{process},'
                    f'"tid":{self.thread(node.stream)},"ts":%d.%03d,"dur":{micros(duration)},'
                    f'"args":{{"what":"{node.work}"}}}},'
                )
            streams = tuple(dict.fromkeys(node.stream for node in program.nodes))
            self._templates[of] = known = ("".join(parts).encode(), streams)
        return known

    def _messages(
        self, pipeline_run: PipelineRun, first: int, names: list[str], wanted: Collection[int]
    ) -> Iterator[bytes]:
        track, run = self._simulation.lowered.track, pipeline_run.run
        lanes: dict[tuple[int, str], list[float]] = {}  # end of the last message of each lane of a stream
        for message in np.argsort(run.log.message_start, kind="stable").tolist():
            source, target = int(track.source[message]), int(track.target[message])
            stage, to = int(track.stage[source]), int(track.stage[target])
            if stage not in wanted:
                continue
            begin, end = float(run.log.message_start[message]), float(run.log.message_finish[message])
            stream = f"pp {names[source][0]} to stage {to}"
            ends = lanes.setdefault((stage, stream), [])
            lane = next((number for number, last in enumerate(ends) if last <= begin), len(ends))
            ends[lane : lane + 1] = [end]
            if lane:  # several messages between two stages at the same time
                stream += f" ({lane + 1})"
            yield self.span(f"{names[source]} to stage {to}", (first + stage, stream), (begin, end), "pp")
            if not self._by_op:
                places = ((stage, "compute", run.log.start[source, 0]), (stage, stream, begin))
                ends_at = (to, "compute", run.log.start[target, 0])
                yield self.flow("message", [(first + at, *rest) for at, *rest in (*places, ends_at)])
        for stage in range(track.num_stages):
            mine = track.stage[track.source] == stage
            times = (run.log.message_start[mine], run.log.message_finish[mine])
            yield from self.outstanding("messages in flight", first + stage, *times)


def memory_moments(simulation: Simulation, pipeline_run: PipelineRun) -> Iterator[tuple[int, Floats, Floats]]:
    """Stage, begins of its actions and optimizer, and bytes from each on; none where a schedule merges actions."""
    stages = simulation.lowered.track.stage
    for stage, moments in enumerate(estimate_moments(simulation.job, simulation.hardware)):
        begins = np.sort(pipeline_run.run.log.start[np.flatnonzero(stages == stage), 0])
        if len(begins) == len(moments) - 1:
            yield stage, np.append(begins, simulation.begin[stage]), moments


def action_names(lowered: Lowered) -> list[str]:
    """``F3``, ``B0``; with several chunks on a stage, ``F3.1`` for the second."""
    track = lowered.track
    chunk = track.schedule.placement[:, 1][track.part]
    several = bool(chunk.max(initial=0))
    rows = zip(track.kind.tolist(), track.micro_batch.tolist(), chunk.tolist(), strict=True)
    return [f"{KIND_NAMES[k]}{m}{f'.{c}' if several else ''}" for k, m, c in rows]


Event = dict[str, Any]
Work = Op | Collective
_DEVICE, _HOST, _THREAD, _FIRST_STREAM = 0, 1000, 1001, 7
_NAMES = {_DEVICE: "predicted device", _HOST: "predicted host"}
_COMPUTE = "compute"
_BASE_US = 1.0e6  # start of the first kernel
_PHASES, _DIGITS = ("forward", "backward", "optimizer"), frozenset("0123456789")
_LAUNCH_US = 1.0  # viewers round times to whole microseconds
_KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_RING",
    "all_gather": "ncclDevKernel_AllGather_RING",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_RING",
    "broadcast": "ncclDevKernel_Broadcast_RING",
}


class _Span(NamedTuple):
    """One kernel: its pass (``F3``), phase, operator, signature and stream, and its times in microseconds."""

    action: str
    phase: str
    operator: str
    signature: str
    stream: int
    group: str
    begin: float
    length: float


def num_kernels(simulation: Simulation) -> list[int]:
    """Kernels in the trace of each stage of the first pipeline, messages not counted."""
    low, pipeline_run = simulation.lowered, simulation.pipeline_runs[0]
    nodes = np.array([len(segment.graph.work) for segment in low.segments])
    counts = nodes[low.optimizer]
    np.add.at(counts, low.track.stage, nodes[pipeline_run.segments[pipeline_run.rows]])
    return [int(count) for count in counts]


def profiler_traces(
    simulation: Simulation, scale: float = 1.0, stages: Collection[int] | None = None
) -> Iterator[tuple[int, Event]]:
    """Make the trace of the first rank of pipeline stages of the first pipeline.

    Args:
        simulation: Of the job.
        scale: Multiplies all times.
        stages: Numbers of the stages; None: all.

    Yields:
        The number of a rank, and its trace as plain values for JSON.
    """
    low, job = simulation.lowered, simulation.job
    wanted = range(low.num_stages) if stages is None else sorted(stages)
    events = json.loads(b"".join(timeline_json(simulation, "op", scale, wanted)))["traceEvents"]
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    works = {str(work): work for work in low.all_works}
    spans: dict[int, list[_Span]] = {stage: [] for stage in wanted}
    for event in events:
        if event["ph"] == "X":
            action, _, operator = event["name"].partition(" ")
            signature = event.get("args", {}).get("what", "send_recv")
            times = _BASE_US + event["ts"], event["dur"]
            stream = _FIRST_STREAM + event["tid"]
            group = streams[event["pid"], event["tid"]]
            spans[event["pid"]].append(_Span(action, event["cat"], operator, signature, stream, group, *times))
    length = simulation.iteration_time_s * scale * 1e6
    for stage, kernels in spans.items():
        rank = int(layout_of(job).ranks_of_stage(stage)[0])
        kernels.sort(key=lambda span: span.begin)
        yield rank, _trace(kernels, works, length, (rank, job.cluster.num_devices, stage))


def _trace(spans: Sequence[_Span], works: Mapping[str, Work], length: float, place: tuple[int, int, int]) -> Event:
    """The trace of a rank: ``place`` is its number, the number of all ranks, and its stage."""
    rank, world_size, stage = place
    lead = 2.0 * _LAUNCH_US  # the first launch is within the step
    events = [
        _event("user_annotation", "ProfilerStep#0", (_HOST, _THREAD), (_BASE_US - lead, length + lead), {}),
        *({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in _NAMES.items()),
    ]
    events += _phases(spans, stage, _BASE_US + length)
    sequence: dict[str, int] = {}
    for number, span in enumerate(spans, start=1):
        events += _kernel(number, span, works.get(span.signature), _sequence(span, sequence))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": _DEVICE, "name": "predicted", "totalGlobalMem": 0}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": events,
    }


def _phases(spans: Sequence[_Span], stage: int, end: float) -> list[Event]:
    """Annotations of passes: each lasts from its first launch on the computation's stream to that of the next."""
    firsts: list[_Span] = []
    for span in spans:
        if span.group == _COMPUTE and (not firsts or span.action != firsts[-1].action):
            firsts.append(span)
    begins = [_launch(span) for span in firsts]
    found = []
    for span, begin, until in zip(firsts, begins, [*begins[1:], end], strict=True):
        label = span.phase if span.phase in _PHASES else "backward"
        number = span.action[1:].partition(".")[0]  # the micro-batch of F3 or B3.1; the optimizer has none
        micro_batch = int(number) if number.isdigit() else 0
        name = f"stepsight::segment label={label} micro_batch={micro_batch} stage={stage}"
        found.append(_event("user_annotation", name, (_HOST, _THREAD), (begin, max(until - begin, 0.0)), {}))
    return found


def _sequence(span: _Span, known: dict[str, int]) -> int:
    """Autograd's number of an operator: that of the forward of the same micro-batch, chunk and layer; -1: none."""
    if span.group != _COMPUTE or span.action[1:2] not in _DIGITS:
        return -1
    layer = f"{span.action[1:]} {span.operator.split(' ')[0]}"
    return known.setdefault(layer, len(known)) if span.phase == "forward" else known.get(layer, -1)


def _launch(span: _Span) -> float:
    """When the host launches a kernel, in microseconds."""
    return math.floor(span.begin) - _LAUNCH_US


def _kernel(number: int, span: _Span, work: Work | None, sequence: int) -> list[Event]:
    """A kernel with its operator and launch, and the arrow from the launch to the kernel."""
    told: Event = {"device": _DEVICE, "context": 1, "stream": span.stream, "correlation": number, "External id": number}
    called: Event = {"External id": number, "part": f"{span.action} {span.operator}"}
    called |= {"Sequence number": sequence} if sequence >= 0 else {}
    if isinstance(work, Op):  # as the harness annotates ops, so that an import finds their sizes
        name = str(work)
        operator = f"stepsight::op kind={work.kind} dims={'x'.join(map(str, work.dims))} dtype={work.dtype}"
    elif work is not None and span.group == _COMPUTE:
        name = operator = f"time lost to {work.kind}"  # an overlapping collective slows the computation
    else:
        kind = work.kind if work is not None else "send_recv"
        name, operator = f"{_KERNELS.get(kind, 'ncclDevKernel_SendRecv')}({span.signature})", f"nccl:{kind}"
        size = work.num_bytes if work is not None else 0
        called |= {"Input Dims": [[size]], "Input type": ["unsigned char"]}
    if isinstance(work, Collective) and operator.startswith("nccl:"):
        call = next(iter(COLLECTIVE_KINDS[work.kind].nccl_names), work.kind)
        sizes = dict.fromkeys(("In msg nelems", "Out msg nelems"), work.num_bytes)
        group = {"Group size": work.group_size, "Process Group Name": span.group}
        told |= {"Collective name": call, **sizes, "dtype": "Byte", **group}
    host, at = (_HOST, _THREAD), (_launch(span), _LAUNCH_US)
    flow = {"cat": "ac2g", "name": "ac2g", "id": number}
    return [
        _event("cpu_op", operator, host, at, called),
        _event("cuda_runtime", "cudaLaunchKernel", host, at, {"correlation": number, "External id": number}),
        _event("kernel", name, (_DEVICE, span.stream), (span.begin, span.length), told),
        {"ph": "s", "pid": _HOST, "tid": _THREAD, "ts": at[0], **flow},
        {"ph": "f", "pid": _DEVICE, "tid": span.stream, "ts": span.begin, **flow, "bp": "e"},
    ]


def _event(category: str, name: str, place: tuple[int, int], times: tuple[float, float], told: Event) -> Event:
    (pid, tid), (ts, dur) = place, times
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": told}
