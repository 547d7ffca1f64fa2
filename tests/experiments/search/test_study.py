"""Searches continue from stored studies, several processes use one, and a user's own study has legal strategies."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.search import search
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import strategies as all_strategies
from stepsight.experiments.search.study import ask_mapped, local_map, open_storage
from stepsight.optuna import LegalStrategies
from stepsight.training.prediction.ask_many import ask_many
from stepsight.training.prediction.prediction import asked_predictor, predict

SMALL = Space(schedules=("1f1b",), zero_stages=(0, 1), recompute=("none", "full"), micro_batches=(1, 2))
OWN = Space(schedules=("1f1b",), zero_stages=(0, 1), recompute=("none",), micro_batches=(1, 2))
LEGAL = 92  # strategies of ``SMALL``
TABLES: dict[str, Any] = {
    "model": {"family": "gpt", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 1024, "seq_len": 512},
    "batch": {"micro_batch": 1, "global_batch": 32},
    "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
}

# One process imports everything and becomes several, which all begin at once.
SEARCH = f"""
import json, os, sys
from pathlib import Path
from stepsight import Space, search
storage, trials, workers, sampler, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
job, space = {TABLES!r}, {SMALL!r}
search(job, space=space, trials=1)  # whatever is loaded late is loaded once
children = []
for number in range(workers):
    pid = os.fork()
    if not pid:
        found = search(job, space=space, trials=trials, sampler=sampler, storage=storage, study_name="s", seed=number)
        (out / f"{{number}}.json").write_text(json.dumps([found.evaluated, found.gap_percent, found.best.to_dict()]))
        os._exit(0)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


@pytest.fixture
def job() -> Job:
    return Job.from_dict(TABLES)


def start(storage: str, out: Path, trials: int, workers: int, sampler: str) -> subprocess.Popen[str]:
    out.mkdir()
    command = [sys.executable, "-c", SEARCH, storage, str(trials), str(workers), sampler, str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def trials_of(place: str) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(place)
    trials = optuna.load_study(study_name="s", storage=storage).trials
    storage.remove_session()
    if engine := getattr(storage, "engine", None):
        engine.dispose()
    return trials


@pytest.fixture
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server of this test, which listens on a socket in its folder alone."""
    programs = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
    if programs is None:
        pytest.skip("no PostgreSQL server here (apt-get install postgresql)")
    owner = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())  # it refuses to run as root
    identity: dict[str, Any] = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    identity = identity if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:  # short: a socket's path has 107 characters
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        options = ["-A", "trust", "-U", "postgres", "--no-sync", "-D", f"{folder}/data"]
        subprocess.run([programs / "initdb", *options], check=True, capture_output=True, cwd=folder, **identity)
        command = [programs / "postgres", "-D", f"{folder}/data", "-k", folder, "-c", "listen_addresses="]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=folder, **identity) as server:
            deadline = time.monotonic() + 60
            while subprocess.run([programs / "pg_isready", "-q", "-h", folder], check=False).returncode:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
            server.send_signal(signal.SIGINT)


@pytest.mark.parametrize("sampler", ["auto", "random"])
@pytest.mark.parametrize(
    "storage",
    ["sqlite:///{}/study.db", "{}/study.log", pytest.param("postgres", marks=pytest.mark.storm)],
)
def test_processes_share_a_new_study(
    storage: str, sampler: str, job: Job, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They create it together, and all find the best strategy; with limits, they stop at one total."""
    place = request.getfixturevalue("postgres") if storage == "postgres" else storage.format(tmp_path)
    trials = 15 if sampler == "random" else 1000
    searches = start(place, tmp_path / "out", trials, 3, sampler)
    _, errors = searches.communicate(timeout=300)
    assert searches.returncode == 0, f"{searches.returncode} died: {errors[-3000:]}"
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()]
    distinct = {json.dumps(trial.params) for trial in trials_of(place)}
    assert len(results) == 3 and all(evaluated <= len(distinct) <= LEGAL for evaluated, _, _ in results)
    if sampler == "random":
        assert all(evaluated >= trials for evaluated, _, _ in results)
    else:
        best = search(job, space=SMALL).best.timed
        assert all(gap == 0 and found["iteration_time_s"] == best[0] for _, gap, found in results)


