"""An Optuna study of one's own, with three workers on one journal: ``python examples/own_study.py``."""

import sys
from multiprocessing import Process
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend

from stepsight.optuna import LegalStrategies

JOB, JOURNAL, TRIALS, WORKERS = Path(__file__).with_name("gpt3-175b-1024.toml"), "own_study.log", 60, 3


def open_study(journal: str) -> optuna.Study:
    storage = optuna.storages.JournalStorage(JournalFileBackend(journal))
    return optuna.create_study(storage=storage, study_name="own", load_if_exists=True)


def work(journal: str) -> None:
    open_study(journal).optimize(LegalStrategies(JOB).objective, n_trials=TRIALS // WORKERS)


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else JOURNAL
    LegalStrategies(JOB).enqueue(open_study(place), TRIALS)  # the strategies that can be fastest are asked about first
    workers = [Process(target=work, args=(place,)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    best = open_study(place).best_trial  # of those that keep the constraint: that fit in memory
    print(f"{best.value:.2f} s: {best.params}")
