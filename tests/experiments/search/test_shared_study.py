"""Processes that search with one study: each strategy is evaluated once, all stop at one total, and none dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from stepsight.experiments.search.shared_study import _open
from tests.experiments.search.postgres_server import running_postgres

LEGAL = 92  # strategies of the space below

# One process imports everything and becomes several, which all begin at once.
SEARCH = """
import json, os, sys
from pathlib import Path
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.search import search
from stepsight.experiments.search.space import Space
storage, trials, workers, sampler, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
job = Job.from_dict({
    "model": {"family": "gpt", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 1024, "seq_len": 512},
    "batch": {"micro_batch": 1, "global_batch": 32},
    "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
})
space = Space(schedules=(("1f1b", 1),), zero_stages=(0, 1), recompute=("none", "full"), micro_batches=(1, 2))
search(job, space=space, trials=1)  # whatever is loaded late is loaded once
children = []
for number in range(workers):
    pid = os.fork()
    if not pid:
        own = []
        found = search(job, space=space, trials=trials, sampler=sampler, storage=storage, study_name="s",
                       on_trial=lambda number, best: own.append(number))
        result = {"evaluated": found.evaluated, "own": len(own), "best": found.best.to_dict()}
        (out / f"{number}.json").write_text(json.dumps(result))
        os._exit(0)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


def start(storage: str, out: Path, total: int, workers: int, sampler: str = "random") -> subprocess.Popen[str]:
    out.mkdir()
    command = [sys.executable, "-c", SEARCH, storage, str(total), str(workers), sampler, str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def check(searches: subprocess.Popen[str], storage: str, out: Path, total: int) -> list[dict[str, Any]]:
    """No process died, all say the same, and every strategy is in the study once."""
    _, errors = searches.communicate(timeout=300)
    assert searches.returncode == 0, f"{searches.returncode} died: {errors[-3000:]}"
    results = [json.loads(path.read_text()) for path in out.iterdir()]
    assert {result["evaluated"] for result in results} == {total}
    assert len({json.dumps(result["best"]) for result in results}) == 1
    opened = _open(storage if "://" in storage else Path(storage))
    trials = optuna.load_study(study_name="s", storage=opened).trials
    if engine := getattr(opened, "engine", None):
        opened.remove_session()
        engine.dispose()
    counts = Counter(json.dumps(trial.params) for trial in trials if trial.state.name in ("COMPLETE", "PRUNED"))
    assert len(counts) == total and set(counts.values()) == {1}
    return results


@pytest.fixture
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server of our own, which listens on a socket in its folder alone."""
    with running_postgres() as folder:
        yield f"postgresql+psycopg://postgres@/postgres?host={folder}"


@pytest.mark.parametrize(
    ("kind", "total", "workers"),
    [
        ("sqlite", 15, 3),
        ("journal", 15, 3),
        *(pytest.param(kind, 60, 8, marks=pytest.mark.storm) for kind in ("sqlite", "journal", "postgres")),
        *(pytest.param(kind, LEGAL, 8, marks=pytest.mark.storm) for kind in ("sqlite", "journal", "postgres")),
    ],
)
def test_workers_share_a_new_study(
    kind: str, total: int, workers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They create it together; no strategy is evaluated twice."""
    storage = _storage(kind, tmp_path, request)
    results = check(start(storage, tmp_path / "out", total, workers), storage, tmp_path / "out", total)
    assert sum(result["own"] for result in results) == total and len(results) == workers


def _storage(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    if kind == "postgres":
        url: str = request.getfixturevalue("postgres")
        return url
    return {"sqlite": f"sqlite:///{folder}/new/study.db", "journal": str(folder / "new" / "study.log")}[kind]


@pytest.mark.storm
@pytest.mark.parametrize("sampler", ["enumerate", "tpe"])
@pytest.mark.parametrize("kind", ["sqlite", "journal", "postgres"])
def test_killed_workers_lose_nothing(kind: str, sampler: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Workers that are killed with -9 again and again leave a study that others finish."""
    storage = _storage(kind, tmp_path, request)
    for number in range(3):
        out = tmp_path / f"out{number}"
        searches = start(storage, out, LEGAL, 4, sampler)
        time.sleep(10 + 2 * number)
        os.killpg(searches.pid, signal.SIGKILL)
        searches.communicate()
    check(start(storage, tmp_path / "last", LEGAL, 4, sampler), storage, tmp_path / "last", LEGAL)
