"""Strategy search: the best legal strategy of a model on a cluster, with a proof, or the best of several clusters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job, JobLike
from stepsight.experiments.reports.notebook_bar import NotebookBar
from stepsight.experiments.search.choices import SearchResult
from stepsight.experiments.search.expert_loads import ExpertLoads
from stepsight.experiments.search.job_search import Manner, OnTrial, search_job
from stepsight.experiments.search.mapped import MapFn
from stepsight.experiments.search.objectives import Goal
from stepsight.experiments.search.scenarios import Scenarios, search_scenarios
from stepsight.experiments.search.settings import SearchSettings
from stepsight.experiments.search.space import Space

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
    with NotebookBar("strategies") as bar:
        manner = Manner(
            space=Space.of(space),
            goal=goal or Goal(),
            on_trial=on_trial or _shown_in(bar),
            map_fn=map_fn,
            expert_loads=ExpertLoads.of(expert_loads),
            **{**vars(settings or SearchSettings()), **options},
        )
        return _searched(Job.of(job), predictor, manner, scenarios)


def _searched(job: Job, predictor: Predictor | str | None, manner: Manner, scenarios: Scenarios | None) -> SearchResult:
    if scenarios is None or _checked(scenarios).is_empty:
        return search_job(job, predictor, manner)
    return search_scenarios(job, predictor, manner, scenarios)


def _shown_in(bar: NotebookBar) -> OnTrial | None:
    """``on_trial`` that updates a bar; None outside of notebooks."""

    def on_trial(number: int, best: float | None) -> None:
        bar.show(number + 1, more="none fits yet" if best is None else f"best {best:.4g} s")

    return on_trial if bar.active else None


def _checked(scenarios: Scenarios) -> Scenarios:
    if not isinstance(scenarios, Scenarios):
        raise StepsightError(f"scenarios must be Scenarios, as in Scenarios(nodes=(8, 16)), got {scenarios!r:.80}")
    return scenarios


def exhaustive(job: Job, predictor: Predictor | str | None = None, space: Space | None = None) -> SearchResult:
    """Evaluate every legal strategy: the reference for ``search``."""
    return search(job, predictor, space=space, sampler="enumerate")
