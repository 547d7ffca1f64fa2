"""A simulated iteration as Chrome trace events, which Perfetto (ui.perfetto.dev) opens.

Events are written as JSON from templates, one for each distinct segment: millions a second.  Arrows (flow events) join
an action, its message and the action that needs it, at level ``segment``; counters show each stage's memory and the
messages that it sends at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.simulator.clock.codes import NUM_CLOCKS
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.iteration.simulated_iteration import Passing, SimulatedIteration
from stepsight.simulator.memory import estimate_moments
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.programs.segment import CLOCK_STREAMS
from stepsight.simulator.schedules import KIND_NAMES

LEVELS = ("segment", "op")
_MICROSECONDS = 1e6
# Times are written in whole nanoseconds: starts rounded up and durations down, so that what follows on a stream never
# begins before what precedes it has ended.  The margin is far above the error of a sum of floats.
_MARGIN_NS = 0.01
_ACTION, _PROCESS = b"\x01", b"\x02"  # fields that a template leaves open, besides the times


def trace_events(simulation: SimulatedIteration, level: str = "segment") -> dict[str, Any]:
    """Trace events of all stages; one rank represents all equal ranks.

    Raises:
        StepsightError: If the level is unknown.
    """
    events: dict[str, Any] = json.loads(b"".join(timeline_json(simulation, level)))
    return events


def timeline_json(
    simulation: SimulatedIteration, level: str = "segment", scale: float = 1.0, stages: Collection[int] | None = None
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
    return _pieces(simulation, level, scale, stages)


def _pieces(
    simulation: SimulatedIteration, level: str, scale: float, stages: Collection[int] | None
) -> Iterator[bytes]:
    writer = _Writer(simulation, level, _MICROSECONDS * scale)
    yield b'{"displayTimeUnit":"ms","otherData":'
    yield _json({"job": simulation.job.name, "iteration_time_s": simulation.iteration_time_s * scale})
    yield b',"traceEvents":['
    every, count = range(simulation.lowered.num_stages), simulation.lowered.num_stages
    for number, passing in enumerate(simulation.passings if stages is None else simulation.passings[:1]):
        yield from writer.pipeline(passing, number * count, frozenset(every if stages is None else stages))
    yield b",".join(writer.names())
    yield b"]}"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _whole_ns(nanoseconds: Any) -> Any:
    """A duration or an array of them, rounded down to whole nanoseconds."""
    return np.maximum(np.floor(np.asarray(nanoseconds) - _MARGIN_NS), 0.0).astype(np.int64)


def _micros(nanoseconds: int) -> str:
    """Nanoseconds as the microseconds of a trace event."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


