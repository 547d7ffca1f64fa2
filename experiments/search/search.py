"""Strategy search: the best legal strategy of a model on a cluster, with a proof, or the best of several clusters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.errors import StepsightError
from stepsight.dataset.job import Job, JobLike
from stepsight.experiments.search.choices import SearchResult
from stepsight.experiments.search.expert_loads import ExpertLoads
from stepsight.experiments.search.job_search import Manner, OnTrial, search_job
from stepsight.experiments.search.mapped import MapFn
from stepsight.experiments.search.objectives import REGRET, Goal
from stepsight.experiments.search.scenarios import Scenarios, search_scenarios
from stepsight.experiments.search.space import Space

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor


def search(
    job: JobLike,
    predictor: Predictor | str | None = None,
    *,
    space: Space | dict[str, Any] | str | Path | None = None,
    trials: int | None = None,
    timeout_s: float | None = None,
    gap: float = 0.0,
    top: int = 1,
    goal: Goal | None = None,
    scenarios: Scenarios | None = None,
    sampler: str = "auto",
    seed: int = 0,
    storage: str | None = None,
    study_name: str | None = None,
    on_trial: OnTrial | None = None,
    map_fn: MapFn | None = None,
    expert_loads: ExpertLoads | str | Path | None = None,
) -> SearchResult:
    """Find the strategy with the shortest predicted iteration that fits in memory.

    Every legal strategy has a lower bound: what it computes and sends at least.  The least bound is asked about first,
    until none is below the best time found.  The job's own strategy counts too: ``best`` is never slower than the job.

    Args:
        job: As in ``predict``: its model, global batch and cluster are kept, and what the space does not vary.
        predictor: As in ``predict``.
        space: Choices to try: a ``Space``, or what ``Space.of`` takes; by default those of ``Space()``.
        trials: Total of strategies evaluated in the study at the end, by earlier searches and other processes too;
            None: as many as it takes (``tpe`` and ``random``: ``TRIALS``).  Each scenario is a study of its own.
        timeout_s: No strategy is asked about after so many seconds; None: no limit.
        gap: How much longer than the optimum the best strategy may take, in percent.
        top: So many of the best strategies are sought and proved, not the best alone.
        goal: What is sought; by default the shortest iteration.
        scenarios: Clusters, batches and sequence lengths to compare; by default those of the job alone.
        sampler: ``auto`` (by bounds), ``enumerate`` (every legal strategy), ``tpe`` or ``random``.
        seed: Of the sampler, 0 to ``MOST_SEED``.
        storage: None (in memory), a database URL, or the path of a journal file; several processes may share a study.
        study_name: Name of the study in the storage; a stored study of that name goes on.
        on_trial: Called after each strategy with the number of those before it and the shortest time, in seconds.
        map_fn: Has other processes predict, as ``concurrent.futures.Executor.map``; None: this process does.
        expert_loads: Tokens that each expert gets, or the path of a CSV file of them: every strategy then places its
            experts so that the busiest rank has the least to compute, and ``model.imbalance`` is what that leaves.

    Returns:
        The strategies, best first: ``.best``, ``.gap_percent``, ``.choices``, ``.to_frame()``, ``.to_dict()``.

    Raises:
        JobError: If the job cannot be predicted, or no legal strategy exists.
        StepsightError: If an option has no legal value, or the stored study answers another question.

    Example:
        >>> search("examples/gpt3-175b-1024.toml").best.job.parallel  # doctest: +SKIP
    """
    job = Job.of(job)
    manner = Manner(
        space=Space.of(space), goal=goal or Goal(), trials=trials, timeout_s=timeout_s, gap=gap, top=top, seed=seed,
        sampler=sampler, storage=storage, study_name=study_name, on_trial=on_trial, map_fn=map_fn,
        expert_loads=expert_loads if isinstance(expert_loads, ExpertLoads) or expert_loads is None
        else ExpertLoads.read(Path(expert_loads)))  # fmt: skip
    if scenarios is None or scenarios.is_empty:
        return search_job(job, predictor, manner)
    if manner.goal.robust == REGRET:
        raise StepsightError(f"robust {REGRET} is for one cluster and batch: search the best scenario again with it")
    return search_scenarios(job, predictor, manner, scenarios)


def exhaustive(job: Job, predictor: Predictor | str | None = None, space: Space | None = None) -> SearchResult:
    """Evaluate every legal strategy: the reference for ``search``."""
    return search(job, predictor, space=space, sampler="enumerate")
