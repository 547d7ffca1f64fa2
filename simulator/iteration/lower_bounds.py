"""Lower bounds of any schedule: the least seconds and bytes of blocks, of pipeline stages, and of replicas' traffic.

A stage's computation runs one pass at a time, and traffic of replicas, messages and launches only delay it (every rule
of the clock is a maximum or a sum of times that are not negative).  So the seconds of its passes, added up, are a lower
bound of the iteration for every schedule and every way of sharing states.  They come from the same timer as the
prediction, so that the bound holds for any latency model, smooth or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.job.execution import COMPUTE_DTYPE, ExecutionSemantics
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import DTYPE_BYTES
from stepsight.simulator.blocks.family import embedding_block, head_block, layer_block, layer_kinds
from stepsight.simulator.blocks.step import Block, Group, RankShape
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.memory.part import Gradients, end_memory, layer_memory
from stepsight.simulator.memory.peaks import States
from stepsight.simulator.programs.block_pass import WEIGHT, BackwardSpec, BlockPass
from stepsight.simulator.programs.sizes import Groups, gathering_of
from stepsight.simulator.programs.stage import block_pass_of

WHOLE = ("gpipe", "1f1b", "looped-bfs")  # schedules that run each backward without splitting it
LOOPED = (*WHOLE, "zb-h1", "interleaved-zb")  # part i of the model lies on stage i % pp
VEE = ("zbv", "dualpipev")  # parts go to the last stage and back


class PassKind(NamedTuple):
    """A pass through a block: ``forward``, ``backward``, ``input`` or ``weight``; fields as in ``BackwardSpec``."""

    part: str
    recompute: str = "none"
    whole: bool = False


def block_seconds(
    timer: Timer, shapes: Sequence[RankShape], kinds: Sequence[str], passes: Sequence[PassKind]
) -> Floats:
    """Time passes through one layer of each kind, the embedding and the head of several ranks, in one batch.

    Returns:
        Seconds of the computation, and of the host that launches it; shape
        ``(2, num_shapes, num_blocks, num_passes)``.
    """
    found = []
    for shape in shapes:
        layers = [layer_block(shape, kind) for kind in kinds]
        for block, end in [(each, False) for each in layers] + [(make(shape, False), True) for make in _ENDS]:
            found += [_passage(block, pass_kind, shape, end=end) for pass_kind in passes]
    timer.work_seconds(list(dict.fromkeys(work for passage in found for work in passage.works)))
    paths = np.array([timer.passage(passage).paths for passage in found], dtype=np.float64)
    paths = paths.reshape(len(shapes), len(kinds) + 2, len(passes), 3)
    return np.stack([paths[..., 0], paths[..., 2]])


_ENDS = embedding_block, head_block  # in the order in which they follow the layers


def _passage(block: Block, kind: PassKind, shape: RankShape, *, end: bool) -> BlockPass:
    if kind.part == "forward":
        return block_pass_of(block)
    once = end and kind.recompute == "full"
    recompute = "none" if once or kind.part == WEIGHT else kind.recompute
    whole = kind.whole and not once
    return block_pass_of(block, BackwardSpec(kind.part, recompute, whole=whole, dtype=shape.kernels.main_dtype))


def block_sizes(shapes: Sequence[RankShape], kinds: Sequence[str], recompute: Sequence[str]) -> tuple[Floats, Floats]:
    """Sizes of blocks in memory.

    Returns:
        Elements of the parameters of each block, of others and of experts, shape ``(num_shapes, num_blocks, 2)``;
        bytes that it keeps from forward to backward, shape ``(num_shapes, num_blocks, len(recompute))``.
    """
    numel, kept = np.zeros((len(shapes), len(kinds) + 2, 2)), np.zeros((len(shapes), len(kinds) + 2, len(recompute)))
    none = Gradients()
    for row, shape in enumerate(shapes):
        for at, kind in enumerate(kinds):
            memories = [layer_memory(shape, kind, how, none) for how in recompute]
            numel[row, at] = memories[0].numel, memories[0].expert_numel
            kept[row, at] = [memory.kept * (1.0 - shape.offload_share) for memory in memories]
        for at, is_head in ((len(kinds), False), (len(kinds) + 1, True)):
            memory = end_memory(shape, is_head, shape.model.tied_embeddings and is_head, none)
            numel[row, at], kept[row, at] = (memory.numel, memory.expert_numel), memory.kept
    return numel, np.maximum(kept, 0.0)


@cached(1024)
def layer_counts(shape: RankShape, num_parts: int, kinds: tuple[str, ...], every: int) -> tuple[Floats, Floats]:
    """Blocks of each part of a model that is split evenly, in the order of ``block_seconds``, and how many of these are
    recomputed, one in ``every``; shape ``(num_parts, num_blocks)``.  Of the shape, its model counts alone.
    """
    of_layers = [kinds.index(kind) for kind, count in layer_kinds(shape.model)
                 for _ in range(count)]  # fmt: skip
    each, rest = divmod(len(of_layers), num_parts)
    counts, again = np.zeros((2, num_parts, len(kinds) + 2))
    begin = 0
    for part in range(num_parts):
        own = of_layers[begin : begin + each + (part < rest)]
        begin += len(own)
        np.add.at(counts[part], own, 1.0)
        np.add.at(again[part], own[::every], 1.0)
    counts[0, -2] = counts[-1, -1] = 1.0
    return counts, again


def is_split(schedule: str) -> bool:
    """Whether a schedule may split the gradients of input and weights; a user's schedule may."""
    return schedule not in WHOLE


