"""What the parts of a model hold on each stage, and the peak of every stage over its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.compiling import compiled
from stepsight.simulator.blocks.step import RankShape
from stepsight.simulator.memory.part import BlockMemory
from stepsight.simulator.programs.sizes import Parts, PartShape, boundary_bytes
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
    """Walk the actions of every stage in order."""
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


@dataclass(frozen=True, eq=False)
class Places:
    """All parts of a model: each distinct one once, and the position of each, shape ``(num_parts,)``."""

    distinct: tuple[Place, ...]
    of_part: NDArray[np.int64]


@cached(4096)
def places_of(shape: RankShape, parts: Parts) -> Places:
    passes = boundary_bytes(shape, parts)
    found: dict[Place, int] = {}
    places = [
        Place(part, before, after, index == 0)
        for index, (part, before, after) in enumerate(zip(parts, (0, *passes), (*passes, 0), strict=True))
    ]
    of_part = np.array([found.setdefault(place, len(found)) for place in places])
    return Places(tuple(found), of_part)


def schedule_bytes(
    shape: RankShape, schedule: Schedule, places: Places, parts: list[BlockMemory], *, torch_runtime: bool
) -> tuple[Floats, Floats]:
    """Arguments of ``find_peaks``, and bytes of messages on every stage; ``parts``: of the distinct places.

    PyTorch's pipeline runtime has a place for each micro-batch's message of either direction, keeps what each sends
    until its backward, and keeps all logits until the end; Megatron's has two messages at a time.  PyTorch's split
    backward frees little before the parameters' half: only what comes after the last parameters, the softmax of the
    loss; the first part has no input's half at all.
    """
    logits = shape.dtype_bytes / shape.main_bytes  # as they are; of their softmax, in the main type
    piped = torch_runtime and len(places.of_part) > 1
    rows = []
    for place, part in zip(places.distinct, parts, strict=True):
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
    table = np.array(rows)[places.of_part]
    stage, chunk = schedule.placement.T
    bytes_of = np.zeros((schedule.num_stages, schedule.virtual_stages, 9))
    bytes_of[stage, chunk] = table[:, :9]
    messages = np.zeros(schedule.num_stages)
    if piped:
        np.add.at(messages, stage, schedule.num_micro_batches * table[:, 9])
    else:
        np.maximum.at(messages, stage, table[:, 9])
    return bytes_of, messages
