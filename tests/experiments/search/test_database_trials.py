"""Trials that are written together are those that Optuna writes one by one."""

from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from stepsight.experiments.search.database_trials import add_finished

DISTRIBUTIONS = {"layout": CategoricalDistribution(["tp1", "tp2"]), "size": IntDistribution(1, 8)}


def finished(size: int) -> FrozenTrial:
    fits = size % 2 == 1
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE if fits else TrialState.PRUNED,
        value=0.5 * size if fits else None,
        params={"layout": "tp2", "size": size},
        distributions=DISTRIBUTIONS,
        user_attrs={"seconds": [1.0, 0.5, 2.0] if fits else None},
        constraints={"memory": -1.0},
    )


def test_a_batch_is_what_optuna_writes(tmp_path: Path) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    together, one_by_one = (optuna.create_study(storage=storage, study_name=name) for name in ("a", "b"))
    trials = [finished(size) for size in (1, 2, 3, 4)]
    for some in (trials[:1], trials[1:]):
        assert add_finished(storage, storage.get_study_id_from_name("a"), some)
    for trial in trials:
        one_by_one.add_trial(trial)
    wanted = [{**vars(trial), "_trial_id": 0} for trial in one_by_one.get_trials()]
    assert [{**vars(trial), "_trial_id": 0} for trial in together.get_trials()] == wanted
    assert together.best_trial.number == 0 and len(wanted) == 4
    assert together.ask().number == 4


def test_other_storages_are_left_alone() -> None:
    assert not add_finished(optuna.storages.InMemoryStorage(), 0, [finished(1)])
