"""Lower bounds of every strategy of a grid: least seconds and least bytes.

Seconds are the larger of what a stage computes (``simulator.iteration.lower_bounds``), with the pipeline's fill before
it and its drain after it, and of what its fully sharded replicas send; parameters that are gathered after the
optimizer's step are added.  Bytes are training's states, and what is kept of the micro-batches that a schedule has in
flight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.execution import semantics_of
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.search.strategies import Block, Grid
from stepsight.simulator.blocks.family import layer_kinds
from stepsight.simulator.blocks.step import RankShape
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.durations.latency_model import LatencyModel, Seconds
from stepsight.simulator.durations.segment_timing import Timer, launch_calls
from stepsight.simulator.iteration import lower_bounds as lower
from stepsight.simulator.iteration.lower_bounds import Collectives, PassKind, Sharing, Traffic
from stepsight.simulator.iteration.simulate import other_latency
from stepsight.simulator.memory.peaks import states_of
from stepsight.simulator.programs.sizes import groups_of, rank_shape
from stepsight.training.prediction.prediction import Prediction
from stepsight.training.predictor.predictor import Predictor

Ids = NDArray[np.int64]
ROUNDING = 1e-9  # relative difference that sums in another order may have


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the strategies of a grid."""

    seconds: Floats  # of the predicted iteration time, shape ``(n,)``
    peak_bytes: Floats  # of the estimated peak memory, shape ``(n,)``
    capacity_bytes: float = math.inf  # of a device

    @property
    def may_fit(self) -> NDArray[np.bool_]:
        """Strategies that may fit in memory, shape ``(n,)``."""
        return np.asarray(self.peak_bytes <= self.capacity_bytes)


def grid_bounds(grid: Grid, given: Prediction) -> Bounds:
    """Bound every strategy of a grid, for the latency model and predictor of a prediction of the grid's job."""
    timer, hardware = given.simulation.timer, given.simulation.hardware
    if grid.job.cluster.mixed:  # other devices may be faster, or have more memory
        others = [other_latency(other.hardware, grid.job) for other in grid.job.cluster.mixed]
        devices, timer = [hardware, *(model.hardware for model in others)], Timer(FastestDevice(timer.latency, others))
        hardware = replace(
            hardware,
            memory_bytes=max(device.memory_bytes for device in devices),
            reserved_bytes=min(device.reserved_bytes for device in devices),
            fragmentation=min(device.fragmentation for device in devices),
        )
    table = ShapeTable(grid, timer, hardware)
    sent = Collectives(timer)
    blocks = [_BlockBounds(grid, block, table, sent, hardware) for block in grid.blocks.values()]
    seconds = np.concatenate([block.seconds().ravel() for block in blocks])
    peak_bytes = np.concatenate([block.peak_bytes().ravel() for block in blocks])
    factor = least_factor(given.predictor, grid.job) * (1.0 - ROUNDING)
    return Bounds(seconds * factor, peak_bytes * (1.0 - ROUNDING), hardware.memory_bytes)


def least_factor(predictor: Predictor | None, job: Job) -> float:
    """The smallest factor by which a predictor's context and calibration may multiply times of single ops."""
    if predictor is None:
        return 1.0
    in_context = 0.0 if predictor.context is None else predictor.context.bound
    return predictor.calibration.least_factor(job) * math.exp(-in_context)


class FastestDevice:
    """A lower bound of latency in a cluster: each op takes the least time of all kinds of devices, and collectives that
    of the job's own hardware.
    """

    knows_context = False

    def __init__(self, own: LatencyModel, others: Sequence[LatencyModel]) -> None:
        self.hardware = own.hardware
        self.calls = launch_calls(own)
        self._own, self._others = own, others

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return np.asarray(np.min([model.op_seconds(ops) for model in (self._own, *self._others)], axis=0))

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return self._own.collective_seconds(collectives)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        return seconds


