import json
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.errors import PredictorError
from stepsight.dataset.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.op import Collective, Op
from stepsight.training.predictor import Predictor


def _job(hardware: str = "toy") -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=2, hidden=128, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(),
        batch=BatchSpec(micro_batch=1, global_batch=2, precision="fp32"),
        cluster=ClusterSpec(hardware=hardware, devices_per_node=2, fabric="loopback"),
    )


def test_a_saved_predictor_answers_as_before(predictor: Predictor, tmp_path: Path) -> None:
    ops, collectives = [Op("linear", (100, 200, 300), "fp32")], [Collective("all_reduce", 12345, 2, 2)]
    predictor.save(tmp_path / "p")
    loaded = Predictor.load(tmp_path / "p").latency(_job())
    before = predictor.latency(_job())
    assert loaded.op_seconds(ops) == pytest.approx(before.op_seconds(ops), rel=1e-5)
    assert loaded.collective_seconds(collectives) == pytest.approx(before.collective_seconds(collectives), rel=1e-5)
    assert {path.suffix for path in (tmp_path / "p").iterdir()} <= {".json", ".gz", ".safetensors"}


def test_durations_are_for_as_many_busy_devices_as_the_job_has_on_a_node(predictor: Predictor) -> None:
    latency = predictor.latency(_job())
    assert latency.busy == 2
    op = Op("gelu", (100_000,), "fp32")
    assert latency.op_seconds([op, op]).tolist() == np.repeat(predictor.kernel.seconds([op], 2), 2).tolist()


def test_another_hardware_is_refused(predictor: Predictor) -> None:
    with pytest.raises(PredictorError, match="must be 'toy', got 'a100-sxm-80gb'"):
        predictor.latency(_job("a100-sxm-80gb"))


def test_a_folder_that_is_no_predictor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"folder with manifest\.json"):
        Predictor.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("manifest.json", "{", "readable"),
        ("manifest.json", "[1]", "what Predictor.save wrote"),
        ("manifest.json", json.dumps({"format": "stepsight-predictor", "schema": 99}), "schema 4"),
        ("hardware.json", "{}", "fields of Hardware"),
        ("kernel.json", '{"physics": {}}', "kernel.json"),
        ("kernel.json", None, "readable"),
        ("collective.json", '{"trees": {"a": {"file": "absent.txt", "share": 1}}}', "absent.txt"),
        ("intervals.json", '{"calibration": {"scale": 9}}', "scale must lie within"),
        ("intervals.json", '{"calibration": {"scale": 0}}', "scale must lie within"),
        ("intervals.json", '{"calibration": {"scale": Infinity}}', "finite, got Infinity"),
        ("intervals.json", '{"calibration": {"scale": 1e999}}', "scale must lie within"),
        (
            "intervals.json",
            '{"calibration": {"scale": 1}, "intervals": {"half_width_log": 1, "coverage": 0.9, "num_runs": 1e999}}',
            "what Predictor.save wrote",
        ),
        ("intervals.json", "[" * 10**5, "nested thousands deep"),
        ("kernel.json", '{"trees": {}, "trees": {}}', "'trees' twice"),
        ("hardware.json", '{"name": "toy", "kind": "cpu", "peak_flops": 3}', "hardware.json"),
        ("kernel.gemm.txt.gz", "tree", "changed or missing kernel.gemm.txt.gz"),
    ],
)
def test_a_broken_file_is_refused(
    predictor: Predictor, tmp_path: Path, file: str, text: str | None, message: str
) -> None:
    predictor.save(tmp_path / "p")
    path = tmp_path / "p" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(PredictorError, match=message):
        Predictor.load(tmp_path / "p")


def test_numbers_that_do_not_fit_each_other_are_refused(predictor: Predictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / "p")
    path = tmp_path / "p" / "kernel.json"
    table = json.loads(path.read_text())
    table["physics"]["gelu"]["log_constants"].pop()
    path.write_text(json.dumps(table))
    with pytest.raises(PredictorError, match="gelu must have 6 constants"):
        Predictor.load(tmp_path / "p")


def test_saving_again_replaces_the_folder_whole(predictor: Predictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / "p")
    (tmp_path / "p" / "left-over.txt").write_text("old")
    predictor.save(tmp_path / "p")
    assert not (tmp_path / "p" / "left-over.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_cut_or_missing_file_is_noticed(predictor: Predictor, tmp_path: Path) -> None:
    """Nothing half-written is read: trees cut short and a context model gone missing are errors."""
    predictor.save(tmp_path / "p")
    names = [path.name for path in (tmp_path / "p").iterdir() if path.name != "manifest.json"]
    for name in names:
        whole = (tmp_path / "p" / name).read_bytes()
        (tmp_path / "p" / name).write_bytes(whole[: len(whole) - 20])
        with pytest.raises(PredictorError):
            Predictor.load(tmp_path / "p")
        (tmp_path / "p" / name).unlink()
        with pytest.raises(PredictorError):
            Predictor.load(tmp_path / "p")
        (tmp_path / "p" / name).write_bytes(whole)
    Predictor.load(tmp_path / "p")


def test_nothing_but_a_predictor_is_replaced(predictor: Predictor, tmp_path: Path) -> None:
    """A folder with anything else in it is left as it is."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("precious")
    with pytest.raises(PredictorError, match="new or empty folder"):
        predictor.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "a.txt").read_text() == "precious"
    for _ in range(2):
        predictor.save(tmp_path / "p")
