"""Peak bytes of a rank of each pipeline stage, the device that limits them, and advice if a job does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware, find_hardware
from stepsight.dataset.job.execution import semantics_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding import fullest_rank
from stepsight.simulator.blocks.step import RankShape
from stepsight.simulator.memory import peaks
from stepsight.simulator.memory.part import part_memory
from stepsight.simulator.programs.sizes import Parts, groups_of, layout_of, part_shapes, rank_shape
from stepsight.simulator.schedules import Schedule, schedule_of


def smallest_devices(job: Job, hardware: Hardware) -> tuple[Hardware, ...]:
    """For each stage the smallest device that has one of its ranks; a single one if all nodes are equal.

    Raises:
        JobError: If the devices of some nodes are unknown.
    """
    if not job.cluster.mixed:
        return (hardware,)
    known = [hardware]
    for other in job.cluster.mixed:
        found = find_hardware(other.hardware)
        if found is None:
            raise JobError(f"cluster.mixed: {HARDWARE.unknown(other.hardware)}")
        known.append(found)
    layout = layout_of(job)
    kind, stage = layout.mixed_kinds(job.cluster.mixed), layout.coordinates("pp")
    room = [(device.memory_bytes - device.reserved_bytes) / (1 + device.fragmentation) for device in known]
    kinds = [np.unique(kind[stage == at]).tolist() for at in range(job.parallel.pp)]
    return tuple(known[min(own, key=room.__getitem__)] for own in kinds)


def advice(job: Job, peak_bytes: float, estimate: Callable[[Job], Memory]) -> str:
    """Advise like ``recompute "selective" would free 12.3 GB``: the first sufficient change, else the one that frees
    most.

    Args:
        job: What does not fit.
        peak_bytes: What it needs.
        estimate: Memory of another job on the same hardware.
    """
    best, most = "", 0.0
    for words, tables in _changes(job):
        try:
            specs = {section: replace(getattr(job, section), **values) for section, values in tables.items()}
            other = estimate(replace(job, **specs))
        except JobError:
            continue
        free = peak_bytes - other.peak_bytes
        if other.fits:
            return f"{words} would free {free / 1e9:.1f} GB, enough"
        if free > most:
            best, most = f"{words} would free {free / 1e9:.1f} GB, not enough alone", free
    return best


def _changes(job: Job) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    p, batch = job.parallel, job.batch
    if p.tp > 1 and not p.sequence_parallel:
        yield "sequence_parallel", {"parallel": {"sequence_parallel": True}}
    if p.zero_stage == 0 and p.dp > 1:
        yield "zero_stage 1", {"parallel": {"zero_stage": 1}}
    if p.recompute == "none":
        yield "recompute selective", {"parallel": {"recompute": "selective"}}
    if p.pp > 1 and p.schedule != "1f1b":
        yield "schedule 1f1b", {"parallel": {"schedule": "1f1b", "virtual_stages": 1, "stage_layers": ()}}
    if batch.micro_batch > 1:
        smaller = max(size for size in range(1, batch.micro_batch) if batch.micro_batch % size == 0)
        yield f"micro_batch {smaller}", {"batch": {"micro_batch": smaller}}
    if p.recompute != "full" or p.recompute_every > 1:
        yield "recompute full", {"parallel": {"recompute": "full", "recompute_every": 1}}
    if p.zero_stage < 3 and p.dp > 1:
        yield "zero_stage 3", {"parallel": {"zero_stage": 3}}
    if not job.optimizer.offload:
        yield "offloading the optimizer", {"optimizer": {"offload": True}}


Floats = NDArray[np.float64]

FIELDS = ("parameters", "gradients", "optimizer", "activations", "temporary", "reserved")
MOMENTS = ("forward", "backward", "backward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank of a stage at its peak."""

    # parameters, gradients, optimizer: of training's states, those that are there
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # kept for backward, over all micro-batches in flight
    temporary: float  # what the moment itself needs: what an op works on, gathered or recomputed layers, messages
    reserved: float  # what no tensor can have: context, libraries, fragments of what is allocated and freed
    in_flight: int  # passes whose activations are kept: a micro-batch counts once for every chunk
    moment: str  # forward, backward or optimizer
    capacity_bytes: float  # of the smallest device that holds a rank of the stage

    @property
    def tensors(self) -> float:
        """Bytes without the reserve: what a framework counts as allocated."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary

    @property
    def total(self) -> float:
        return self.tensors + self.reserved

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory that a job needs, and the memory of its devices."""

    # shape (num_stages, 6): the fields of StageMemory of every stage, in FIELDS's order
    bytes_of: Floats = field(repr=False)
    flying: Floats = field(repr=False)  # passes in flight on each stage
    moments: Floats = field(repr=False)  # number of each stage's moment in MOMENTS
    # of each stage the smallest that holds one of its ranks; a single one where all nodes are alike
    devices: tuple[Hardware, ...] = field(repr=False)
    # job, hardware: what was asked, for advice
    job: Job = field(repr=False)
    hardware: Hardware = field(repr=False)

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Memory of each pipeline stage."""
        rows = zip(self.bytes_of.tolist(), self.flying.tolist(), self.moments.tolist(), strict=True)
        return tuple(
            StageMemory(
                **dict(zip(FIELDS, sizes, strict=True)),
                in_flight=int(flying),
                moment=MOMENTS[int(moment)],
                capacity_bytes=self.device(at).memory_bytes,
            )
            for at, (sizes, flying, moment) in enumerate(rows)
        )

    def device(self, stage: int) -> Hardware:
        """The smallest device that has a rank of a stage."""
        return self.devices[stage % len(self.devices)]

    @cached_property
    def fullest(self) -> int:
        """Number of the stage that needs the largest share of its device."""
        needs = self.bytes_of.sum(axis=1)
        if len(self.devices) > 1:
            needs /= [device.memory_bytes for device in self.devices]
        return int(needs.argmax())

    @cached_property
    def peak_bytes(self) -> float:
        """Peak memory of the fullest stage, in bytes."""
        return float(self.bytes_of[self.fullest].sum())

    @property
    def capacity_bytes(self) -> float:
        """Memory of the fullest stage's device, in bytes."""
        return self.device(self.fullest).memory_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def tight(self) -> bool:
        """Whether the job fits, but the allocator's usual slack does not."""
        return is_tight(self.peak_bytes, self.capacity_bytes)

    @property
    def reason(self) -> str:
        """Why the job does not fit, and what to try; empty if it fits."""
        if self.fits:
            return ""
        at = self.fullest
        stage = self.stages[at]
        parts = ", ".join(f"{name} {getattr(stage, name) / 1e9:.1f}" for name in FIELDS)
        count, many = stage.in_flight, self.job.num_micro_batches
        flying = f"{count} micro-batch{'' if count == 1 else 'es'}"
        if self.job.parallel.virtual_stages > 1:
            flying = f"{count} pass{'' if count == 1 else 'es'} of {many} micro-batch{'' if many == 1 else 'es'}"
        whose = f"its smallest device, {self.device(at).name}," if self.job.cluster.mixed else "a device"
        text = (
            f"stage {at} needs {stage.total / 1e9:.1f} GB in its {stage.moment} ({parts}; "
            f"{flying} in flight), {whose} has {stage.capacity_bytes / 1e9:.1f} GB"
        )
        tip = advice(self.job, self.peak_bytes, lambda job: estimate_memory(job, self.hardware))
        tables, spec = self.job.model.tables, self.job.sharding
        held = [fullest_rank(tables, spec, self.job.table_ranks)] if tables else []
        return "; ".join([text, *held, *filter(None, [tip])])

    def to_dict(self) -> dict[str, Any]:
        names = ("peak_bytes", "capacity_bytes", "fits", "tight", "reason")
        return {**{name: getattr(self, name) for name in names}, "stages": [stage.to_dict() for stage in self.stages]}


