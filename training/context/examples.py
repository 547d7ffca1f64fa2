"""From measured runs to what the context model learns from, and how well it does on runs held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import JobError
from stepsight.dataset.hardware import find_fabric, usual_fabric
from stepsight.dataset.imported.rank_graph import OPAQUE
from stepsight.dataset.op import Op
from stepsight.dataset.program import Node
from stepsight.gnn.inference import ContextWeights
from stepsight.simulator.latency_model import LatencyModel
from stepsight.simulator.segment_timing import timer_of
from stepsight.simulator.simulate import simulate
from stepsight.training.context.fit_context import Example, Whole, fit_context, op_error
from stepsight.training.context.through_simulator import Iteration
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import MeasuredRun, average
from stepsight.training.measured.stand_in_runs import run_latency
from stepsight.training.predictor.learned_latency import LearnedLatency
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
FOLDS = 5
MIN_RUNS = 4  # fewer cannot be held back in turn
_UNKNOWN_LINKS = "loopback"  # of hardware without usual links: they are features of collectives, and teach nothing


Taught = MeasuredRun | ImportedSegments  # what has segments


def make_examples(runs: Sequence[Taught], predictor: Predictor) -> list[Example]:
    """Distinct segments of the runs' traces, with the predictor's seconds alone."""
    examples = []
    for run in runs:
        imported = isinstance(run, ImportedSegments)
        latency = _latency(run, predictor)
        for mean in average(run.segments):
            if len(mean.program):
                if imported:
                    mean = replace(mean, slot_s=np.where(_learnable(mean.program.nodes), mean.slot_s, np.nan))
                alone = seconds_alone(mean.program.nodes, latency)
                examples.append(Example(mean.program, alone, mean.slot_s, mean.busy, mean.run, mean.repeats))
    return examples


def _latency(run: Taught, predictor: Predictor) -> LatencyModel:
    return (
        imported_latency(run, predictor) if isinstance(run, ImportedSegments) else run_latency(run.manifest, predictor)
    )


def imported_latency(run: ImportedSegments, predictor: Predictor) -> LatencyModel:
    """What a predictor knows of an imported run; without a job, of one device on the hardware's usual links."""
    if run.job is not None and run.job.hardware_name == predictor.hardware.name:
        return predictor.latency(run.job)
    try:
        fabric = find_fabric(usual_fabric(predictor.hardware.name))
    except JobError:
        fabric = find_fabric(_UNKNOWN_LINKS)
    return LearnedLatency(
        predictor.hardware, predictor.kernel, predictor.collective, predictor.context, fabric=fabric, busy=1
    )


def _learnable(nodes: Sequence[Node]) -> NDArray[np.bool_]:
    """``(n,)``: which nodes a predictor can know: not opaque kernels, nor ops of unknown sizes."""
    return np.array(
        [not isinstance(n.work, Op) or (n.work.kind != OPAQUE and min(n.work.dims, default=0) > 0) for n in nodes]
    )


def seconds_alone(nodes: Sequence[Node], latency: LatencyModel) -> Array:
    """Seconds of each node of a program on its own, its share included, ``(len(nodes),)``."""
    return timer_of(latency).work_seconds([node.work for node in nodes]) * [node.share for node in nodes]


def make_wholes(runs: Sequence[MeasuredRun], predictor: Predictor) -> list[Whole]:
    """The runs that are whole as functions of their nodes, with their measured iteration times."""
    wholes = []
    for run in (run.manifest for run in runs if run.manifest.whole):
        iteration = Iteration.of(run.job, run_latency(run, predictor))
        wholes.append(Whole(iteration, run.iteration_time_s, run.busy, run.name))
    return wholes


def iteration_times(runs: Sequence[MeasuredRun], predictor: Predictor) -> Array:
    """Predicted seconds of each run's job, before calibration, ``(runs,)``."""
    latencies = [(run.manifest.job, run_latency(run.manifest, predictor)) for run in runs]
    return np.array([simulate(job, latency).iteration_time_s for job, latency in latencies])


