"""Trials that are written together are those that Optuna writes one by one."""

from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from stepsight.experiments.search import database_trials
from stepsight.experiments.search.database_trials import add_finished, count_trials

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
    study_id = storage.get_study_id_from_name("a")
    assert [add_finished(storage, study_id, some) for some in (trials[:1], trials[1:], [])] == [0, 1, 4]
    assert count_trials(storage, study_id) == 4
    for trial in trials:
        one_by_one.add_trial(trial)
    wanted = [{**vars(trial), "_trial_id": 0} for trial in one_by_one.get_trials()]
    assert [{**vars(trial), "_trial_id": 0} for trial in together.get_trials()] == wanted
    assert together.best_trial.number == 0 and len(wanted) == 4
    assert together.ask().number == 4


def test_other_storages_are_left_alone() -> None:
    storage = optuna.storages.InMemoryStorage()
    assert add_finished(storage, 0, [finished(1)]) is None
    assert count_trials(storage, 0) is None


def test_tables_of_another_version_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a column that nobody here knows is not written to: Optuna does it itself."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    study = optuna.create_study(storage=storage, study_name="a")
    monkeypatch.setattr(database_trials, "_trial_row", lambda study_id, trial: {"number": -1, "study_id": study_id})
    assert add_finished(storage, storage.get_study_id_from_name("a"), [finished(1)]) is None
    assert not study.trials
