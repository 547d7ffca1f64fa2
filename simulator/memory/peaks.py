r"""What the parts of a model hold on each stage, and the peak of every stage over its schedule.

Parameters, gradients and optimizer states: bytes per element, and the share that a rank holds.

=============  ====  ====  ====  ====  ====  ======================================================================
\               fp32  fp16  bf16  fp8   FSDP
=============  ====  ====  ====  ====  ====  ======================================================================
parameters      4     2     2     4     4     fp8: bf16, and casts of both layouts; FSDP: shards are the main ones
gradients       4     2     4     4     4     Megatron has a place for all from the beginning, of ``gradient_dtype``
optimizer       8     16    12    12    8     moments; a main copy in fp32; fp16: the gradients in fp32
=============  ====  ====  ====  ====  ====  ======================================================================

These are Megatron's (the table of its distributed optimizer: ``4 + 16 / d``, ``6 + 12 / d`` and ``8 + 8 / d`` bytes)
and PyTorch's.  ZeRO stage 1 divides the optimizer's by the replicas that share states, 2 the gradients' too, 3 the
parameters' too (Rajbhandari et al. 2019, arXiv:1910.02054); experts have fewer replicas.  In eager PyTorch, gradients
come into being in the first backward after each step, unless DDP's buckets hold them.  In pure 16 bits the main type
has 2 bytes too: half of the fp32 column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached, compiled
from stepsight.dataset.job.execution import COMPUTE_DTYPE, ExecutionSemantics
from stepsight.dataset.job.specs import QUANTIZED, ParallelSpec
from stepsight.dataset.kinds.op import DTYPE_BYTES
from stepsight.simulator.blocks.step import RankShape
from stepsight.simulator.memory.part import BlockMemory, Gathered, Gradients, PartExecution
from stepsight.simulator.programs.sizes import Groups, Parts, PartShape, boundary_bytes, gathering_of
from stepsight.simulator.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

KEPT, LEFT, DEFERRED, GROWN, FORWARD_PEAK, BACKWARD_PEAK, FIRST_PEAK, GATHERED, WEIGHT_PEAK = range(9)
MOMENT, ACTIVATIONS, GRADIENTS, FLYING, ACTION = range(5)


@cached(256)
def _flat(schedule: Schedule) -> tuple[NDArray[np.int64], Ints]:
    lengths = [len(rows) for rows in schedule.actions]
    return np.concatenate([[0], np.cumsum(lengths)]), np.concatenate(schedule.actions)


def find_moments(schedule: Schedule, bytes_of: Floats) -> tuple[Floats, ...]:
    """Walk every stage's actions.

    Args:
        schedule: Of all stages.
        bytes_of: Shape ``(num_stages, num_chunks, 9)``: what a micro-batch keeps until its backward, leaves until the
            end, defers from its input's to its parameters' gradients; gradients that its first backward brings; peaks
            of forward, of backward, and of the first backward; parameters that stay gathered from the first forward on;
            peak of the parameters' half of a backward.

    Returns:
        For each stage an array of shape ``(num_actions, 5)``, in the order of its schedule: bytes that the action
        needs, of them kept activations and gradients, micro-batches in flight, and the kind of action.
    """
    bounds, rows = _flat(schedule)
    moments = np.empty((len(rows), 5))
    _run_actions(bounds, rows, bytes_of, np.zeros((2, *bytes_of.shape[:2]), dtype=np.bool_), moments)
    return tuple(np.split(moments, bounds[1:-1]))


def find_peaks(schedule: Schedule, bytes_of: Floats) -> Floats:
    """The largest moment of every stage, shape ``(num_stages, 5)``: rows of ``find_moments``."""
    return np.array([moments[moments[:, MOMENT].argmax()] for moments in find_moments(schedule, bytes_of)])


@compiled
def _run_actions(
    bounds: NDArray[np.int64], rows: Ints, bytes_of: Floats, ran: NDArray[np.bool_], moments: Floats
) -> None:
    came, seen = ran[0], ran[1]
    for stage in range(len(bounds) - 1):
        kept, grown, flying, gathered = 0.0, 0.0, 0, 0.0
        for at in range(bounds[stage], bounds[stage + 1]):
            kind, chunk = rows[at, 0], rows[at, 2]
            size = bytes_of[stage, chunk]
            if kind == FORWARD and not came[stage, chunk]:
                came[stage, chunk] = True
                gathered += size[GATHERED]
            if kind == FORWARD:
                moment = kept + size[FORWARD_PEAK]
                kept += size[KEPT] + size[LEFT]
                flying += 1
                there, number = kept, flying
            elif kind == BACKWARD_WEIGHT:
                there, number = kept, flying
                kept -= size[DEFERRED]
                moment = kept + size[WEIGHT_PEAK] + size[GATHERED]
                if not seen[stage, chunk]:
                    moment += size[GROWN]
                flying -= 1
            else:
                again = kind == BACKWARD_INPUT or seen[stage, chunk]
                there, number = kept, flying
                kept -= size[KEPT]
                moment = kept + size[BACKWARD_PEAK if again else FIRST_PEAK]
                if kind == BACKWARD:
                    flying -= 1
                else:  # the gradients of the parameters come later
                    kept += size[DEFERRED]
                    if kept + size[GATHERED] > moment:
                        moment, there = kept + size[GATHERED], kept
            moment += gathered - size[GATHERED]  # the chunk's own bytes are included in its peaks
            moments[at, MOMENT], moments[at, ACTIVATIONS] = moment + grown, min(there, moment)
            moments[at, GRADIENTS], moments[at, FLYING], moments[at, ACTION] = grown, number, kind
            if kind in (BACKWARD, BACKWARD_WEIGHT) and not seen[stage, chunk]:
                seen[stage, chunk] = True
                grown += size[GROWN]


class Place(NamedTuple):
    """A part of the model, bytes of the messages that arrive at it and leave it, and whether it is the first."""

    part: PartShape
    arrives: int
    leaves: int
    is_first: bool


@cached(4096)
def places_of(shape: RankShape, parts: Parts) -> tuple[tuple[Place, ...], NDArray[np.int64]]:
    """Each distinct part of a model once, and the position of each among these, shape ``(num_parts,)``."""
    passes, found = boundary_bytes(shape, parts), dict[Place, int]()
    places = map(Place, parts, (0, *passes), (*passes, 0), [True] + [False] * len(passes))
    of_part = np.array([found.setdefault(place, len(found)) for place in places])
    return tuple(found), of_part


def schedule_bytes(
    shape: RankShape,
    schedule: Schedule,
    places: tuple[tuple[Place, ...], NDArray[np.int64]],
    parts: list[BlockMemory],
    *,
    torch_runtime: bool,
) -> tuple[Floats, Floats]:
    """Arguments of ``find_peaks``, and bytes of messages on every stage; ``parts``: of the distinct places.

    PyTorch's pipeline runtime has a place for each micro-batch's message of either direction, keeps what each sends
    until its backward, and keeps all logits until the end; Megatron's has two messages at a time.  PyTorch's split
    backward frees little before the parameters' half: only what comes after the last parameters, the softmax of the
    loss; the first part has no input's half at all.
    """
    logits = shape.dtype_bytes / shape.main_bytes  # as they are; of their softmax, in the main type
    distinct, of_part = places
    piped = torch_runtime and len(of_part) > 1
    rows = []
    for place, part in zip(distinct, parts, strict=True):
        kept, left = part.kept, 0.0
        deferred = part.deferred
        weight = deferred + part.weight
        if piped:
            kept += place.leaves - place.arrives
            left = part.output * logits
            deferred = kept if place.is_first else max(kept - part.output + part.output_gradients, deferred)
            weight = part.backward - part.gathered if place.is_first else deferred + part.weight
        rows.append((
            max(kept, 0.0), left, max(deferred, 0.0), part.grown, part.forward, part.backward, part.backward_first,
            part.gathered, weight, float(place.arrives + place.leaves),
        ))  # fmt: skip
    table = np.array(rows)[of_part]
    stage, chunk = schedule.placement.T
    bytes_of = np.zeros((schedule.num_stages, schedule.virtual_stages, 9))
    bytes_of[stage, chunk] = table[:, :9]
    messages = np.zeros(schedule.num_stages)
    if piped:
        np.add.at(messages, stage, schedule.num_micro_batches * table[:, 9])
    else:
        np.maximum.at(messages, stage, table[:, 9])
    return bytes_of, messages


@dataclass(frozen=True, slots=True)
class States:
    """Bytes per element on one rank, of ordinary parameters and of experts'."""

    # parameters, gradients, optimizer: of each kind
    parameters: tuple[float, float]
    gradients: tuple[float, float]
    frozen: tuple[float, float]  # of parameters that are not trained
    optimizer: tuple[float, float]
    workspace: tuple[float, float]  # of the optimizer's step, for a moment
    bucket_bytes: float  # of gradients on their way while backward runs
    flat_bytes: float  # the same after it: eager pipelines reduce copies, a bucket at a time
    execution: PartExecution  # what this means for parts of the model


