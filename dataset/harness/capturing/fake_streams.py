"""Streams and events of the fake device: waits are recorded, and nothing runs."""

from __future__ import annotations

from typing import Any

from .recorder import COMPUTE, Recorder

_worlds: list[Recorder] = []  # the recorder of this process


def follow_streams(recorder: Recorder) -> None:
    """Connect streams and events to a recorder."""
    _worlds[:] = [recorder]


class Stream:
    """Replaces ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **more: Any) -> None:
        self.name = name or _worlds[0].new_stream()
        self.priority, self.device, self.cuda_stream, self.stream_id = priority, device, id(self), id(self)
        self._outer: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            _worlds[0].wait(self.name, event.mark)

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _worlds[0].wait_on_host(self.name, "stream synchronize", 0)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._outer.append(_worlds[0].stream)
        _worlds[0].stream = self.name
        return self

    def __exit__(self, *error: Any) -> None:
        _worlds[0].stream = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mark: Any = None

    def record(self, stream: Stream | None = None) -> Event:
        self.mark = _worlds[0].mark(stream.name if stream is not None else _worlds[0].stream)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _worlds[0].wait_on_host(_worlds[0].stream, "event synchronize", 0)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class StreamContext:
    """Replaces ``torch.cuda.StreamContext`` and ``torch.cuda.stream``; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        return None if self._stream is None else self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__()


def current_stream(device: Any = None) -> Stream:
    """The current stream."""
    return Stream(name=_worlds[0].stream)


def default_stream(device: Any = None) -> Stream:
    """The stream on which a script computes by default."""
    return Stream(name=COMPUTE)


def synchronize(device: Any = None) -> None:
    """Make the host wait for all streams."""
    _worlds[0].wait_on_host(None, "synchronize", 0)
