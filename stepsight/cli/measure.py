"""Verbs that measure: collect, plan-profile, verify, demo, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stepsight.cli.files import Box, JobOptions, LearnedSource, load_predictor
from stepsight.cli.options import Answer, Positive, Written, refuse_given
from stepsight.cli.scripts import WORDS
from stepsight.dataset.base.errors import StepsightError, need
from stepsight.experiments.tasks.settings import CollectSettings, Rounds

_OF_JOBS = ("framework", "hardware", "given")
_OF_PLANS = ("reuse", "role", "rounds", "steps", "warmup", "profile_steps", "event_seconds", "extra_seconds")


def collect_command(
    context: typer.Context,
    jobs: list[Path] | None = None,
    *,
    out: Annotated[Path, "-o"],
    settings: CollectSettings,
    overrides: JobOptions,
    box: Box = None,
    plan_only: Annotated[bool, "--plan-only/--no-plan-only"] = False,
    script: Annotated[Path | None, typer.Option(metavar="FILE ARGS…")] = None,
    ops: Annotated[Path | None, typer.Option(metavar="PROGRAM")] = None,
    predictor: Path | None = None,
    nproc_per_node: str | None = None,
    timeout_s: Annotated[float, typer.Option(min=1)] = 600.0,
    reuse: list[Path] | None = None,
) -> Answer:
    """Run jobs as processes of torch.distributed, time and trace them, and measure their ops one by one.

    Each rank needs a core or a GPU. In a box, sixteen ranks share two cores; a run is rejected (exit code 2) if the
    load on the cores distorts its times. Examples:

        stepsight collect examples/local-gpt-tp2.toml --out runs/mine
        stepsight collect --out runs/script --nproc-per-node 2 --script train.py --lr 0.1
        stepsight collect --out runs/ops --ops captured --predictor predictor

    Args:
        jobs: Job files (.toml or .json) to run for real, or one plan (plan.json).
        out: Collection folder. An interrupted collection resumes there.
        plan_only: Only write plan.json. Another machine with a copy of the harness folder can run it.
        script: Run your own unmodified training script instead of jobs, until the measured steps are done. Must be the
            last option: all words after FILE are arguments of the script (except --out and --json at the end).
        ops: Measure ops instead of jobs: the slowest calls of this captured program that the training data of
            --predictor does not contain, one by one.
        predictor: With --ops: the predictor that lacks these calls.
        nproc_per_node: With --script: number of ranks, started as torchrun does; `auto`: one for each core or GPU.
            Default: one process without torch.distributed.
        timeout_s: With --script: time within which its measured steps must be done.
        reuse: Earlier collection on this machine whose measured ops and collectives are not measured again. Repeatable.
    """
    from stepsight.dataset.runs.run_manifest import read_box
    from stepsight.experiments.tasks.collecting import collect_jobs, is_plan

    if ops is not None:
        from stepsight.dataset.capture.captured import read_captured
        from stepsight.experiments.tasks.collecting import collect_ops

        stated = {"jobs", "script", "box", "plan_only", *_OF_PLANS, *_OF_JOBS, "nproc_per_node", "timeout_s"}
        refuse_given(context, sorted(stated - {"event_seconds"}), "is not for a captured program (--ops)")
        need("torch")
        if not settings.event_seconds:
            raise StepsightError("--ops needs --event-seconds > 0, got 0")
        summary = collect_ops(read_captured(ops), load_predictor(predictor), out, settings.event_seconds)
        return Answer(summary, summary["text"])
    refuse_given(context, ("predictor",), "is for a captured program (--ops)")
    if script is not None:
        from stepsight.experiments.tasks.scripts import Script, collect_script, ranks_of

        their = ("box", "plan_only", "jobs", "extra_seconds", "reuse", *_OF_JOBS)
        refuse_given(context, their, "is for jobs, not for a script")
        asked: dict[str, Any] = {"ranks": ranks_of(nproc_per_node), "counts": settings.counts(), "role": settings.role}
        if not asked["counts"]["profile_steps"]:
            raise StepsightError("a script needs --profile-steps >= 1: its traces say which ops it runs, got 0")
        run = Script(path=script, arguments=context.meta[WORDS], timeout_s=timeout_s, **asked)
        summary = collect_script(run, out, settings.event_seconds)
        return Answer(summary, summary["text"])
    refuse_given(context, ("nproc_per_node", "timeout_s"), "is for a script (--script)")
    if not jobs:
        raise StepsightError("collect takes job files, a plan, or --script with a training script; got none")
    if not plan_only:
        need("torch")
    plan = len(jobs) == 1 and is_plan(jobs[0])
    if plan:
        refuse_given(context, (*_OF_PLANS, *_OF_JOBS), f"is for job files: the plan {jobs[0]} states its own")
    if box is not None or plan_only:
        refuse_given(context, ("reuse",), "is for runs on this machine, outside of a box")
    held = None if box is None else read_box(box)
    read = jobs if plan else overrides.read_all(jobs)
    summary = collect_jobs(read, out, settings, plan_only=plan_only, progress=True, box=held, reuse=reuse or ())
    return Answer(summary, summary["text"], "" if summary.get("rejected") else None)


def plan_profile_command(
    *,
    hardware: str,
    minutes: float = 5.0,
    job: list[Path] | None = None,
    devices: Positive = 1,
    out: Annotated[Path, "-o", Written((".json",))] = Path("plan.json"),
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> Answer:
    """Choose what to measure first on a new device, and write it as a plan for the harness.

    The candidates are the training ops of the models in the catalogue, and of your jobs. The plan begins with those
    that most reduce the expected error, given what the shipped predictors know. An error counts by the time that your
    jobs spend in the op; without --job by that of training the models in the catalogue. Examples:

        stepsight plan-profile --hardware h200-sxm-141gb --minutes 5 --out plan.json
        stepsight collect plan.json --out runs/profile
        stepsight show runs/profile --table mine.parquet
        stepsight train mine.parquet --hardware h200-sxm-141gb --out mine

    Args:
        hardware: Device to measure: a preset, or a .toml or .json file with its facts.
        minutes: Measuring time.
        job: A job that you will ask about, on any hardware (repeatable).
        devices: Devices of the node; with 2 or more, collectives are measured too.
        out: The plan to write (.json).
        seed: Random seed.
    """
    from collections import Counter

    from stepsight.dataset.base.files import write_json
    from stepsight.dataset.hardware.hardware import canonical_hardware, find_hardware, unknown_hardware
    from stepsight.dataset.job.job import Job
    from stepsight.training.fitting.profile_plan import profile_plan
    from stepsight.training.predictor.predictor import teacher_of
    from stepsight.training.shipped.catalogue import teaching_names

    if (found := find_hardware(canonical_hardware(hardware))) is None:
        raise StepsightError(unknown_hardware(hardware))
    teachers, jobs = map(teacher_of, teaching_names()), map(Job.from_file, job or ())
    plan = profile_plan(found, [*teachers], minutes, jobs=[*jobs], devices=devices, seed=seed)
    write_json(out, plan)
    counts = Counter(f"{item['kind']} {item.get('dtype', '')}".strip() for e in plan["events"] for item in e["ops"])
    links = sum(len(event["collectives"]) for event in plan["events"])
    kinds = "".join(f"\n{count:>6}  {name}" for name, count in counts.most_common())
    text = (
        f"plan {out}: {counts.total()} ops and {links} collectives to measure on {found.name}{kinds}\n"
        f"next: stepsight collect {out} --out runs/profile\n      stepsight show runs/profile --table mine.parquet\n"
        f"      stepsight train mine.parquet --hardware {hardware} --out mine"
    )
    told = {"plan": str(out), "hardware": found.name, "minutes": minutes, "ops": dict(counts), "collectives": links}
    return Answer(told, text)


def verify_command(
    jobs: list[Path],
    *,
    out: Annotated[Path, "-o"],
    search: Path | None = None,
    top: Annotated[int | None, typer.Option(min=1)] = None,
    source: LearnedSource,
    overrides: JobOptions,
    repeats: Rounds,
    box: Box = None,
) -> Answer:
    """Run the best strategies of a search, or job files, and print predicted beside measured times.

    Runs are made as in `stepsight collect`: with one core or GPU for each rank, or in a box, where ranks sleep instead
    of computing. Strategies that the harness cannot run are skipped and named. Examples:

        stepsight verify examples/local-gpt-tp2.toml --out runs/verified
        stepsight search job.toml --json > found.json
        stepsight verify job.toml --search found.json --top 3 --box 4x1@200mbit --out runs/verified

    Args:
        jobs: Job files to run, or one job whose best strategies to run.
        out: Collection folder. A collection that was killed resumes there.
        search: File with strategies to run: the output of `stepsight search JOB --json`.
        top: Number of best strategies to run. Without --search, a search finds them first.
    """
    from stepsight.dataset.base.bounded import parsing
    from stepsight.dataset.base.files import check_writable, read_json
    from stepsight.dataset.runs.run_manifest import read_box
    from stepsight.experiments.tasks.verifying import strategies_of, verify

    held = None if box is None else read_box(box)
    check_writable(out)
    if len(jobs) > 1 and (search is not None or top is not None):
        raise StepsightError(f"--search and --top take one job, got {len(jobs)}")
    read, predictor = [overrides.read(job) for job in jobs], source.load()
    if held is not None:
        read = [held.holds(job) for job in read]
    if search is not None:
        with parsing(f"the result of a search must be JSON, got {search}", StepsightError):
            found = read_json(search)
        read = strategies_of(read[0], found if isinstance(found, dict) else {}, str(search))
    elif top is not None:
        from stepsight.experiments.search.search import search as search_strategies

        read = [choice.job for choice in search_strategies(read[0], predictor).choices if choice.fits]
    settings = CollectSettings(rounds=repeats.rounds, steps=repeats.steps, profile_steps=0)
    value = verify(read, out, predictor, most=top, counts=settings.counts(held is not None), box=held, progress=True)
    return Answer(value, value.pop("text"))


def demo_command(*, out: Annotated[Path, "-o"] = Path("runs/demo")) -> Answer:
    """Measure this machine, train a predictor, predict held-out runs and search a strategy: about five minutes on two
    cores. Example:

        stepsight demo

    Args:
        out: Output folder.
    """
    from stepsight.experiments.demo.demo import run_demo

    for module in ("torch", "lightgbm", "mlflow", "optuna"):
        need(module)
    return Answer(*run_demo(out))


def doctor_command(
    run: Annotated[Path | None, typer.Argument(metavar="RUN")] = None, *, job: Path | None = None, source: LearnedSource
) -> Answer:
    """Check this machine: libraries, GPUs, links, load, and what can be collected here. Or find out why a traced run
    is slow.

    For a run, the answer lists causes with evidence and advice: host-bound, data loader, waiting for peers, exposed
    communication, small messages, slow transport, throttling. If the run's job is known, the prediction is printed
    beside the measured step. Examples:

        stepsight doctor
        stepsight doctor runs/theirs --job job.toml

    Args:
        run: A traced run, to find out why it is slow. Default: this machine.
        job: Job file of the run, if the run does not state its job.
    """
    if run is None:
        if job is not None:
            raise StepsightError("--job is the job of a run: name the run folder too")
        from stepsight.experiments.tasks.machine import check_machine, machine_text

        told = check_machine()
        return Answer(told, machine_text(told))
    from stepsight.experiments.questions.traced_runs import diagnose, diagnosis_text

    told = diagnose(run, None if job is None else JobOptions().read(job), source.load())
    return Answer(told, diagnosis_text(told))
