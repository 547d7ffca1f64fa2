"""The clock: longest paths over static graphs given as arrays, in issue order.

Ties are broken towards the dependency that is listed first, so results never depend on chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
P = ParamSpec("P")

PATIENCE_S = 0.1


class compiled(Generic[P]):  # noqa: N801  (a decorator)
    """A loop over arrays that is interpreted at first, and compiled by numba once all such took ``PATIENCE_S``.

    Loading numba costs more than a handful of predictions do, so a single question is answered sooner without.  The
    compiled code is kept on disk where a folder can be written.  Either way the results are the same.
    """

    spent_s: ClassVar[float] = 0.0  # interpreting, all kernels together

    def __init__(self, function: Callable[P, None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._native: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._native is not None:
            self._native(*args, **kwargs)
        elif compiled.spent_s > PATIENCE_S:
            self._native = self.compile()
            self._native(*args, **kwargs)
        else:
            begin = time.perf_counter()
            self.function(*args, **kwargs)
            compiled.spent_s += time.perf_counter() - begin

    def compile(self) -> Callable[P, None]:
        """The function as machine code."""
        import numba

        try:
            return numba.njit(cache=True, nogil=True)(self.function)  # type: ignore[no-any-return]
        except RuntimeError:  # numba finds no folder for its cache
            return numba.njit(nogil=True)(self.function)  # type: ignore[no-any-return]


@compiled
def longest_paths(seconds: Floats, pointer: Ints, before: Ints, ready: Floats, finish: Floats, critical: Ints) -> None:
    """Finish of every node of a graph and the dependency that it waited for longest.

    Args:
        seconds: Duration of each node, shape ``(n,)``; a node only depends on earlier ones.
        pointer, before: Dependencies in CSR: those of node ``i`` are ``before[pointer[i]:pointer[i + 1]]``.
        ready: Earliest start of each node by itself, ``-inf`` where its dependencies alone decide.
        finish: Filled, shape ``(n,)``; ``-inf`` for nodes that nothing ready leads to.
        critical: Filled, shape ``(n,)``: the dependency that decided the start, -1 if ``ready`` did.
    """
    for node in range(len(seconds)):
        start = ready[node]
        cause = -1
        for at in range(pointer[node], pointer[node + 1]):
            if finish[before[at]] > start:
                start = finish[before[at]]
                cause = before[at]
        finish[node] = start + seconds[node]
        critical[node] = cause


@compiled
def find_ends(
    clock: NDArray[np.int8],
    blocks: NDArray[np.bool_],
    joined: bool,
    finish: Floats,
    transition: Floats,
    last: NDArray[np.int64],
) -> None:
    """Longest path through a program from a clock to a clock.

    Args:
        clock: Of each node's stream, shape ``(n,)``.
        blocks: Whether the computation waits for each node, same shape.
        joined: Whether all clocks end together, with the last node of all.
        finish: Longest path from each clock to the end of each node, shape ``(num_starts, n)``; a start beyond the
            clocks of streams is the host.
        transition: Filled, shape ``(num_clocks, num_starts)``: to clock, from clock; ``-inf`` where none leads, 0 from
            a stream that nothing is on to itself.
        last: Filled, same shape: the node where the path ends, -1 if none.
    """
    num_clocks = len(transition)
    transition[:] = -np.inf
    last[:] = -1
    for to in range(num_clocks):
        nothing = True
        for node in range(len(clock)):
            if clock[node] == to:
                nothing = False
            if joined or clock[node] == to or (to == 0 and blocks[node]):
                for start in range(len(finish)):
                    if finish[start, node] > transition[to, start]:
                        transition[to, start] = finish[start, node]
                        last[to, start] = node
        if nothing:
            for end in range(num_clocks):
                if end == to or joined:
                    transition[end, to] = max(transition[end, to], 0.0)


@compiled
def run_events(
    events: Ints,
    paths: Floats,
    nodes: Floats,
    bounds: NDArray[np.int64],
    sent: Floats,
    compute_share: float,
    joined: bool,
    launches: Floats,
    sent_launches: Floats,
    has_host: bool,
    kinds: NDArray[np.int8],
    streams: Floats,
    transition: Floats,
    carried: Floats,
    by_stream: Floats,
    lost: Floats,
) -> None:
    """Longest path through a segment's events from a clock to a clock.

    Beside the clocks there is the host, which takes its time to launch each node, and without which no node starts.

    Args:
        events: See ``segment.Segment``; kinds are run 0, send 1, block 2, wait 3.
        paths: Of each passage: from the computation, from the host, and the host's own; shape ``(num_passages, 3)``.
        nodes: Seconds of the nodes of all passages.
        bounds: Nodes of passage ``i`` are ``bounds[i]:bounds[i + 1]``.
        sent: Seconds of each collective.
        compute_share: Part of a sent one that the computation loses.
        joined: Whether all clocks end together.
        launches, sent_launches: What the host takes to launch each of ``nodes`` and ``sent``; 0: it needs no launch.
        has_host: Whether any of them is more than 0.
        kinds: Stream of each of ``nodes``.
        streams: Seconds by stream of each passage, shape ``(num_passages, num_streams)``.
        transition: Filled, shape ``(num_clocks, num_clocks)``: to clock, from clock; ``-inf`` where none leads.  The
            host starts with the computation.
        carried: Filled likewise, shape ``(num_clocks + 1, num_clocks + 1)``: the host is a clock of its own, the last.
        by_stream: Added to: seconds of what is run by stream, shape ``(num_streams,)``.
        lost: Added to: seconds that the computation waits for the host, and for sent collectives, when nothing else
            is under way at the start.
    """
    num_clocks = len(transition)
    clocks = np.empty(num_clocks)
    finish = np.empty(len(events))
    carried[:] = -np.inf
    alone, by_host = num_clocks, num_clocks + 1  # further starts: the computation's and the host's, each by itself
    for start in range(num_clocks + 2 if has_host else num_clocks):
        clocks[:] = -np.inf
        if start < by_host:
            clocks[start if start < alone else 0] = 0.0
        host = 0.0 if start in (0, by_host) else -np.inf
        pending, newest = 0.0, -1  # newest: the last run, before which nothing pends
        for at in range(len(events)):
            kind, what = events[at, 0], events[at, 1]
            finish[at] = -np.inf
            if kind == 0:
                clocks[0] += pending
                if start == 0:
                    lost[1] += pending
                pending, newest = 0.0, at
                first, last, times = events[at, 2], events[at, 3], events[at, 4]
                if last - first == bounds[what + 1] - bounds[what]:
                    own = paths[what, 0]
                    end = clocks[0] + times * own
                    if has_host:
                        end = max(end, host + paths[what, 1] + (times - 1) * max(own, paths[what, 2]))
                        host += times * paths[what, 2]
                        if start == 0:
                            lost[0] += end - clocks[0] - times * own
                    if start == 0:
                        for stream in range(len(by_stream)):
                            by_stream[stream] += times * streams[what, stream]
                    clocks[0] = end
                else:
                    for node in range(bounds[what] + first, bounds[what] + last):
                        if launches[node] > 0.0:
                            host += launches[node]
                            if start == 0:
                                lost[0] += max(host - clocks[0], 0.0)
                            clocks[0] = max(clocks[0], host)
                        clocks[0] += nodes[node]
                        if start == 0:
                            by_stream[kinds[node]] += nodes[node]
            elif kind == 3:
                if finish[what] > clocks[0]:
                    if start == 0:
                        lost[1] += finish[what] - clocks[0]
                    clocks[0] = finish[what]
                if what > newest and events[what, 0] == 1:
                    pending -= compute_share * sent[events[what, 1]]
            else:
                clock = events[at, 2]
                begin = clocks[clock]
                host += sent_launches[what]
                if kind == 2 or events[at, 4] == 0:
                    begin = max(begin, clocks[0])
                    if sent_launches[what] > 0.0:
                        begin = max(begin, host)
                if kind == 1 and events[at, 3] >= 0:
                    begin = max(begin, finish[events[at, 3]])
                clocks[clock] = begin + sent[what]
                finish[at] = clocks[clock]
                if kind == 2:
                    if start == 0:
                        lost[1] += clocks[clock] - clocks[0]
                    clocks[0] = clocks[clock]
                else:
                    pending += compute_share * sent[what]
        latest = clocks.max()
        for to in range(num_clocks):
            end = latest if joined else clocks[to]
            if start < alone:
                transition[to, start] = end
            if start > 0 or not has_host:
                carried[to, start if start < alone else (start - alone) * num_clocks] = end
        if start == by_host:
            carried[num_clocks, num_clocks] = host
    if not has_host:
        carried[num_clocks, num_clocks] = 0.0


@compiled
def add_path(critical: Ints, node: int, work: Ints, amount: Floats, weight: float, counts: Floats) -> None:
    """Walk back from a node and add ``weight * amount`` of every node on its critical path to ``counts[work]``."""
    while node >= 0:
        counts[work[node]] += weight * amount[node]
        node = critical[node]
