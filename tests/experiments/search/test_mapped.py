"""Strategies that other processes predict: the same answers, and mistakes of a ``map_fn`` are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.mapped import ask_mapped, local_map
from stepsight.experiments.search.search import search
from stepsight.experiments.search.strategies import strategies
from stepsight.training.prediction.ask_many import ask_many
from stepsight.training.prediction.prediction import asked_predictor


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.from_dict(
        {
            "model": {"family": "gpt", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 1024, "seq_len": 512},
            "batch": {"micro_batch": 1, "global_batch": 64},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
        }
    )


def test_a_map_gives_the_same_answers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of neighbours, in order, also by a predictor that is sent along."""
    monkeypatch.setattr("stepsight.experiments.search.mapped.SMALLEST_PART", 16)
    jobs = list(strategies(job))[:37]
    sizes: list[int] = []

    def noted(ask: Callable[[Sequence[Job]], Any], parts: Sequence[Sequence[Job]]) -> list[Any]:
        sizes.extend(map(len, parts))
        return [ask(part) for part in parts]

    own = asked_predictor("a100-sxm-80gb", None)
    for predictor in (None, own):
        mapped, here = ask_mapped(jobs, predictor, noted), ask_many(jobs, predictor, only_fitting=True)
        for one, two in zip(mapped, here, strict=True):
            assert one == pytest.approx(two, rel=1e-12, nan_ok=True)
    assert sizes == [16, 16, 5] * 2


def test_a_search_with_workers_finds_the_same(job: Job) -> None:
    """Two processes, or the map of any executor."""
    alone = [choice.timed[0] for choice in search(job, top=3).choices[:3]]
    with local_map(2) as two, ThreadPoolExecutor(2) as threads:
        for map_fn in (two, threads.map):
            found = search(job, top=3, map_fn=map_fn)
            assert found.gap_percent == 0
            assert [choice.timed[0] for choice in found.choices[:3]] == pytest.approx(alone, rel=1e-9)
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
from stepsight.experiments.search.mapped import local_map
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
