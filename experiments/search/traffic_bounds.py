"""Least traffic of replicas: parameters that are gathered, gradients that are scattered."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.execution import COMPUTE_DTYPE, ExecutionSemantics
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import DTYPE_BYTES
from stepsight.simulator.blocks.shape import Group
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.memory.states import States
from stepsight.simulator.programs.replicas import gathering_of
from stepsight.simulator.programs.sizes import Groups


class Sharing(NamedTuple):
    """One way of sharing states between replicas.

    Attributes:
        job: A strategy that has it.
        semantics: What executes the job.
        groups: Who shares.
        states: Bytes that a rank holds.
        beside: Whether collectives run beside the computation.
    """

    job: Job
    semantics: ExecutionSemantics
    groups: Groups
    states: States
    beside: bool

    @property
    def fully(self) -> bool:
        """Whether parameters are sharded (FSDP)."""
        return self.job.parallel.zero_stage == 3 and self.groups.shard.size > 1


class Traffic(NamedTuple):
    """Seconds of collectives of each stage.

    Attributes:
        each: Of every micro-batch, on a stream of its own, shape ``(stages,)``.
        once: Of an iteration, on the same stream, same shape.
        after: After the last backward, while the computation waits; same shape.
    """

    each: Floats
    once: Floats
    after: Floats


def traffic(sharing: Sharing, sent: Collectives, layers: Floats, numel: Floats, held: Floats) -> Traffic:
    """Bound the traffic of each stage's replicas.

    Args:
        sharing: Who shares.
        sent: Seconds of collectives.
        layers: Layers of each kind on each stage, shape ``(stages, kinds)``.
        numel: Elements of their parameters, others' and experts', shape ``(kinds, 2)``.
        held: Elements that each stage holds, others' and experts', shape ``(stages, 2)``.
    """
    nothing = np.zeros(len(layers))
    p, overlap = sharing.job.parallel, sharing.semantics.overlap
    size = DTYPE_BYTES[COMPUTE_DTYPE[sharing.job.batch.precision]]
    groups = (sharing.groups.shard, sharing.groups.experts)
    if sharing.fully:
        gathering = gathering_of(p, overlap, beside=sharing.beside)
        each, once = nothing, nothing
        for which, group in enumerate(groups):
            gather = sent.seconds(group, "all_gather", numel[:, which] * size)
            grads = DTYPE_BYTES[sharing.semantics.states.gradient_dtype]
            scatter = sent.seconds(group, "reduce_scatter", numel[:, which] * grads)
            gathers, scatters = layers @ gather, layers @ scatter
            every = 2 * gathers * gathering.reshard + (0 if gathering.reduce_once else scatters)
            rest = gathers * (not gathering.reshard) + (scatters if gathering.reduce_once else 0)
            # The two kinds travel on two streams: the longer one counts.
            longer = every.sum() + rest.sum() > each.sum() + once.sum()
            each, once = (every, rest) if longer else (each, once)
        return Traffic(each, once, nothing)
    if p.zero_stage in (1, 2) and not overlap.parameters:
        after = sum((sent.seconds(g, "all_gather", held[:, i] * size) for i, g in enumerate(groups)), nothing)
        return Traffic(nothing, nothing, np.asarray(after))
    return Traffic(nothing, nothing, nothing)


class Collectives:
    """Seconds of collectives of some sizes, cached because the same sizes occur repeatedly.

    Args:
        timer: Of the latency model that predicts.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._known: dict[tuple[Group, str, bytes], Floats] = {}

    def seconds(self, group: Group, kind: str, num_bytes: Floats) -> Floats:
        """Seconds of a collective of each size; 0 for zero bytes, and for a group of one rank."""
        key = (group, kind, num_bytes.tobytes())
        if key not in self._known:
            self._known[key] = self._ask(group, kind, num_bytes)
        return self._known[key]

    def _ask(self, group: Group, kind: str, num_bytes: Floats) -> Floats:
        seconds = np.zeros(len(num_bytes))
        asked: NDArray[np.int64] = np.flatnonzero(num_bytes > 0)
        if group.size > 1 and len(asked):
            sizes, place = np.unique(num_bytes[asked].astype(np.int64), return_inverse=True)
            seconds[asked] = self._timer.work_seconds([group.collective(kind, int(n)) for n in sizes])[place]
        return seconds
