"""A simulated iteration as Chrome trace events, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.errors import StepsightError
from stepsight.dataset.program import Program
from stepsight.simulator.schedules import KIND_NAMES

if TYPE_CHECKING:
    from stepsight.simulator.simulate import Simulation

LEVELS = ("segment", "op")
_MICROSECONDS = 1e6


def trace_events(simulation: Simulation, level: str = "segment") -> dict[str, Any]:
    """Trace events of all stages; one rank stands for its tensor- and data-parallel replicas.

    Raises:
        StepsightError: If the level is unknown.
    """
    if level not in LEVELS:
        raise StepsightError(f"timeline level must be one of {', '.join(LEVELS)}, got {level!r}")
    threads = _Threads()
    events = _op_events(simulation, threads) if level == "op" else _segment_events(simulation, threads)
    events += _message_events(simulation, threads)
    return {
        "traceEvents": threads.names(simulation) + events,
        "displayTimeUnit": "ms",
        "otherData": {"job": simulation.job.name, "iteration_time_s": simulation.iteration_time_s},
    }


class _Threads:
    """Numbers of streams, the same on every stage."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._seen: dict[tuple[int, str], None] = {}

    def number(self, stage: int, stream: str) -> int:
        self._seen.setdefault((stage, stream))
        return self._numbers.setdefault(stream, len(self._numbers))

    def names(self, simulation: Simulation) -> list[dict[str, Any]]:
        low = simulation.lowered
        metadata = []
        for stage in range(low.num_stages):
            name = f"stage {stage}" if low.num_stages > 1 else "rank"
            metadata.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": name}})
        for stage, stream in self._seen:
            tid = self._numbers[stream]
            metadata.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": tid, "args": {"name": stream}})
        return metadata


def _event(name: str, stage: int, thread: int, start: float, seconds: float, category: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": stage,
        "tid": thread,
        "ts": start * _MICROSECONDS,
        "dur": seconds * _MICROSECONDS,
    }


def _action_names(simulation: Simulation) -> list[str]:
    order = simulation.lowered.order
    names = [f"{KIND_NAMES[k]}{m}" for k, m in zip(order.kind.tolist(), order.micro_batch.tolist(), strict=True)]
    return names + ["optimizer"] * simulation.lowered.num_stages


def _segment_events(simulation: Simulation, threads: _Threads) -> list[dict[str, Any]]:
    low, events = simulation.lowered, []
    for action, name in enumerate(_action_names(simulation)):
        stage = int(low.stage[action])
        label = low.programs[low.segment[action]].label
        begin, end = float(simulation.start[action, 0]), float(simulation.finish[action, 0])
        events.append(_event(name, stage, threads.number(stage, "compute"), begin, end - begin, label))
        tail = float(simulation.finish[action, 1])
        if tail > max(end, float(simulation.start[action, 1])):
            events.append(_event(f"{name} tail", stage, threads.number(stage, "dp"), end, tail - end, "dp"))
    return events


@lru_cache(maxsize=256)
def _labels(program: Program) -> list[tuple[str, str, dict[str, str]]]:
    """Title, stream and arguments of every node's events."""
    return [(f"{node.name} {node.work.kind}", node.stream, {"what": str(node.work)}) for node in program.nodes]


def _op_events(simulation: Simulation, threads: _Threads) -> list[dict[str, Any]]:
    low, graph, times, events = simulation.lowered, simulation.lowered.graph, simulation.segments, []
    for action, name in enumerate(_action_names(simulation)):
        stage, segment = int(low.stage[action]), int(low.segment[action])
        program = low.programs[segment]
        nodes = slice(int(graph.bounds[segment]), int(graph.bounds[segment + 1]))
        by_compute = simulation.start[action, 0] + times.finish[0, nodes]
        finish = np.maximum(by_compute, simulation.start[action, 1] + times.finish[1, nodes])
        start = finish - times.seconds[nodes]
        labels = _labels(program)
        for label, begin, seconds in zip(labels, start.tolist(), times.seconds[nodes].tolist(), strict=True):
            title, stream, what = label
            thread = threads.number(stage, stream)
            event = _event(f"{name} {title}", stage, thread, begin, seconds, program.label)
            events.append({**event, "args": what})
    return events


def _message_events(simulation: Simulation, threads: _Threads) -> list[dict[str, Any]]:
    low, events = simulation.lowered, []
    names = _action_names(simulation)
    for action in np.flatnonzero(low.message >= 0).tolist():
        source = int(low.source[action])
        stage = int(low.stage[source])
        seconds = float(simulation.work_seconds[low.message_work[low.message[action]]])
        to = int(low.stage[action])
        thread = threads.number(stage, "pp to next" if to > stage else "pp to previous")
        begin = float(simulation.start[action, 0]) - seconds
        events.append(_event(f"{names[source]} to stage {to}", stage, thread, begin, seconds, "pp"))
    return events
