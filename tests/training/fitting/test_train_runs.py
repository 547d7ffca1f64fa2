"""Training end to end on a collection whose truth is known: event profiles, and runs that were only timed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import signatures
from stepsight.training.fitting.train_runs import evaluate_heldout, spearman, train
from stepsight.training.measured.planning import job_digest
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.tracking.tracking import default_uri, load_model_uri

OpTruth = Callable[[Op, int], float]
CollectiveTruth = Callable[[Collective], float]


def _job(layers: int, hidden: int, dp: int = 1, tp: int = 1) -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=layers, hidden=hidden, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(dp=dp, tp=tp),
        batch=BatchSpec(micro_batch=2, global_batch=2 * dp, precision="fp32"),
        cluster=ClusterSpec(hardware="toy", devices_per_node=dp * tp, fabric="loopback"),
    )


class _Truth:
    """Ops take 20 % longer within a step than alone."""

    knows_context = True

    def __init__(self, hardware: Hardware, op: OpTruth, collective: CollectiveTruth, busy: int) -> None:
        self.hardware, self._op, self._collective, self._busy = hardware, op, collective, busy

    def op_seconds(self, ops: Any) -> np.ndarray:
        return np.array([self._op(op, self._busy) for op in ops])

    def collective_seconds(self, collectives: Any) -> np.ndarray:
        return np.array([self._collective(c) for c in collectives])

    def in_context(self, programs: list[Program], seconds: list[np.ndarray]) -> list[np.ndarray]:
        return [alone * 1.2 for alone in seconds]


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def collection(
    hardware: Hardware, op_truth: OpTruth, collective_truth: CollectiveTruth, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("collection")
    train_jobs = [
        _job(2, 64),
        _job(3, 128),
        _job(2, 192, dp=2),
        _job(4, 128, dp=2),
        _job(2, 128, tp=2),
        _job(3, 64, tp=2),
    ]
    heldout_jobs = [_job(3, 192), _job(3, 96, dp=2), _job(2, 256, tp=2)]
    rng = np.random.default_rng(0)
    for index, job in enumerate([*train_jobs, *heldout_jobs]):
        truth = _Truth(hardware, op_truth, collective_truth, job.cluster.num_devices)
        seconds = simulate(job, truth).iteration_time_s
        manifest = {
            "schema": 1,
            "name": f"run{index}",
            "role": "train" if index < len(train_jobs) else "heldout",
            "job": job.to_dict(),
            "world_size": job.cluster.num_devices,
            "fingerprint": {"device": "cpu"},
            "versions": {},
            "rounds": (seconds * np.exp(rng.normal(0, 0.01, (3, 4)))).tolist(),
            "profiled_seconds": [],
            "losses": [],
            "peak_memory_bytes": [],
            "traces": {},
        }
        _write(folder / "runs" / f"run{index}" / "manifest.json", manifest)
    for busy in (1, 2):
        ops: set[Op] = set()
        collectives: set[Collective] = set()
        for job in train_jobs:
            if job.cluster.num_devices == busy:
                more_ops, more = signatures(job, hardware)
                ops, collectives = ops | more_ops, collectives | more
        records = [{"op": asdict(op), "seconds": op_truth(op, busy)} for op in sorted(ops, key=str)]
        records += [
            {"collective": asdict(c), "seconds": collective_truth(c)}
            for c in sorted(collectives, key=str)  # type: ignore[misc]
        ]
        facts = {key: value for key, value in hardware.to_dict().items() if key not in ("name", "kind", "source")}
        table = {"schema": 1, "busy": busy, "world_size": busy, "records": records, "hardware": facts}
        _write(folder / "events" / f"world{busy}.json", table)
    return folder


@pytest.fixture(scope="module")
def trained(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path]:
    out = tmp_path_factory.mktemp("out") / "predictor"
    return train([collection], out, hardware_name="toy", progress=False), out


def test_held_out_runs_are_predicted(trained: tuple[Predictor, Path], collection: Path) -> None:
    result = evaluate_heldout(trained[0], collection, role="heldout")
    assert result.mape < 6
    assert result.mape < 0.6 * result.mape_without_gnn
    assert result.spearman == 1.0
    assert {"job", "measured_s", "predicted_s", "low_s", "high_s", "spread_percent", "error_percent"} <= set(
        result.rows[0]
    )


def test_a_digest_tells_predictors_of_other_forms_apart(
    trained: tuple[Predictor, Path], collection: Path, tmp_path: Path
) -> None:
    """The same runs with another context network predict other times."""
    other = train([collection], tmp_path / "p", hardware_name="toy", context="none", progress=False)
    assert other.manifest["digest"] != trained[0].manifest["digest"]
    assert other.manifest["data_digests"] == trained[0].manifest["data_digests"]


def test_events_alone_train(collection: Path, tmp_path: Path) -> None:
    """A predictor of ops and collectives, which no run teaches a context network."""
    _write(tmp_path / "c" / "plan.json", {"schema": 1, "runs": [], "events": []})
    (tmp_path / "c" / "events").mkdir()
    shutil.copy(collection / "events" / "world1.json", tmp_path / "c" / "events")
    found = train([tmp_path / "c"], tmp_path / "p", hardware_name="toy", progress=False)
    assert found.context is None and found.manifest["runs"] == [] and found.manifest["digest"]


def test_only_training_runs_train(trained: tuple[Predictor, Path], collection: Path) -> None:
    assert trained[0].manifest["runs"] == [f"run{i}" for i in range(6)]
    with pytest.raises(TraceError, match="role 'later', got none"):
        evaluate_heldout(trained[0], collection, role="later")


def test_runs_that_trained_cannot_judge(
    trained: tuple[Predictor, Path], collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However their collection's path is spelled, and also if an older manifest states their names alone."""
    job = Job.from_dict(json.loads((collection / "runs/run6/manifest.json").read_text())["job"])
    monkeypatch.chdir(collection.parent)
    for taught in ({"jobs": [job_digest(job)]}, {"jobs": None, "runs": ["run6"]}):
        predictor = replace(trained[0], manifest={**trained[0].manifest, **taught})
        for path in (collection, Path(collection.name), collection / ".." / collection.name):
            with pytest.raises(TraceError, match="cannot judge it, got run6"):
                evaluate_heldout(predictor, path, role="heldout")


