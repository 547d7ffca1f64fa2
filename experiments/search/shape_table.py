"""Rank shapes of a grid's strategies, and the least seconds and bytes of their blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.execution import semantics_of
from stepsight.experiments.search.schedule_bounds import is_split
from stepsight.experiments.search.strategies import Grid
from stepsight.simulator.blocks.family import find_family
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.iteration.lower_bounds import PassKind, block_floors, block_sizes, layer_counts
from stepsight.simulator.programs.sizes import rank_shape

Ids = NDArray[np.int64]


class ShapeTable:
    """The distinct rank shapes of a grid.

    Attributes:
        micro_batches: Sizes, in the order of ``ids``.
        ids: For each block the number of each shape: micro-batch size, sequence parallelism, order of ranks, whether
            fully sharded, whether offloaded.
        shapes: By number.
        kinds: Kinds of layers; the embedding and the head follow them wherever blocks are counted.
        numel: Elements of the parameters of each block, others' and experts', shape ``(shapes, blocks, 2)``.
    """

    def __init__(self, grid: Grid, timer: Timer, hardware: Hardware) -> None:
        model = grid.job.model
        self._grid, self._hardware = grid, hardware
        self.micro_batches = grid.space.micro_batches
        self._known: dict[RankShape, int] = {}
        self.ids = [self._number(block) for block in range(len(grid.layouts))]
        self.shapes = tuple(self._known)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in find_family(model.family).layer_kinds(model)))
        asked = {how.partition("/")[0] for options in grid.options for how in options["recompute"]}
        self._recompute = sorted({"none", *asked} - {"offload"})
        split = any(is_split(text.split()[1]) for options in grid.options for text in options["pipeline"])
        parts = ("backward", *(("input",) if split else ()))
        passes = [PassKind(part, how, whole=False) for part in parts for how in self._recompute]
        if "full" in self._recompute:
            passes += [PassKind(part, "full", whole=True) for part in parts]
        self._passes = [PassKind("forward"), *passes, *([PassKind("weight")] if split else [])]
        self._floors = block_floors(timer, self.shapes, self.kinds, self._passes)
        self.numel, self._kept = block_sizes(self.shapes, self.kinds, self._recompute)

    def _number(self, block: int) -> Ids:
        layout, options = self._grid.layouts[block], self._grid.options[block]
        offload = [False, True] if any("offload" in o["recompute"] for o in self._grid.options) else [False]
        places = [
            (micro_batch, sp, order, zero, off)
            for micro_batch in self.micro_batches
            for sp in options["sequence_parallel"]
            for order in options.get("order", [""])
            for zero in ("0", "3")
            for off in offload
        ]
        base: dict[tuple[str, str, bool], RankShape] = {}
        numbers = []
        for micro_batch, sp, order, zero, off in places:
            if (order, zero, off) not in base:
                base[order, zero, off] = self._shape(layout, options, order, zero, off)
            shape = replace(base[order, zero, off], micro_batch=micro_batch, sequence_parallel=sp)
            numbers.append(self._known.setdefault(shape, len(self._known)))
        shape_of = (len(self.micro_batches), len(options["sequence_parallel"]), len(options.get("order", [""])), 2)
        return np.array(numbers).reshape(*shape_of, len(offload))

    def _shape(self, layout: Any, options: dict[str, list[Any]], order: str, zero: str, offload: bool) -> RankShape:
        """The shape with a micro-batch of 1 and without sequence parallelism; messages between stages do not count."""
        how = "offload" if offload else next((how for how in options["recompute"] if how != "offload"), "none")
        chosen = {"pipeline": "1 1f1b x1", "zero_stage": zero, "recompute": how, "sequence_parallel": False}
        job = self._grid.build(layout, chosen | ({"order": order} if order else {}))
        share = self._hardware.comm_compute_share if self._hardware.kind != "cpu" else 0.0
        return replace(rank_shape(job, share, semantics_of(job, self._hardware.kind)), scatter_p2p=False)

    def counts(self, parts: int, every: int) -> tuple[Floats, Floats]:
        """Number of blocks of each part of the model, and how many are recomputed."""
        return layer_counts(self.shapes[0], parts, self.kinds, every)

    def part_seconds(self, ids: Ids, part: str, how: str, parts: int, every: int) -> Floats:
        """The least seconds of a pass through each part of the model, of the computation and of the host's launches.

        Args:
            ids: Numbers of shapes; the last axis: whether fully sharded.
            part: As in ``PassKind``.
            how: ``none``, ``selective`` or ``full``.
            parts: Parts of the model.
            every: Of the layers of a part, every n-th is recomputed.

        Returns:
            Shape ``(2, *ids.shape, parts)``.
        """
        counts, again = self.counts(parts, every)
        if part == "forward" or part == "weight":
            columns = [self._passes.index(PassKind(part))] * 2
            return self._sums(ids, (columns, columns), counts, np.zeros_like(counts))
        plain = self._passes.index(PassKind(part, "selective" if how == "selective" else "none"))
        if how != "full":
            return self._sums(ids, ([plain] * 2, [plain] * 2), counts, np.zeros_like(counts))
        whole = [  # fully sharded ranks stop after the last step that keeps an activation
            self._passes.index(PassKind(part, "full", self.shapes[0].kernels.whole_layers_again and not fully))
            for fully in (False, True)
        ]
        return self._sums(ids, ([plain] * 2, whole), counts - again, again)

    def _sums(self, ids: Ids, columns: tuple[list[int], list[int]], counts: Floats, again: Floats) -> Floats:
        found = []
        for table in (self._floors.seconds, self._floors.launches):
            both = [
                table[ids[..., fully], :, columns[0][fully]] @ counts.T
                + table[ids[..., fully], :, columns[1][fully]] @ again.T
                for fully in (0, 1)
            ]
            found.append(np.stack(both, axis=-2))
        return np.array(found)

    def kept_bytes(self, ids: Ids, how: str, parts: int, every: int) -> Floats:
        """Least bytes that each part of the model keeps of a micro-batch; shape ``(*ids.shape, parts)``."""
        counts, again = self.counts(parts, every)
        plain = self._recompute.index("selective" if how == "selective" else "none")
        if how != "full":
            return np.asarray(self._kept[ids, :, plain] @ counts.T)
        full = self._recompute.index("full")
        return np.asarray(self._kept[ids, :, plain] @ (counts - again).T + self._kept[ids, :, full] @ again.T)
