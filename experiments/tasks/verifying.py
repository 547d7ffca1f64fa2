"""``stepsight verify``: run strategies with the harness, and compare predicted with measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter
from pathlib import Path
from statistics import median_high
from typing import Any

from stepsight.dataset.base.errors import CollectError, JobError
from stepsight.dataset.base.files import read_json
from stepsight.dataset.harness.plan.plan_checks import MOST_CPU
from stepsight.dataset.job.job import BatchSpec, Job, ParallelSpec
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.dataset.runs.run_manifest import Box
from stepsight.experiments.reports.text_table import Column, table_of
from stepsight.experiments.tasks.collecting import available_ranks, plan_in_box, run_plan
from stepsight.training.measured.planning import as_the_harness_runs, collectable, make_plan, run_name
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

ROLE = "verify"  # role of the runs: they never train a predictor


def strategies_of(job: Job, found: Mapping[str, Any], file: str = "a search's result") -> list[Job]:
    """The strategies of a search that fit in memory, best first; ``file``: what an error calls ``found``."""
    rows = found.get("choices") or found.get("top")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        rule = f"{file} must hold `choices` or `top`"
        raise CollectError(f"{rule}: write it with `stepsight search JOB --json`")
    tables = {"parallel": ParallelSpec, "batch": BatchSpec}
    known = {section: {item.name for item in fields(spec)} for section, spec in tables.items()}
    jobs = []
    for row in (row for row in rows if row.get("fits", True)):
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        chosen = {section: {key: plain[key] for key in plain if key in known[section]} for section in tables}
        try:
            parallel = replace(job.parallel, **{"stage_layers": (), **chosen["parallel"]})
            jobs.append(replace(job, parallel=parallel, batch=replace(job.batch, **chosen["batch"])))
        except JobError as error:
            raise CollectError(f"a strategy of the search does not fit the job {job.name}: {error}") from None
    return jobs


def verify(
    jobs: Sequence[Job],
    out: Path,
    predictor: Predictor | str | None = None,
    *,
    most: int | None = None,
    counts: Mapping[str, int],
    box: Box | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run the first jobs that the harness can run, and compare their times with the predictions.

    Told of each are its prediction with its interval, the median of the timed steps, how far the medians of the rounds
    lie apart, and the signed error; and whether the strategy that is predicted to be fastest is the fastest.
    """
    held, not_run = runnable(jobs, most, box)
    if not held:
        first, *others = not_run.items()
        reasons = ": ".join(first) + (f"; and {len(others)} more strategies" if others else "")
        raise CollectError(f"the harness can run none of the strategies here: {reasons}")
    chosen = list(held.values())
    if box is not None:
        plan = plan_in_box(box, chosen, ROLE, dict(counts), 0.0)
    else:
        plan = make_plan([(ROLE, job, dict(counts)) for job in chosen], event_seconds=0.0)
    run_plan(plan, out, progress=progress)
    manifests = {manifest.name: manifest for manifest in read_collection(out)}
    not_run |= {name: why_no_run(out, name) for name in held if name not in manifests}
    rows = []
    for manifest in (manifests[name] for name in held if name in manifests):
        prediction, measured = predict(manifest.job, predictor), manifest.iteration_time_s
        predicted, low, high = prediction.iteration_time_s, prediction.low_s, prediction.high_s
        row = {"name": manifest.job.name, "predicted_s": predicted, "low_s": low, "high_s": high}
        medians = [median_high(steps) for steps in manifest.rounds]
        row |= {"measured_s": measured, "spread_percent": 100 * (max(medians) / min(medians) - 1)}
        row |= {"error_percent": 100 * (predicted / measured - 1), "inside_interval": low <= measured <= high}
        rows.append(row)
    return _report(rows, not_run)


def why_no_run(out: Path, name: str) -> str:
    """Why a collection has no run of this name: it ran and is not valid, or was refused."""
    path = out / "rejected" / name / "manifest.json"
    if not path.exists():
        return "the collection ended before it ran"
    manifest = read_json(path)
    if reason := manifest.get("rejected"):
        return str(reason)
    return f"it ran, but its ranks took more than {100 * MOST_CPU:.0f} % of the cores' time, so its times do not count"


def runnable(jobs: Sequence[Job], most: int | None, box: Box | None) -> tuple[dict[str, Job], dict[str, str]]:
    """The first jobs that the harness can run, by the name of their run, and the reasons against the others."""
    ranks = None if box is not None else available_ranks()
    held, not_run = dict[str, Job](), dict[str, str]()
    for job in jobs:
        if most is not None and len(held) == most:
            break
        try:
            if box is not None:
                plan_in_box(box, [job], ROLE, {"rounds": 1, "steps": 1, "warmup": 1, "profile_steps": 0}, 0.0)
            else:
                job = as_the_harness_runs(job)
                collectable(job, ranks)
            name = run_name(job if box is None else box.holds(job))
        except (CollectError, JobError) as error:
            not_run[job.name] = str(error)
            continue
        if name in held:
            not_run[f"{job.name} (again)"] = "the harness runs it as it runs another strategy"
            continue
        held[name] = job
    return held, not_run


def _report(runs: Sequence[dict[str, Any]], not_run: Mapping[str, str]) -> dict[str, Any]:
    value: dict[str, Any] = {"runs": list(runs), "not_run": dict(not_run)}
    columns: dict[str, str | Column] = {
        "strategy": "name",
        "predicted ms": "predicted_s",
        "interval ms": lambda run: f"{1e3 * run['low_s']:.1f} to {1e3 * run['high_s']:.1f}",
        "measured ms": "measured_s",
        "error %": lambda run: f"{run['error_percent']:+.1f}",
        "spread %": "spread_percent",
    }
    lines = [table_of(runs, columns)] if runs else ["no run was measured"]
    if len(runs) > 1:
        chosen, fastest = (min(runs, key=itemgetter(key)) for key in ("predicted_s", "measured_s"))
        regret = 100 * (chosen["measured_s"] / fastest["measured_s"] - 1)
        value |= {"best_is_best": chosen is fastest, "regret_percent": regret}
        same = "is the fastest" if chosen is fastest else f"takes {regret:.1f} % longer than the fastest"
        lines.append(f"the strategy predicted to be fastest {same} of {len(runs)} measured")
    lines += [f"not run: {name}: {why}" for name, why in not_run.items()]
    return {**value, "text": "\n".join(lines)}
