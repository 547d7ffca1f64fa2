"""Placement of experts on ranks by load, such that the busiest rank has the least work.

All ranks of an expert-parallel group wait for the busiest one.  Each holds the same number of experts.  The loads are
those of the whole group's tokens, so it makes no difference on which node a rank lies: where the group itself lies is
the order of ranks, which a search varies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stepsight.dataset.base.bounded import read_file, reason
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job

Placement = tuple[tuple[int, ...], ...]  # numbers of the experts of each rank
MOST_LAYERS, MOST_EXPERTS = 4096, 16384


@dataclass(frozen=True)
class ExpertLoads:
    """Number of tokens of each expert."""

    # of each layer with experts, or one row for all of them: tokens of each expert, in any unit
    layers: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(loads) for loads in self.layers}
        if len(sizes) != 1 or not 1 <= len(self.layers) <= MOST_LAYERS or not 2 <= max(sizes) <= MOST_EXPERTS:
            rule = f"one row, or one for each of at most {MOST_LAYERS} layers, of 2 to {MOST_EXPERTS} experts each"
            raise StepsightError(f"expert loads must be {rule}, got {len(self.layers)} rows of {sorted(sizes)!s:.80}")
        for row, loads in enumerate(self.layers):
            wrong = [load for load in loads if not 0 <= load < math.inf]
            if wrong or not sum(loads) > 0:
                got = f"{wrong[0] if wrong else 'only 0'} in row {row + 1}"
                raise StepsightError(f"loads of experts must be numbers of tokens >= 0, not all 0, got {got}")

    @classmethod
    def read(cls, path: Path) -> ExpertLoads:
        """Read a CSV file: a number of tokens for each expert; one line, or one for each layer with experts."""
        try:
            lines = read_file(path).decode("utf-8", "replace").splitlines()
        except OSError as error:
            raise StepsightError(f"cannot read expert loads {path}: {reason(error)}") from None
        rows = list[tuple[float, ...]]()
        for number, line in enumerate(lines, start=1):
            try:
                rows += [tuple(map(float, line.split(",")))] if line.strip() else []
            except ValueError:
                rule = "loads must be numbers separated by commas, one for each expert"
                raise StepsightError(f"{path}, line {number}: {rule}, got {line!r:.80}") from None
        if not rows:
            raise StepsightError(f"{path} must hold a line of loads, one number for each expert, got none")
        return cls(tuple(rows))

    @classmethod
    def of(cls, value: ExpertLoads | str | Path | None) -> ExpertLoads | None:
        """Loads unchanged, or those of a file."""
        return cls.read(Path(value)) if isinstance(value, str | Path) else value

    def check(self, job: Job) -> None:
        """Check that the job has the same experts and layers."""
        model, experts = job.model, len(self.layers[0])
        mixtures = (model.layers - model.dense_layers) // model.moe_every
        if not model.experts:
            raise StepsightError(f"expert loads are for a model with experts, got {job.model_name}, which has none")
        if experts != model.experts:
            raise StepsightError(f"expert loads must be of the model's {model.experts} experts, got {experts}")
        if len(self.layers) not in (1, mixtures):
            rule = f"one line, or one for each of the {mixtures} layers with experts"
            raise StepsightError(f"expert loads must be {rule}, got {len(self.layers)}")

    def imbalance(self, ep: int, *, by_load: bool = True) -> float:
        """Tokens of the busiest rank relative to the mean, averaged over layers."""
        place = _placed if by_load else _in_order
        return fmean(_busiest(loads, place(loads, ep)) * ep / sum(loads) for loads in self.layers)

    def apply(self, job: Job, *, by_load: bool = True) -> Job:
        """The job with the imbalance of its experts under its expert-parallel degree."""
        imbalance = max(1.0, self.imbalance(job.parallel.ep, by_load=by_load))
        return replace(job, model=replace(job.model, imbalance=imbalance))

    def to_dict(self, ep: int) -> dict[str, Any]:
        """Plain values for JSON: the experts of each rank by layer, and the gain of this placement."""
        return {
            "imbalance": self.imbalance(ep),
            "imbalance_in_order": self.imbalance(ep, by_load=False),
            "experts_of_ranks": [list(map(list, _placed(loads, ep))) for loads in self.layers],
        }


def _in_order(loads: tuple[float, ...], ep: int) -> Placement:
    each = len(loads) // ep
    return tuple([tuple(range(rank * each, (rank + 1) * each)) for rank in range(ep)])


def least_loaded(loads: Sequence[float], ranks: int, room: int) -> list[int]:
    """The rank of each load: the heaviest first, to the rank with least that has room (Graham 1969, LPT)."""
    found, held, heap = [0] * len(loads), [0] * ranks, [(0.0, rank) for rank in range(ranks)]
    for at in sorted(range(len(loads)), key=lambda at: -loads[at]):
        load, found[at] = heapq.heappop(heap)
        held[found[at]] += 1
        if held[found[at]] < room:
            heapq.heappush(heap, (load + loads[at], found[at]))
    return found


@cached(4096)
def _placed(loads: tuple[float, ...], ep: int) -> Placement:
    """The experts of each rank by load; in their order where this is no better."""
    ranks = least_loaded(loads, ep, len(loads) // ep)
    found = tuple([tuple([expert for expert, own in enumerate(ranks) if own == rank]) for rank in range(ep)])
    plain = _in_order(loads, ep)
    return found if _busiest(loads, found) < _busiest(loads, plain) else plain


def _busiest(loads: tuple[float, ...], placement: Placement) -> float:
    return max(sum(loads[expert] for expert in rank) for rank in placement)