def is_tight(peak_bytes: float, capacity_bytes: float) -> bool:
    """Whether a job fits, but the allocator's usual slack does not."""
    return capacity_bytes - 2.0 <= peak_bytes <= capacity_bytes


def estimate_memory(job: Job, hardware: Hardware) -> Memory:
    """Peak bytes of every stage of a job.

    Raises:
        JobError: If the devices of some nodes are unknown, or a schedule's table does not go with the job.
    """
    asked = _asked(job, hardware)
    bytes_of, flying, moments = _stages(asked)
    devices = smallest_devices(job, hardware)
    if job.cluster.mixed:
        bytes_of = bytes_of.copy()
        facts = ("reserved_bytes", "fragmentation", "memory_bytes")
        bytes_of[:, 5] = _reserved(bytes_of, asked.states, *(np.array([getattr(d, f) for d in devices]) for f in facts))
    return Memory(bytes_of, flying, moments, devices, job, hardware)


class _Asked(NamedTuple):
    """Everything that the memory of the stages depends on."""

    shape: RankShape
    parts: Parts
    states: peaks.States
    schedule: Schedule
    torch_runtime: bool
    experts_shared: bool  # whether other ranks hold the same experts: only then their gradients are copied
    reserve: tuple[float, float, float]  # bytes, slack as a part of what is allocated and freed, the device's bytes


def _asked(job: Job, hardware: Hardware) -> _Asked:
    p, semantics = job.parallel, semantics_of(job, hardware.kind)
    groups = groups_of(job)
    states = peaks.states_of(p, semantics, job.batch.dtype, groups)
    schedule = schedule_of(p.schedule, p.pp, job.num_micro_batches, p.virtual_stages, job.batch.flushes)
    reserve = hardware.reserved_bytes, hardware.fragmentation, hardware.memory_bytes
    shape, torch_runtime = rank_shape(job, semantics=semantics), semantics.overlap.runtime == "torch"
    return _Asked(shape, part_shapes(job), states, schedule, torch_runtime, groups.experts.size > 1, reserve)


