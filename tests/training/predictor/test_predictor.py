import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.corrections.calibration import Calibration, Constants
from stepsight.training.predictor.model_tables import write_manifest
from stepsight.training.predictor.predictor import SHIPPED, Predictor


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


def test_one_that_a_killed_replacement_set_aside_is_told_of(predictor: Predictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / ".p.x1" / "p")
    with pytest.raises(PredictorError, match=r"p is missing: .* To restore it: mv .*/\.p\.x1/p .*/p$"):
        Predictor.load(tmp_path / "p")
    (tmp_path / ".p.x1" / "p").rename(tmp_path / "p")
    assert Predictor.load(tmp_path / "p").hardware == predictor.hardware


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("manifest.json", "{", "readable"),
        ("manifest.json", "[1]", "what Predictor.save wrote"),
        ("manifest.json", json.dumps({"format": "stepsight-predictor", "schema": 99}), "schema 5"),
        ("hardware.json", "{}", "memory_bytes must be stated; the fields are"),
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
        ("kernel.gemm.txt.gz", "tree", "changed, missing or added kernel.gemm.txt.gz"),
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


def _edit(folder: Path, file: str, *keys: str, value: Any) -> None:
    """Change one value of a file by hand, and the digests with it, as nobody does by accident."""
    table = json.loads((folder / file).read_text())
    at = table
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (folder / file).write_text(json.dumps(table))
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, manifest, manifest["hardware"])


@pytest.mark.parametrize(
    ("file", "keys", "value", "message"),
    [
        (
            "kernel.json",
            ("physics", "gelu", "log_constants"),
            [1e4] * 6,
            r"constants .* of gelu must lie within \+-100",
        ),
        ("kernel.json", ("physics", "gelu", "busy_exponents"), [None] * 6, "of gelu must lie within"),
        ("kernel.json", ("physics", "gelu", "log_constants"), [10**400] * 6, "OverflowError"),
        ("kernel.json", ("physics", "gelu", "overlapping"), [99], r"of gelu must be of 0 \.\.\. 5, got \(99,\)"),
        ("kernel.json", ("physics", "gelu", "overlapping"), "ab", "overlapping must be a list"),
        ("kernel.json", ("physics", "gelo"), {}, "kernel.json"),
        ("kernel.json", ("support", "gelu", "high"), [1e3, 1, 1], "support of gelu must have 3 axes and logarithms"),
        ("kernel.json", ("support", "gelu", "high"), [1, 1], "kernel.json"),
        ("kernel.json", ("support", "gelu", "high"), "x", "kernel.json"),
        ("kernel.json", ("neighbours", "gelu", "weights"), [1e300], "kernel.json"),
        ("kernel.json", ("neighbours", "gelu", "weights"), [[0.1]], "must be one list of numbers, got shape"),
        ("kernel.json", ("neighbours", "gelu", "weights"), 0.1, "must be one list of numbers, got shape"),
        ("kernel.json", ("neighbours", "gelu", "length"), 0, "a length > 0, got"),
        ("kernel.json", ("busy",), [0, 2], r"1 <= least busy <= most busy <= 1e\+06 must hold, got \(0.0, 2.0\)"),
        ("kernel.json", ("derives",), "no", "derives must be true or false, got 'no'"),
        ("kernel.json", ("trees", "gemm", "share"), 7, "0 < share <= 1 must hold for trees, got 7.0"),
        ("collective.json", ("carried",), "all_reduce", "carried must be a list, got"),
        ("collective.json", ("support", "all_reduce/intra", "low"), [0, 0], "collective.json"),
        ("collective.json", ("physics", "all_reduce/intra", "log_constants"), [-1e9] * 5, "must lie within"),
        ("intervals.json", ("intervals", "num_runs"), -1, "num_runs >= 0 must hold"),
        ("manifest.json", ("name",), 3, "name of a predictor must be a printable text, got 3"),
        ("manifest.json", ("digest",), ["x"], "digest of a predictor must be a printable text"),
        ("manifest.json", ("fitted_rows",), "abc", "fitted_rows of a predictor must be a list of texts, got 'abc'"),
    ],
)
def test_numbers_that_nothing_learned_are_refused(
    predictor: Predictor, tmp_path: Path, file: str, keys: tuple[str, ...], value: Any, message: str
) -> None:
    """Wrong types, other shapes and huge numbers, though the digests are right."""
    predictor.save(tmp_path / "p")
    _edit(tmp_path / "p", file, *keys, value=value)
    with pytest.raises(PredictorError, match=message):
        Predictor.load(tmp_path / "p")


