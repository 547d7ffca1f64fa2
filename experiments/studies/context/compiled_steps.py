"""Steps of compiled training, predicted from captured programs: models of families that nothing was learned from.

Three parts, each of which goes on where it was stopped: measure compiled steps on this machine, capture the same
training with its regions, and predict each step from eager runs of other families (``stepsight experiment
architectures``) and from constants of fused loops that random regions taught.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.capture.captured import MANIFEST, read_captured, write_captured
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.imported.rank_graph import RankGraph
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.studies.architectures.family_programs import read_alone
from stepsight.experiments.studies.architectures.family_runs import read_runs_of_families, steps_of
from stepsight.experiments.studies.architectures.family_script import FAMILIES
from stepsight.experiments.studies.architectures.held_out import HostLatency, folds_of
from stepsight.experiments.studies.context.step_collecting import MeasuredStep, read_steps
from stepsight.simulator.replay.captured_step import time_captured
from stepsight.training.kernels.fused_loops import FUSED, loop_seconds
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.measured.host_costs import learn_host_calls

SCRIPT = Path(__file__).with_name("compiled_script.py")
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class JudgedStep:
    """A compiled step of a model whose family was held out.

    Attributes:
        name: Family and configuration.
        measured_s: CPU seconds of a step.
        as_is_s: Predicted by what eager runs of other families teach.
        after_s: Predicted after the calls of its own program were measured on their own.
        loops_s, loops_measured_s: Of fused loops.
        share: Of fused loops in the predicted step.
    """

    name: str
    measured_s: float
    as_is_s: float
    after_s: float
    loops_s: float
    loops_measured_s: float
    share: float


def capture_steps(folder: Path, steps: Sequence[MeasuredStep]) -> None:
    """Capture the training of the measured steps, where that was not done."""
    for step in steps:
        out = folder / step.name
        if not (out / MANIFEST).exists():
            print(f"capture {step.name}", file=sys.stderr, flush=True)
            request = CaptureRequest(
                SCRIPT, (step.family, str(step.size)), 1, 1, warm_up=2, device="cpu", timeout_s=_TIMEOUT_S
            )
            write_captured(capture(request), out)


def judge_steps(data: Path, eager: Path) -> list[JudgedStep]:
    """Predict every captured compiled step.

    Args:
        data: Folder with ``steps`` (measured) and ``programs`` (captured).
        eager: Folder of ``stepsight experiment architectures``.

    Raises:
        TraceError: If there is nothing to learn from, or nothing to judge.
    """
    runs = [(run, step) for run, step in steps_of(read_runs_of_families(eager, list(FAMILIES)))]
    if not runs:
        raise TraceError(f"{eager} must hold eager runs: collect them with stepsight experiment architectures --out")
    fold = folds_of(list(FAMILIES))
    known = {family: read_alone(eager, family, 0) for family in FAMILIES if _has_alone(eager, family)}
    measured = [step for step in read_steps(data / "steps") if (data / "programs" / step.name / MANIFEST).exists()]
    judged = []
    for turn in sorted({fold[step.family] for step in measured}):
        costs = learn_host_calls([step for run, step in runs if fold[run.family] != turn])
        for step in measured:
            if fold[step.family] == turn:
                own = known.get(step.family, {}) if step.size == 0 else {}
                after = replace(costs, alone=own)
                graph = read_captured(data / "programs" / step.name).ranks[0].graph
                judged.append(_judged(step, graph, costs, after))
    if not judged:
        raise TraceError(f"{data} must hold measured and captured steps, got none")
    return sorted(judged, key=lambda each: each.name)


def _has_alone(eager: Path, family: str) -> bool:
    return (eager / "alone" / f"{family}-0" / "events" / "ops.json").exists()


def _judged(step: MeasuredStep, graph: RankGraph, costs: HostCalls, after: HostCalls) -> JudgedStep:
    ops = [graph.works[work] for work in graph.nodes["work"].tolist() if work >= 0]
    loops = float(after.scale * loop_seconds(after.loops, [op for op in ops if op.kind == FUSED]).sum())
    as_is, total = (time_captured([graph], HostLatency(each)).iteration_time_s for each in (costs, after))
    inside = sum(sum(each.values()) for each in step.kernel_s)
    return JudgedStep(step.name, min(step.step_s, step.again_s), as_is, total, loops, inside, loops / as_is)


def figures_of(rows: Sequence[JudgedStep]) -> dict[str, float]:
    """Mean and median absolute errors of steps, percent; mean |log| error of fused loops; their share."""
    found: dict[str, float] = {}
    measured = np.array([row.measured_s for row in rows])
    for name in ("as_is", "after"):
        off = 100.0 * np.abs(np.array([getattr(row, f"{name}_s") for row in rows]) / measured - 1.0)
        found |= {f"{name}_mape_percent": float(off.mean()), f"{name}_median_percent": float(np.median(off))}
    loops = np.log([row.loops_s / row.loops_measured_s for row in rows])
    found["loops_mean_log_error"] = float(np.abs(loops).mean())
    found["loops_share_percent"] = 100.0 * float(np.mean([row.share for row in rows]))
    return found


def steps_text(rows: Sequence[JudgedStep]) -> str:
    """The table and the figures."""
    titles = ["model", "measured ms", "as is %", "after measuring %", "fused loops ms", "measured loops ms"]
    cells: list[list[Any]] = [
        [
            row.name, Number(1e3 * row.measured_s), Number(100 * (row.as_is_s / row.measured_s - 1)),
            Number(100 * (row.after_s / row.measured_s - 1)), Number(1e3 * row.loops_s),
            Number(1e3 * row.loops_measured_s),
        ] for row in rows
    ]  # fmt: skip
    told = "\n".join(f"{name.replace('_', ' ')}: {value:.2f}" for name, value in figures_of(rows).items())
    return f"{table(titles, cells)}\n\n{len(rows)} compiled steps of families that were held out\n{told}"
