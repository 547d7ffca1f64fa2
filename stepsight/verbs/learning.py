"""Verbs that learn predictors, and that say what to measure for one: train, plan-profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.options import Json, answer, path, refuse_given

_OF_TABLES = ("like", "software", "fabric", "samples")


def train_command(
    context: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=path,
            metavar="SOURCE…",
            help="Collection folders written by `stepsight collect` or `import`, or tables of ops and collectives of "
            "one device (.parquet) written by `stepsight import`.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="Folder of the predictor to write.")],
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Collections: the name of this hardware in [cluster] hardware of jobs (default: local-cpu). Tables: a "
            "preset, or a .toml or .json file with the device's facts (default: the device of the rows)."
        ),
    ] = None,
    like: Annotated[
        str,
        typer.Option(
            help="Tables: the shipped predictor of the most similar device, for example b200-sxm. Default: all of them."
        ),
    ] = "",
    software: Annotated[
        str,
        typer.Option(
            help="Tables: the software to predict for, or a part of its name. Default: the software of most rows."
        ),
    ] = "",
    fabric: Annotated[
        str, typer.Option(help="Tables: the fabric for rows that name none: a name or a .toml file.")
    ] = "",
    samples: Annotated[
        int,
        typer.Option(
            min=0, help="Tables: learn from at most this many shapes of each family, drawn at random. 0: all shapes."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow tracking URI. Default: SQLite in the folder of the predictor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a predictor on collections, or on tables of a device's ops and collectives; record it in MLflow.

    Collections train regressors for ops and collectives, and a model that corrects them in context: the simplest of a
    table, a network without edges and a graph neural network that is as good as the best on runs held back.
    Tables train only the regressors. A family of ops with thousands of rows is trained on its own rows. A family with
    fewer rows starts from the efficiency of the shipped predictors' devices, and its rows correct it. A fifth of the
    shapes is held out to judge the predictor (`held_out` in --json). Examples:

        stepsight train runs/mine --out runs/predictor
        stepsight import aiconfigurator data/gb200 --out gb200.parquet
        stepsight train gb200.parquet --like b200-sxm --out gb200
        stepsight train mine.parquet --hardware my-gpu.toml --out mine
    """
    from stepsight.experiments.reports.verb_reports import training_report

    tables = [source for source in sources if source.suffix == ".parquet"]
    if tables and len(tables) < len(sources):
        raise StepsightError("train takes collections or tables (.parquet), got both: train one predictor on each")
    if tables:
        from stepsight.training.train_tables import train_tables

        predictor = train_tables(
            tables,
            out,
            hardware=hardware or "",
            like=like,
            software=software,
            fabric=fabric,
            samples=samples,
            seed=seed,
            tracking_uri=tracking_uri,
        )
    else:
        from stepsight.training.fit import train

        refuse_given(context, _OF_TABLES, "is for tables (.parquet), got collections: leave it out")
        name = "local-cpu" if hardware is None else hardware
        predictor = train(sources, out, hardware_name=name, seed=seed, tracking_uri=tracking_uri, progress=True)
    report = training_report(predictor, out)
    answer(report, report["text"], as_json)


def plan_profile_command(
    hardware: Annotated[
        str, typer.Option(help="Device to measure: a preset, or a .toml or .json file with its facts.")
    ],
    minutes: Annotated[float, typer.Option(help="Measuring time.")] = 5.0,
    job: Annotated[
        list[Path] | None,
        typer.Option(parser=path, help="A job that you will ask about, on any hardware (repeatable)."),
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of the node; with 2 or more, collectives are measured too.")
    ] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="The plan to write (.json).")] = Path(
        "plan.json"
    ),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Choose what to measure first on a new device, and write it as a plan for the harness.

    The candidates are the training ops of the models in the catalogue, and of your jobs. The plan begins with those
    that most reduce the expected error, given what the shipped predictors know. An error counts by the time that your
    jobs spend in the op; without --job by that of training the models in the catalogue. Examples:

        stepsight plan-profile --hardware my-gpu.toml --minutes 5 --out plan.json
        stepsight collect plan.json --out runs/profile
        stepsight show runs/profile --table mine.parquet
        stepsight train mine.parquet --hardware my-gpu.toml --out mine
    """
    from collections import Counter

    from stepsight.dataset.base.files import check_output_file, write_json
    from stepsight.dataset.hardware.hardware import canonical_hardware, find_hardware, unknown_hardware
    from stepsight.dataset.job.job import Job
    from stepsight.training.predictor.predictor import shipped_names, teacher_of
    from stepsight.training.transfer.profile_plan import profile_plan

    found = find_hardware(canonical_hardware(hardware))
    if found is None:
        raise StepsightError(unknown_hardware(hardware))
    if out.suffix != ".json":
        raise StepsightError(f"--out ends in .json, got {str(out)!r:.80}")
    check_output_file(out)
    teachers, jobs = [teacher_of(name) for name in shipped_names()], [Job.from_file(each) for each in job or ()]
    plan = profile_plan(found, teachers, minutes, jobs=jobs, devices=devices, seed=seed)
    write_json(out, plan)
    counts = Counter(f"{item['kind']} {item.get('dtype', '')}".strip() for e in plan["events"] for item in e["ops"])
    links = sum(len(event["collectives"]) for event in plan["events"])
    told = {"plan": str(out), "hardware": found.name, "minutes": minutes, "ops": dict(counts), "collectives": links}
    lines = [f"plan {out}: {counts.total()} ops and {links} collectives to measure on {found.name}"]
    lines += [f"{count:>6}  {name}" for name, count in counts.most_common()]
    lines += [
        f"next: stepsight collect {out} --out runs/profile",
        "      stepsight show runs/profile --table mine.parquet",
    ]
    lines += [f"      stepsight train mine.parquet --hardware {hardware} --out mine"]
    answer(told, "\n".join(lines), as_json)