def test_an_answer_is_finite_or_an_error(predictor: Predictor) -> None:
    """Whatever was learned: the simulator adds up no infinities."""
    physics = predictor.kernel.regressor.physics["gelu"]
    broken = replace(physics, log_constants=np.array([1e3, *[-30.0] * 5]))
    regressor = replace(predictor.kernel.regressor, physics={"gelu": broken})
    wrong = replace(predictor, kernel=replace(predictor.kernel, regressor=regressor))
    rule = r"times that its hardware allows, .* got inf of gelu"
    with np.errstate(all="ignore"), pytest.raises(PredictorError, match=rule):
        wrong.latency(_job()).op_seconds([Op("gelu", (1000,), "fp32")])


def test_the_files_are_those_that_were_saved(predictor: Predictor, tmp_path: Path) -> None:
    """Rows that were fitted cannot be taken from the list, nor files from the folder, nor others be put there."""
    folder = tmp_path / "p"
    replace(predictor, manifest={"fitted_rows": ["a", "b"], "metrics": {"x": 0.1}}).save(folder)
    whole = (folder / "manifest.json").read_text()
    assert Predictor.load(folder).manifest["fitted_rows"] == ["a", "b"]
    manifest = json.loads(whole)
    for changed in (
        {**manifest, "fitted_rows": ["a"]},
        {key: value for key, value in manifest.items() if key != "fitted_rows"},
        {**manifest, "files": {key: of for key, of in manifest["files"].items() if key != "manifest.json"}},
    ):
        (folder / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(PredictorError, match=r"changed, missing or added manifest\.json$"):
            Predictor.load(folder)
    (folder / "manifest.json").write_text(whole)
    for name in ("more.txt", "more"):
        (folder / name).write_text("x") if "." in name else (folder / name).mkdir()
        with pytest.raises(PredictorError, match=f"added {name}$"):
            Predictor.load(folder)
        (folder / name).unlink() if "." in name else (folder / name).rmdir()
    Predictor.load(folder)


@pytest.mark.parametrize("fitted", [True, False])
def test_a_predictor_of_the_schema_before_tells_nothing_of_its_rows(
    predictor: Predictor, tmp_path: Path, fitted: bool
) -> None:
    """It is read where no table of runs was fitted."""
    folder = tmp_path / "p"
    calibration = Calibration(constants=Constants((0.01, 0.0, 0.0, 0.0, 0.0)) if fitted else Constants())
    replace(predictor, calibration=calibration).save(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["manifest.json"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": 4}))
    if fitted:
        with pytest.raises(PredictorError, match=r"schema 4 does not tell which rows .* calibrate it again"):
            Predictor.load(folder)
    else:
        assert Predictor.load(folder).hardware == predictor.hardware


def test_saving_again_replaces_the_folder_whole(predictor: Predictor, tmp_path: Path) -> None:
    """Also one of whose files some are gone."""
    predictor.save(tmp_path / "p")
    before = sorted(path.name for path in (tmp_path / "p").iterdir())
    (tmp_path / "p" / "kernel.json").unlink()
    predictor.save(tmp_path / "p")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == before
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
    predictor.save(tmp_path / "p")
    (tmp_path / "p" / "a.txt").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "p")
    for name, message in (("p", r"p with a\.txt$"), ("link", "link, a link$")):
        with pytest.raises(PredictorError, match=message):
            predictor.save(tmp_path / name)
    assert (tmp_path / "p" / "a.txt").read_text() == "precious"


def test_its_repr_is_one_short_line(predictor: Predictor, tmp_path: Path) -> None:
    predictor.save(tmp_path / "p")
    text = repr(Predictor.load(tmp_path / "p"))
    assert text.startswith(f"Predictor({predictor.hardware.name}, ") and len(text) < 100 and "\n" not in text


def test_only_one_that_is_as_it_came_is_said_to_come_with_stepsight(tmp_path: Path) -> None:
    """Whatever name a folder's manifest claims."""
    assert Predictor.load("a100-sxm").source.startswith("shipped predictor a100-sxm for a100-sxm-80gb (digest ")
    folder = tmp_path / "p"
    folder.mkdir()
    for file in (SHIPPED / "a100-sxm").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert Predictor.load(folder).source.startswith("shipped")
    _edit(folder, "collective.json", "busy", value=[1.0, 2.0])
    assert Predictor.load(folder).source.startswith("predictor a100-sxm for a100-sxm-80gb")


def test_a_feature_is_named_once(predictor: Predictor, tmp_path: Path) -> None:
    names = ("log_flops", "log_bytes")
    trees = {family: replace(t, text=t.text.replace(*names)) for family, t in predictor.kernel.regressor.trees.items()}
    if not trees:
        pytest.skip("the predictor of these tests has no trees")
    regressor = replace(predictor.kernel.regressor, trees=trees)
    replace(predictor, kernel=replace(predictor.kernel, regressor=regressor)).save(tmp_path / "p")
    with pytest.raises(PredictorError, match="must name every feature once"):
        Predictor.load(tmp_path / "p")