def placement_of(schedule: str, stages: int) -> str:
    """``loop``, ``vee``, or ``any``: the placement of the model's parts."""
    return "loop" if stages == 1 or schedule in LOOPED else "vee" if schedule in VEE else "any"


def stage_sums(parts: Floats, placement: str, stages: int) -> Floats:
    """Sums over the parts of each stage, shape ``(..., stages)``, of values of each part, shape ``(..., num_parts)``.

    Where the placement is ``any``, every stage has the mean, which the fullest has at least.
    """
    if placement == "loop":
        return np.asarray(parts.reshape(*parts.shape[:-1], -1, stages).sum(axis=-2))
    if placement == "vee":
        return np.asarray(parts[..., :stages] + parts[..., : stages - 1 : -1])
    mean = parts.sum(axis=-1, keepdims=True) / stages
    return np.repeat(mean, stages, axis=-1)


def stage_times(placement: str, stages: int, micro_batches: Floats, passes: tuple[Floats, Floats, Floats]) -> Floats:
    """Lower bound of the time when each stage has run its last backward, shape ``(..., stages)``.

    Nothing runs on a stage before one micro-batch came through all stages before it.  After its last gradient of an
    input, the micro-batch goes back through these stages; only gradients of weights may be left to run beside that.

    Args:
        placement: From ``placement_of``.
        stages: Number of stages.
        micro_batches: Of an iteration; broadcast against the others without their last axis.
        passes: The least seconds of each part for a forward, for the gradient of the input, and for a whole backward;
            shape ``(..., num_parts)``.
    """
    forward, to_input, backward = passes
    many = micro_batches[..., None]
    ahead = stage_sums(forward, placement, stages)
    busy = ahead + stage_sums(backward, placement, stages)
    if placement == "any" or stages == 1:
        return np.asarray(many * busy)
    fill, drain = np.zeros_like(ahead), np.zeros_like(ahead)
    fill[..., 1:] = forward[..., : stages - 1].cumsum(axis=-1)
    drain[..., 1:] = to_input[..., : stages - 1].cumsum(axis=-1)
    back = ahead + stage_sums(to_input, placement, stages)
    return np.asarray(fill + np.maximum(many * busy, many * back + drain))


def in_flight(schedule: str, stages: int, micro_batches: int, chunks: int) -> NDArray[np.float64]:
    """Least number of micro-batches of each chunk that a stage keeps at its peak; shape ``(stages, chunks)``."""
    stage, total = np.arange(stages), micro_batches * chunks
    if schedule not in LOOPED or stages == 1:
        first = np.zeros((stages, chunks))
        first[:, 0] = 1.0
        return first if stages > 1 else np.ones((1, chunks))
    in_round = micro_batches if chunks == 1 else micro_batches // max(1, micro_batches // stages)
    if schedule in ("gpipe", "looped-bfs"):
        return np.full((stages, chunks), float(micro_batches))
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = (2 if schedule == "1f1b" else 1) * ahead + (chunks - 1) * in_round
    passes = np.minimum(ahead + 1, total)  # forwards before the first backward
    chunk_of = np.arange(total) // in_round % chunks
    return np.array([np.bincount(chunk_of[:count], minlength=chunks) for count in passes], dtype=np.float64)


class Sharing(NamedTuple):
    """One way of sharing states between replicas: a job that has it, who shares, and bytes that a rank holds."""

    job: Job
    semantics: ExecutionSemantics
    groups: Groups
    states: States
    beside: bool

    @property
    def fully(self) -> bool:
        return self.job.parallel.zero_stage == 3 and self.groups.shard.size > 1


class Traffic(NamedTuple):
    """Seconds of collectives of each stage, shape ``(stages,)``: of every micro-batch and of an iteration, on a stream
    of their own; and after the last backward, while the computation waits.
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
    size = DTYPE_BYTES[COMPUTE_DTYPE[sharing.job.batch.precision]] / (1 + sharing.semantics.kernels.fp8_weights)
    groups = (sharing.groups.shard, sharing.groups.experts)
    if sharing.fully:
        gathering = gathering_of((p.zero_stage, p.pp > 1), sharing.semantics, beside=sharing.beside)
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
    """Seconds of collectives of some sizes, cached because the same sizes occur repeatedly."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._known: dict[tuple[Group, str, bytes], Floats] = {}

    def seconds(self, group: Group, kind: str, num_bytes: Floats) -> Floats:
        """Seconds of a collective of each size; 0 for zero bytes, and for a group of one rank."""
        key = (group, kind, num_bytes.tobytes())
        if key not in self._known:
            self._known[key] = seconds = np.zeros(len(num_bytes))
            asked: NDArray[np.int64] = np.flatnonzero(num_bytes > 0)
            if group.size > 1 and len(asked):
                sizes, place = np.unique(num_bytes[asked].astype(np.int64), return_inverse=True)
                seconds[asked] = self._timer.work_seconds([group.collective(kind, int(n)) for n in sizes])[place]
        return self._known[key]
