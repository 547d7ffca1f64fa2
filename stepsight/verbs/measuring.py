"""Verbs that measure, read, and say what is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stepsight.dataset.base.errors import StepsightError, need
from stepsight.verbs.options import Box, Json, answer, load, path, refuse_given
from stepsight.verbs.script_arguments import WORDS
from stepsight.verbs.tracing import TRACES, import_traces


def collect_command(
    context: typer.Context,
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(parser=path, help="Job files (.toml or .json) to run for real, or one plan (plan.json)."),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", parser=path, help="Collection folder. An interrupted collection resumes there."),
    ],
    role: Annotated[
        str, typer.Option(help="Purpose of the runs. Only runs with the role `train` can train a predictor.")
    ] = "train",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds: each runs every job once, so that drift of the machine becomes visible.")
    ] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round, without a profiler.")] = 4,
    warmup: Annotated[
        int | None,
        typer.Option(min=1, help="Warm-up steps of each round: at least 2; in a box 1.", show_default="2"),
    ] = None,
    profile_steps: Annotated[
        int | None, typer.Option(min=0, help="Profiled steps in the last round; in a box 0.", show_default="2")
    ] = None,
    event_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for measuring all distinct ops and collectives. 0: skip this.")
    ] = 30.0,
    extra_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for more rounds of the jobs whose times vary most; for busy machines.")
    ] = 0.0,
    box: Box = None,
    plan_only: Annotated[
        bool, typer.Option(help="Only write plan.json. Another machine with a copy of the harness folder can run it.")
    ] = False,
    script: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE ARGS…",
            help="Run your own unmodified training script instead of jobs, until the measured steps are done. Must be "
            "the last option: all words after FILE are arguments of the script (except --out and --json at the end).",
        ),
    ] = None,
    ops: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="PROGRAM",
            help="Measure ops instead of jobs: the slowest calls of this captured program that the training data of "
            "--predictor does not contain, one by one.",
        ),
    ] = None,
    predictor: Annotated[
        Path | None, typer.Option(parser=path, help="With --ops: the predictor that lacks these calls.")
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node",
            help="With --script: number of ranks, started as torchrun does; `auto`: one for each core or GPU. Default: "
            "one process without torch.distributed.",
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", min=1, help="With --script: time within which its measured steps must be done."),
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """Run jobs as processes of torch.distributed, time and trace them, and measure their ops one by one.

    Each rank needs a core or a GPU. In a box, sixteen ranks share two cores; a run is rejected (exit code 2) if the
    load on the cores distorts its times. Examples:

        stepsight collect examples/local-gpt-tp2.toml --out runs/mine
        stepsight collect examples/box-gpt-pp4.toml --box 4x1@200mbit --out runs/box
        stepsight collect --out runs/script --nproc-per-node 2 --script train.py --lr 0.1
        stepsight collect --out runs/ops --ops captured --predictor predictor
    """
    if ops is not None:
        counted = ("rounds", "steps", "warmup", "profile_steps", "extra_seconds")
        stated = ("jobs", "script", "box", "plan_only", "role", *counted)
        refuse_given(context, (*stated, "nproc_per_node", "timeout_s"), "is not for a captured program (--ops)")
        _collect_ops(ops, predictor, out, event_seconds, as_json)
        return
    refuse_given(context, ("predictor",), "is for a captured program (--ops)")
    if script is not None:
        refuse_given(context, ("box", "plan_only", "jobs", "extra_seconds"), "is for job files, not for a script")
        counts = _counts(False, rounds=rounds, steps=steps, warmup=warmup, profile_steps=profile_steps)
        _collect_script(
            context,
            script,
            out,
            event_seconds,
            as_json,
            ranks=nproc_per_node,
            timeout_s=timeout_s,
            role=role,
            counts=counts,
        )
        return
    refuse_given(context, ("nproc_per_node", "timeout_s"), "is for a script (--script)")
    if not jobs:
        raise StepsightError("collect takes job files, a plan, or --script with a training script; got none")
    from stepsight.dataset.runs.box_spec import read_box
    from stepsight.experiments.tasks.collecting import collect_jobs, is_plan

    if not plan_only:
        need("torch")
    if len(jobs) == 1 and is_plan(jobs[0]):
        their = ("role", "rounds", "steps", "warmup", "profile_steps", "event_seconds", "extra_seconds")
        refuse_given(context, their, f"is for job files: the plan {jobs[0]} states its own")
    held = None if box is None else read_box(box)
    counts = _counts(box is not None, rounds=rounds, steps=steps, warmup=warmup, profile_steps=profile_steps)
    summary = collect_jobs(
        jobs,
        out,
        role=role,
        counts=counts,
        event_seconds=event_seconds,
        plan_only=plan_only,
        progress=True,
        box=held,
        extra_seconds=extra_seconds,
    )
    answer(summary, summary["text"], as_json)
    if summary.get("rejected"):
        raise typer.Exit(2)


def _collect_ops(program: Path, predictor: Path | None, out: Path, seconds: float, as_json: bool) -> None:
    from stepsight.dataset.capture.captured import read_captured
    from stepsight.experiments.tasks.collecting import collect_ops

    need("torch")
    if not seconds:
        raise StepsightError("--ops needs --event-seconds > 0, got 0")
    summary = collect_ops(read_captured(program), load(predictor), out, seconds)
    answer(summary, summary["text"], as_json)


def _collect_script(
    context: typer.Context,
    script: Path,
    out: Path,
    event_seconds: float,
    as_json: bool,
    *,
    ranks: str | None,
    **how: Any,
) -> None:
    from stepsight.experiments.tasks.script_collecting import Script, collect_script, ranks_of

    if not how["counts"]["profile_steps"]:
        raise StepsightError("a script needs --profile-steps >= 1: its traces say which ops it runs, got 0")
    asked = Script(path=script, arguments=context.meta[WORDS], ranks=ranks_of(ranks), **how)
    summary = collect_script(asked, out, event_seconds)
    answer(summary, summary["text"], as_json)


def _counts(in_box: bool, **stated: int | None) -> dict[str, int]:
    """The number of runs of each kind: as stated, else the usual one."""
    usual = {"warmup": 1, "profile_steps": 0} if in_box else {"warmup": 2, "profile_steps": 2}
    return {**usual, **{name: count for name, count in stated.items() if count is not None}}


def demo_command(
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Output folder.")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Measure this machine, train a predictor, predict held-out runs and search a strategy: about five minutes on two
    cores."""
    from stepsight.experiments.demo.demo import run_demo

    for module in ("torch", "lightgbm", "mlflow", "optuna"):
        need(module)
    summary, text = run_demo(out)
    answer(summary, text, as_json)


