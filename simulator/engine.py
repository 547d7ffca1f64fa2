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
    bounds: NDArray[np.int64],
    on_data: NDArray[np.bool_],
    joined: bool,
    finish: Floats,
    transition: Floats,
    last: NDArray[np.int64],
) -> None:
    """Longest path through every program from a clock to a clock.

    Args:
        bounds: Nodes of program ``i`` are ``bounds[i]:bounds[i + 1]``.
        on_data: Whether each node is on the data-parallel stream.
        joined: Whether both clocks end together, with the last node of all.
        finish: Longest path from each clock to the end of each node, shape ``(2, num_nodes)``.
        transition: Filled, shape ``(num_programs, 2, 2)``: to clock, from clock; ``-inf`` where none leads, 0 for a
            data-parallel stream that nothing is on.
        last: Filled, same shape: the node where the path ends, -1 if none.
    """
    for program in range(len(bounds) - 1):
        transition[program] = -np.inf
        last[program] = -1
        anything = False
        for node in range(bounds[program], bounds[program + 1]):
            anything |= on_data[node]
            for to in range(2):
                if joined or on_data[node] == (to == 1):
                    for start in range(2):
                        if finish[start, node] > transition[program, to, start]:
                            transition[program, to, start] = finish[start, node]
                            last[program, to, start] = node
        if not anything:
            transition[program, 1, 1] = 0.0


@compiled
def add_path(critical: Ints, node: int, work: Ints, amount: Floats, weight: float, counts: Floats) -> None:
    """Walk back from a node and add ``weight * amount`` of every node on its critical path to ``counts[work]``."""
    while node >= 0:
        counts[work[node]] += weight * amount[node]
        node = critical[node]


@compiled
def run_schedule(
    stage: Ints,
    segment: Ints,
    source: Ints,
    message: Ints,
    transition: Floats,
    message_seconds: Floats,
    gated: NDArray[np.bool_],
    start: Floats,
    finish: Floats,
    cause: Ints,
) -> None:
    """Run segments in a global order on stages that pass messages.

    Every stage has two clocks: when its computation is free, and when its data-parallel stream is.  A message passes
    when
    its sender has finished and its receiver has asked for it, which a stage does when it has nothing else to do: so do
    torch's schedules and Megatron's (without interleaving).  Senders do not wait.

    Args:
        stage, segment: Of each action, shape ``(n,)``.
        source: Action whose message it waits for, -1 if none.
        message: Index into ``message_seconds`` of that message, -1 if it needs no transfer.
        transition: Shape ``(num_segments, 2, 2)``: longest path from the start of a clock (last axis; 0 computation,
            1 data-parallel stream) to the end of a clock; ``-inf`` where none leads.
        message_seconds: Of each distinct message.
        gated: Whether a segment starts only when its stage's data-parallel stream is done as well.
        start: Filled, shape ``(n, 2)``: each clock where the action starts.
        finish: Filled, shape ``(n, 2)``.
        cause: Filled, shape ``(n, 4)``: 0/1 the clock that decided each finish; 2 the action that decided the start
            (-1 none); 3 what of it: 0 the computation, 1 the data-parallel stream of the stage's previous action,
            2 the sender of the message.
    """
    num_stages = 0
    for action in range(len(stage)):
        num_stages = max(num_stages, stage[action] + 1)
    clocks = np.zeros((num_stages, 2))
    last = np.full(num_stages, -1, dtype=np.int32)
    for action in range(len(stage)):
        s = stage[action]
        begin, who, how = clocks[s, 0], last[s], 0
        if gated[segment[action]] and clocks[s, 1] > begin:
            begin, how = clocks[s, 1], 1
        if source[action] >= 0:
            if finish[source[action], 0] > begin:
                begin, who, how = finish[source[action], 0], source[action], 2
            if message[action] >= 0:  # it starts when it is sent and asked for
                begin += message_seconds[message[action]]
        start[action, 0] = begin
        start[action, 1] = clocks[s, 1]
        cause[action, 2] = who
        cause[action, 3] = how
        for clock in range(2):
            by_compute = begin + transition[segment[action], clock, 0]
            by_data = clocks[s, 1] + transition[segment[action], clock, 1]
            finish[action, clock] = max(by_compute, by_data)
            cause[action, clock] = 1 if by_data > by_compute else 0
        clocks[s, 0] = finish[action, 0]
        clocks[s, 1] = finish[action, 1]
        last[s] = action


@compiled
def walk_schedule(
    action: int,
    clock: int,
    segment: Ints,
    message: Ints,
    previous: Ints,
    cause: Ints,
    uses: Floats,
    message_uses: Floats,
) -> None:
    """Walk back along the critical path and count what lies on it.

    Args:
        action, clock: Where the path ends.
        segment, message, cause: As in ``run_schedule``.
        previous: The action before on the same stage, -1 if none.
        uses: Added to, shape ``(num_segments, 2, 2)``: passages from a clock to a clock of each segment.
        message_uses: Added to, shape ``(num_messages,)``.
    """
    while action >= 0:
        entered = cause[action, clock]
        uses[segment[action], clock, entered] += 1.0
        if entered == 1:
            action, clock = previous[action], 1
        else:
            if message[action] >= 0:
                message_uses[message[action]] += 1.0
            action, clock = cause[action, 2], 1 if cause[action, 3] == 1 else 0
