"""Jobs that are drawn at random are searched, and compared with asking about every strategy."""

import json
from random import Random

import pytest

from stepsight.dataset.job.job import Job
from stepsight.experiments.studies import search_regret
from stepsight.experiments.studies.study import cases


def test_families_and_clusters_are_drawn() -> None:
    """Six families on all clusters, 8 to 16,384 devices, each job legal."""
    random = Random(0)
    jobs = [search_regret.drawn_job(random) for _ in range(200)]
    assert {job.model.name for job in jobs} == set(cases("search"))
    assert {job.cluster.hardware for job in jobs} == set(search_regret.CLUSTERS)
    assert min(job.cluster.num_devices for job in jobs) == 8
    assert max(job.cluster.num_devices for job in jobs) == 16_384


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of a small job is proved, and as good as the enumeration."""
    job = Job.from_dict(
        {
            "model": {"family": "gpt", "layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq_len": 512},
            "batch": {"micro_batch": 1, "global_batch": 8},
            "cluster": {"hardware": "a100-sxm-80gb", "devices_per_node": 2},
        }
    )
    monkeypatch.setattr(search_regret, "drawn_job", lambda random: job)
    assert search_regret.STUDY.main(["--jobs", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["jobs"]
    assert row["gap_percent"] == 0 and row["regret_percent"] < 1e-6
    assert row["legal"] >= row["evaluated"] > 0
    assert search_regret.STUDY.main(["--jobs", "1", "--most-legal", "1"]) == 2
    assert "--most-legal must leave one job" in capsys.readouterr().err