EXPERIMENTS = {  # by name: the module of ``experiments/studies`` (not in the wheel), and what it measures
    "architectures": ("architectures", "training scripts of model families that are not in the training data"),
    "box-search": ("box_regret", "the strategy that search chooses against other strategies, run on sixteen ranks"),
    "capture": ("capture_agreement", "programs lowered from jobs against programs captured from scripts"),
    "collectives": ("collective_accuracy", "collectives between nodes, with sites held out"),
    "context": ("context", "the context network against simpler models, task by task"),
    "emulate": ("emulation", "emulated ranks against closed forms and real ranks"),
    "kernels": ("kernel_accuracy", "kernels of public tables, with shapes held out"),
    "memory": ("memory_accuracy", "predicted memory against PyTorch's tracker"),
    "one-gpu": ("one_gpu", "a predictor from ten minutes of measurements on one GPU, judged on held-out runs"),
    "search": ("search_regret", "search against predictions of every strategy"),
    "selection": ("selection_accuracy", "what to measure first, against random and grid choice"),
    "small-to-large": ("small_to_large", "predictions for sixteen ranks, trained on four"),
    "traced": ("traced_accuracy", "ops of a trace, predicted from its other steps and from other traces of the device"),
    "transfer": ("transfer_accuracy", "a predictor for a device with few measurements"),
    "what-if": ("what_if_accuracy", "changes predicted from one trace against runs with the change"),
}
_NAMED = "; ".join(f"`{name}`: {what}" for name, (_, what) in EXPERIMENTS.items())


