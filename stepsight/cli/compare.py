"""Verbs that show jobs and put them beside others: sweep, compare, report, page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from stepsight.cli import files
from stepsight.cli.files import JobOptions, LearnedSource, MovedJobOptions, Plot, Prices, Source
from stepsight.cli.options import Answer, Written, progress
from stepsight.dataset.base.errors import StepsightError, need
from stepsight.experiments.questions.training_plan import Reliability


def sweep_command(
    job: Path,
    *,
    vary: Annotated[list[str], typer.Option(metavar="KEY=VALUES")],
    source: Source,
    overrides: JobOptions,
    weak: bool = False,
    plot: Plot = None,
    csv: Annotated[Path | None, Written((".csv",), rb"[a-z_]+\.[a-z_.]+,")] = None,
) -> Answer:
    """Predict a job over ranges of its keys.

    The number of replicas follows from the number of devices, unless parallel.dp is varied too. Combinations that break
    a rule are listed with the reason. Examples:

        stepsight sweep examples/gpt3-175b-1024.toml --vary cluster.nodes=32..256 --plot nodes.png
        stepsight sweep job.toml --vary parallel.tp=1..8 --vary batch.micro_batch=1,2,4 --csv sweep.csv

    Args:
        job: Job file, or a training framework's configuration.
        vary: Key of the job and its values: cluster.nodes=8..1024 (doubling), cluster.nodes=8..64+8 (steps of 8),
            parallel.recompute=none,full. Repeatable: all combinations are predicted. Links have keys too, for example
            cluster.fabric.inter_node.bandwidth_gbytes_per_s.
        weak: Let the global batch grow with the number of devices (weak scaling).
        plot: Plot the iteration time over the last key (.png, .svg).
        csv: Write a row for each job to this file (.csv).
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.experiments.questions.sweep import Axis, plot_sweep, sweep, sweep_csv, sweep_text

    axes = [Axis.parse(text) for text in vary]
    if len({axis.key for axis in axes}) < len(axes):
        raise StepsightError(f"--vary takes each key once, got {', '.join(axis.key for axis in axes)}")
    read = overrides.read(job)
    points = sweep(read, axes, source.load(), weak=weak, on_point=progress("jobs predicted"))
    if plot is not None:
        plot_sweep(axes, points, plot, read.name)
    if csv is not None:
        write_text(csv, sweep_csv(points))
    return Answer({"job": read.name, "points": [point.to_dict() for point in points]}, sweep_text(read, axes, points))


def compare_command(
    things: Annotated[list[Path], typer.Argument(metavar="A B…")],
    *,
    predictors: Annotated[list[Path] | None, "--predictor", "-p"] = None,
    overrides: MovedJobOptions,
) -> Answer:
    """Compare jobs, predictors and measured runs: what differs, and where the time differs.

    Every job is predicted with every predictor. Runs need no prediction: their measured times are used. All others are
    compared with the first. For a traced run, the table splits the time by the kinds of ops on its critical path. Of
    traces it also lists the kernels that gained or lost time, by name, kind and sizes. Examples:

        stepsight compare examples/gpt3-175b-1024.toml examples/gpt3-175b-1024-zero-bubble.toml
        stepsight compare job.toml -p h100-sxm -p runs/predictor
        stepsight compare runs/before/runs/train runs/after/runs/train
        stepsight compare before.json.gz after.json.gz

    Args:
        things: Job files, configurations, run folders of a collection (runs/NAME), or traces of PyTorch's profiler (a
            file, or a folder with those of all ranks).
        predictors: Predictor for the jobs, as in `stepsight predict`. Repeat it to compare predictors.
    """
    from stepsight.dataset.traces.event_blocks import is_trace
    from stepsight.experiments.questions.compare import compare_sides, comparison_text, predicted_side, run_side
    from stepsight.training.prediction.prediction import predict

    sides = []
    for thing in things:
        files.refuse_program(thing)
        if thing.is_dir() or (thing.is_file() and (thing.name.endswith(".json.gz") or is_trace(thing))):
            sides.append(run_side(thing))
            continue
        job = overrides.read(thing)
        for named in predictors or (None,):
            by = f" by {named.name}" if named is not None and len(predictors or ()) > 1 else ""
            sides.append(predicted_side(predict(job, files.load_predictor(named)), f"{thing.name}{by}"))
    told = compare_sides(sides)
    return Answer(told, comparison_text(told))


