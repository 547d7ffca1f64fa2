"""Events of a Chrome trace, which Perfetto (ui.perfetto.dev) opens, as pieces of JSON.

Times are written in whole nanoseconds: starts rounded up and durations down, so that what follows on a stream never
begins before what precedes it has ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MICROSECONDS = 1e6
_MARGIN_NS = 0.01  # far above the error of a sum of floats


def whole_ns(nanoseconds: Any) -> Any:
    """A duration or an array of them, rounded down to whole nanoseconds."""
    return np.maximum(np.floor(np.asarray(nanoseconds) - _MARGIN_NS), 0.0).astype(np.int64)


def micros(nanoseconds: int) -> str:
    """Nanoseconds as the microseconds of a trace event."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


class TraceWriter:
    """Writes spans, arrows and counters of numbered processes and named streams.

    Attributes:
        unit: Microseconds of a second of the times that are given.
        processes: Names of processes by number, which ``whole`` writes.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.unit = _MICROSECONDS * scale
        self.processes: dict[int, str] = {}
        self._threads: dict[str, int] = {}
        self._seen: dict[tuple[int, str], None] = {}
        self._flows = 0

    def whole(self, told: Mapping[str, Any], events: Iterable[bytes]) -> Iterator[bytes]:
        """The file: facts, events, and names of processes and streams."""
        yield b'{"displayTimeUnit":"ms","otherData":' + json.dumps(told).encode() + b',"traceEvents":['
        yield from events
        names = [("process_name", process, 0, name) for process, name in self.processes.items()]
        names += [("thread_name", process, self._threads[stream], stream) for process, stream in self._seen]
        yield ",".join(
            json.dumps({"ph": "M", "name": key, "pid": process, "tid": thread, "args": {"name": name}})
            for key, process, thread, name in names
        ).encode()
        yield b"]}"

    def thread(self, stream: str, process: int | None = None) -> int:
        """Number of a stream, which all processes share; a process that has it is named with it."""
        if process is not None:
            self._seen.setdefault((process, stream))
        return self._threads.setdefault(stream, len(self._threads))

    def span(
        self, name: str, place: tuple[int, str], times: tuple[float, float], category: str, **args: object
    ) -> bytes:
        """An event on a process and stream, from the first to the second of ``times``."""
        begin, end = times
        told = f',"args":{json.dumps(args)}' if args else ""
        text = (
            f'{{"ph":"X","name":{json.dumps(name)},"cat":"{category}","pid":{place[0]},'
            f'"tid":{self.thread(place[1], place[0])},"ts":{self._at(begin)},'
            f'"dur":{micros(int(whole_ns((end - begin) * self.unit * 1e3)))}{told}}},'
        )
        return text.encode()

    def flow(self, name: str, places: Sequence[tuple[int, str, float]]) -> bytes:
        """Arrows from event to event, each named by its process, stream and begin."""
        self._flows += 1
        parts = []
        for phase, (process, stream, begin) in zip(f"s{'t' * (len(places) - 2)}f", places, strict=True):
            binding = ',"bp":"e"' if phase == "f" else ""
            parts.append(
                f'{{"ph":"{phase}","id":{self._flows},"name":"{name}","cat":"{name}","pid":{process},'
                f'"tid":{self.thread(stream)},"ts":{self._at(begin)}{binding}}},'
            )
        return "".join(parts).encode()

    def counter(self, name: str, process: int, begin: float, value: float) -> bytes:
        """The value of a counter from a moment on."""
        told = f'"ts":{self._at(begin)},"args":{{"value":{value:g}}}'
        return f'{{"ph":"C","name":"{name}","pid":{process},{told}}},'.encode()

    def outstanding(self, name: str, process: int, begins: Floats, ends: Floats) -> Iterator[bytes]:
        """A counter of what has begun and has not ended."""
        moments = np.concatenate([ends, begins])
        order = np.argsort(moments, kind="stable")
        counts = np.cumsum(np.repeat([-1, 1], [len(ends), len(begins)])[order])
        for at, count in zip(moments[order].tolist(), counts.tolist(), strict=True):
            yield self.counter(name, process, at, count)

    def _at(self, begin: float) -> str:
        return micros(math.ceil(float(begin) * self.unit * 1e3))