def experiment_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"One of {_NAMED}.")] = "",
) -> None:
    """Run a study that measures an accuracy that the documentation states. Each study has its own options; all have
    `--json` and `--help`.

    Example:

        stepsight experiment capture --only "*fsdp*"
    """
    from importlib import import_module

    if name in ("", "-h", "--help"):
        typer.echo(context.get_help())
        return
    if name not in EXPERIMENTS:
        raise StepsightError(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {name!r:.80}")
    try:
        study = import_module(f"stepsight.experiments.studies.{EXPERIMENTS[name][0]}")
    except ModuleNotFoundError as error:
        if error.name != "stepsight.experiments.studies":
            raise
        raise StepsightError(
            "experiments run from a checkout of stepsight, and this installation is not one: "
            "clone the repository, run `pip install -e .` there, and try again"
        ) from None
    sys.exit(study.main(context.args))


def import_command(
    format: Annotated[
        str,
        typer.Argument(
            help="Traces: kineto (PyTorch's profiler) or chakra (execution traces with durations, .et or JSON). "
            "Tables: aiconfigurator, neusight, vidur, simumax, nccl-tests (logs or parsed), vtrain, aicb, or csv (your "
            "own, with columns op, dims (4096x4096x1024), dtype, microseconds)."
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH…",
            parser=path,
            help="Files of that format, or a folder. Traces: one file for each rank. Tables: a single file.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(parser=path, help="Traces: the collection to write. Tables: the file to write (.parquet)."),
    ] = None,
    et: Annotated[
        list[Path] | None,
        typer.Option("--et", parser=path, help="Traces: execution trace of a rank, for data dependencies. Repeatable."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(parser=path, help="Traces: job file of the run, if you have it; it must match."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Import traces of any PyTorch job into a collection, or published measurements into a table.

    Traces become graphs of ops, streams and dependencies, which `replay`, `show`, `dataset` and `train` read. A trace
    needs no annotations and no job file. For a table, the summary lists its ops, sizes, devices and software, and the
    rows that were left out, in common units and names. The shipped predictors are trained on such tables
    (`python -m stepsight.training.shipped.catalogue`). Examples:

        stepsight import kineto rank0.json.gz rank1.json.gz --out runs/theirs
        stepsight import chakra traces/chakra.*.et --out runs/theirs
        stepsight import nccl-tests logs/ --out collectives.parquet
    """
    if format in TRACES:
        import_traces(format, paths, out, et or [], job, as_json)
        return
    from stepsight.dataset.tables import check_table_output, read_table, summary, summary_text

    if len(paths) != 1:
        raise StepsightError(f"import {format} takes one file or folder, got {len(paths)}")
    if et or job is not None:
        raise StepsightError(f"--et and --job belong to traces ({', '.join(TRACES)}), got format {format!r:.80}")
    if out is not None:
        check_table_output(format, paths[0], out)
    found = read_table(format, paths[0])
    told = summary(found)
    text = summary_text(told)
    if out is not None and not len(found):
        why = "; ".join(f"{count} times: {reason}" for reason, count in found.skipped.items()) or "it has no rows"
        raise StepsightError(f"no measurement of {paths[0]} could be read, so {out} was not written ({why})")
    if out is not None:
        found.to_parquet(out)
        told["out"] = str(out)
        text += f"\n\nwrote {len(found)} measurements to {out}"
    answer(told, text, as_json)


def show_command(
    path: Annotated[
        Path,
        typer.Argument(
            parser=path,
            help="A job file, collection, run folder, captured script, table (.parquet) or summary.json; a predictor "
            "(folder or name); hardware, a fabric or a framework's profile (file or name).",
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(parser=path, help="A second captured script: show what differs."),
    ] = None,
    *,
    table: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="For a collection: write every measured op and collective to this file (.parquet)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Describe a file or folder: what it is and what it contains."""
    from stepsight.experiments.questions.describe import describe, write_table

    if other is not None:
        from stepsight.dataset.capture.captured import read_captured
        from stepsight.experiments.reports.capture_reports import captures_differ, difference_text

        told = captures_differ(read_captured(path).to_dict(), read_captured(other).to_dict())
        answer(told, difference_text(told), as_json)
        return
    description = describe(path)
    text = description.pop("text")
    if table is not None:
        description["measurements"] = write_table(path, table)
        text += f"\nwrote {description['measurements']} measurements to {table}"
    answer(description, text, as_json)
