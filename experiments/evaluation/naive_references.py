"""Two baselines without a simulator, with which every prediction is compared.

*Constant MFU*: the model's FLOP at one utilisation, times the pipeline's bubble; the utilisation is the best one for
the very rows that it is scored on, each device and precision of a source for itself.  *Carried forward*: the smallest
run of a series gives a speed per device, which all larger runs are said to have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from stepsight.experiments.evaluation.error_metrics import best_scale
from stepsight.experiments.evaluation.scored_row import Scored

DIGITS = 12  # of a time: what is predicted alike is equal, whatever the last bits of its FLOP are


def constant_mfu(rows: Sequence[Scored]) -> list[float]:
    """Seconds of every row, in their order."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.row.source, row.job.cluster.hardware, row.job.batch.precision].append(index)
    seconds = [0.0] * len(rows)
    for indices in groups.values():
        ideal = [rows[i].ideal_s * _bubble(rows[i]) for i in indices]
        scale = best_scale(ideal, [rows[i].measured_s for i in indices])
        for i, value in zip(indices, ideal, strict=True):
            seconds[i] = float(f"{scale * value:.{DIGITS}g}")
    return seconds


def _bubble(row: Scored) -> float:
    """Time of a pipeline over that of its work: 1 + (pp - 1) / (chunks * micro-batches)."""
    p = row.job.parallel
    return 1.0 + (p.pp - 1) / (p.virtual_stages * row.job.num_micro_batches)


def carried_forward(rows: Sequence[Scored]) -> list[float | None]:
    """Seconds of every row, in their order; None for the smallest runs of their series."""
    series: dict[Hashable, list[Scored]] = defaultdict(list)
    for row in rows:
        series[series_of(row)].append(row)
    return [_carried(row, series[series_of(row)]) for row in rows]


def _carried(row: Scored, series: Sequence[Scored]) -> float | None:
    fewest = min(other.row.gpus for other in series)
    if row.row.gpus == fewest:
        return None
    batch = row.job.batch

    def unlike(other: Scored) -> tuple[float, float]:
        """Sort key for the smallest run that is most similar to a row: by micro-batch, then by sequences per device."""
        micro = other.job.batch.micro_batch / batch.micro_batch
        return max(micro, 1 / micro), abs(_sequences(other) / _sequences(row) - 1.0)

    start = min((other for other in series if other.row.gpus == fewest), key=unlike)
    return start.measured_s * _sequences(row) / _sequences(start)


def _sequences(row: Scored) -> float:
    """Sequences of an iteration for every device."""
    return row.job.batch.global_batch / row.row.gpus


def series_of(row: Scored) -> Hashable:
    """Common properties of the runs of a series: all except the number of replicas and the batch."""
    m, p, job = row.job.model, row.job.parallel, row.job
    degrees = (p.tp, p.pp, p.virtual_stages, p.cp, p.ep, p.sequence_parallel, p.recompute, p.recompute_every)
    return (
        row.row.source,
        row.row.text("framework"),
        m,
        degrees,
        p.zero_stage,
        p.dp_shard,
        job.batch.precision,
        job.cluster.hardware,
    )