@dataclass(frozen=True)
class HeldBack:
    """What comes out when runs are held back in turn; shapes ``(runs,)``, those that are whole.

    Attributes:
        measured: Iteration times.
        alone: Predicted by regressors alone.
        in_context: Predicted with a context model that never saw the run.
        op_error_alone, op_error_in_context: Of ops in traces, percent, runs held back; NaN without traces.
    """

    measured: Array
    alone: Array
    in_context: Array
    op_error_alone: float
    op_error_in_context: float

    @property
    def context_helps(self) -> bool:
        """Whether the context model earns its place on runs that it never saw."""
        whole = 1.0
        if len(self.measured):
            before, after = (np.abs(np.log(each / self.measured)).mean() for each in (self.alone, self.in_context))
            whole = float(after) / max(1e-9, float(before))
        ops = self.op_error_in_context / max(1e-9, self.op_error_alone) if self.op_error_alone > 0 else 1.0
        return bool(np.sqrt(whole * ops) < 1.0)


def hold_back(
    runs: Sequence[Taught],
    examples: Sequence[Example],
    wholes: Sequence[Whole],
    predictor: Predictor,
    *,
    seed: int,
    on_fold: Callable[[int, int], None],
) -> HeldBack:
    """Cross-validate over runs; what is held back counts as never measured, its ops and collectives included.

    Args:
        runs: To hold back in turn.
        examples, wholes: Of the runs, for training.
        predictor: Fitted regressors, no context model.
        seed: Of folds and weights.
        on_fold: Called with the number of the fold and of all folds.
    """
    folds = np.random.default_rng(seed).permutation(len(runs)) % min(FOLDS, len(runs))
    unseen = predictor.left_out
    whole = np.array([run.whole for run in runs], dtype=np.bool_)
    in_context = np.zeros(len(runs))
    before, after = [], []
    for fold in range(folds.max() + 1):
        on_fold(fold, int(folds.max()) + 1)
        own = [run for run, at in zip(runs, folds, strict=True) if at == fold]
        names = {run.name for run in own}
        context = fit_context(
            [example for example in examples if example.run not in names],
            [whole for whole in wholes if whole.run not in names],
            predictor.hardware,
            seed=seed,
        )
        judged = _whole(own)
        in_context[(folds == fold) & whole] = iteration_times(judged, replace(unseen, context=context))
        if left_out := make_examples(own, unseen):
            before.append(op_error(left_out, None, predictor.hardware))
            after.append(op_error(left_out, context, predictor.hardware))
    judged = _whole(runs)
    return HeldBack(
        np.array([run.manifest.iteration_time_s for run in judged]),
        iteration_times(judged, unseen),
        in_context[whole],
        float(np.mean(before)) if before else 0.0,
        float(np.mean(after)) if after else 0.0,
    )


def _whole(runs: Sequence[Taught]) -> list[MeasuredRun]:
    return [run for run in runs if isinstance(run, MeasuredRun) and run.whole]


def family_errors(
    examples: Sequence[Example], context: ContextWeights | None, predictor: Predictor
) -> dict[str, float]:
    """Time-weighted error of ops in context by family, percent."""
    off: dict[str, list[tuple[float, float]]] = {}
    for example in examples:
        log = np.log(example.alone / np.maximum(example.inside, 1e-9))
        if context is not None:
            log = log + context.log_correction(example.program, example.alone, predictor.hardware, example.busy)
        for node, error, seconds in zip(example.program.nodes, np.abs(log), example.inside, strict=True):
            if isinstance(node.work, Op) and np.isfinite(seconds):
                off.setdefault(node.work.family, []).append((float(error), float(seconds) * example.repeats))
    return {
        family: 100 * float(np.expm1(np.average([e for e, _ in pairs], weights=[w + 1e-12 for _, w in pairs])))
        for family, pairs in off.items()
    }
