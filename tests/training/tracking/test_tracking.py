import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pandas
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from stepsight.dataset.base.errors import JobError, PredictorError
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.served_model import ServedModel
from stepsight.training.tracking.tracking import default_uri, load_model_uri, load_predictor, reopened, tracked

JOB = {
    "model": {"family": "gpt", "layers": 2, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128},
    "batch": {"micro_batch": 1, "global_batch": 2, "precision": "fp32"},
    "cluster": {"nodes": 1, "devices_per_node": 1, "fabric": "loopback"},
}


def test_a_predictor_comes_back_from_the_registry(predictor: Predictor, tmp_path: Path) -> None:
    uri = default_uri(tmp_path / "p")
    predictor.save(tmp_path / "p")
    with tracked(uri, "toy") as run:
        run.log({"seed": 0}, {"mape": 3.5}, {"stepsight.hardware": "toy"})
        versions = [run.publish(tmp_path / "p", "toy", {"hardware": "toy"}) for _ in range(2)]
    assert versions == ["1", "2"]
    op = Op("gelu", (1000,), "fp32")
    loaded = load_model_uri("models:/toy", uri)
    assert loaded.kernel.seconds([op], 1) == pytest.approx(predictor.kernel.seconds([op], 1), rel=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {"p", "mlflow.db", ".mlflow.db.lock", "mlartifacts"}
    with pytest.raises(PredictorError, match="must hold models:/other "):
        load_model_uri("models:/other", uri)
    with pytest.raises(RuntimeError, match="broken"), tracked(uri, "toy"):
        raise RuntimeError("broken")


def test_mlflow_serves_a_predictor(predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of jobs in, times and intervals out, by a module of the package: nothing is unpickled."""
    uri = default_uri(tmp_path / "p")
    predictor.save(tmp_path / "p")
    with tracked(uri, "toy") as run:
        run.publish(tmp_path / "p", "toy", {})
    client = MlflowClient(uri, uri)
    folder = client.download_artifacts(client.get_model_version("stepsight-toy", "1").run_id, "predictor")
    assert not list(Path(folder).rglob("*.pkl"))
    served = mlflow.pyfunc.load_model(folder)
    assert served.metadata.signature.inputs.input_names() == ["job"]
    job = Job.of({**JOB, "cluster": {**JOB["cluster"], "hardware": "toy"}})
    answer = served.predict(pandas.DataFrame({"job": [job.to_json(), job.to_json()]}))
    expected = predict(job, predictor)
    assert answer["iteration_time_s"].tolist() == pytest.approx([expected.iteration_time_s] * 2, rel=1e-6)
    assert (answer["low_s"] < answer["high_s"]).all()
    with pytest.raises(JobError, match="row 0: a job needs a table"):
        ServedModel(predictor).predict(pandas.DataFrame({"job": ["{}"]}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name in ("models:/toy@champion", "models:/stepsight-toy/1", "models:/toy"):
        assert load_model_uri(name).hardware == predictor.hardware
        assert predict(job, name).iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-6)
        assert load_predictor(name).source == load_model_uri(name).source
    with pytest.raises(PredictorError, match="must hold models:/other@champion"):
        load_model_uri("models:/other@champion")


def test_the_champion_is_who_was_better_on_the_same_data(predictor: Predictor, tmp_path: Path) -> None:
    """The first is the champion; another one needs a lower error, and without anything to judge by it is challenger."""
    uri = default_uri(tmp_path / "p")
    predictor.save(tmp_path / "p")
    client = MlflowClient(uri, uri)
    holders = []
    with tracked(uri, "toy") as run:
        for errors in (None, None, (5.0, 4.0), (3.0, 4.0), (3.0, 3.0)):
            run.publish(tmp_path / "p", "toy", {}, lambda champion, errors=errors: errors)
            holders.append(int(client.get_model_version_by_alias("stepsight-toy", "champion").version))
    assert holders == [1, 1, 1, 4, 4]
    assert client.get_model_version_by_alias("stepsight-toy", "challenger").tags["error_percent"] == "3.000"
    assert client.get_model_version("stepsight-toy", "3").tags["champion_error_percent"] == "4.000"


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "https://127.0.0.1:9/x", "postgresql://me@127.0.0.1:9/db"])
def test_a_store_out_of_reach_is_refused_in_one_line(uri: str) -> None:
    with pytest.raises(PredictorError, match=r"^tracking needs a store that can be reached, got .*refused$"):
        enter(uri)


def test_a_server_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(PredictorError, match=r"^tracking needs a URI of an MLflow store with a registry, got [^\n]*$"),
    ):
        enter(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_database_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database at all")
    (tmp_path / "folder.db").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name, says in (("text.db", "not a database"), ("folder.db", "plain file"), ("text.db/x.db", "folder")):
        with pytest.raises(PredictorError, match=f"^tracking needs a store that can be reached, got [^\n]*{says}"):
            enter(f"sqlite:///{tmp_path / name}")
    assert sorted(tmp_path.rglob("*")) == before


def enter(uri: str) -> None:
    with tracked(uri, "run"):
        raise AssertionError("nothing may be learned for a store that is none")


def test_a_new_store_is_created_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """MLflow's own level is set when it is imported, which may be earlier; 3.9 tells of every migration of a store."""
    logging.getLogger("alembic").setLevel(logging.INFO)
    with tracked(default_uri(tmp_path / "p"), "run"):
        pass
    assert capfd.readouterr().err == ""


def test_a_run_ends_as_what_happened_to_it(tmp_path: Path) -> None:
    uri = default_uri(tmp_path / "p")
    with pytest.raises(KeyboardInterrupt), tracked(uri, "interrupted"):
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError), tracked(uri, "failed"):
        raise RuntimeError
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("stepsight").experiment_id
    with tracked(uri, "finished") as run:
        assert status(client, experiment)["finished"] == "RUNNING"
    reopened(uri, run.run_id).log({}, {"heldout_mape": 3.0}, {})
    assert client.get_run(run.run_id).data.metrics == {"heldout_mape": 3.0}
    assert status(client, experiment) == {
        "interrupted": "KILLED",
        "failed": "FAILED",
        "finished": "FINISHED",
    }


def status(client: MlflowClient, experiment: str) -> dict[str, str]:
    return {run.info.run_name: run.info.status for run in client.search_runs([experiment])}


def test_a_store_that_goes_away_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="persistent store"), tracked(default_uri(tmp_path / "p"), "run"):
        raise MlflowException("gone\nfor good")