def test_a_killed_search_continues(job: Job, tmp_path: Path) -> None:
    """What the study holds is not evaluated again; a line that was half written is dropped."""
    place = tmp_path / "study.log"
    searches = start(str(place), tmp_path / "out", LEGAL, 1, "tpe")
    deadline = time.monotonic() + 60
    while (not place.exists() or place.read_bytes().count(b"\n") < 8) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(searches.pid, signal.SIGKILL)
    searches.communicate()
    whole = place.read_bytes()[: place.read_bytes().rfind(b"\n") + 1]
    (tmp_path / "study.log.lock").unlink(missing_ok=True)  # the next search would wait half a minute for it
    place.write_bytes(whole + whole.splitlines()[-1][:20])
    before, numbers = len(trials_of(str(place))), list[int]()
    found = search(
        job, space=SMALL, storage=str(place), study_name="s", sampler="random", trials=500,
        on_trial=lambda number, best: numbers.append(number),
    )  # fmt: skip
    assert numbers == list(range(before, LEGAL)) and found.evaluated == found.legal == LEGAL
    assert place.read_bytes().startswith(whole) and all(map(json.loads, place.read_text().splitlines()))


@pytest.mark.parametrize("storage", ["{}/study.log", "sqlite:///{}/study.db"])
def test_trials_are_those_of_the_whole_study(
    storage: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each strategy is there once; what is stored is not predicted again unless its prediction is asked for."""
    place = storage.format(tmp_path)
    options: dict[str, Any] = {"space": SMALL, "sampler": "random", "storage": place, "study_name": "s"}
    for trials, evaluated in ((3, 3), (6, 6), (4, 6)):
        first = search(job, trials=trials, **options)
        assert first.evaluated == len({choice.job for choice in first.choices}) == evaluated
    assert [trial.state.name for trial in trials_of(place)] == ["COMPLETE"] * 6
    asked: list[Job] = []

    def counted(candidate: Job, *rest: Any) -> Any:
        asked.append(candidate)
        return predict(candidate, *rest)

    monkeypatch.setattr("stepsight.experiments.search.search.predict", counted)
    monkeypatch.setattr("stepsight.experiments.search.search.ask_many", None)
    second = search(job, trials=6, **options)
    assert second.to_dict() == first.to_dict() and asked == [job]
    other = next(choice for choice in second.choices if choice.job != job and choice.fits)
    assert other.prediction is other.prediction is not None
    assert other.prediction.iteration_time_s == pytest.approx(other.to_dict()["iteration_time_s"])
    assert asked == [job, other.job]


def test_a_study_answers_one_question(job: Job, tmp_path: Path) -> None:
    """Another strategy of the job asks the same; another job, and a storage that is none, are refused."""
    storage = str(tmp_path / "study.log")
    first = search(job, space=SMALL, trials=4, sampler="random", storage=storage, study_name="s")
    own = replace(job, parallel=replace(job.parallel, tp=2, dp=4))
    second = search(own, space=SMALL, trials=9, sampler="random", storage=storage, study_name="s")
    assert second.evaluated > first.evaluated
    for other in (
        replace(job, parallel=replace(job.parallel, overlap_grad_reduce=False)),
        replace(job, batch=replace(job.batch, global_batch=64)),
    ):
        with pytest.raises(StepsightError, match="another job"):
            search(other, space=SMALL, trials=1, storage=storage, study_name="s")
    with pytest.raises(StepsightError, match="state storage"):
        search(job, space=SMALL, study_name="s")
    with pytest.raises(StepsightError, match="storage must be"):
        search(job, space=SMALL, trials=1, storage="foo://bar")
    with pytest.raises(StepsightError, match=r"write sqlite:///s9\.db"):
        search(job, space=SMALL, trials=1, storage="s9.db")
    notes = tmp_path / "notes.txt"
    notes.write_text("hi")
    with pytest.raises(StepsightError, match="journal"):
        search(job, space=SMALL, trials=1, storage=str(notes))
    assert notes.read_text() == "hi"


@pytest.fixture
def strategies() -> LegalStrategies:
    model = {"family": "gpt", "layers": 8, "hidden": 2048, "heads": 16, "vocab": 8192, "seq_len": 1024}
    return LegalStrategies(Job.from_dict({**TABLES, "model": model}), OWN)


def test_enqueued_strategies_find_the_best(strategies: LegalStrategies) -> None:
    """The study asks about the least bounds first, prunes what cannot be best, and ends at the search's best."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert strategies.enqueue(study, 20) == 20 == len(study.trials) and strategies.enqueue(study, 20) == 0
    study.optimize(strategies.objective, n_trials=40)
    trial = study.best_trial
    job = strategies.suggest(optuna.trial.FixedTrial(trial.params))
    found = search(job, space=OWN)
    assert trial.value == pytest.approx(found.best.timed[0])
    assert all(value <= 0 for value in trial.constraints.values())
    pruned = [t for t in study.trials if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned and all(t.user_attrs["bound_s"] >= trial.value for t in pruned)


def test_suggestions_are_legal(strategies: LegalStrategies) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    jobs = [strategies.suggest(study.ask()) for _ in range(20)]
    assert all(job.cluster.num_devices == 8 for job in jobs) and len(strategies) >= len(set(jobs)) > 5


def test_a_map_gives_the_same_answers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of neighbours, in order, also by a predictor that is sent along."""
    monkeypatch.setattr("stepsight.experiments.search.study.SMALLEST_PART", 16)
    jobs = list(all_strategies(job))[:37]
    sizes: list[int] = []

    def noted(ask: Callable[[Sequence[Job]], Any], parts: Sequence[Sequence[Job]]) -> list[Any]:
        sizes.extend(map(len, parts))
        return [ask(part) for part in parts]

    own = asked_predictor("a100-sxm-80gb", None)
    for predictor in (None, own):
        mapped, here = ask_mapped(jobs, predictor, noted), ask_many(jobs, predictor, only_fitting=True)
        for one, two in zip(mapped, here, strict=True):
            assert one == pytest.approx(two, rel=1e-9, nan_ok=True)
    assert sizes == [16, 16, 5] * 2


def test_a_search_with_workers_finds_the_same(job: Job) -> None:
    """Two processes, or the map of any executor."""
    alone = [choice.timed[0] for choice in search(job, top=3).choices[:3]]
    with local_map(2) as two, ThreadPoolExecutor(2) as threads:
        for map_fn in (two, threads.map):
            found = search(job, top=3, map_fn=map_fn)
            assert found.gap_percent == 0
            assert [choice.timed[0] for choice in found.choices[:3]] == pytest.approx(alone, rel=1e-9)
    for workers in (0, 10**400):
        with pytest.raises(StepsightError, match="workers must be from 1 to 1024"), local_map(workers):
            pass
    with local_map(1) as none:
        assert none is None


def test_a_map_that_is_none_is_refused(job: Job) -> None:
    """Futures in place of results, too few results, and what cannot be called."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(StepsightError, match="of type Future"):
        search(job, map_fn=lambda ask, parts: [pool.submit(ask, part) for part in parts])  # type: ignore[misc]
    with pytest.raises(StepsightError, match="got 0 results for"):
        search(job, map_fn=lambda ask, parts: [])
    with pytest.raises(StepsightError, match="map_fn must be a function"):
        search(job, map_fn=4)  # type: ignore[arg-type]


def test_a_worker_that_dies_is_named(job: Job) -> None:
    with pytest.raises(StepsightError, match="one of 2 worker processes ended early"), local_map(2) as map_fn:
        assert map_fn is not None
        list(map_fn(_die, [[job]]))


def _die(jobs: Sequence[Job]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


HELD = """
import os, sys, time
from stepsight.experiments.search.study import local_map
with local_map(2) as map_fn:
    print(*map_fn(os.getpgid, [0, 0]), flush=True)
    print(*(child for child in open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel ends them on Linux alone")
def test_workers_end_with_a_killed_search() -> None:
    """However it ends, no process is left."""
    run = subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    run.stdout.readline()
    children = [Path(f"/proc/{child}/stat") for child in run.stdout.readline().split()]
    assert len(children) == 2
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while any(path.exists() and ") Z" not in path.read_text() for path in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(path.exists() and ") Z" not in path.read_text() for path in children)
    run.stdout.close()
