"""Write what the package learns from tables of published runs: power of products by chip, corrections, intervals.

``python tools/shipped_data.py power RUNS...``, then ``runs`` and then ``widths`` write the files of
``training.shipped.catalogue``, ``training.corrections.residual`` and ``training.corrections.intervals``.  To be run
after shipped predictors or what is simulated have changed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.base.files import write_text
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.hardware.hardware_facts import power_type
from stepsight.dataset.job.frameworks import GENERIC
from stepsight.dataset.job.job import Job
from stepsight.experiments.evaluation.error_metrics import Scored
from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.experiments.evaluation.row_jobs import jobs_of
from stepsight.experiments.evaluation.runs_table import Row, read_runs_table
from stepsight.training.corrections import intervals, residual
from stepsight.training.corrections.calibration import MOST_WIDTH
from stepsight.training.corrections.intervals import JobClass, Widths, class_of, conformal_quantile
from stepsight.training.corrections.residual import JobFeatures, PublishedRun, PublishedRuns, block_of
from stepsight.training.prediction.prediction import PHYSICS, ROOFLINE, predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped import catalogue
from stepsight.training.shipped.catalogue import RECIPES, ChipPower

STEP = 1.1  # of the slowdown by which the time's part in products is found
LEAST_PART = 0.3  # of the time that follows products: runs of less tell of other things


@cached(64)
def _at(hardware: str, slowdown: float) -> Predictor | None:
    """The shipped predictor for a hardware, its products as many times as long as at the highest clock."""
    found = catalogue.shipped_predictor(hardware)
    if found is None:
        return None
    facts = found.hardware
    watts = facts.idle_w + slowdown**3 * (facts.power_w - facts.idle_w)
    facts = replace(facts, product_power_w=dict.fromkeys(("bf16", "fp8"), watts))
    return replace(found.with_published(None), hardware=facts)


def slowdown_of(job: Job, measured_s: float) -> float | None:
    """Logarithm of how many times as long as alone a run's products took; None: it tells nothing of them."""
    alone, slower = (predict(job, _at(job.cluster.hardware, slowdown)).iteration_time_s for slowdown in (1.0, STEP))
    part = math.log(slower / alone) / math.log(STEP)
    return None if part < LEAST_PART else math.log(measured_s / alone) / part


def dense_job(row: Row) -> Job | None:
    """The job of a row that tells of the clock: a dense model, fused attention, nothing open, a shipped predictor."""
    if row.weak or row.suspect:
        return None
    published = jobs_of(row)[0]
    job = published.job
    told = catalogue.chip_of(job.cluster.hardware) and job.model.fused_attention and not job.model.experts
    return job if told and not published.open else None


def learn(rows: Sequence[Row]) -> dict[str, dict[str, ChipPower]]:
    """Estimates from the rows for every chip and type of products."""
    told: dict[tuple[str, str], list[tuple[str, float, Hardware]]] = defaultdict(list)
    for row in rows:
        with suppress(JobError):
            job = dense_job(row)
            found = None if job is None else slowdown_of(job, row.measured_s)
            facts = None if job is None else find_hardware(job.cluster.hardware)
            if job is not None and found is not None and facts is not None and facts.power_w:
                chip = catalogue.chip_of(job.cluster.hardware)
                told[chip, power_type(job.batch.dtype)].append((row.source, found, facts))
    chips: dict[str, dict[str, ChipPower]] = defaultdict(dict)
    for (chip, dtype), runs in told.items():
        limit, idle = (max(getattr(facts, name) for _, _, facts in runs) for name in ("power_w", "idle_w"))
        logs: dict[str, list[float]] = defaultdict(list)
        for source, found, facts in runs:
            logs[source].append(found + math.log((facts.power_w - idle) / (limit - idle)) / 3.0)
        tabled = math.log(catalogue.TABLED.get(chip, {}).get(dtype, 1.0))
        chips[chip][dtype] = catalogue.learn_chip(limit, logs, idle, tabled)
    return dict(chips)


