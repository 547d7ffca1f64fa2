"""Verbs that show and compare: report, compare, sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.config_options import read_job, refuse_program
from stepsight.verbs.options import (
    FrameworkName,
    HardwareName,
    Json,
    LatencyName,
    Nodes,
    PredictorPath,
    answer,
    check_plot,
    check_result,
    load,
    path,
    progress,
)
from stepsight.verbs.plan_options import (
    CheckpointSeconds,
    NodeMtbf,
    Prices,
    RestartSeconds,
    Tokens,
    goal_of,
    reliability_of,
)

PAGE = (".html", rb"<!doctype html>")
SWEEP = (".csv", rb"[a-z_]+\.[a-z_.]+,")


def report_command(
    jobs: Annotated[
        list[Path], typer.Argument(parser=path, metavar="JOB…", help="Job files, or configurations of frameworks.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="The page to write (.html).")],
    predictor: PredictorPath = None,
    framework: FrameworkName = "",
    hardware: HardwareName = "",
    nodes: Nodes = None,
    search: Annotated[
        bool, typer.Option("--search", help="Also search the best strategies of each job; this takes seconds.")
    ] = False,
    tokens: Tokens = 1e12,
    prices: Prices = None,
    node_mtbf_hours: NodeMtbf = 0.0,
    checkpoint_s: CheckpointSeconds = 30.0,
    restart_s: RestartSeconds = 600.0,
    as_json: Json = False,
) -> None:
    """Write a page about jobs: one self-contained HTML file.

    The page shows the prediction and its basis, where the time goes, a zoomable timeline, memory over time by stage,
    duration and cost of training, sensitivity to links, batch and nodes, what to try next, and all assumptions. With
    several jobs it begins with their comparison. Examples:

        stepsight report examples/gpt3-175b-1024.toml --out gpt3.html
        stepsight report job.toml --search --tokens 15e12 --prices prices.toml --node-mtbf-hours 6000 --out job.html
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.experiments.questions.compare import compare_sides, predicted_side
    from stepsight.experiments.questions.job_page import job_facts, job_part, jobs_page
    from stepsight.experiments.questions.training_plan import plan_text, training_plan
    from stepsight.experiments.search.search import search as search_strategies
    from stepsight.training.predictor.prediction import predict

    check_result("--out", out, PAGE)
    goal, reliability = goal_of(tokens, prices), reliability_of(node_mtbf_hours, checkpoint_s, restart_s)
    loaded, tell = load(predictor), progress("jobs reported")
    read = [read_job(job, framework, hardware, nodes) for job in jobs]
    facts, parts = [], []
    for number, job in enumerate(read):
        prediction = predict(job, loaded)
        best = search_strategies(job, loaded).choices[:5] if search else ()
        plan = training_plan(prediction, goal, reliability)
        facts.append(job_facts(prediction, loaded, plan, search=best))
        parts.append(job_part(prediction, facts[-1], number))
        tell(number + 1, len(read))
    compared = None
    if len(read) > 1:
        compared = compare_sides([predicted_side(job, loaded, job.name) for job in read])
    write_text(out, jobs_page(parts, [f"{each['job']} on {each['hardware']}" for each in facts], compared))
    told = {"out": str(out), "jobs": facts, **({"comparison": compared} if compared else {})}
    lines = [f"wrote {out}: {len(facts)} job{'s' if len(facts) > 1 else ''}"]
    for each in facts:
        lines.append(
            f"{each['job']}: iteration {each['iteration_time_s']:.4g} s, {plan_text(each['hardware'], each['plan'])}"
        )
        if not each["memory"]["fits"]:
            lines.append(f"does not fit: {each['memory']['reason']}")
    answer(told, "\n".join(lines), as_json)


def compare_command(
    things: Annotated[
        list[Path],
        typer.Argument(
            parser=path, metavar="A B…", help="Job files, configurations, or run folders of a collection (runs/NAME)."
        ),
    ],
    *,
    predictors: Annotated[
        list[Path] | None,
        typer.Option(
            "--predictor",
            "-p",
            parser=path,
            help="Predictor for the jobs, as in `stepsight predict`. Repeat it to compare predictors.",
        ),
    ] = None,
    framework: FrameworkName = "",
    hardware: HardwareName = "",
    nodes: Nodes = None,
    as_json: Json = False,
) -> None:
    """Compare jobs, predictors and measured runs: what differs, and where the time differs.

    Every job is predicted with every predictor. Runs need no prediction: their measured times are used. All others are
    compared with the first. For a traced run, the table splits the time by the kinds of ops on its critical path.
    Examples:

        stepsight compare a.toml b.toml
        stepsight compare job.toml -p h100-sxm -p runs/predictor
        stepsight compare runs/before/runs/train runs/after/runs/train
    """
    from stepsight.experiments.questions.compare import compare_sides, comparison_text, predicted_side, run_side

    sides = []
    for thing in things:
        refuse_program(thing)
        if thing.is_dir():
            sides.append(run_side(thing))
            continue
        job = read_job(thing, framework, hardware, nodes)
        asked: list[Path | None] = [*predictors] if predictors else [None]
        for named in asked:
            by = f" by {named.name}" if named is not None and len(predictors or ()) > 1 else ""
            sides.append(predicted_side(job, load(named), f"{thing.name}{by}"))
    told = compare_sides(sides)
    answer(told, comparison_text(told), as_json)


def sweep_command(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(parser=path, help="Job file, or a training framework's configuration.")],
    *,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUES",
            help="Key of the job and its values: cluster.nodes=8..1024 (doubling), cluster.nodes=8..64+8 (steps of 8), "
            "parallel.recompute=none,full. Repeatable: all combinations are predicted. Links have keys too, for "
            "example cluster.fabric.inter_node.bandwidth_gbytes_per_s.",
        ),
    ],
    predictor: PredictorPath = None,
    latency: LatencyName = "",
    framework: FrameworkName = "",
    hardware: HardwareName = "",
    weak: Annotated[
        bool, typer.Option("--weak", help="Let the global batch grow with the number of devices (weak scaling).")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(parser=path, help="Plot the iteration time over the last key (.png, .svg).")
    ] = None,
    csv: Annotated[Path | None, typer.Option(parser=path, help="Write a row for each job to this file (.csv).")] = None,
    as_json: Json = False,
) -> None:
    """Predict a job over ranges of its keys.

    The number of replicas follows from the number of devices, unless parallel.dp is varied too. Combinations that break
    a rule are listed with the reason. Examples:

        stepsight sweep examples/gpt3-175b-1024.toml --vary cluster.nodes=32..256 --plot nodes.png
        stepsight sweep job.toml --vary parallel.tp=1..8 --vary batch.micro_batch=1,2,4 --csv sweep.csv
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.experiments.questions.sweep import Axis, plot_sweep, sweep, sweep_csv, sweep_text

    check_plot(plot)
    if csv is not None:
        check_result("--csv", csv, SWEEP)
    axes = [Axis.parse(text) for text in vary]
    if len({axis.key for axis in axes}) < len(axes):
        raise StepsightError(f"--vary takes each key once, got {', '.join(axis.key for axis in axes)}")
    read = read_job(job, framework, hardware)
    tell = progress("jobs predicted")
    points = sweep(read, axes, load(predictor, latency, context), weak=weak, on_point=tell)
    if plot is not None:
        plot_sweep(axes, points, plot, read.name)
    if csv is not None:
        write_text(csv, sweep_csv(points))
    told = {"job": read.name, "points": [point.to_dict() for point in points]}
    answer(told, sweep_text(axes, points), as_json)