def report_command(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB…")],
    *,
    out: Annotated[Path, "-o", Written((".html",), b"<!doctype html>")],
    source: LearnedSource,
    overrides: MovedJobOptions,
    search: bool = False,
    tokens: Annotated[float | None, typer.Option(show_default="1e12; 1e9 samples")] = None,
    prices: Prices = None,
    reliability: Reliability,
) -> Answer:
    """Write a page about jobs: one self-contained HTML file.

    The page shows the prediction and its basis, where the time goes, a zoomable timeline, memory over time by stage,
    duration and cost of training, sensitivity to links, batch and nodes, what to try next, and all assumptions. With
    several jobs it begins with their comparison. Examples:

        stepsight report examples/gpt3-175b-1024.toml --out gpt3.html
        stepsight report job.toml --search --tokens 15e12 --prices prices.toml --node-mtbf-hours 6000 --out job.html

    Args:
        jobs: Job files, or configurations of frameworks.
        out: The page to write (.html).
        search: Also search the best strategies of each job; this takes seconds.
        tokens: Tokens (samples of a recommendation model) to train on, for duration, device-hours, cost and energy.
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.experiments.page import views
    from stepsight.experiments.questions.compare import compare_sides, predicted_side
    from stepsight.experiments.questions.job_facts import job_facts
    from stepsight.experiments.questions.training_plan import TOKENS, plan_text, training_plan, usual_amount
    from stepsight.experiments.search.search import search as search_strategies
    from stepsight.training.prediction.prediction import predict

    goal = files.goal_of(TOKENS if tokens is None else tokens, prices)
    predictor, tell = source.load(), progress("jobs reported")
    read = overrides.read_all(jobs, overrides.nodes)
    facts, extra, predictions = [], [], [predict(job, predictor) for job in read]
    for number, prediction in enumerate(predictions):
        own = goal if tokens is not None else replace(goal, tokens=usual_amount(prediction.job))
        facts.append(job_facts(prediction, predictor, training_plan(prediction, own, reliability)))
        if search:
            found = search_strategies(prediction.job, predictor)
            facts[-1]["search"] = [{"job": each.job.name, **each.to_dict()} for each in found.choices[:5]]
            extra.append(views.section("Search", views.search_view(found)))
        tell(number + 1, len(read))
    compared = None
    if len(read) > 1:
        compared = compare_sides([predicted_side(each, each.job.name) for each in predictions])
        extra.insert(0, views.comparison(compared, links=True))
    write_text(out, views.job_page(predictions, facts, extra))
    lines = [f"wrote {out}: {len(facts)} job{'s' if len(facts) > 1 else ''}"]
    for each in facts:
        plan = plan_text(each["hardware"], each["plan"])
        lines.append(f"{each['job']}: iteration {each['iteration_time_s']:.4g} s, {plan}")
        if not each["memory"]["fits"]:
            lines.append(f"does not fit: {each['memory']['reason']}")
    return Answer({"out": str(out), "jobs": facts, **({"comparison": compared} if compared else {})}, "\n".join(lines))


def page_command(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE…")] = None,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    browser: Annotated[bool, "--browser/--no-browser"] = True,
    source: LearnedSource,
    hardware: str = "",
) -> Answer:
    """Plan in the browser: change a job by sliders and see the answer at once.

    The page shows time, memory, a timeline and sensitivity of a job, compares answers, searches strategies, and opens
    traced runs. It is served on this machine alone, to browsers that have the address with its token, until Ctrl-C.
    It reads files of the current folder only, and needs no network. Examples:

        stepsight page
        stepsight page examples/gpt3-175b-1024.toml

    Args:
        files: Job files, configurations, captured scripts, or collections. Default: GPT-3 175B on 1,024 A100.
        port: Port to serve on; 0: a free one.
        browser: Open a browser.
        hardware: Name of the devices for configurations, which do not state it.
    """
    import gc
    import webbrowser

    need("nicegui")
    from stepsight.experiments.page.server import PageServer, Workspace

    server, named = PageServer(port), [path.resolve() for path in files or ()]
    space = Workspace(Path.cwd(), hardware, source.load(), server.address)
    opened = tuple(replace(space, root=path.parent).open(path.name)[0] for path in named)

    def serve() -> None:
        if browser:  # it starts, and waits for the socket, while the libraries of the page are imported
            webbrowser.open(server.address)
        gc.disable()  # the page does it again once all is loaded: half a million new objects hold no garbage
        from stepsight.experiments.page.page import make_app

        folders = [space.root, *(path.parent for path in named), *filter(None, [source.predictor])]
        server.run(make_app(replace(space, opened=opened)), folders)

    return Answer({"address": server.address}, server.address, then=serve)
