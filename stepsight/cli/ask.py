"""Verbs that ask about one job or program: predict, explain, search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepsight.cli.files import Force, JobOptions, MovedJobOptions, Plot, Prices, Source, check_job_output, goal_of
from stepsight.cli.options import Answer, Positive, Written, comma_separated, note, progress, refuse_given
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.experiments.search.settings import REGRET, TOKENS, Goal, Scenarios, SearchSettings

if TYPE_CHECKING:
    from stepsight.dataset.job.job import Job
    from stepsight.experiments.search.choices import SearchResult
    from stepsight.training.prediction.prediction import Prediction
    from stepsight.training.predictor.predictor import Predictor

MOST_BYTES = 200e6  # of traces that are written without being asked for by stage
BYTES_OF_KERNEL = 900  # its operator, launch, arrow and the kernel itself
_OF_JOBS = ("jobs", "schedule", "traces", "trace_stages", "tokens", "prices", "framework", "level", "latency",
            "baseline", "date", "container", "given")  # fmt: skip
TEN_BEST = SearchSettings(top=10)


@dataclass(frozen=True, kw_only=True)
class PredictionFiles:
    """Files that show a prediction.

    Attributes:
        timeline: Write the predicted timeline to this file; it opens at ui.perfetto.dev. One job only.
        level: Detail of the timeline: `segment` or `op`.
        traces: Write the timeline to this new folder as traces of PyTorch's profiler, one file for each pipeline stage;
            HTA, TensorBoard and `stepsight import kineto` read them. One job only.
        trace_stages: Stages of --traces: all, or numbers as 0,15. Default: all, or the first and the last if all would
            take more than 200 MB.
        schedule: Write the pipeline schedule to this file (.csv), in the format of torch's pipelining. One job only.
    """

    timeline: Annotated[Path | None, Written((".json",), rb'\{"displayTimeUnit":')] = None
    level: str = "segment"
    traces: Path | None = None
    trace_stages: str = ""
    schedule: Annotated[Path | None, Written((".csv",), rb"\(?\d+[A-Z]")] = None

    def check(self, context: typer.Context, num_jobs: int) -> None:
        """Check, before the work, that the files are of one job and can be written."""
        from stepsight.dataset.base.files import check_writable

        for name in ("timeline", "schedule", "traces"):
            if getattr(self, name) is not None and num_jobs != 1:
                raise StepsightError(f"--{name} takes one job, got {num_jobs}")
        if self.level not in ("segment", "op"):
            raise StepsightError(f"--level must be segment or op, got {self.level!r:.80}")
        if self.timeline is None:
            refuse_given(context, ("level",), "sets the detail of a timeline: name the file with --timeline FILE")
        if self.traces is None:
            refuse_given(context, ("trace_stages",), "chooses stages of traces: name their folder with --traces DIR")
        elif self.traces.exists() and (not self.traces.is_dir() or any(self.traces.iterdir())):
            raise StepsightError(f"--traces must be a new or empty folder, got {str(self.traces)!r:.80}")
        else:
            check_writable(self.traces)

    def write(self, prediction: Prediction) -> None:
        """Write the files that are wanted."""
        from stepsight.dataset.base.files import write_pieces
        from stepsight.simulator.schedules import write_schedule

        if self.timeline is not None:
            write_pieces(self.timeline, prediction.timeline_json(self.level))
        if self.traces is not None:
            write_traces(prediction, self.traces, self.trace_stages)
        if self.schedule is not None:
            write_schedule(prediction.simulation.lowered.track.schedule, self.schedule)


def predict_command(
    context: typer.Context,
    jobs: list[Path] | None = None,
    *,
    program: Path | None = None,
    fabric: str = "",
    source: Source,
    files: PredictionFiles,
    tokens: float | None = None,
    prices: Prices = None,
    baseline: Annotated[str, typer.Option(metavar="analytic")] = "",
    date: str = "",
    container: str = "",
    overrides: MovedJobOptions,
) -> Answer:
    """Predict iteration time, interval, breakdown and memory of jobs.

    Examples:

        stepsight predict examples/gpt3-175b-1024.toml --timeline timeline.json
        stepsight predict examples/llama3-70b-fsdp-512.toml --tokens 15e12 --prices prices.toml
        stepsight predict --program captured --hardware h100-sxm-80gb --fabric dgx-h100

    Args:
        jobs: Job files, or configurations of training frameworks (see `stepsight job`). If one of them states no
            model, as a DeepSpeed JSON beside a config.json, all are read as those of one run.
        program: Predict a captured script instead of jobs (see `stepsight capture`).
        fabric: With --program: the fabric, a name or a file. Default: the usual one.
        tokens: Also print the days, device-hours and cost of training on this many tokens, as 15e12.
        baseline: Also print the closed form of automatic planners, term by term: analytic.
        date: Answer for software of this date, as 2025-04: with its profile, and the drift that dated runs show.
        container: Answer for the software in this container, as nvcr.io/nvidia/nemo:26.06.
    """
    if baseline not in ("", "analytic"):
        raise StepsightError(f"--baseline of predict must be analytic, got {baseline!r:.80}")
    if program is not None:
        fixed = "the captured ranks fix the number of devices; capture again with --world-size"
        refuse_given(context, ("nodes",), f"does not go with --program: {fixed}")
        refuse_given(context, _OF_JOBS, "does not go with --program: leave it out")
        return _predict_program(program, source.load(), (overrides.hardware, fabric), files.timeline)
    refuse_given(context, ("fabric",), "belongs to --program: a job file names its own fabric")
    if not jobs:
        raise StepsightError("predict needs job files, or a captured script with --program DIR")
    files.check(context, len(jobs))
    if tokens is None and prices is not None:
        raise StepsightError("--prices needs --tokens: the number of tokens to train on")
    from stepsight.experiments.questions.training_plan import plan_text, training_plan
    from stepsight.experiments.reports.job_texts import prediction_report
    from stepsight.training.prediction.prediction import predict
    from stepsight.training.predictor.software_used import software_change, software_stated, with_change

    predictor = source.load()
    predictions = [predict(read, predictor) for read in overrides.read_all(jobs, overrides.nodes)]
    if release := software_stated(date, container):
        changed = replace(overrides, given=[*(overrides.given or ()), *(f'{key}="{release[key]}"' for key in release)])
        asked = changed.read_all(jobs, overrides.nodes)
        predictions = [
            with_change(predict(job, predictor), software_change(one.job, job))
            for one, job in zip(predictions, asked, strict=True)
        ]
    reports = [prediction_report(prediction.job, prediction) for prediction in predictions]
    if tokens is not None:
        goal = goal_of(tokens, prices)
        for report, prediction in zip(reports, predictions, strict=True):
            report["plan"] = training_plan(prediction, goal)
            report["text"] += f"\ntraining   {plan_text(prediction.job.hardware_name, report['plan'])}"
    if baseline:
        from stepsight.experiments.evaluation.baselines import closed_form, terms_text

        for report, prediction in zip(reports, predictions, strict=True):
            terms = closed_form(prediction.simulation)
            report["analytic"] = {"iteration_time_s": sum(terms.values()), "terms": terms}
            report["text"] += f"\n{terms_text(terms, prediction.iteration_time_s)}"
    files.write(predictions[0])
    text = "\n\n".join(report.pop("text") for report in reports)
    return Answer(reports[0] if len(reports) == 1 else {"predictions": reports}, text)


def _predict_program(
    program: Path, predictor: Predictor | str | None, cluster: tuple[str, str], timeline: Path | None
) -> Answer:
    """``stepsight predict --program``; ``cluster``: names of the hardware and of the fabric, empty if not given."""
    from stepsight.dataset.base.files import write_pieces
    from stepsight.dataset.capture.captured import read_captured
    from stepsight.dataset.tensors.program import is_model, read_model
    from stepsight.experiments.reports.job_texts import program_text
    from stepsight.simulator.replay.captured_step import step_timeline
    from stepsight.training.prediction.captured_prediction import captured_latency, predict_captured

    captured_latency(*cluster, predictor)  # a program takes long to read
    captured = read_model(program) if is_model(program) and program.is_file() else read_captured(program)
    prediction = predict_captured(captured, *cluster, predictor)
    if timeline is not None:
        memory = [rank.live_bytes for rank in prediction.captured.ranks]
        write_pieces(timeline, step_timeline(prediction.step, memory, prediction.captured.script))
    told = prediction.to_dict()
    return Answer(told, program_text(told))


def write_traces(prediction: Prediction, folder: Path, asked: str) -> None:
    """Write a trace of PyTorch's profiler for the first rank of pipeline stages, ``rank<number>.json``; ``asked``: the
    stages, as of ``--trace-stages``.
    """
    from stepsight.dataset.base.files import new_folder, write_json
    from stepsight.simulator.iteration.timeline import num_kernels, profiler_traces

    stages = list(range(prediction.simulation.lowered.num_stages))
    size = BYTES_OF_KERNEL * sum(num_kernels(prediction.simulation))
    if asked and asked != "all":
        wanted = sorted({*comma_separated("--trace-stages", int, (), asked)})
        if wanted[-1] not in stages:
            raise StepsightError(f"--trace-stages must be all, or stages from 0 to {stages[-1]}, got {asked!r:.80}")
        stages = wanted
    elif not asked and size > MOST_BYTES and len(stages) > 2:
        note(
            f"traces of all {len(stages)} stages would take about {size / 1e6:,.0f} MB: the first and the last stage "
            "are written; --trace-stages all writes all, --trace-stages 0,1 those two"
        )
        stages = [stages[0], stages[-1]]
    written, scale = progress("stages written"), prediction.iteration_time_s / prediction.simulation.iteration_time_s
    with new_folder(folder) as part:
        for done, (rank, trace) in enumerate(profiler_traces(prediction.simulation, scale, stages), 1):
            write_json(part / f"rank{rank}.json", trace, indent=None)
            written(done, len(stages))


def explain_command(job: Path, *, source: Source, overrides: MovedJobOptions, top: Positive = 10) -> Answer:
    """List the ops and collectives that decide the iteration time, and what halving each would save.

    Example:

        stepsight explain examples/gpt3-175b-1024.toml

    Args:
        job: Job file, or a training framework's configuration.
        top: Rows of the table.
    """
    from stepsight.experiments.reports.job_texts import explanation_report
    from stepsight.training.prediction.prediction import predict

    predictor, read = source.load(), overrides.read(job)
    report = explanation_report(read, predict(read, predictor), top)
    return Answer(report, report.pop("text"))


@dataclass(frozen=True, kw_only=True)
class BestStrategyFile:
    """The file with the best strategy of a search.

    Attributes:
        out: Write the best strategy to this job file (.toml).
        to: Write --out as a framework's configuration: a FORMAT of `stepsight job --to`. If the job is read from a
            configuration of that framework, --out is that file with the settings of the best strategy, and the
            answer has the differences.
    """

    out: Annotated[Path | None, "-o"] = None
    to: Annotated[str, typer.Option(metavar="FORMAT")] = ""
    force: Force = False

    def check(self, jobs: list[Path]) -> None:
        """Check, before the work, that the file can be written, has a known format and overwrites no user's file."""
        from stepsight.dataset.configs.formats import written_formats

        if self.to and self.to not in written_formats():
            raise StepsightError(f"--to must be one of {', '.join(written_formats())}, got {self.to!r:.80}")
        if self.to and self.out is None:
            raise StepsightError(f"--to {self.to} needs --out, the file to write")
        check_job_output(self.out, self.to, jobs, self.force)


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """What a search minimises.

    Attributes:
        objective: What to minimise: iteration_time, training_time, cost or energy; or tokens_per_s_per_device to
            maximise. Default: iteration_time; training_time if clusters, batches or lengths are compared.
    """

    objective: str = ""
    tokens: Annotated[float, Goal, typer.Option(show_default="1e9")] = TOKENS
    critical_batch: Annotated[float, Goal] = 0.0
    prices: Prices = None
    robust: Annotated[str, Goal, typer.Option(metavar="interval|regret")] = ""

    def goal(self, scenarios: Scenarios) -> Goal:
        objective = self.objective or ("iteration_time" if scenarios.is_empty else "training_time")
        critical, robust = self.critical_batch, self.robust or False
        return goal_of(self.tokens, self.prices, objective=objective, critical_batch=critical, robust=robust)


