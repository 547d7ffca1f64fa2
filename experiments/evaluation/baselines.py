"""Simple models beside every claim: a roofline, the closed form of automatic planners, and a constant utilisation.

*roofline*: the simulator with hardware facts alone.  *analytic*: a sum of terms, without simulating a schedule, from
the same rates of ops and collectives that answer for the job.  *mfu*: the model's FLOP at one utilisation for each chip
and precision, times the pipeline's bubble; the utilisation is the best one for the very rows that it is judged on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from stepsight.dataset.base.errors import JobError, PredictorError, StepsightError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.evaluation import error_metrics
from stepsight.experiments.evaluation.error_metrics import PredictorOf, Scored
from stepsight.experiments.reports.text_table import Number, table_of
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.iteration.simulate import Simulation
from stepsight.simulator.programs.segment import Segment
from stepsight.training.corrections.intervals import seconds_text
from stepsight.training.prediction.prediction import ROOFLINE, predict

ANALYTIC, MFU = "analytic", "mfu"
BASELINES = (ROOFLINE, ANALYTIC, MFU)


def read_baselines(text: str) -> tuple[str, ...]:
    """The names in ``roofline,analytic``."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not set(names) <= set(BASELINES):
        raise StepsightError(f"--baseline takes some of {', '.join(BASELINES)}, separated by commas, got {text!r:.80}")
    return names


def closed_form(simulation: Simulation) -> dict[str, float]:
    """The iteration by the closed form of automatic planners: seconds by term, which add up to it.

    Of the slowest stage: ``m (f + b)`` of computation; collectives between ranks of a replica and messages there and
    back for each of ``m`` micro-batches; the pipeline stands still for ``(p - 1) / v`` micro-batches; gradients are
    sent once (for each micro-batch, with gathers, if parameters are sharded), and computation hides them where there is
    no pipeline; the optimizer follows.
    """
    lowered, latency, parallel = simulation.lowered, simulation.timer.latency, simulation.job.parallel
    many, track = simulation.job.num_micro_batches, lowered.track
    passes: dict[tuple[int, str], tuple[float, float, float]] = {}  # by part and label: ops, collectives, of replicas
    for action, at in enumerate(lowered.segment.tolist()):
        part, segment = int(track.part[action]), lowered.segments[at]
        if (part, segment.label) not in passes:
            sent = (_sent(segment, latency, replicas=replicas) for replicas in (False, True))
            passes[part, segment.label] = (_computed(segment, latency), *sent)  # type: ignore[assignment]
    compute = inside = sharded = backward = 0.0
    for stage in {int(track.schedule.placement[part, 0]) for part, _ in passes}:
        own = {key: of for key, of in passes.items() if track.schedule.placement[key[0], 0] == stage}
        if sum(of[0] for of in own.values()) >= compute:
            compute, inside, sharded = (sum(of[index] for of in own.values()) for index in range(3))
            backward = sum(of[0] for (_, label), of in own.items() if label != "forward")
    message = float(latency.collective_seconds(lowered.messages).max()) if lowered.messages else 0.0
    gradients, hidden = max((_sent(each, latency, replicas=True) for each in lowered.segments), default=0.0), 0.0
    if parallel.zero_stage == 3:
        gradients = many * sharded
        hidden = min(gradients, many * compute)
    elif parallel.pp == 1 and not parallel.zero_stage:
        hidden = min(gradients, backward)
    steps = [lowered.segments[number] for number in {*lowered.optimizer.tolist()} if number >= 0]
    return {
        "computation": many * compute,
        "tensor_communication": many * inside,
        "pipeline_communication": many * 2 * message,
        "bubble": (parallel.pp - 1) / parallel.virtual_stages * (compute + inside + 2 * message),
        "data_communication": gradients - hidden,
        "optimizer": max((_computed(step, latency) for step in steps), default=0.0),
    }


def _computed(segment: Segment, latency: LatencyModel) -> float:
    """Seconds of a segment's ops."""
    ops = [node.work for node in segment.program.nodes if isinstance(node.work, Op)]
    return float(latency.op_seconds(ops).sum()) if ops else 0.0


def _sent(segment: Segment, latency: LatencyModel, *, replicas: bool) -> float:
    """Seconds of a segment's collectives between replicas, or of those between ranks of one replica."""
    nodes = [node for node in segment.program.nodes if node.stream.startswith("dp") == replicas and node.share == 1]
    sent = [node.work for node in nodes if isinstance(node.work, Collective)]  # others: what they take of computation
    return float(latency.collective_seconds(sent).sum()) if sent else 0.0


def baseline_figures(rows: Sequence[Scored], predictor_of: PredictorOf, names: Sequence[str]) -> dict[str, Any]:
    """Errors and regret of baselines on rows by name, in percent, and as ``ours`` those of the predictions of the rows
    that each answers.
    """

    def seconds_of(name: str, row: Scored) -> float | None:
        taught = predictor_of(row.job.cluster.hardware) if name == ANALYTIC else None
        asked = error_metrics.without_source(taught, row.row.source)
        with suppress(JobError, PredictorError):  # it says nothing
            found = predict(row.job, asked or ROOFLINE, software=row.row.software)
            return sum(closed_form(found.simulation).values()) if name == ANALYTIC else found.iteration_time_s
        return None

    def figures(of: Sequence[Scored], seconds: Sequence[float]) -> dict[str, Any]:
        measured = [row.measured_s for row in of]
        return {
            **error_metrics.errors(seconds, measured).to_dict(),
            "regret": error_metrics.regret([row.choice for row in of], seconds, measured),
        }

    found = {}
    for name in names:
        mfu = error_metrics.constant_mfu(rows, by_source=False) if name == MFU else None
        seconds: Sequence[float | None] = mfu or [seconds_of(name, row) for row in rows]
        pairs = [(row, value) for row, value in zip(rows, seconds, strict=True) if value is not None]
        known = [row for row, _ in pairs]
        ours = figures(known, [row.predicted_s for row in known])
        found[name] = {**figures(known, [value for _, value in pairs]), "ours": ours}
    return found


def baselines_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a row for each baseline, and ours on the same rows."""
    pairs = [((name, each), ("  ours", each["ours"])) for name, each in found.items()]
    rows = [{"model": name, **of} for pair in pairs for name, of in pair]
    keys = ("mape", "median", "p90", "max", "bias", "regret")
    columns = {"baseline, percent": "model", "rows": "used", **{key: key for key in keys}}
    return table_of(rows, columns)


def terms_text(terms: Mapping[str, float], ours_s: float) -> str:
    """The terms of the closed form as text, beside the prediction."""
    whole = sum(terms.values())
    rows = [
        {"analytic": name.replace("_", " "), "time": seconds_text(value), "%": Number(100 * value / whole)}
        for name, value in terms.items()
        if value > 0
    ]
    difference = f"{100 * (whole / ours_s - 1):+.1f} % from the prediction"
    head = f"analytic   {seconds_text(whole)}, {difference}: terms that add up, without simulating the schedule"
    return f"{head}\n{table_of(rows, {key: key for key in ('analytic', 'time', '%')})}"
