"""Search the best legal strategy of a model on a cluster, with a proof, or the best of several clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.configs.formats import write_config
from stepsight.dataset.job.job import Job, JobLike
from stepsight.experiments.reports.notebook_bar import NotebookBar
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.expert_loads import ExpertLoads
from stepsight.experiments.search.job_search import OnTrial, SearchRequest, search_job
from stepsight.experiments.search.mapped import MapFn
from stepsight.experiments.search.settings import REGRET, Goal, Scenarios, SearchSettings
from stepsight.experiments.search.space import Space
from stepsight.experiments.search.strategies import VARIED, strategies
from stepsight.training.prediction.ask_many import ask_many
from stepsight.training.prediction.prediction import predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor


def search(
    job: JobLike,
    predictor: Predictor | str | None = None,
    *,
    space: Space | dict[str, Any] | str | Path | None = None,
    goal: Goal | None = None,
    scenarios: Scenarios | None = None,
    expert_loads: ExpertLoads | str | Path | None = None,
    settings: SearchSettings | None = None,
    on_trial: OnTrial | None = None,
    map_fn: MapFn | None = None,
    **options: Any,
) -> SearchResult:
    """Find the strategy with the shortest predicted iteration that fits in memory.

    Every legal strategy has a lower bound of its time.  Strategies are predicted in the order of their bounds, until no
    bound is below the best time found.  The job's own strategy is included, so ``best`` is never slower than the job.

    Args:
        job: As in ``predict``; everything is kept that the space does not vary: model, global batch, cluster and more.
        predictor: As in ``predict``.
        space: Search space: a ``Space``, or what ``Space.of`` takes; None: ``Space()``.
        goal: Objective; None: the shortest iteration.
        scenarios: Clusters, batches and sequence lengths to compare; None: only those of the job.
        expert_loads: Tokens of each expert, or a CSV file of them: each strategy places its experts by them.
        settings: Limits, sampler and study; None: ``SearchSettings()``.
        on_trial: Called after each strategy with the number before it and the least seconds; None: a bar in notebooks.
        map_fn: A ``map`` function that predicts in other processes, such as ``concurrent.futures.Executor.map``.
        options: Fields of ``SearchSettings``, such as ``trials=200``; they replace those of ``settings``.

    Returns:
        The strategies, best first: ``.best``, ``.gap_percent``, ``.choices``, ``.to_frame()``, ``.to_dict()``.

    Raises:
        JobError: If the job cannot be predicted, or no legal strategy exists.
        StepsightError: If an option has no legal value, or the stored study answers another question.

    Example:
        >>> search("examples/gpt3-175b-1024.toml").best.job.parallel  # doctest: +SKIP
    """
    if scenarios is not None and not isinstance(scenarios, Scenarios):
        raise StepsightError(f"scenarios must be Scenarios, as in Scenarios(nodes=(8, 16)), got {scenarios!r:.80}")
    with NotebookBar("strategies") as bar:
        request = SearchRequest(
            space=Space.of(space),
            goal=goal or Goal(),
            settings=replace(settings or SearchSettings(), **options),
            expert_loads=ExpertLoads.of(expert_loads),
            on_trial=on_trial or _shown_in(bar),
            map_fn=map_fn,
        )
        if scenarios is None or scenarios.is_empty:
            return search_job(Job.of(job), predictor, request)
        return search_scenarios(Job.of(job), predictor, request, scenarios)


def _shown_in(bar: NotebookBar) -> OnTrial | None:
    """``on_trial`` that updates a bar; None outside of notebooks."""

    def on_trial(number: int, best: float | None) -> None:
        bar.show(number + 1, more="none fits yet" if best is None else f"best {best:.4g} s")

    return on_trial if bar.active else None


def search_scenarios(
    job: Job, predictor: Predictor | str | None, request: SearchRequest, scenarios: Scenarios
) -> SearchResult:
    """Search every scenario, and compare their strategies.

    Returns:
        The strategies of all scenarios, best first; ``own`` is the job as it was given.

    Raises:
        JobError: If no scenario has a legal strategy.
        StepsightError: If the goal is the least expected regret, which is for one cluster and batch.
    """
    if request.goal.robust == REGRET:
        raise StepsightError(f"robust {REGRET} is for one cluster and batch: search the best scenario again with it")
    found: list[SearchResult] = []
    skipped: list[str] = []
    for words, candidate in scenarios.of(job):
        if isinstance(candidate, JobError):
            skipped.append(f"{words}: {candidate}")
            continue
        name = request.settings.study_name and f"{request.settings.study_name}: {words}"
        named = replace(request, settings=replace(request.settings, study_name=name))
        try:
            found.append(search_job(candidate, predictor, named))
        except JobError as error:
            skipped.append(f"{words}: {error}")
    if not found:
        raise JobError(f"no scenario can be searched: {skipped[0]}")
    return merged(job, predictor, found, skipped)


def merged(job: Job, predictor: Predictor | str | None, found: list[SearchResult], skipped: list[str]) -> SearchResult:
    """Merge the results of several scenarios."""
    goal = found[0].goal
    own = next((one.own for one in found if one.own is not None and one.own.job == job), None)
    own = own or Choice.of(predict(job, predictor), lambda asked: predict(asked, predictor))
    choices = sorted((choice for one in found for choice in one.choices), key=lambda choice: choice.rank(goal))
    fitting = [one for one in found if one.any_fits]
    plans = sorted((one.best for one in fitting), key=lambda choice: choice.rank(goal))
    gaps = [one.gap_percent for one in found if one.undecided or one.any_fits]
    gap: float | None = None
    if plans and None not in gaps:
        least = min(
            goal.score(one.best.job, one.best.timed) / (1.0 + (one.gap_percent or 0.0) / 100.0) for one in fitting
        )
        gap = max(0.0, 100.0 * (goal.score(plans[0].job, plans[0].timed) / least - 1.0))
    return SearchResult(
        choices,
        evaluated=sum(one.evaluated for one in found),
        legal=sum(one.legal for one in found),
        own=own,
        gap_percent=gap,
        undecided=sum(one.undecided for one in found),
        rivals=next((one.rivals for one in fitting if one.best is plans[0]), ()),
        goal=goal,
        plans=plans,
        skipped=tuple(skipped),
        expert_loads=found[0].expert_loads,
    )


MOST_LEGAL = 20_000  # most strategies to check: some ten seconds
_KEYS = {f"parallel.{name}" for name in VARIED} | {"batch.micro_batch"}


def expresses(to: str, job: Job) -> bool:
    """Whether a format can express all degrees and options of a job's strategy."""
    return not _KEYS & {line.partition(" = ")[0] for line in write_config(job, to).ignored}


