"""Layers of each pipeline stage, with embedding, head, memory and slower nodes.

The time and the memory of every part of the model are taken as linear in its layers.  Two predictions, which differ by
one layer between neighbouring parts, give the lines.  What minimizes the longest part by these lines is
predicted, and becomes the next point of departure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.simulator.clock.engine import NUM_CLOCKS
from stepsight.simulator.clock.track import through
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.predictor.predictor import Predictor

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = tuple[int, ...]
MOST_ROUNDS = 4  # rounds of lines and shares
MOST_MOVES, MOST_PREDICTIONS = 12, 100  # rounds of moving single layers, after that; and of both together
_LESS = 1e-6  # relative; smaller differences count as equal


@dataclass(frozen=True)
class StageLayers:
    """The best layers per stage that were found."""

    job: Job  # the job with them; the job as it was if nothing is faster
    best: Prediction  # of it
    even: Prediction  # of the job as it was
    predictions: int  # how many were made

    @property
    def gain_percent(self) -> float:
        """Relative improvement of the iteration over the original job."""
        return 100 * (1 - self.best.iteration_time_s / self.even.iteration_time_s)


def best_stage_layers(job: Job, predictor: Predictor | str | None = None) -> StageLayers:
    """Find the layers per stage with the shortest predicted iteration that fits in memory."""
    if job.parallel.pp == 1:
        raise JobError(f"layers per stage need a pipeline, got pp 1 in {job.name}")
    if job.parallel.schedule.endswith(".csv"):
        raise JobError(f"layers per stage are those of the schedule {job.parallel.schedule}")
    parts = job.parallel.pp * job.parallel.virtual_stages
    each, rest = divmod(job.model.total_layers, parts)
    counts = start = job.parallel.stage_layers or tuple(each + (part < rest) for part in range(parts))
    search = _Search(job, predictor)
    for _ in range(MOST_ROUNDS):
        wanted = search.next_counts(counts)
        if wanted in search.tried:
            break
        search.ask(wanted)
        counts = search.best
    search.move_layers()
    best = search.tried[search.best]
    return StageLayers(job if search.best == start else best.job, best, search.ask(start), len(search.tried))


def with_uneven_stages(result: SearchResult, predictor: Predictor | str | None = None, top: int = 3) -> SearchResult:
    """Refine the best strategies of a search by uneven stages; improved ones are added as choices."""
    piped = [choice.job for choice in result.choices if choice.fits and choice.job.parallel.pp > 1][:top]
    refined = [best_stage_layers(job, predictor) for job in piped]
    more = [
        Choice.of(found.best, partial(predict, predictor=predictor))
        for found in refined
        if found.best.memory.fits and found.gain_percent > 100 * _LESS
    ]
    return replace(result, choices=sorted([*result.choices, *more], key=lambda choice: choice.rank(result.goal)))


def least_bottleneck(
    intercept: Floats, slope: Floats, layers: int, least: Sequence[int], most: Sequence[int]
) -> Counts:
    """Layers of each part with the sum ``layers`` that minimise the longest part; empty if there are none.

    Each layer goes to the part that is shortest with it: parts only grow, so no other share has a shorter longest part.
    ``intercept``, ``slope``: seconds of each part without layers, and of each of its layers, shape ``(num_parts,)``;
    ``least``, ``most``: layers of each part.
    """
    counts = np.array(least)
    while counts.sum() < layers:
        after = np.where(counts < most, intercept + slope * (counts + 1), np.inf)
        counts[after.argmin()] += 1
        if np.isinf(after.min()):
            return ()
    return tuple(counts.tolist()) if counts.sum() == layers else ()


class _Search:
    """Predicted distributions of layers."""

    def __init__(self, job: Job, predictor: Predictor | str | None) -> None:
        self._job, self._predictor = job, predictor
        self.tried: dict[Counts, Prediction] = {}

    def ask(self, counts: Counts) -> Prediction:
        """The prediction of a distribution of layers."""
        if counts not in self.tried:
            job = replace(self._job, parallel=replace(self._job.parallel, stage_layers=counts))
            self.tried[counts] = predict(job, self._predictor)
        return self.tried[counts]

    @property
    def best(self) -> Counts:
        """The distribution with the shortest iteration that fits in memory; if none fits, with the least memory."""

        def key(counts: Counts) -> tuple[bool, float]:
            prediction = self.tried[counts]
            fits = prediction.memory.fits
            return not fits, prediction.iteration_time_s if fits else prediction.memory.peak_bytes

        return min(self.tried, key=key)

    def next_counts(self, counts: Counts) -> Counts:
        """The distribution with the shortest longest part, by lines through one and its shifted neighbour, in which of
        every two neighbouring parts one has given a layer to the other.
        """
        here, shifted, parts = self.ask(counts), list(counts), len(counts)
        for part in range(0, parts - 1, 2):
            source, target = (part, part + 1) if shifted[part] > 1 else (part + 1, part)
            if shifted[source] > 1:
                shifted[source] -= 1
                shifted[target] += 1
        if parts % 2 and parts > 2 and shifted[-2] > 1:
            shifted[-2] -= 1
            shifted[-1] += 1
        if tuple(shifted) == counts:  # one layer for each part: there is nothing to distribute
            return counts
        there, step = self.ask(tuple(shifted)), np.array(shifted) - np.array(counts)
        moved, seconds = step != 0, part_seconds(here)
        slope = np.maximum((part_seconds(there) - seconds) / np.where(moved, step, 1), 0.0)
        slope[~moved] = slope[moved].mean()
        intercept = np.maximum(seconds - slope * np.array(counts), 0.0)
        layers, least = sum(counts), [1] * parts
        least[0] = least[-1] = 0 if parts > 2 else 1
        most = [layers] * parts
        if parts == here.job.parallel.pp:  # what fits in the memory of each device, by a line as well
            now, then = (prediction.memory.bytes_of.sum(axis=1) for prediction in (here, there))
            for part, count in enumerate(counts):
                each = (then[part] - now[part]) / step[part] if step[part] else 0.0
                room = (here.memory.device(part).memory_bytes - now[part]) / each if each > 0 else layers
                most[part] = int(np.clip(count + np.floor(room), 1, layers))
        return least_bottleneck(intercept, slope, layers, least, most) or counts

    def move_layers(self) -> None:
        """Move single layers from the longest parts to the shortest as long as the iteration gets shorter."""
        for _ in range(MOST_MOVES):
            best = self.best
            order = np.argsort(part_seconds(self.tried[best])).tolist()
            for source, target in product(order[::-1], order):
                if source == target or best[source] <= (1 if 0 < source < len(best) - 1 else 0):
                    continue
                if len(self.tried) >= MOST_PREDICTIONS:
                    return
                moved = list(best)
                moved[source] -= 1
                moved[target] += 1
                self.ask(tuple(moved))
            if self.tried[self.best].iteration_time_s > self.tried[best].iteration_time_s * (1 - _LESS):
                return


def part_seconds(prediction: Prediction) -> Floats:
    """Seconds of one micro-batch in each part of the model, in the slowest pipeline; shape ``(num_parts,)``."""
    pipeline, track = prediction.simulation.slowest, prediction.simulation.lowered.track
    transition = pipeline.transition[pipeline.rows]
    actions = through(transition, np.zeros((len(transition), transition.shape[-1])))[:, :NUM_CLOCKS].max(axis=1)
    total = np.zeros(int(track.part.max()) + 1)
    np.add.at(total, track.part, actions)
    return total / prediction.simulation.lowered.num_micro_batches
