"""Predictors that come with the package."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import PredictorError, TableError
from stepsight.dataset.hardware.hardware import find_fabric, find_hardware, usual_fabric
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements
from stepsight.dataset.tables.measurements import SourceFile
from stepsight.training.prediction.ask_many import predict_many
from stepsight.training.prediction.prediction import ROOFLINE, predict
from stepsight.training.predictor.model_tables import read_predictor_manifest
from stepsight.training.predictor.predictor import SHIPPED, Predictor
from stepsight.training.shipped import catalogue
from stepsight.training.shipped.catalogue import (
    RECIPES,
    TableSource,
    main,
    retrain,
    shipped_names,
    shipped_predictor,
    teaching_names,
)
from stepsight.training.shipped.from_tables import in_known_precisions
from stepsight.training.tracking.tracking import load_predictor

DATA = Path(os.environ.get("STEPSIGHT_DATA", Path(__file__).parents[4] / "shared" / "data"))
EXAMPLES = Path(__file__).parents[3] / "examples"
MOST_BYTES = 12_000_000


def test_every_recipe_is_shipped_and_all_are_a_few_megabytes() -> None:
    assert set(shipped_names()) == set(RECIPES)
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < MOST_BYTES


def test_every_predictor_has_a_digest_of_its_own() -> None:
    """Also where several are made of one set of tables."""
    digests = {name: read_predictor_manifest(SHIPPED / name)["digest"] for name in shipped_names()}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("name", RECIPES)
def test_manifests_name_every_source_with_its_licence(name: str) -> None:
    sources = Predictor.load(name).manifest["sources"]
    found = {source.split("/")[0] for source in sources}
    assert found <= {"aiconfigurator", "neusight", "nccl-tests", "simumax", "vidur", "vtrain"} and found
    assert {source["licence"] for source in sources.values()} <= {"Apache-2.0", "MIT"}


@pytest.mark.parametrize("name", teaching_names())
def test_products_lie_between_a_third_of_the_peak_and_the_peak(name: str) -> None:
    predictor = shipped_predictor(name)
    assert predictor is not None
    ops = [Op(kind, (4096, 8192, 8192)) for kind in ("linear", "linear_dgrad", "linear_wgrad")]
    ops += [Op(kind, (1, 64, 8, 8192, 8192, 128, 1)) for kind in ("attention", "attention_backward")]
    for op, seconds in zip(ops, predictor.kernel.seconds(ops, 8), strict=True):
        assert 0.33 < op.flops / seconds / predictor.hardware.flops_per_s("bf16") < 1, op


def test_products_of_older_devices_reach_most_of_their_peak_in_the_precision_that_was_measured() -> None:
    """NeuSight's tables are in fp32, without tensor cores; of 16 bits their predictors know hardware facts alone."""
    op = Op("linear", (4096, 4096, 4096), "fp32")
    for name in ("v100-pcie", "p100-pcie", "t4-pcie", "a100-pcie"):
        predictor = shipped_predictor(name)
        assert predictor is not None
        assert 0.4 < op.flops / predictor.kernel.seconds([op], 1)[0] / predictor.hardware.flops_per_s("fp32") < 1, name
        backward = Op("conv_backward", (32, 64, 64, 3136, 9, 1, 3136, 2, 1), "fp32")
        base = "linear" if name == "a100-pcie" else "conv"  # nobody measured its convolutions
        assert f"predicted from {base} and physics" in predictor.kernel.unsupported(backward)


def test_rows_in_a_precision_that_the_device_lacks_are_left_out_and_counted() -> None:
    v100 = find_hardware("v100-pcie-32gb")
    assert v100 is not None
    works = (Op("linear", (8, 8, 8)), Op("linear", (8, 8, 8), "fp16"), Op("add", (8,)))
    table = Measurements(works, np.ones(3), ("",) * 3, ("",) * 3, ("",) * 3, ("a",) * 3, {"a": SourceFile("MIT", "0")})
    kept = in_known_precisions(table, v100)
    assert kept.works == works[1:]
    assert kept.skipped == {"the facts of v100-pcie-32gb state no peak for their precision": 1}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_longer_on_more_tokens(name: str) -> None:
    """Also beyond all that was measured."""
    predictor = shipped_predictor(name)
    assert predictor is not None
    for kind in ("linear", "attention_backward", "rms_norm", "softmax", "adamw"):
        dims = {"linear": (8192, 8192), "attention_backward": (32, 8, 4096, 4096, 128, 1), "rms_norm": (8192,)}
        rest = dims.get(kind, (64,))
        dtype = "bf16" if "bf16" in predictor.hardware.peak_flops else "fp32"
        seconds = predictor.kernel.seconds([Op(kind, (2**power, *rest), dtype) for power in range(4, 30, 5)], 8)
        least = 1.0 if RECIPES[name].teaches else 0.9  # launches of short kernels scatter
        assert (seconds[1:] > least * seconds[:-1]).all(), kind