class ShapeTable:
    """The distinct rank shapes of a grid.

    ``ids`` has by layout the number of each shape: micro-batch size, sequence parallelism, order of ranks, whether
    fully sharded, whether offloaded. The embedding and the head follow the ``kinds`` of layers wherever blocks are
    counted. ``numel``: elements of the parameters of each block, others' and experts', shape ``(shapes, blocks, 2)``.
    """

    def __init__(self, grid: Grid, timer: Timer, hardware: Hardware) -> None:
        model = grid.job.model
        self._grid, self._hardware = grid, hardware
        self.micro_batches = grid.space.micro_batches
        options = [block.options for block in grid.blocks.values()]
        kept = [sets for each in options for sets in each["recompute"].values()]
        self._offload = [False, True] if any(sets["offload_activations"] for sets in kept) else [False]
        self._recompute = sorted({"none", *(sets["recompute"] for sets in kept)})
        self._known: dict[RankShape, int] = {}
        self.ids = {block.layout: self._number(block) for block in grid.blocks.values()}
        self.shapes = tuple(self._known)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in layer_kinds(model)))
        split = any(lower.is_split(sets["schedule"]) for each in options for sets in each["pipeline"].values())
        parts = ("backward", *(("input",) if split else ()))
        passes = [PassKind(part, how, whole=False) for part in parts for how in self._recompute]
        if "full" in self._recompute:
            passes += [PassKind(part, "full", whole=True) for part in parts]
        self._passes = [PassKind("forward"), *passes, *([PassKind("weight")] if split else [])]
        self._seconds = lower.block_seconds(timer, self.shapes, self.kinds, self._passes)
        self.numel, self._kept = lower.block_sizes(self.shapes, self.kinds, self._recompute)

    def _number(self, block: Block) -> Ids:
        options = block.options
        orders = list(options.get("order", {"": {}}).values())
        sequences, recompute = list(options["sequence_parallel"]), options["recompute"].values()
        share = self._hardware.comm_compute_share if self._hardware.kind != "cpu" else 0.0
        base = []  # with a micro-batch of 1 and without sequence parallelism; messages between stages do not count
        for order, zero, off in itertools.product(orders, (0, 3), self._offload):
            none = {"recompute": "none", "offload_activations": off, "recompute_modules": ()}
            kept = next((sets for sets in recompute if sets["offload_activations"] is off), none)
            job = self._grid.build(block.layout, **kept, **order, zero_stage=zero, sequence_parallel=False)
            shape = rank_shape(job, share, semantics_of(job, self._hardware.kind))
            base.append(replace(shape, scatter_p2p=False))
        numbers = [
            self._known.setdefault(replace(shape, micro_batch=size, sequence_parallel=sp), len(self._known))
            for size, sp in itertools.product(self.micro_batches, sequences)
            for shape in base
        ]
        return np.array(numbers).reshape(len(self.micro_batches), len(sequences), len(orders), 2, len(self._offload))

    def counts(self, parts: int, every: int) -> tuple[Floats, Floats]:
        """Number of blocks of each part of the model, and how many are recomputed."""
        return lower.layer_counts(self.shapes[0], parts, self.kinds, every)

    def part_seconds(self, ids: Ids, part: str, how: str, parts: int, every: int) -> Floats:
        """The least seconds of a pass through each of ``parts`` parts of the model, of the computation and of the
        host's launches, shape ``(2, *ids.shape, parts)``; ``part`` as in ``PassKind``, ``how`` it recomputes ``every``
        n-th layer.  The last axis of ``ids``: whether fully sharded.
        """
        counts, again = self.counts(parts, every)
        full = how == "full" and part in ("backward", "input")
        how = "selective" if how == "selective" and part in ("backward", "input") else "none"
        plain = whole = self._passes.index(PassKind(part, how))
        if not full:
            again = np.zeros_like(counts)
        found = []
        for fully in (False, True):
            if full:  # fully sharded ranks stop after the last step that keeps an activation
                again_whole = self.shapes[0].kernels.whole_layers_again and not fully
                whole = self._passes.index(PassKind(part, "full", again_whole))
            once, twice = (self._seconds[..., column][:, ids[..., int(fully)]] for column in (plain, whole))
            found.append(once @ (counts - again).T + twice @ again.T)
        return np.stack(found, axis=-2)

    def kept_bytes(self, ids: Ids, how: str, parts: int, every: int) -> Floats:
        """Least bytes that each part of the model keeps of a micro-batch; shape ``(*ids.shape, parts)``."""
        counts, again = self.counts(parts, every)
        plain = self._recompute.index("selective" if how == "selective" else "none")
        if how != "full":
            return np.asarray(self._kept[ids, :, plain] @ counts.T)
        full = self._recompute.index("full")
        return np.asarray(self._kept[ids, :, plain] @ (counts - again).T + self._kept[ids, :, full] @ again.T)