class _Writer:
    def __init__(self, simulation: SimulatedIteration, level: str, unit: float) -> None:
        self._simulation = simulation
        self._by_op = level == "op"
        self._unit = unit
        self._threads: dict[str, int] = {}
        self._seen: dict[tuple[int, str], None] = {}
        self._processes: dict[int, str] = {}
        self._templates: dict[tuple[int, Any], tuple[bytes, tuple[str, ...]]] = {}
        self._flows = 0

    def names(self) -> Iterator[bytes]:
        """Metadata: names of processes and threads."""
        for process, name in self._processes.items():
            yield _json({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for process, stream in self._seen:
            thread = self._threads[stream]
            event = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": stream}}
            yield _json(event)

    def pipeline(self, passing: Passing, first: int, wanted: Collection[int]) -> Iterator[bytes]:
        """Events of some stages of one pipeline; its stages are processes from ``first`` on."""
        low, run = self._simulation.lowered, passing.run
        for stage in range(low.num_stages):
            name = f"stage {stage}" if low.num_stages > 1 else "rank"
            alike = f", {passing.pipeline.count} alike" if passing.pipeline.count > 1 else ""
            several = len(self._simulation.passings) > 1
            self._processes[first + stage] = name + (f", replica {passing.pipeline.replica}{alike}" if several else "")
        names = action_names(low)
        stages = low.track.stage.tolist()
        for action, (name, stage) in enumerate(zip(names, stages, strict=True)):
            if stage not in wanted:
                continue
            row = int(passing.rows[action])
            of = (int(passing.segments[row]), passing.condition(row))
            yield from self._action(name, first + stage, of, run.start[action], run.finish[action])
        yield from self._messages(passing, first, names, wanted)
        yield from self._memory(passing, first)
        entry = self._simulation.entry
        for stage in sorted(wanted):
            of = (int(low.optimizer[stage]), self._simulation.optimizer_condition(stage))
            yield from self._action("optimizer", first + stage, of, entry[stage], self._simulation.finish[stage])

    def _action(self, name: str, process: int, of: tuple[int, Any], start: Floats, finish: Floats) -> Iterator[bytes]:
        label = self._simulation.lowered.segments[of[0]].label
        if not self._by_op:
            yield self._event(name, process, "compute", float(start[0]), float(finish[0]), label)
            for clock in range(1, NUM_CLOCKS):
                begin, stream = max(finish[0], start[clock]), CLOCK_STREAMS[clock]
                if finish[clock] > begin:
                    yield self._event(f"{name} tail", process, stream, float(begin), float(finish[clock]), "dp")
            return
        times = self._simulation.ops_of(*of)
        template, streams = self._template(of)
        for stream in streams:
            self._seen.setdefault((process, stream))
        ends = (start[:, None] + times.finish).max(axis=0)
        begins = np.ceil((ends - times.seconds) * self._unit * 1e3).astype(np.int64)
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
            durations = _whole_ns(times.seconds * self._unit * 1e3)
            for node, duration in zip(program.nodes, durations.tolist(), strict=True):
                title = json.dumps(f"{node.name} {node.work.kind}")[1:-1].replace("%", "%%")
                parts.append(
                    f'{{"ph":"X","name":"{action} {title}","cat":"{program.label}","pid":{process},'
                    f'"tid":{self._thread(node.stream)},"ts":%d.%03d,"dur":{_micros(duration)},'
                    f'"args":{{"what":"{node.work}"}}}},'
                )
            streams = tuple(dict.fromkeys(node.stream for node in program.nodes))
            self._templates[of] = known = ("".join(parts).encode(), streams)
        return known

    def _thread(self, stream: str) -> int:
        return self._threads.setdefault(stream, len(self._threads))

    def _event(self, name: str, process: int, stream: str, begin: float, end: float, category: str) -> bytes:
        self._seen.setdefault((process, stream))
        starts, lasts = math.ceil(begin * self._unit * 1e3), int(_whole_ns((end - begin) * self._unit * 1e3))
        text = (
            f'{{"ph":"X","name":"{name}","cat":"{category}","pid":{process},"tid":{self._thread(stream)},'
            f'"ts":{_micros(starts)},"dur":{_micros(lasts)}}},'
        )
        return text.encode()

    def _messages(self, passing: Passing, first: int, names: list[str], wanted: Collection[int]) -> Iterator[bytes]:
        track, run = self._simulation.lowered.track, passing.run
        lanes: dict[tuple[int, str], list[float]] = {}  # end of the last message of each lane of a stream
        for message in np.argsort(run.message_start, kind="stable").tolist():
            source, target = int(track.source[message]), int(track.target[message])
            stage, to = int(track.stage[source]), int(track.stage[target])
            if stage not in wanted:
                continue
            begin, end = float(run.message_start[message]), float(run.message_finish[message])
            stream = f"pp {names[source][0]} to stage {to}"
            ends = lanes.setdefault((stage, stream), [])
            lane = next((number for number, last in enumerate(ends) if last <= begin), len(ends))
            ends[lane : lane + 1] = [end]
            if lane:  # several messages between two stages at the same time
                stream += f" ({lane + 1})"
            yield self._event(f"{names[source]} to stage {to}", first + stage, stream, begin, end, "pp")
            if not self._by_op:
                places = ((stage, "compute", run.start[source, 0]), (stage, stream, begin))
                yield self._flow(first, (*places, (to, "compute", run.start[target, 0])))
        yield from self._in_flight(passing, first)

    def _flow(self, first: int, places: tuple[tuple[int, str, float], ...]) -> bytes:
        """Arrows from event to event, each named by its stage, stream and begin."""
        self._flows += 1
        parts = []
        for phase, (stage, stream, begin) in zip(("s", "t", "f"), places, strict=True):
            at = _micros(math.ceil(float(begin) * self._unit * 1e3))
            binding = ',"bp":"e"' if phase == "f" else ""
            parts.append(
                f'{{"ph":"{phase}","id":{self._flows},"name":"message","cat":"pp","pid":{first + stage},'
                f'"tid":{self._thread(stream)},"ts":{at}{binding}}},'
            )
        return "".join(parts).encode()

    def _counter(self, name: str, process: int, begin: float, value: float) -> bytes:
        at = _micros(math.ceil(begin * self._unit * 1e3))
        return f'{{"ph":"C","name":"{name}","pid":{process},"ts":{at},"args":{{"value":{value:g}}}}},'.encode()

    def _in_flight(self, passing: Passing, first: int) -> Iterator[bytes]:
        """Counters of the messages that each stage has in flight."""
        track, run = self._simulation.lowered.track, passing.run
        stages = track.stage[track.source]
        for stage in range(track.num_stages):
            mine = stages == stage
            changes = [(float(at), 1) for at in run.message_start[mine]]
            changes += [(float(at), -1) for at in run.message_finish[mine]]
            count = 0
            for at, change in sorted(changes):
                count += change
                yield self._counter("messages in flight", first + stage, at, count)

    def _memory(self, passing: Passing, first: int) -> Iterator[bytes]:
        """Counters of the memory of each stage, from one action to the next."""
        simulation = self._simulation
        track, run = simulation.lowered.track, passing.run
        for stage, moments in enumerate(estimate_moments(simulation.job, simulation.hardware)):
            begins = np.sort(run.start[np.flatnonzero(track.stage == stage), 0])
            if len(begins) == len(moments) - 1:
                for begin, size in zip(
                    [*begins.tolist(), float(simulation.begin[stage])], moments.tolist(), strict=True
                ):
                    yield self._counter("memory (GB)", first + stage, begin, size / 1e9)


def action_names(lowered: Lowered) -> list[str]:
    """``F3``, ``B0``; with several chunks on a stage, ``F3.1`` for the second."""
    track = lowered.track
    chunk = track.schedule.placement[:, 1][track.part]
    several = bool(chunk.max(initial=0))
    rows = zip(track.kind.tolist(), track.micro_batch.tolist(), chunk.tolist(), strict=True)
    return [f"{KIND_NAMES[k]}{m}{f'.{c}' if several else ''}" for k, m, c in rows]
