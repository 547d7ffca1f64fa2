"""Loops over arrays that numba compiles, and longest paths over static graphs in issue order.

Ties are broken towards the dependency that is listed first, so results never depend on chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FunctionType
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

    A loop may call plain functions of its own module, which are compiled with it.  Arguments that belong together are
    passed as one ``NamedTuple`` of arrays and numbers.
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
        """The function, and the functions of its module that it calls, as machine code."""
        return _machine_code(self.function, {})  # type: ignore[no-any-return]


def _machine_code(function: Any, done: dict[Any, Any]) -> Any:
    """Compile a function with numba.

    numba calls compiled functions only, so each function of the same module that ``function`` calls is compiled too
    and takes its place among the global names.  Functions of other modules stay as they are: numba's cache on disk
    would not notice that their file has changed.

    Args:
        function: Plain.
        done: What is compiled already, by function; added to.
    """
    import numba

    if function not in done:
        known = function.__globals__
        called = {n: known[n] for n in function.__code__.co_names if isinstance(known.get(n), FunctionType)}
        helpers = {name: _machine_code(f, done) for name, f in called.items() if f.__module__ == function.__module__}
        linked = FunctionType(function.__code__, {**known, **helpers}, function.__name__) if helpers else function
        try:
            done[function] = numba.njit(cache=True, nogil=True)(linked)
        except RuntimeError:  # numba finds no folder for its cache
            done[function] = numba.njit(nogil=True)(linked)
    return done[function]


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
def delayed_paths(
    seconds: Floats,
    order: Ints,
    pointer: Ints,
    edges: Ints,
    source: Ints,
    delay: Floats,
    ready: Floats,
    ends: Floats,
    cause: Ints,
) -> None:
    """End of every node of a graph whose dependencies take time of their own, and the edge that decided its start.

    Args:
        seconds: Duration of each node, shape ``(n,)``.
        order: The nodes such that each comes after those that it depends on, same shape.
        pointer, edges: Edges into node ``i`` are ``edges[pointer[i]:pointer[i + 1]]``.
        source, delay: Of each edge: the node it comes from, and the time from that node's end.
        ready: Earliest start of each node by itself, ``-inf`` where its dependencies alone decide.
        ends: Filled, shape ``(n,)``.
        cause: Filled, same shape: the edge that decided the start, -1 if ``ready`` did.
    """
    for at in range(len(order)):
        node = order[at]
        start = ready[node]
        cause[node] = -1
        for place in range(pointer[node], pointer[node + 1]):
            edge = edges[place]
            if ends[source[edge]] + delay[edge] > start:
                start = ends[source[edge]] + delay[edge]
                cause[node] = edge
        ends[node] = start + seconds[node]


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
        transition: All ``-inf``; filled where a path leads, 0 from a stream that nothing is on to itself; shape
            ``(num_clocks, num_starts)``: to clock, from clock.
        last: All -1; filled with the node where each path ends; same shape.
    """
    num_clocks = len(transition)
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
def add_path(critical: Ints, node: int, work: Ints, amount: Floats, weight: float, counts: Floats) -> None:
    """Walk back from a node and add ``weight * amount`` of every node on its critical path to ``counts[work]``."""
    while node >= 0:
        counts[work[node]] += weight * amount[node]
        node = critical[node]