@cached(4096)
def states_of(p: ParallelSpec, semantics: ExecutionSemantics, precision: str, groups: Groups) -> States:
    """How many bytes an element costs in a parallel strategy; ``precision``: of matrix products."""
    states, kernels = semantics.states, semantics.kernels
    main, dtype = DTYPE_BYTES[kernels.main_dtype], COMPUTE_DTYPE[precision]
    size, casts = DTYPE_BYTES[dtype], dtype != kernels.main_dtype
    shards = (groups.shard.size, groups.experts.size)
    sharded, replicated = p.zero_stage == 3 and groups.shard.size > 1, groups.replicas.size > 1
    copied = states.main_copy and not sharded  # the model's parameters differ from those that the optimizer updates
    half = states.main_gradients and not sharded
    parts = [shards if p.zero_stage >= stage else (1, 1) for stage in (3, 2, 1)]

    def each(size: float, divisors: tuple[int, int]) -> tuple[float, float]:
        return size / divisors[0], size / divisors[1]

    moments = main * (2.0 + (copied and casts) + half)
    own = states.gradient_buffers and not sharded
    model = QUANTIZED.get(precision, 0) + (0 if states.narrow_parameters else size)
    # Of frozen weights one layout is enough (NeMo's LoRA recipes: disable_parameter_transpose_cache).
    narrow = QUANTIZED[precision] / 2 if precision in QUANTIZED and states.narrow_parameters else float(size)
    gradients = each(float(size if half else DTYPE_BYTES[states.gradient_dtype] if own else main), parts[1])
    copies = states.bucket_copies and not sharded and replicated
    grows = not (states.gradient_buffers and not sharded) and not (copies and p.pp == 1)
    gathering, gathered = gathering_of((p.zero_stage, p.pp > 1), semantics), Gathered()
    fresh = float(main) if kernels.accumulation == "autograd" else 0.0
    if sharded:
        gathered = Gathered(size, main, gathering)
        fresh = 0.0 if gathering.reduce_once else float(size)
    whole = sharded and gathering.reduce_once
    stay = each(float(main), (1, 1)) if whole else gradients if grows else (0.0, 0.0)
    growing = Gradients(*stay, fresh, whole_blocks=sharded and not whole)
    bucket_bytes = semantics.overlap.bucket_bytes
    own_loss = 6 if p.tp == 1 else 14  # as in PyTorch's cross-entropy, and in its ``loss_parallel``
    return States(
        parameters=each(float(model if copied else main), parts[0]),
        gradients=gradients,
        frozen=each(narrow, parts[0]),
        optimizer=each(0.0 if semantics.optimizer == "host" else moments, parts[2]),
        workspace=each(float(main), parts[2]) if semantics.optimizer == "foreach" else (0.0, 0.0),
        bucket_bytes=2 * bucket_bytes if p.zero_stage == 2 and groups.shard.size > 1 else 0.0,
        flat_bytes=bucket_bytes if copies and p.pp > 1 else 0.0,
        execution=PartExecution(
            p.recomputes,
            p.recompute_every,
            growing,
            gathered,
            placeholder_bytes=size if states.gradient_buffers and not sharded else 0,
            loss_bytes=own_loss if casts and sharded else 0,
        ),
    )