@pytest.mark.parametrize("name", teaching_names())
def test_collectives_reach_most_of_their_links_and_never_more(name: str) -> None:
    """Up to 2,048 ranks, wherever the measurements came from."""
    predictor = shipped_predictor(name)
    assert predictor is not None
    fabric = find_fabric(usual_fabric(predictor.hardware.name))
    for ranks, near in ((8, 8), (16, 8), (80, 8), (2048, 8), (64, 1)):
        work = Collective("all_gather", 1 << 32, ranks, near)
        link = fabric.intra_node.bandwidth_bytes_per_s
        link = link if ranks == near else min(link, near * fabric.inter_node.bandwidth_bytes_per_s)
        seconds = predictor.collective.seconds([work], fabric)[0]
        least = 0.35 if ranks > 1000 else 0.6  # a ring of so many ranks spends most of its time on steps
        assert least < work.num_bytes * (ranks - 1) / ranks / seconds / link < 1, work


def test_a_job_is_answered_offline() -> None:
    job = Job.from_file(EXAMPLES / "gpt3-175b-1024.toml")
    answer = predict(job)
    assert answer.source.startswith("shipped predictor a100-sxm for a100-sxm-80gb")
    assert 0.4 < answer.mfu < 0.7
    assert not any("linear" in reason for reason in answer.unsupported)
    assert any("and physics" in reason for reason in answer.unsupported)


def test_what_another_device_lent_is_said_to_be() -> None:
    """H200's tables know products and attention alone; H100 has the same chip and three quarters of its bandwidth."""
    borrower, lender = shipped_predictor("h200-sxm-141gb"), shipped_predictor("h100-sxm-80gb")
    assert borrower is not None and lender is not None
    lent = borrower.manifest["lent"]
    assert lent["devices"] == ["h100-sxm-80gb"] and {"add", "rms_norm", "linear/fp8"} <= set(lent["kinds"])
    assert borrower.manifest["kinds_measured"] == ["attention", "attention/fp8", "linear", "linear/fp8"]
    assert set(lent["sources"]) < set(borrower.manifest["sources"])
    ops = [Op("linear", (8192, 8192, 8192)), Op("linear", (8192, 8192, 8192), "fp8"), Op("rms_norm", (16384, 8192))]
    longer = borrower.kernel.seconds(ops, 8) / lender.kernel.seconds(ops, 8)
    assert longer == pytest.approx([1, 1, 3.35 / 4.8], abs=0.1)
    assert "send_recv/intra" in borrower.collective.carried


def test_a_twin_streams_at_its_own_bandwidth() -> None:
    own, twin = shipped_predictor("a100-sxm-80gb"), shipped_predictor("a100-sxm-40gb")
    assert own is not None and twin is not None and twin.hardware.name == "a100-sxm-40gb"
    product, addition = Op("linear", (8192, 8192, 8192)), Op("add", (2**25,))
    slower = twin.kernel.seconds([product, addition], 8) / own.kernel.seconds([product, addition], 8)
    assert slower == pytest.approx([1, 2.039 / 1.555], rel=0.01)


def test_predict_takes_a_name() -> None:
    job = Job.from_file(EXAMPLES / "gpt3-175b-1024.toml")
    by_name, by_hardware = (predict(job, name).iteration_time_s for name in ("a100-sxm", "a100-sxm-80gb"))
    assert by_name == by_hardware == predict(job).iteration_time_s
    with pytest.raises(
        PredictorError, match=r"or .*a100-sxm, .* their hardware, roofline, physics or models:/NAME@ALIAS, got 'x'"
    ):
        predict(job, "x")


def test_other_hardware_has_none() -> None:
    assert shipped_predictor("local-cpu") is None