def search_command(
    job: list[Path],
    *,
    source: Source,
    overrides: JobOptions,
    scenarios: Scenarios,
    space: str = "usual",
    expert_loads: Path | None = None,
    uneven: bool = False,
    goal_options: GoalOptions,
    settings: SearchSettings = TEN_BEST,
    workers: Positive = 1,
    best: BestStrategyFile,
    plot: Plot = None,
    csv: Annotated[Path | None, Written((".csv",), b"tp,cp,pp,ep,dp,")] = None,
) -> Answer:
    """Find the parallel strategy with the shortest predicted iteration that fits in memory.

    The search varies the parallel degrees, micro-batch, schedule, virtual stages, ZeRO stage, recomputation and
    sequence parallelism. With --space wide it also varies hybrid sharding, recomputation of every n-th layer,
    offloading and the order of ranks. Everything else stays as in the job.

    Strategies are predicted in the order of lower bounds of their time, until no remaining one can be faster than the
    best; the best is then optimal. Strategies that do not fit in memory are not timed.

    Columns of the table: mb is the micro-batch, zero the ZeRO stage (3/8: sharded over 8 replicas), sp sequence
    parallelism, GB the memory of the fullest pipeline stage, of a tight one without the allocator's slack.

    With one number of --nodes the job is searched on as many. With several, and with --clusters, --global-batches or
    --seq-lens, every combination is searched. The table then has the best strategy of each combination, with time,
    throughput, cost and energy (an estimate from the devices' rated power).

    Examples:

        stepsight search examples/gpt3-175b-1024.toml --plot search.png
        stepsight search examples/llama3-70b-fsdp-512.toml --nodes 16,32,64 --tokens 1e12 --prices prices.toml

    Args:
        job: Job file or configuration; its model, global batch and cluster are kept. A run may have several files, as a
            DeepSpeed JSON beside a config.json; --to changes the one of its format.
        space: Search space: usual, wide (all axes), or a .toml file with attributes of stepsight.Space.
        expert_loads: A .csv file with the tokens of each expert: one line, or one line for each layer with experts. The
            search then places experts so that the busiest rank has the least work.
        uneven: Also choose the number of layers of each pipeline stage, for the best strategies.
        workers: Processes on this machine that predict strategies.
        plot: Plot time over memory of all strategies to this file (.png, .svg); for several scenarios, time over cost.
        csv: Write all evaluated strategies to this file, one row each.
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.dataset.job.frameworks import GENERIC, framework_in
    from stepsight.experiments.search.search_report import plot_result, search_report, write_best

    best.check(job)
    if uneven and not scenarios.is_empty:
        raise StepsightError("--uneven is for one cluster and batch: search the best scenario again with it")
    if uneven and goal_options.robust == REGRET:
        raise StepsightError(f"--uneven does not go with --robust {REGRET}: give one of them")
    asked: dict[str, Any] = {"predictor": source.load(), "space": space}
    compared, own, read, problem = _job_to_search(job, overrides, scenarios)
    profile = framework_in("megatron-core" if best.to.startswith("megatron") else best.to)
    if best.to and not own.framework and profile is not GENERIC:  # ranks of the framework that will run the job
        overrides = replace(overrides, framework=profile.name)
        compared, own, read, problem = _job_to_search(job, overrides, scenarios)
    if best.to == "torchrec":  # it cannot share the rows of a table among some ranks
        read = replace(read, sharding=replace(read.sharding, partial_rows=False))
    more = {"goal": goal_options.goal(compared), "scenarios": compared, "expert_loads": expert_loads}
    result = _searched(read, settings, workers, uneven, {**asked, **more})
    report = search_report(read, replace(result, own=None) if problem else result, settings.top)
    written = {"text": ""} if best.out is None else write_best(result, best.out, best.to, (job, own), asked)
    notes = [problem] * bool(problem)
    text = "\n".join([report.pop("text"), *notes]) + written.pop("text")
    report |= {**written, "notes": [*notes, *written.get("notes", ())]}
    if plot is not None:
        plot_result(result, plot, read.name)
    if csv is not None:
        write_text(csv, result.to_frame().to_csv(index=False))
    return Answer(report, text)


def _job_to_search(files: list[Path], overrides: JobOptions, scenarios: Scenarios) -> tuple[Scenarios, Job, Job, str]:
    """The scenarios to compare, the job as it is read, the job to search, and why its own strategy does not run.

    One number of nodes is no scenario: the job is searched there.
    """
    from stepsight.experiments.search.strategies import scenario_jobs

    if len(scenarios.nodes) != 1:
        problem = ""
        try:
            own = overrides.read(files)
        except JobError as error:  # another rule may place tables that fit no device by the job's own
            problem = f"the job's own sharding is not possible: {error}"
            try:
                own = replace(overrides, given=[*(overrides.given or ()), "sharding.rule=auto"]).read(files)
            except JobError:
                raise error from None
        return scenarios, own, own, problem
    (nodes,), others = scenarios.nodes, replace(scenarios, nodes=())
    try:
        own = overrides.read(files, nodes)
        return others, own, own, ""
    except JobError as error:
        own, problem = overrides.read(files), f"the job's own strategy does not run on {nodes} nodes: {error}"
        ((_, found),) = scenario_jobs(own, Scenarios(nodes=scenarios.nodes))
        if isinstance(found, JobError):
            raise found from None
        return others, own, found, problem


def _searched(job: Job, settings: SearchSettings, workers: int, uneven: bool, asked: dict[str, Any]) -> SearchResult:
    """Search with progress on stderr."""
    from stepsight.experiments.search.search import progress_words, search
    from stepsight.experiments.search.stage_layers import with_uneven_stages
    from stepsight.experiments.search.study import local_map

    tell, evaluated = progress(progress_words(job, None)[0]), 0

    def on_trial(number: int, best: float | None) -> None:
        nonlocal evaluated
        evaluated = number + 1
        tell(evaluated, settings.trials or "", progress_words(job, best)[1])

    if uneven and job.model.tables:
        raise StepsightError("--uneven is for stages of layers, not for tables of a recommendation model: leave it out")
    with local_map(workers) as map_fn:
        result = search(job, settings=settings, on_trial=on_trial, map_fn=map_fn, **asked)
    tell(evaluated, evaluated)
    return with_uneven_stages(result, asked["predictor"]) if uneven else result