def widths_of(scored: Sequence[Scored], *, of_facts: bool = False) -> Widths:
    """Errors of every row whose hardware has a shipped predictor."""
    sources: dict[str, list[tuple[JobClass, float]]] = defaultdict(list)
    for row in scored:
        if catalogue.shipped_predictor(row.job.cluster.hardware) is not None:
            like = class_of(row.job, row.hfu)
            sources[row.row.source].append((like, math.log(row.measured_s / row.predicted_s)))
    return Widths({name: tuple(rows) for name, rows in sources.items()}, of_facts)


def write_power(runs: Sequence[Path], out: Path) -> str:
    """Write the power of products; what was found, as text."""
    found = learn([row for table in runs for row in read_runs_table(table)])
    table = {chip: {dtype: power.to_dict() for dtype, power in each.items()} for chip, each in found.items()}
    write_text(out, json.dumps({"chips": table}, indent=1) + "\n")
    lines = []
    for chip, each in found.items():
        for dtype, power in each.items():
            lines.append(f"{chip} {dtype}: {power.power_w():.0f} W at full clock, limit {power.reference_w:.0f} W")
            lines += [
                f"  {name}: {source.runs} runs, products {math.exp(source.slowdown_log):.3f} times as long as alone; "
                f"without it {power.power_w(name):.0f} W"
                for name, source in power.sources.items()
            ]
    return "\n".join(lines)


def write_widths(runs: Sequence[Path], out: Path) -> str:
    """Write the errors that decide the widths of intervals, of shipped predictors and of facts alone; what was found,
    as text.
    """
    lines = []
    for file, word in (out, None), (out.with_name(intervals.FACTS_PRESET), ROOFLINE):
        scored = [row for table in runs for row in evaluate(table, word).scored]
        found = widths_of(scored, of_facts=word == ROOFLINE)
        write_text(file, json.dumps(found.to_dict()).replace("]], ", "]],\n").replace("], [", "],\n[") + "\n")
        lines.append(f"{sum(map(len, found.sources.values()))} runs of {len(found.sources)} sources: {file}")
    return "\n".join(lines)


def write_runs(runs: Sequence[Path], out: Path) -> str:
    """Write what the correction by published runs is fitted with: their features, and what physics is off by."""
    found: dict[str, PublishedRun] = {}
    for row in (row for table in runs for row in evaluate(table, PHYSICS).scored):
        if catalogue.chip_of(row.job.cluster.hardware) and row.framework.name != GENERIC.name:
            like, model = JobFeatures.of(row.job, row.framework.name), row.row.text("model_name") or row.job.model_name
            log = math.log(row.measured_s / row.predicted_s)
            found.setdefault(row.digest, PublishedRun(row.digest, row.row.source, model, log, like))
    told = PublishedRuns(tuple(found.values()), MOST_WIDTH, catalogue.facts_digest())
    scores = list[float]()
    for recipe in RECIPES.values():
        for block, of in told.on((recipe.hardware, *recipe.twins)).blocks.items():
            own = [run for run in told.on((recipe.hardware, *recipe.twins)).runs if block_of(run.like) == block]
            off, stds = of.left_out([run.group for run in own])
            scores += np.abs(off / stds).tolist()
    told = replace(told, width=round(min(conformal_quantile(scores), MOST_WIDTH), 3))
    write_text(out, json.dumps(told.to_dict()).replace("], [", "],\n[") + "\n")
    return f"{len(told.runs)} runs of {len({run.source for run in told.runs})} sources, width {told.width}: {out}"


WRITERS = {
    "power": (write_power, catalogue.PRESET),
    "runs": (write_runs, residual.PRESET),
    "widths": (write_widths, intervals.PRESET),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/shipped_data.py", description=__doc__)
    parser.add_argument("what", choices=WRITERS)
    parser.add_argument("runs", type=Path, nargs="+", help="tables of published runs")
    parser.add_argument("--out", type=Path, help="file to write; by default the one of the package")
    args = parser.parse_args(arguments)
    write, usual = WRITERS[args.what]
    try:
        print(write(args.runs, args.out or usual))
    except (StepsightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