class _BlockBounds:
    """Bounds of one block of a grid.

    Axes are named in shapes: ``p`` pipelines, ``z`` ways of sharding, ``r`` recomputation, ``s`` sequence parallelism,
    ``o`` orders of ranks, ``m`` micro-batch sizes, ``d`` stages.
    """

    def __init__(self, grid: Grid, block: Block, table: ShapeTable, sent: Collectives, hardware: Hardware) -> None:
        self._table, self._collectives, self._hardware = table, sent, hardware
        self._layout, self._ids = block.layout, table.ids[block.layout]
        self._orders = list(block.options.get("order", {"": {}}).values())
        self._zeros: list[list[Sharing]] = []  # ways of sharding, one for each order of ranks
        for zero in block.options["zero_stage"].values():
            jobs = [grid.build(block.layout, sequence_parallel=False, **zero, **order) for order in self._orders]
            self._zeros.append([])
            for job in jobs:  # how its replicas share its states
                semantics, groups = semantics_of(job, hardware.kind), groups_of(job)
                states = states_of(job.parallel, semantics, job.batch.dtype, groups)
                self._zeros[-1].append(Sharing(job, semantics, groups, states, hardware.kind != "cpu"))
        self._fully = np.array([int(shared[0].job.parallel.zero_stage == 3) for shared in self._zeros])
        self._recompute = [  # kind, of every n-th layer, whether offloaded
            (sets["recompute"], sets.get("recompute_every", 1), int(sets["offload_activations"]))
            for sets in block.options["recompute"].values()
        ]
        self._pipelines = [
            (table.micro_batches.index(sets["micro_batch"]), sets["schedule"], sets["virtual_stages"])
            for sets in block.options["pipeline"].values()
        ]
        replica = grid.job.batch.global_batch // self._layout.dp
        self._many = np.array([replica // size for size in table.micro_batches], dtype=np.float64)

    def seconds(self) -> Floats:
        """Lower bounds of seconds, shape ``(p, z, r, s, o)``."""
        computed: dict[Any, Floats] = {}
        sent: dict[Any, Traffic] = {}
        out = []
        for size, schedule, chunks in self._pipelines:
            place = (chunks, lower.placement_of(schedule, self._layout.pp))
            if (key := (*place, lower.is_split(schedule))) not in computed:
                stages = [self._computed(schedule, chunks, *how) for how in self._recompute]
                computed[key] = np.stack(stages, axis=1)  # m r s o fully d
            if place not in sent:
                sent[place] = self._sent(*place)
            own = np.moveaxis(computed[key][size][..., self._fully, :], -2, 0)  # z r s o d
            each, once, after = (values[:, None, None] for values in sent[place])  # z 1 1 o d
            out.append(np.maximum(own + after, self._many[size] * each + once).max(axis=-1))
        return np.array(out)

    def _computed(self, schedule: str, chunks: int, kind: str, every: int, offload: int) -> Floats:
        """Earliest time at which each stage has computed, shape ``(m, s, o, 2, d)``; the 2: whether fully sharded."""
        stages, ids = self._layout.pp, self._ids[..., offload]

        def seconds(part: str) -> Floats:
            return self._table.part_seconds(ids, part, kind, stages * chunks, every)

        forward, backward = seconds("forward"), seconds("backward")
        to_input = backward
        if lower.is_split(schedule):  # a schedule that splits some backwards may run others whole
            halves = seconds("input")
            to_input, backward = np.minimum(halves, backward), np.minimum(halves + seconds("weight"), backward)
        if stages > 1:  # the host starts each pass together with the computation, and the slower one decides
            forward, to_input, backward = (values.max(axis=0) for values in (forward, to_input, backward))
        many = self._many[:, None, None, None]
        times = lower.stage_times(lower.placement_of(schedule, stages), stages, many, (forward, to_input, backward))
        return times if stages > 1 else np.asarray(times.max(axis=0))

    def _sent(self, chunks: int, placement: str) -> Traffic:
        """Traffic of the replicas, each of shape ``(z, o, d)``."""
        counts = self._stage_counts(chunks, placement)
        numel = self._table.numel[int(self._ids.flat[0])]
        sizes = counts[:, :-2], numel[:-2], counts @ numel
        found = [[lower.traffic(one, self._collectives, *sizes) for one in shared] for shared in self._zeros]
        return Traffic(*np.moveaxis(np.array(found), 2, 0))

    def _stage_counts(self, chunks: int, placement: str) -> Floats:
        """Blocks of each stage, shape ``(d, blocks)``; none if they are not known."""
        counts, _ = self._table.counts(self._layout.pp * chunks, 1)
        if placement == "any":
            return np.zeros((self._layout.pp, counts.shape[1]))
        return lower.stage_sums(counts.T, placement, self._layout.pp).T

    def peak_bytes(self) -> Floats:
        """Lower bounds of peak memory, shape ``(p, z, r, s, o)``."""
        out, held = [], {}
        for size, schedule, chunks in self._pipelines:
            place = lower.placement_of(schedule, self._layout.pp)
            if (chunks, place) not in held:
                held[chunks, place] = self._held(chunks, place)
            states, gradients, late = (values[:, None, None] for values in held[chunks, place])  # z 1 1 o d
            kept = np.moveaxis(self._kept(size, schedule, chunks)[..., self._fully, :], -2, 0)  # z r s o d
            kept = (1.0 + self._hardware.fragmentation) * kept
            out.append((states + np.maximum(gradients, late + kept)).max(axis=-1))
        return np.asarray(self._hardware.reserved_bytes + np.array(out))

    def _held(self, chunks: int, placement: str) -> Floats:
        """Bytes of parameters and optimizer states, of gradients, and of gradients before the first backward; shape
        ``(3, z, o, d)``.
        """
        numel = self._stage_counts(chunks, placement) @ self._table.numel[int(self._ids.flat[0])]
        found = []
        for shared in self._zeros:
            for one in shared:
                states = one.states
                gradients = numel @ np.array(states.gradients)
                held = numel @ (np.array(states.parameters) + np.array(states.optimizer))
                found.append((held, gradients, gradients * (states.execution.gradients.numel == 0)))
        return np.moveaxis(np.array(found), 1, 0).reshape(3, len(self._zeros), len(self._orders), -1)

    def _kept(self, size: int, schedule: str, chunks: int) -> Floats:
        """Bytes of activations that each stage keeps at some moment, shape ``(r, s, o, 2, d)``."""
        stages, ids = self._layout.pp, self._ids[size]
        flying = lower.in_flight(schedule, stages, int(self._many[size]), chunks)
        found = []
        for kind, every, offload in self._recompute:
            kept = self._table.kept_bytes(ids[..., offload], kind, stages * chunks, every)
            looped = lower.placement_of(schedule, stages) == "loop"
            if looped and self._zeros[0][0].semantics.overlap.runtime != "torch":
                found.append((kept.reshape(*kept.shape[:-1], chunks, stages) * flying.T).sum(axis=-2))
            else:
                found.append(np.zeros((*kept.shape[:-1], stages)))
        return np.array(found)
