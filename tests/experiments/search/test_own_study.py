"""A user's own Optuna study of legal strategies."""

import optuna
import pytest

from stepsight.dataset.job.job import Job
from stepsight.experiments.search.search import search
from stepsight.experiments.search.space import Space
from stepsight.optuna import LegalStrategies

SMALL = Space(schedules=("1f1b",), zero_stages=(0, 1), recompute=("none",), micro_batches=(1, 2))


@pytest.fixture
def strategies() -> LegalStrategies:
    tables = {
        "model": {"family": "gpt", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 8192, "seq_len": 1024},
        "batch": {"micro_batch": 1, "global_batch": 32},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
    }
    return LegalStrategies(Job.from_dict(tables), SMALL)


def test_enqueued_strategies_find_the_best(strategies: LegalStrategies) -> None:
    """The study asks about the least bounds first, prunes what cannot be best, and ends at the search's best."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert strategies.enqueue(study, 20) == 20 == len(study.trials) and strategies.enqueue(study, 20) == 0
    study.optimize(strategies.objective, n_trials=40)
    trial = study.best_trial
    job = strategies.suggest(optuna.trial.FixedTrial(trial.params))
    found = search(job, space=SMALL)
    assert trial.value == pytest.approx(found.best.timed[0])
    assert all(value <= 0 for value in trial.constraints.values())
    pruned = [t for t in study.trials if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned and all(t.user_attrs["bound_s"] >= trial.value for t in pruned)


def test_suggestions_are_legal(strategies: LegalStrategies) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    jobs = [strategies.suggest(study.ask()) for _ in range(20)]
    assert all(job.cluster.num_devices == 8 for job in jobs) and len(strategies) >= len(set(jobs)) > 5