def estimate_moments(job: Job, hardware: Hardware) -> tuple[Floats, ...]:
    """Estimate the bytes of every stage during each action of its schedule, and during the optimizer's step.

    Args:
        job: What to run.
        hardware: What it runs on; nodes with other devices count as this one.

    Returns:
        For each stage an array of shape ``(num_actions + 1,)``; its maximum is the stage's ``StageMemory.total``.
    """
    asked = _asked(job, hardware)
    bytes_of, (parameters, gradients, optimizer, workspace), passing = _held(asked)
    reserved_bytes, fragmentation, memory_bytes = asked.reserve
    stays = parameters + optimizer + reserved_bytes
    frees = _frees_gradients(asked.states)
    found = []
    for at, actions in enumerate(peaks.find_moments(asked.schedule, bytes_of)):
        freed = np.append(actions[:, peaks.MOMENT] + passing[at], workspace[at] + (gradients[at] if frees else 0.0))
        held = stays[at] + (0.0 if frees else gradients[at])
        found.append(held + freed + np.minimum(fragmentation * freed, _room_left(memory_bytes - held - freed)))
    return tuple(found)


def _held(asked: _Asked) -> tuple[Floats, Floats, Floats]:
    """The bytes of a schedule's passes, as ``find_peaks`` takes them; bytes of states and of the optimizer's
    workspace, shape ``(4, num_stages)``; and of messages and buckets, shape ``(num_stages,)``.
    """
    shape, states, schedule = asked.shape, asked.states, asked.schedule
    places = peaks.places_of(shape, asked.parts)
    parts = [part_memory(shape, place.part, states.execution) for place in places[0]]
    bytes_of, messages = peaks.schedule_bytes(shape, schedule, places, parts, torch_runtime=asked.torch_runtime)
    elements = np.zeros((schedule.num_stages, 4))
    sizes = [(part.numel, part.expert_numel, part.frozen, part.expert_frozen) for part in parts]
    np.add.at(elements, schedule.placement[:, 0], np.array(sizes, dtype=np.float64)[places[1]])
    numel, frozen = elements[:, :2], elements[:, 2:]
    held = np.array([states.parameters, states.gradients, states.optimizer, states.workspace]) @ numel.T
    held[0] += frozen @ states.frozen
    held[3] += np.minimum(states.flat_bytes, numel @ (np.array(states.gradients) * (1, asked.experts_shared)))
    if shape.tables is not None:
        held[[0, 2], 0] += shape.tables.parameter_bytes, shape.tables.state_bytes
    return bytes_of, held, messages + np.minimum(states.bucket_bytes, float(shape.main_bytes) * numel.sum(axis=1))


@cached(4096)
def _stages(asked: _Asked) -> tuple[Floats, Floats, Floats]:
    """The first three fields of ``Memory``."""
    frees = _frees_gradients(asked.states)
    bytes_of, (parameters, gradients, optimizer, workspace), passing = _held(asked)
    peak = peaks.find_peaks(asked.schedule, bytes_of)
    there = peak[:, peaks.GRADIENTS] if frees else gradients
    moment = peak[:, peaks.MOMENT] - peak[:, peaks.GRADIENTS] + passing
    reserved_bytes, fragmentation, memory_bytes = asked.reserve
    more = 1.0 + fragmentation
    own = more if frees else 1.0
    steps = own * gradients + more * workspace > own * there + more * moment  # at the peak of the optimizer's step
    held = parameters, np.where(steps, gradients, there), optimizer, np.where(steps, 0.0, peak[:, peaks.ACTIVATIONS])
    out = np.stack(
        [*held, np.where(steps, workspace, moment - peak[:, peaks.ACTIVATIONS]), np.zeros(len(peak))], axis=1
    )
    out[:, 5] = _reserved(out, asked.states, reserved_bytes, fragmentation, memory_bytes)
    out.flags.writeable = False  # shared by all equal jobs
    return out, np.where(steps, 0, peak[:, peaks.FLYING]), np.where(steps, len(MOMENTS) - 1, peak[:, peaks.ACTION])


def _reserved(bytes_of: Floats, states: peaks.States, fixed: Any, fragmentation: Any, device: Any) -> Floats:
    """Bytes of each stage that no tensor has.

    The allocator keeps what it has freed while there is room.  When there is none it gives the free blocks back and
    asks again (PyTorch's ``CUDACachingAllocator.cpp``, ``release_cached_blocks``), so its slack fills a device and
    does not overflow it.
    """
    room = _room_left(device - bytes_of[:, :5].sum(axis=1) - fixed)
    freed: Floats = bytes_of[:, 3] + bytes_of[:, 4]  # what is allocated and freed within a step; states are not
    if _frees_gradients(states):
        freed = freed + bytes_of[:, 1]
    found: Floats = fixed + np.minimum(fragmentation * freed, room)
    return found


def _room_left(free: Floats) -> Floats:
    """Bytes of a device that slack may fill; one less than are free, since the sums that use it are rounded."""
    return np.maximum(free - 1.0, 0.0)


def _frees_gradients(states: peaks.States) -> bool:
    """Whether gradients are allocated in each backward and freed after the step."""
    return states.execution.gradients.numel > 0
