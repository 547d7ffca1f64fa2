"""Sensitivity of a job's time, and single changes that make it faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.questions.sweep import change_job
from stepsight.training.prediction.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

MOST_STEPS = 6
LEAST_GAIN = 0.002  # share of the throughput: smaller gains are within the prediction error


Effect = dict[str, Any]  # of a change: name, values, tokens_per_s_ratio, iteration_time_s, memory_bytes, fits


def tornado(prediction: Prediction, predictor: Predictor | str | None = None) -> list[dict[str, Any]]:
    """Halve and double links, latency, batch sizes and nodes, one at a time.

    Returns:
        A row for each with ``name``, ``half`` and ``double`` (``Effect``; None: not legal), the largest
        effect first.
    """
    rows: list[dict[str, Any]] = []
    for name, key, value in _levers(prediction.job):
        half = _effect(prediction, f"{name} halved", {key: _scaled(value, 0.5)}, predictor)
        double = _effect(prediction, f"{name} doubled", {key: _scaled(value, 2.0)}, predictor)
        if half or double:
            rows.append({"name": name, "half": half, "double": double})
    size = lambda row: max(abs(row[way]["tokens_per_s_ratio"] - 1) for way in ("half", "double") if row[way])
    return sorted(rows, key=size, reverse=True)


def _levers(job: Job) -> Iterator[tuple[str, str, float]]:
    """Name, key and value of each quantity that is halved and doubled."""
    for name, link in (("inter_node", job.fabric.inter_node), ("intra_node", job.fabric.intra_node)):
        between = name == "inter_node"
        words, key = f"links {'between' if between else 'within'} nodes", f"cluster.fabric.{name}"
        if (job.cluster.nodes if between else job.cluster.devices_per_node) > 1:
            yield f"bandwidth of {words}", f"{key}.bandwidth_gbytes_per_s", link.bandwidth_bytes_per_s / 1e9
            yield f"latency of {words}", f"{key}.latency_us", link.latency_s * 1e6
    yield "global batch", "batch.global_batch", job.batch.global_batch
    yield "micro-batch", "batch.micro_batch", job.batch.micro_batch
    yield "nodes", "cluster.nodes", job.cluster.nodes
    yield "sequence length", "model.seq_len", job.model.seq_len


def _scaled(value: float, factor: float) -> float:
    return max(1, int(value * factor)) if isinstance(value, int) else value * factor


def _effect(
    prediction: Prediction, name: str, values: dict[str, Any], predictor: Predictor | str | None
) -> Effect | None:
    """The effect of a change; None if the changed job is not legal or the same."""
    try:
        job = change_job(prediction.job, values)
        if job == prediction.job:
            return None
        found = predict(job, predictor)
    except StepsightError:
        return None
    return {
        "name": name,
        "values": values,
        "tokens_per_s_ratio": found.tokens_per_s / prediction.tokens_per_s,
        "iteration_time_s": found.iteration_time_s,
        "memory_bytes": found.memory.peak_bytes,
        "fits": found.memory.fits,
    }


def next_steps(prediction: Prediction, predictor: Predictor | str | None = None) -> list[Effect]:
    """Find single changes of the strategy that fit in memory and are faster, the fastest first."""
    found = [_effect(prediction, name, values, predictor) for name, values in _moves(prediction.job)]
    better = [each for each in found if each and each["fits"] and each["tokens_per_s_ratio"] > 1 + LEAST_GAIN]
    return sorted(better, key=lambda effect: -effect["tokens_per_s_ratio"])[:MOST_STEPS]


def _moves(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    p, batch = job.parallel, job.batch
    for recompute in ("none", "selective"):
        if p.recompute != recompute:
            yield f"recompute = {recompute}", {"parallel.recompute": recompute}
    for size in (batch.micro_batch * 2, batch.micro_batch // 2):
        if size:
            yield f"micro_batch = {size}", {"batch.micro_batch": size}
    if p.tp > 1 and not p.sequence_parallel:
        yield "sequence_parallel = true", {"parallel.sequence_parallel": True}
    if p.pp > 1:
        if p.schedule != "zb-h1":
            yield "schedule = zb-h1", {"parallel.schedule": "zb-h1", "parallel.virtual_stages": 1}
        for virtual in (2, 4):
            yield (
                f"schedule = 1f1b with virtual_stages = {virtual}",
                {"parallel.schedule": "1f1b", "parallel.virtual_stages": virtual},
            )
        yield f"pp = {p.pp // 2}", {"parallel.pp": p.pp // 2}
    if p.tp > 1:
        yield f"tp = {p.tp // 2}", {"parallel.tp": p.tp // 2}
    yield f"tp = {p.tp * 2}", {"parallel.tp": p.tp * 2}
    yield f"pp = {p.pp * 2}", {"parallel.pp": p.pp * 2}
    for stage in (0, 1, 3):
        if p.zero_stage != stage and p.dp > 1:
            yield f"zero_stage = {stage}", {"parallel.zero_stage": stage}
    if not p.overlap_grad_reduce:
        yield "overlap_grad_reduce = true", {"parallel.overlap_grad_reduce": True}
    if p.zero_stage in (1, 2) and not p.overlap_param_gather:
        yield "overlap_param_gather = true", {"parallel.overlap_param_gather": True}
    if p.tp > 1 and not p.overlap_tp:
        yield "overlap_tp = split", {"parallel.overlap_tp": "split"}