def test_the_roofline_answers_where_asked() -> None:
    """It knows nothing of what was measured, and says that it was asked for."""
    job = Job.from_file(EXAMPLES / "gpt3-175b-1024.toml")
    facts = predict(job, ROOFLINE)
    assert facts.source == "roofline from hardware facts alone: as asked"
    assert facts.unsupported == () and facts.iteration_time_s != predict(job).iteration_time_s


def test_what_is_outside_is_listed_by_what_it_takes() -> None:
    """A kind without a measurement counts for its part of the critical path, no more."""
    job = Job.from_file(EXAMPLES / "gpt3-175b-1024.toml")
    answer = predict(job)
    assert 0 < answer.unsupported_share < 0.5
    counts, seconds = answer.simulation.work_counts, answer.simulation.work_seconds
    parts = {str(w): n * t for w, n, t in zip(answer.simulation.lowered.all_works, counts, seconds, strict=True)}
    taken = [parts[reason.split(": ")[0]] for reason in answer.unsupported]
    assert taken == sorted(taken, reverse=True)
    assert sum(taken) == pytest.approx(answer.unsupported_share * answer.iteration_time_s)


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a100-sxm").mkdir()
    with pytest.raises(PredictorError, match=r"folder with manifest\.json, or .*a100-sxm"):
        Predictor.load("a100-sxm")


def test_an_unknown_recipe_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"a100-sxm, .*, got 'x'"):
        retrain("x", tmp_path, tmp_path / "out")


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a100-sxm", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(TableError):
        retrain("a100-sxm", tmp_path, tmp_path / "out")


def test_making_one_again_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a part of the data, to be quick."""
    if not DATA.is_dir():
        pytest.skip(f"needs the public data in {DATA}")
    own = (TableSource("vidur", "kernels/vidur/compute/a100/microsoft", ("norm", "elementwise")),)
    monkeypatch.setattr(catalogue, "RECIPES", {"small": replace(RECIPES["a100-sxm"], own=own)})
    for out in ("one", "two"):
        retrain("small", DATA, tmp_path / out)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_a_device_that_is_served_as_a_twin_is_saved_as_one(tmp_path: Path) -> None:
    """So that it can be calibrated: what was measured on the other device stays that."""
    twin = shipped_predictor("h100-sxm-96gb")
    assert twin is not None
    twin.save(tmp_path / "twin")
    loaded = Predictor.load(tmp_path / "twin")
    ops = [Op("linear", (8192, 4096, 4096)), Op("add", (10**8,)), Op("linear", (8192, 4096, 4096), "fp8")]
    assert loaded.kernel.seconds(ops, 8).tolist() == pytest.approx(twin.kernel.seconds(ops, 8).tolist())
    assert loaded.hardware == twin.hardware and loaded.kernel.hardware.name == "h100-sxm-80gb"


def test_a_name_is_the_predictor_that_answers_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name or a hardware's, twins included; a folder of that name goes before."""
    monkeypatch.chdir(tmp_path)
    for name, hardware in (("h100-sxm", "h100-sxm-80gb"), ("h100-sxm-96gb",) * 2, ("a100-sxm-40gb",) * 2):
        found, usual = load_predictor(name), shipped_predictor(hardware)
        assert usual is not None and found.source == usual.source
        assert (found.hardware, found.kernel.serves) == (usual.hardware, usual.kernel.serves)
    (tmp_path / "h100-sxm").mkdir()
    for name in ("h100-sxm", "mine"):
        with pytest.raises(PredictorError, match=r"folder with manifest\.json, or .*a100-sxm"):
            load_predictor(name)


def test_a_folder_answers_by_its_path(tmp_path: Path) -> None:
    """As text and as a path, for one job and for many; it is read once, and again when it was written again."""
    own, job = shipped_predictor("a100-sxm-80gb"), EXAMPLES / "gpt3-175b-1024.toml"
    assert own is not None
    own.save(tmp_path / "mine")
    seconds = predict(job, load_predictor(tmp_path / "mine")).iteration_time_s
    assert predict(job, str(tmp_path / "mine")).iteration_time_s == seconds
    assert predict_many([job], str(tmp_path / "mine"))[0].iteration_time_s == pytest.approx(seconds)
    read = load_predictor(tmp_path / "mine")
    assert load_predictor(str(tmp_path / "mine")) is read
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    with pytest.raises(PredictorError):
        predict(job, tmp_path / "mine")
