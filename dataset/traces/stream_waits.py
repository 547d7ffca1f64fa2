"""Synchronisation: waits of streams for other streams, and of the host for the device.

Recorded where the profiler's ``cuda_sync`` events are on.  They are off by default; then a wait is inferred from the
host's calls that make a stream wait, which do not say for what; and where a kernel starts later than its stream and
its launch explain, just when something on another stream ended, it waited for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stepsight.dataset.graph.columns import Flags, Floats, Ints
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.traces.device_graph import Parts
from stepsight.dataset.traces.event_columns import RankEvents, picked

_SLACK_US = 1.5  # error of clocks and rounding by which an effect may precede its cause
_LATE_US = 4.0  # delay of a kernel after its launch and its stream from which it waited for something else
_MOST_BACK = 3  # last events of a stream, one of which is waited for
_SELDOM_WRONG = 0.98  # share of similar waits whose times must be consistent
_JUST_US = 12.0  # a waiting kernel starts within this time after the awaited work
_JUST_SHARE, _MOST_JUST_US = 0.03, 150.0  # likewise, relative to the delay: events take long on some devices
_TAIL_SHARE = 0.03  # share of a kernel that fills the device, in which its last blocks leave room for another stream
_MOST_LEFT_US = 200.0  # from the end of the awaited work to the end of the call
_IDLE_US = 150.0  # time for which an idle device with launched work does unrecorded work


def _within(late: Floats) -> Floats:
    """Latest time before a delayed kernel at which the awaited work may have ended, in microseconds."""
    return np.clip(_JUST_SHARE * late, _JUST_US, _MOST_JUST_US)


class StreamWaits:
    """Adds synchronisation to the graph of a rank; ``(d,)``: which device events are collectives, and their phases."""

    def __init__(self, events: RankEvents, parts: Parts, collective: Flags, phase: Ints) -> None:
        self._events, self._parts, self._collective, self._phase = events, parts, collective, phase
        device = events.device
        self._start, self._end, self._stream = device.start, device.end, device["stream"]
        self._issued = picked(parts.calls.start, parts.launch, device.start)
        self._by_stream: dict[int, tuple[Ints, Floats]] = {}
        for stream in np.unique(self._stream).tolist():
            rows = np.flatnonzero(self._stream == stream)
            self._by_stream[stream] = rows, np.maximum.accumulate(self._issued[rows])
        self._pairs: dict[tuple[int, int], None] = {}
        busy = np.bincount(self._stream, (self._end - self._start) * ~collective)
        self._main = int(busy.argmax()) if busy.any() else -1  # the stream that computes

    def add(self) -> None:
        """Add all edges of synchronisation."""
        if not self._recorded():
            self._inferred()
        self._late_starts()
        pairs = np.array(list(self._pairs), dtype=np.int64).reshape(-1, 2)
        base, parts = len(self._parts.calls), self._parts
        if len(pairs):
            before, after = pairs.T
            lag, late = self._start[after] - self._end[before], self._lateness()[after]
            seen = (lag >= 0) & (lag <= _within(late)) & (late > _LATE_US)
            if seen.any():
                parts.constants["event"] = float(np.mean(lag[seen]))
            # A wait takes one time for each pair of streams, from the waits that delayed a kernel.
            pair = self._stream[before] * (int(self._stream.max()) + 1) + self._stream[after]
            counts, sums = (np.bincount(pair[seen], weights, pair.max() + 1) for weights in (None, lag[seen]))
            usual = np.where(counts > 0, sums / np.maximum(counts, 1), parts.constants["event"])
            delay = np.minimum(usual[pair], lag)
            parts.edges.append((base + before, base + after, Dependency.SYNCHRONISATION, delay))
        self._host_waits()

    def _last(self, stream: int, moment: float, back: int = 0) -> int:
        """The newest event of a stream that was issued before a time, or ``back`` events earlier; -1: none."""
        rows, issued = self._by_stream[stream]
        place = int(np.searchsorted(issued, moment, "right")) - 1 - back
        return int(rows[place]) if place >= 0 else -1

    def _pair(self, before: int, after: int) -> bool:
        """Record a wait if its times are consistent."""
        if before < 0 or after < 0 or self._stream[before] == self._stream[after]:
            return False
        if self._end[before] > self._start[after] + _SLACK_US:
            return False
        self._pairs[before, after] = None
        return True

    def _recorded(self) -> bool:
        """Waits of streams that the profiler recorded."""
        events = self._events
        numbers = {stream: number for number, stream in enumerate(events.streams) if number in self._by_stream}
        starts = dict(zip(events.runtime["correlation"].tolist(), events.runtime.start.tolist(), strict=True))
        waits = [args for args in events.syncs if "wait_on_stream" in args and args.get("stream", -1) != -1]
        for args in waits:
            device = args.get("device", events.streams[0][0])
            source, target = (numbers.get((device, args[name])) for name in ("wait_on_stream", "stream"))
            recorded = starts.get(args.get("wait_on_cuda_event_record_corr_id", -1))
            waiting = starts.get(args.get("correlation", -1))
            if source is not None and target is not None and recorded is not None and waiting is not None:
                rows, issued = self._by_stream[target]
                after = rows[np.searchsorted(issued, waiting) :]
                self._pair(self._last(source, recorded), int(after[0]) if len(after) else -1)
        return bool(waits)

    def _inferred(self) -> None:
        """Waits from the host's calls: before a launch, its stream was made to wait for an event on another stream.

        The main stream waits for any other one, another stream for the main one.  Which of the newest things on that
        stream it waits for is what no like wait contradicts: none may start before what it waits for ends.
        """
        main, groups = self._main, dict[tuple[int, int, int], list[tuple[int, float]]]()
        for row, moment in self._waiting_rows() if main >= 0 else ():
            target = int(self._stream[row])
            sources = [stream for stream in self._by_stream if stream != main] if target == main else [main]
            for source in sources:
                groups.setdefault((source, target, int(self._phase[row])), []).append((row, moment))
        found = {key: self._candidates(key[0], waits) for key, waits in groups.items()}
        seen: dict[tuple[int, int], int] = {}  # the awaited work, if a start just after it shows it
        for key, candidates in found.items():
            for back, (_, tight) in candidates.items():
                if tight:
                    seen.setdefault(key[:2], back)
        for key, candidates in found.items():
            pairs, _ = candidates.get(seen.get(key[:2], 0)) or candidates.get(0) or ([], False)
            for before, row in pairs:
                self._pair(before, row)

    def _candidates(self, source: int, waits: list[tuple[int, float]]) -> dict[int, tuple[list[tuple[int, int]], bool]]:
        """Pairs by how far back on the source stream they look, where no time contradicts them, and whether any row
        starts just when what it waits for has ended."""
        found = {}
        for back in range(_MOST_BACK):
            pairs = [(before, row) for row, moment in waits if (before := self._last(source, moment, back)) >= 0]
            lags = np.array([self._start[row] - self._end[before] for before, row in pairs])
            if len(lags) and (lags >= -_SLACK_US).mean() >= _SELDOM_WRONG:
                found[back] = pairs, bool((np.abs(lags) <= _JUST_US).any())
        return found

    def _waiting_rows(self) -> list[tuple[int, float]]:
        """Device events whose launch follows a call that makes a stream wait, and when that was called.

        Where no such calls were recorded, every collective counts as one.
        """
        events, parts = self._events, self._parts
        chosen = [number for number, name in enumerate(events.names) if "StreamWaitEvent" in name]
        calls = np.flatnonzero(np.isin(events.runtime["name"], chosen))
        if not len(calls):
            rows = np.flatnonzero(self._collective & (self._stream != self._main))
            return [(row, float(self._issued[row]) - 1e-3) for row in rows.tolist()]
        found, threads, launched = dict[int, float](), events.runtime["thread"], np.flatnonzero(parts.row >= 0)
        for thread in np.unique(threads[calls]).tolist():
            own = launched[threads[parts.row[launched]] == thread]
            own = own[np.argsort(self._issued[own], kind="stable")]
            if len(own):
                moments = events.runtime.start[calls[threads[calls] == thread]]
                places = np.searchsorted(self._issued[own], moments)
                for place, moment in zip(places.tolist(), moments.tolist(), strict=True):
                    if place < len(own):
                        found.setdefault(int(own[place]), moment)
        return list(found.items())

    def _lateness(self) -> Floats:
        """Compute how much later each event starts than its stream and its launch explain."""
        parts, constants = self._parts, self._parts.constants
        before = picked(self._end, parts.previous, -np.inf) + constants["gap"]
        late = self._start - np.maximum(before, picked(parts.calls.end, parts.launch, -np.inf) + constants["launch"])
        return np.where(np.isinf(late), 0.0, late)

    def _late_starts(self) -> None:
        """Waits that are visible only in the times."""
        late, order = self._lateness(), np.argsort(self._end, kind="stable")
        ends, within = self._end[order], np.minimum(_within(late), late)
        waited = {after for before, after in self._pairs if self._start[after] - self._end[before] <= within[after]}
        for row in np.flatnonzero(late > _LATE_US).tolist():
            if row in waited:
                continue
            moment = self._start[row]
            low, high = np.searchsorted(ends, [moment - within[row], moment + _SLACK_US])
            for candidate in order[low:high][::-1].tolist():
                if self._issued[candidate] <= self._issued[row] and self._pair(candidate, row):
                    break
            else:
                self._crowded(row, float(late[row]), int(order[high - 1]) if high else -1)

    def _crowded(self, row: int, late: float, ended: int) -> None:
        """A kernel that waits for room on a full device, or for an idle one with unrecorded work.

        Blocks of a kernel on another stream start when the last blocks of one that fills the device have started:
        just before its end.  ``late``: microseconds; ``ended``: what ended last before it, -1: nothing.
        """
        moment = float(self._start[row])
        running = []
        for stream, (rows, _) in self._by_stream.items():
            place = int(np.searchsorted(self._start[rows], moment, "left")) - 1
            if stream != self._stream[row] and place >= 0 and self._end[rows[place]] > moment:
                running.append(int(rows[place]))
        for other in running:
            left, length = self._end[other] - moment, self._end[other] - self._start[other]
            if left <= _TAIL_SHARE * length and left < late:
                self._pairs[other, row] = None
                return
        idle = moment - self._end[ended] if ended >= 0 else 0.0
        if not running and _IDLE_US < idle < late:
            self._pair(ended, row)

    def _host_waits(self) -> None:
        """Calls of the host that wait for streams, for an event or for their own copy."""
        calls, base, pairs = self._parts.calls, len(self._parts.calls), list[tuple[int, int]]()
        own = {runtime: row for row, runtime in enumerate(self._parts.row.tolist())}
        said = {args.get("correlation"): args for args in self._events.syncs}
        for call in self._parts.waits[self._parts.waits >= 0].tolist():
            runtime, begin, end = int(calls["row"][call]), float(calls.start[call]), float(calls.end[call])
            found = [own[runtime]] if runtime in own else self._awaited(runtime, begin, end, said)
            ended = [row for row in found if row >= 0 and self._end[row] <= end + _SLACK_US]
            pairs += [(base + row, call) for row in ended]
            latest = max((float(self._end[row]) for row in ended), default=-np.inf)
            calls.start[call] = max(begin, min(latest, end))  # the rest after the wait is the call's own time
        source, target = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._parts.edges.append((source, target, Dependency.SYNCHRONISATION, np.zeros(len(pairs))))

    def _awaited(self, runtime: int, begin: float, end: float, said: dict[Any, dict[str, Any]]) -> list[int]:
        """The work that a synchronising call of the host waits for."""
        events = self._events
        name = events.names[events.runtime["name"][runtime]]
        args = said.get(int(events.runtime["correlation"][runtime]), {})
        everything = [self._last(stream, begin) for stream in self._by_stream]
        if "DeviceSynchronize" in name or "Free" in name or args.get("cuda_sync_kind") == "Context Sync":
            return everything
        stream = args.get("stream", -1) if args.get("stream", -1) != -1 else args.get("wait_on_stream", -1)
        number = next((n for n in self._by_stream if events.streams[n][1] == stream != -1), -1)
        if number >= 0:
            return [self._last(number, begin)]
        if end - begin <= _JUST_US:  # it did not wait
            return []
        late = [row for row in everything if row >= 0 and -_SLACK_US <= end - self._end[row] <= _MOST_LEFT_US]
        if not late:  # an event within a stream: the newest one that ended during the wait
            ended = (self._end <= end + _SLACK_US) & (self._end > begin)
            late = np.flatnonzero((self._issued < begin) & ended).tolist()
        return [max(late, key=lambda row: float(self._end[row]))] if late else []
