"""Groups of runs that a user could choose between: the regret of choosing by predictions, and by chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from stepsight.experiments.evaluation.error_metrics import chosen_time
from stepsight.experiments.evaluation.naive_references import constant_mfu
from stepsight.experiments.evaluation.scored_row import Scored

TOP = 5


@dataclass(frozen=True)
class ChoiceGroup:
    """Measured runs of one model on the same devices with the same global batch.

    Attributes:
        source: Who measured.
        name: Model, devices and global batch.
        runs: How many there are, two at least.
        best_s: Time of the fastest one, in seconds.
        chosen_s: Measured time of the one predicted to be fastest, in seconds; the mean of those predicted alike.
        place: Its place among the measured times, 1 if it is the fastest.
        regret: How much longer it takes than the fastest, in percent.
        random_regret: The same of a run chosen by chance, on average.
        constant_mfu_regret: The same of the choice by constant MFU; as by chance where that predicts one time for all.
        top_shared: How many of the ``TOP`` fastest runs are among as many that are predicted to be fastest, in percent;
            None for no more than ``TOP`` runs.
        top_order: How many pairs of the ``TOP`` fastest runs are predicted in their order, in percent; of those
            predicted alike a half.
    """

    source: str
    name: str
    runs: int
    best_s: float
    chosen_s: float
    place: int
    regret: float
    random_regret: float
    constant_mfu_regret: float
    top_shared: float | None
    top_order: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def choice_groups(rows: Sequence[Scored]) -> list[ChoiceGroup]:
    """The groups of some rows, in their order.

    Groups without a choice are left out: those of one strategy, which ran on two clusters, say, or with two versions of
    the software, and those whose runs are all predicted alike.
    """
    naive = _by_source(rows)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.choice].append(index)
    return [
        _group([rows[i] for i in indices], [naive[i] for i in indices])
        for indices in groups.values()
        if len({rows[i].predicted_s for i in indices}) > 1 and len({_strategy(rows[i]) for i in indices}) > 1
    ]


def _strategy(row: Scored) -> Hashable:
    """The strategy of a run, which a user chooses for a model, devices and batch."""
    p, micro_batch = row.job.parallel, row.job.batch.micro_batch
    degrees = (p.tp, p.cp, p.pp, p.ep, p.dp, p.schedule, p.virtual_stages, p.stage_layers, p.order)
    memory = (p.zero_stage, p.dp_shard, p.recompute, p.recompute_every, p.sequence_parallel, p.offload_activations)
    return degrees, memory, micro_batch


def _by_source(rows: Sequence[Scored]) -> list[float]:
    """Predictions of a constant MFU, fitted to each source."""
    sources: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        sources[row.row.source].append(index)
    seconds = [0.0] * len(rows)
    for indices in sources.values():
        for index, value in zip(indices, constant_mfu([rows[i] for i in indices]), strict=True):
            seconds[index] = value
    return seconds


def _group(rows: Sequence[Scored], naive: Sequence[float]) -> ChoiceGroup:
    measured, predicted = [row.measured_s for row in rows], [row.predicted_s for row in rows]
    best, everyone, job = min(measured), range(len(rows)), rows[0].job
    chosen = chosen_time(predicted, measured)
    fastest = sorted(everyone, key=measured.__getitem__)[:TOP]
    said = sorted(everyone, key=predicted.__getitem__)[:TOP]
    pairs = [(predicted[one], predicted[two]) for one, two in combinations(fastest, 2)]  # the faster run first
    return ChoiceGroup(
        source=rows[0].row.source,
        name=f"{rows[0].row.text('model_name') or job.model_name}, {rows[0].row.gpus} x {job.cluster.hardware}, "
        f"global batch {job.batch.global_batch}, {job.batch.precision}",
        runs=len(rows),
        best_s=best,
        chosen_s=chosen,
        place=1 + sum(time_s < chosen for time_s in measured),
        regret=100.0 * (chosen / best - 1.0),
        random_regret=100.0 * (chosen_time([0.0] * len(rows), measured) / best - 1.0),
        constant_mfu_regret=100.0 * (chosen_time(naive, measured) / best - 1.0),
        top_shared=100.0 * len(set(fastest) & set(said)) / TOP if len(rows) > TOP else None,
        top_order=100.0 * sum((one < two) + 0.5 * (one == two) for one, two in pairs) / len(pairs),
    )


def mean_figures(groups: Sequence[ChoiceGroup]) -> dict[str, float | None]:
    """Means over groups; None if there are none."""
    means: dict[str, float | None] = {"groups": len(groups), "runs": sum(group.runs for group in groups)}
    for key in ("regret", "random_regret", "constant_mfu_regret", "top_shared", "top_order"):
        values = [value for value in (getattr(group, key) for group in groups) if value is not None]
        means[key] = sum(values) / len(values) if values else None
    return means