def best_expressed(
    result: SearchResult,
    to: str,
    predictor: Predictor | str | None = None,
    space: Space | dict[str, Any] | str | Path | None = None,
) -> tuple[Choice | None, bool]:
    """Find the best strategy that fits in memory and that a format can express.

    If the format does not express the best strategy, all legal strategies that it expresses are predicted: the search
    evaluated only those that could have been the best of all.

    Args:
        result: Of the search.
        to: Name of the format.
        predictor, space: Of the search.

    Returns:
        The strategy, or None; and whether all legal strategies were considered, not only those that were evaluated.
        Spaces of more than ``MOST_LEGAL`` strategies, and strategies with placed experts, are not looked through.
    """
    found = next((each for each in result.choices if each.fits and expresses(to, each.job)), None)
    if found is result.best:
        return found, True
    if result.legal > MOST_LEGAL or result.expert_loads is not None:
        return found, False
    best = result.best.job
    even = replace(best, parallel=replace(best.parallel, stage_layers=()))
    jobs = [job for job in strategies(even, Space.of(space)) if expresses(to, job)]
    known = [] if found is None else [found]
    if jobs:
        answers = ask_many(jobs, predictor, only_fitting=True)
        choices = Choice.of_answers(jobs, answers, lambda job: predict(job, predictor))
        known += [choice for choice in choices if choice.fits]
    return min(known, key=lambda choice: choice.rank(result.goal), default=None), True
