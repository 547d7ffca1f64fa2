"""Verbs that ask about jobs: predict, explain, search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.capturing import predict_program
from stepsight.verbs.chosen import check_chosen, write_chosen
from stepsight.verbs.config_options import read_job
from stepsight.verbs.options import (
    SCHEDULE,
    STRATEGIES,
    TIMELINE,
    Force,
    FrameworkName,
    HardwareName,
    Json,
    LatencyName,
    Nodes,
    PredictorPath,
    Storage,
    TraceStages,
    Trials,
    answer,
    check_plot,
    check_result,
    listed,
    load,
    numbers,
    path,
    progress,
    refuse_given,
)
from stepsight.verbs.plan_options import Prices, add_plan
from stepsight.verbs.trace_files import check_traces, write_traces


def predict_command(
    context: typer.Context,
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(parser=path, help="Job files, or configurations of training frameworks (see `stepsight job`)."),
    ] = None,
    *,
    program: Annotated[
        Path | None,
        typer.Option(parser=path, help="Predict a captured script instead of jobs (see `stepsight capture`)."),
    ] = None,
    fabric: Annotated[
        str, typer.Option(help="With --program: the fabric, a name or a file. Default: the usual one.")
    ] = "",
    predictor: PredictorPath = None,
    latency: LatencyName = "",
    timeline: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="Write the predicted timeline to this file; it opens at ui.perfetto.dev. One job only."
        ),
    ] = None,
    level: Annotated[str, typer.Option(help="Detail of the timeline: `segment` or `op`.")] = "segment",
    traces: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Write the timeline to this new folder as traces of PyTorch's profiler, one file for each pipeline "
            "stage; HTA, TensorBoard and `stepsight import kineto` read them. One job only.",
        ),
    ] = None,
    trace_stages: TraceStages = "",
    schedule: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Write the pipeline schedule to this file (.csv), in the format of torch's pipelining. One job only.",
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Also print the days, device-hours and cost of training on this many tokens, as 15e12."),
    ] = None,
    prices: Prices = None,
    framework: FrameworkName = "",
    hardware: HardwareName = "",
    nodes: Nodes = None,
    as_json: Json = False,
) -> None:
    """Predict iteration time, interval, breakdown and memory of jobs.

    Examples:

        stepsight predict examples/gpt3-175b-1024.toml --timeline timeline.json
        stepsight predict examples/llama3-70b-fsdp-512.toml --tokens 15e12 --prices prices.toml
        stepsight predict --program captured --hardware h100-sxm-80gb --fabric dgx-h100
    """
    from stepsight.dataset.base.files import new_file
    from stepsight.experiments.reports.verb_reports import prediction_report
    from stepsight.simulator.schedules import write_schedule
    from stepsight.training.predictor.prediction import predict

    if program is not None:
        refuse_given(
            context,
            ("nodes",),
            "does not go with --program: the captured ranks fix the number of devices; capture again with --world-size",
        )
        refuse_given(
            context,
            ("jobs", "schedule", "traces", "trace_stages", "tokens", "prices", "framework", "level", "latency"),
            "does not go with --program: leave it out",
        )
        predict_program(program, predictor, (hardware, fabric), timeline, as_json=as_json)
        return
    refuse_given(context, ("fabric",), "belongs to --program: a job file names its own fabric")
    if not jobs:
        raise StepsightError("predict needs job files, or a captured script with --program DIR")
    if level not in ("segment", "op"):
        raise StepsightError(f"--level must be segment or op, got {level!r:.80}")
    if timeline is None:
        refuse_given(context, ("level",), "sets the detail of a timeline: name the file with --timeline FILE")
    for name, wanted, kind in (("--timeline", timeline, TIMELINE), ("--schedule", schedule, SCHEDULE)):
        if wanted is not None and len(jobs) != 1:
            raise StepsightError(f"{name} takes one job, got {len(jobs)}")
        if wanted is not None:
            check_result(name, wanted, kind)
    if traces is None:
        refuse_given(context, ("trace_stages",), "chooses stages of traces: name their folder with --traces DIR")
    check_traces(traces, len(jobs))
    loaded = load(predictor, latency, context)
    read = [read_job(path, framework, hardware, nodes) for path in jobs]
    predictions = [predict(job, loaded) for job in read]
    reports = [prediction_report(job, prediction) for job, prediction in zip(read, predictions, strict=True)]
    for report, prediction in zip(reports, predictions, strict=True):
        add_plan(report, prediction, tokens, prices)
    if timeline is not None:
        with new_file(timeline) as part, part.open("wb") as file:
            file.writelines(predictions[0].timeline_json(level))
    if traces is not None:
        write_traces(predictions[0], traces, trace_stages)
    if schedule is not None:
        write_schedule(predictions[0].simulation.lowered.track.schedule, schedule)
    text = "\n\n".join(report.pop("text") for report in reports)
    answer(reports[0] if len(reports) == 1 else {"predictions": reports}, text, as_json)


def explain_command(
    context: typer.Context,
    job: Annotated[Path, typer.Argument(parser=path, help="Job file, or a training framework's configuration.")],
    *,
    predictor: PredictorPath = None,
    latency: LatencyName = "",
    framework: FrameworkName = "",
    hardware: HardwareName = "",
    nodes: Nodes = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    as_json: Json = False,
) -> None:
    """List the ops and collectives that decide the iteration time, and what halving each would save.

    Example:

        stepsight explain examples/gpt3-175b-1024.toml
    """
    from stepsight.experiments.reports.verb_reports import explanation_report
    from stepsight.training.predictor.prediction import predict

    loaded = load(predictor, latency, context)
    read = read_job(job, framework, hardware, nodes)
    prediction = predict(read, loaded)
    report = explanation_report(read, prediction, top)
    answer(report, report.pop("text"), as_json)


def search_command(
    context: typer.Context,
    job: Annotated[
        Path,
        typer.Argument(parser=path, help="Job file or configuration; its model, global batch and cluster are kept."),
    ],
    *,
    predictor: PredictorPath = None,
    latency: LatencyName = "",
    framework: FrameworkName = "",
    uneven: Annotated[
        bool,
        typer.Option(
            "--uneven", help="Also choose the number of layers of each pipeline stage, for the best strategies."
        ),
    ] = False,
    expert_loads: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A .csv file with the tokens of each expert: one line, or one line for each layer with experts. The "
            "search then places experts so that the busiest rank has the least work.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", parser=path, help="Write the best strategy to this job file (.toml)."),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="Write --out as a framework's configuration: a FORMAT of `stepsight job --to`."
        ),
    ] = "",
    force: Force = False,
    space: Annotated[
        str,
        typer.Option(help="Search space: usual, wide (all axes), or a .toml file with attributes of stepsight.Space."),
    ] = "usual",
    gap: Annotated[
        float,
        typer.Option(
            min=0.0, help="Stop when the best strategy is proved to be within this many percent of the optimum."
        ),
    ] = 0.0,
    trials: Trials = None,
    timeout_s: Annotated[float | None, typer.Option(help="Stop after this many seconds.")] = None,
    sampler: Annotated[
        str,
        typer.Option(
            help="Order in which strategies are predicted. auto: by lower bounds, until the best is proved. enumerate: "
            "every legal strategy. tpe: Optuna's sampler. random: at random. tpe and random stop after 200 strategies "
            "unless --trials is given."
        ),
    ] = "auto",
    robust: Annotated[
        str,
        typer.Option(
            metavar="interval|regret",
            help="Take prediction errors into account, and list the strategies that cannot be distinguished from the "
            "best. interval: rank by the upper end of the interval. regret: rank the 25 fastest by expected regret, "
            "which is how much longer a strategy takes than the truly fastest one, on average over possible errors.",
        ),
    ] = "",
    hardware: HardwareName = "",
    nodes: Annotated[str | None, typer.Option(help="Numbers of nodes to compare, for example 16,32,64.")] = None,
    clusters: Annotated[
        str | None,
        typer.Option(
            help="Hardware to compare, for example h100-sxm-80gb,a100-sxm-80gb; NAME@FABRIC names the fabric too."
        ),
    ] = None,
    global_batches: Annotated[
        str | None, typer.Option(help="Global batches to compare, in sequences, for example 512,1024.")
    ] = None,
    seq_lens: Annotated[
        str | None, typer.Option(help="Sequence lengths to compare, in tokens, for example 4096,8192.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="What to minimise: iteration_time, training_time, cost or energy; or tokens_per_s_per_device to "
            "maximise. Default: iteration_time; training_time if clusters, batches or lengths are compared."
        ),
    ] = "",
    tokens: Annotated[
        float,
        typer.Option(
            help="Tokens to train on, for training time, cost and energy. With --critical-batch: the tokens that a "
            "very small batch needs.",
            show_default="1e9",
        ),
    ] = 1e9,
    critical_batch: Annotated[
        float,
        typer.Option(
            help="Critical batch G, in sequences: training with a global batch of B sequences takes (1 + B / G) times "
            "--tokens. 0: the number of tokens does not depend on the batch."
        ),
    ] = 0.0,
    prices: Prices = None,
    top: Annotated[
        int,
        typer.Option(
            min=1, help="Number of best strategies to find and print; of combinations, if several are searched."
        ),
    ] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    storage: Storage = None,
    study: Annotated[
        str | None, typer.Option(help="Name of the study in the storage; an existing study continues.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine that predict strategies.")] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Plot time over memory of all strategies to this file (.png, .svg); for several scenarios, "
            "time over cost.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(parser=path, help="Write all evaluated strategies to this file, one row each.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the parallel strategy with the shortest predicted iteration that fits in memory.

    The search varies the parallel degrees, micro-batch, schedule, virtual stages, ZeRO stage, recomputation and
    sequence parallelism. With --space wide it also varies hybrid sharding, recomputation of every n-th layer,
    offloading and the order of ranks. Everything else stays as in the job.

    The search computes lower bounds of the time and memory of every strategy. It predicts strategies in the order of
    these bounds until no remaining one can be faster than the best; the best is then optimal. Strategies that do not
    fit in memory are not timed.

    Columns of the table: mb is the micro-batch, zero the ZeRO stage (3/8: sharded over 8 replicas), sp sequence
    parallelism, GB the memory of the fullest pipeline stage.

    With --nodes, --clusters, --global-batches or --seq-lens every combination is searched. The table then has the best
    strategy of each combination, with time, throughput, cost and energy (an estimate from the devices' rated power).

    Examples:

        stepsight search examples/gpt3-175b-1024.toml --plot search.png
        stepsight search examples/llama3-70b-fsdp-512.toml --nodes 16,32,64 --tokens 1e12 --prices prices.toml
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.experiments.search.mapped import local_map
    from stepsight.experiments.search.search import search
    from stepsight.experiments.search.search_report import plot_result, search_report
    from stepsight.experiments.search.settings import REGRET, Goal, Scenarios, read_prices
    from stepsight.experiments.search.stage_layers import with_uneven_stages

    check_plot(plot)
    check_chosen(out, to, job, force)
    if csv is not None:
        check_result("--csv", csv, STRATEGIES)
    if study is not None and storage is None:
        raise StepsightError(
            f"--study {study!r:.80} needs --storage: name the journal or database that holds the study"
        )
    read = read_job(job, framework, hardware)
    scenarios = Scenarios(
        nodes=numbers("--nodes", nodes),
        clusters=listed("--clusters", clusters, "hardware, or hardware@fabric"),
        global_batches=numbers("--global-batches", global_batches),
        seq_lens=numbers("--seq-lens", seq_lens),
    )
    if uneven and not scenarios.is_empty:
        raise StepsightError("--uneven is for one cluster and batch: search the best scenario again with it")
    if uneven and robust == REGRET:
        raise StepsightError(f"--uneven does not go with --robust {REGRET}: give one of them")
    price, power = ({}, {}) if prices is None else read_prices(prices)
    goal = Goal(
        objective=objective or ("iteration_time" if scenarios.is_empty else "training_time"),
        tokens=tokens,
        critical_batch=critical_batch,
        prices=price,
        power_w=power,
        robust=robust or False,
    )
    loaded = load(predictor, latency, context)
    tell, evaluated = progress("strategies"), 0

    def on_trial(number: int, best: float | None) -> None:
        nonlocal evaluated
        evaluated = number + 1
        tell(evaluated, trials or "", "none fits yet" if best is None else f"best {best:.4g} s")

    with local_map(workers) as map_fn:
        result = search(
            read,
            loaded,
            space=space,
            trials=trials,
            timeout_s=timeout_s,
            gap=gap,
            top=top,
            goal=goal,
            scenarios=scenarios,
            sampler=sampler,
            seed=seed,
            storage=storage,
            study_name=study,
            on_trial=on_trial,
            map_fn=map_fn,
            expert_loads=expert_loads,
        )
    tell(evaluated, evaluated)
    if uneven:
        result = with_uneven_stages(result, loaded)
    report = search_report(read, result, top)
    if out is not None:
        report["text"] += f"\n{write_chosen(result, out, to, loaded, space)}"
    if plot is not None:
        plot_result(result, plot, read.name)
    if csv is not None:
        write_text(csv, result.to_frame().to_csv(index=False))
    answer(report, report.pop("text"), as_json)