def test_the_saved_predictor_is_the_trained_one_and_is_registered(trained: tuple[Predictor, Path]) -> None:
    predictor, out = trained
    job = _job(5, 160, dp=2)
    expected = simulate(job, predictor.latency(job)).iteration_time_s
    for again in (Predictor.load(out), load_model_uri("models:/toy", default_uri(out))):
        assert simulate(job, again.latency(job)).iteration_time_s == pytest.approx(expected, rel=1e-6)
    assert predictor.manifest["mlflow_run_id"]
    assert predictor.manifest["metrics"]["mape_percent"] < 10


def test_other_hardware_is_refused_before_anything_is_written(collection: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cluster\.hardware must be 'other', got 'toy'"):
        train([collection], tmp_path / "p", hardware_name="other", progress=False)
    assert not (tmp_path / "p").exists()


def test_a_negative_seed_is_refused_before_anything_is_written(collection: Path, tmp_path: Path) -> None:
    with pytest.raises(StepsightError, match="seed must be a number >= 0, got -1"):
        train([collection], tmp_path / "p", seed=-1, progress=False)
    assert not (tmp_path / "p").exists()


def test_a_collection_without_measurements_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    with pytest.raises(TraceError, match="needs event profiles or traces of runs with role train"):
        train([tmp_path / "empty"], tmp_path / "p", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_rank_correlation_takes_ties() -> None:
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 1.0, 3.0]), np.array([1.0, 4.0, 9.0])) == pytest.approx(0.866, abs=1e-3)
    assert spearman(np.ones(3), np.arange(3.0)) == 0.0


@pytest.mark.storm
def test_four_trainings_share_one_new_store(collection: Path, tmp_path: Path) -> None:
    """All leave a predictor and a version of their own."""
    store = f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}"
    options = ["--hardware", "toy", "--tracking-uri", store, "--json"]
    command = [sys.executable, "-m", "stepsight", "train", str(collection), *options]
    outs = [tmp_path / f"p{number}" for number in range(4)]
    trainings = [subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True) for out in outs]
    for out, training in zip(outs, trainings, strict=True):
        _, errors = training.communicate(timeout=600)
        assert training.returncode == 0, errors[-3000:]
        Predictor.load(out)
    client = MlflowClient(store, store)
    assert sorted(v.version for v in client.search_model_versions("name='stepsight-toy'")) == [1, 2, 3, 4]
    assert len(client.search_experiments()) == 2  # with MLflow's own