def test_an_impossible_store_is_refused_at_once() -> None:
    """A URI that MLflow does not know is the user's mistake."""
    with pytest.raises(PredictorError, match="foo://x"), tracked("foo://x", "run"):
        raise AssertionError("nothing may be learned for a store that is none")


PUBLISH = """
import sys
from pathlib import Path
from stepsight.training.tracking.tracking import tracked
uri, folder, number = sys.argv[1:]
with tracked(uri, f"run{number}") as run:
    run.log({"seed": number}, {"mape": 1.0}, {})
    print(run.publish(Path(folder), "toy", {"hardware": "toy"}))
"""


def test_several_processes_create_one_store(tmp_path: Path) -> None:
    """Each makes its run and its own version, whoever comes first."""
    uri, folder = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}", tmp_path / "p"
    folder.mkdir()
    (folder / "predictor.json").write_text("{}")
    commands = [[sys.executable, "-c", PUBLISH, uri, str(folder), str(number)] for number in range(3)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    printed = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, [error[-1000:] for _, error in printed]
    assert sorted(version.strip() for version, _ in printed) == ["1", "2", "3"]


def test_a_process_that_is_killed_while_it_creates_a_store_leaves_none(tmp_path: Path) -> None:
    """MLflow would refuse a database that is migrated in part."""
    uri, folder = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "p"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", PUBLISH, uri, str(folder), "0"], stderr=subprocess.DEVNULL)
    new = tmp_path / ".mlflow.db.new"
    while process.poll() is None and not (new.exists() and new.stat().st_size):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert new.exists() and not (tmp_path / "mlflow.db").exists()
    with tracked(uri, "again") as run:
        assert run.run_id
    assert not new.exists()


def test_reading_creates_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path of a registry is an error, and no new database."""
    uri = f"sqlite:///{tmp_path / 'mistyped' / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for load in (lambda: load_model_uri("models:/h100@champion"), lambda: load_model_uri("models:/h100", uri)):
        with pytest.raises(PredictorError, match="the store must exist, got sqlite"):
            load()
    assert not (tmp_path / "mistyped").exists()
