"""Verbs that ask about jobs: predict, explain, search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.errors import StepsightError
from stepsight.verbs.options import (
    SCHEDULE,
    TIMELINE,
    FrameworkName,
    Json,
    PredictorPath,
    Storage,
    Trials,
    answer,
    check_plot,
    check_result,
    load,
    path,
    progress,
    refuse_given,
)


def predict_command(
    context: typer.Context,
    jobs: Annotated[list[Path], typer.Argument(parser=path, help="Job files (.toml or .json).")],
    *,
    predictor: PredictorPath = None,
    timeline: Annotated[
        Path | None,
        typer.Option(parser=path, help="Write the predicted timeline here; open it at ui.perfetto.dev. One job only."),
    ] = None,
    level: Annotated[str, typer.Option(help="Detail of the timeline: `segment` or `op`.")] = "segment",
    schedule: Annotated[
        Path | None,
        typer.Option(parser=path, help="Write the pipeline schedule here, as torch's table of actions. One job only."),
    ] = None,
    framework: FrameworkName = "",
    as_json: Json = False,
) -> None:
    """Predict iteration time, interval, breakdown and memory of jobs.

    Example:

        stepsight predict examples/gpt3-175b-1024.toml --timeline timeline.json
    """
    from stepsight.dataset.files import new_file
    from stepsight.dataset.job import Job
    from stepsight.experiments.reports.verb_reports import prediction_report
    from stepsight.simulator.schedules import write_schedule
    from stepsight.training.predictor.prediction import predict

    if level not in ("segment", "op"):
        raise StepsightError(f"--level must be segment or op, got {level!r:.80}")
    if timeline is None:
        refuse_given(context, ("level",), "is the detail of a timeline: say where to write it with --timeline FILE")
    for name, wanted, kind in (("--timeline", timeline, TIMELINE), ("--schedule", schedule, SCHEDULE)):
        if wanted is not None and len(jobs) != 1:
            raise StepsightError(f"{name} takes one job, got {len(jobs)}")
        if wanted is not None:
            check_result(name, wanted, kind)
    loaded = load(predictor)
    read = [Job.from_file(path, framework) for path in jobs]
    predictions = [predict(job, loaded) for job in read]
    reports = [prediction_report(job, prediction) for job, prediction in zip(read, predictions, strict=True)]
    if timeline is not None:
        with new_file(timeline) as part, part.open("wb") as file:
            file.writelines(predictions[0].timeline_json(level))
    if schedule is not None:
        write_schedule(predictions[0].simulation.lowered.track.schedule, schedule)
    text = "\n\n".join(report.pop("text") for report in reports)
    answer(reports[0] if len(reports) == 1 else {"predictions": reports}, text, as_json)


def explain_command(
    job: Annotated[Path, typer.Argument(parser=path, help="Job file (.toml or .json).")],
    predictor: PredictorPath = None,
    framework: FrameworkName = "",
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    as_json: Json = False,
) -> None:
    """Say which ops and collectives the iteration time depends on, and what halving each would save.

    Example:

        stepsight explain examples/gpt3-175b-1024.toml
    """
    from stepsight.dataset.job import Job
    from stepsight.experiments.reports.verb_reports import explanation_report
    from stepsight.training.predictor.prediction import predict

    read = Job.from_file(job, framework)
    report = explanation_report(read, predict(read, load(predictor)), top)
    answer(report, report.pop("text"), as_json)


def search_command(
    job: Annotated[Path, typer.Argument(parser=path, help="Job file: its model, global batch and cluster are kept.")],
    *,
    predictor: PredictorPath = None,
    framework: FrameworkName = "",
    trials: Trials = 200,
    sampler: Annotated[
        str, typer.Option(help="tpe, random, or auto: the whole space if --trials allows it, else tpe.")
    ] = "auto",
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    storage: Storage = None,
    study: Annotated[str | None, typer.Option(help="Name of the study in the storage; goes on if it exists.")] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=path, help="Write time against memory of all strategies here (.png, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the parallel strategy with the shortest predicted iteration that fits in memory.

    It varies the degrees of all axes, micro-batch, schedule and virtual stages, ZeRO stage, recomputation and sequence
    parallelism; everything else stays as the job has it. The job's own strategy is tried first, and nothing slower is
    ever best; what does not fit in memory is not timed. In the table mb is the micro-batch, zero the ZeRO stage, sp
    sequence parallelism, and GB the memory of the fullest pipeline stage.

    Example:

        stepsight search examples/gpt3-175b-1024.toml --trials 300 --plot search.png
    """
    from stepsight.dataset.job import Job
    from stepsight.experiments.reports.plots import plot_search
    from stepsight.experiments.reports.verb_reports import search_report
    from stepsight.experiments.search.search import search

    check_plot(plot)
    read = Job.from_file(job, framework)
    loaded = load(predictor)
    tell = progress("strategies")

    def on_trial(number: int, best: float | None) -> None:
        tell(number + 1, trials, "none fits yet" if best is None else f"best {best:.4g} s")

    result = search(
        read, loaded, trials=trials, sampler=sampler, seed=seed, storage=storage, study_name=study, on_trial=on_trial
    )
    tell(trials, trials)
    report = search_report(read, result, top)
    if plot is not None:
        shown = {id(choice): choice for choice in (*result.choices, result.own) if choice is not None}
        plot_search([choice.to_dict() for choice in shown.values()], plot, read.name)
    answer(report, report.pop("text"), as_json)
