"""Predictors from a user's tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import alpha_beta_seconds, find_fabric, find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, SourceFile
from stepsight.training.fitting.own_table import find_own_hardware, own_table
from stepsight.training.fitting.train_tables import few_rows
from stepsight.training.kernels.transferred import AskedOps
from stepsight.training.predictor.predictor import Predictor, teacher_of

GPU = find_hardware("l40s-pcie-48gb")
assert GPU is not None
LINKS = find_fabric("pcie-gen4")


def _table(slower: float = 1.3, device: str = GPU.name) -> Measurements:
    """Products at A100's efficiency times ``slower``, by two libraries, and all-reduces as their links say."""
    rng = np.random.default_rng(0)
    sizes = 2 ** rng.integers(9, 14, size=(60, 3))
    ops = [Op("linear", tuple(map(int, row)), "bf16") for row in np.unique(sizes, axis=0)]
    teacher = teacher_of("a100-sxm")
    seconds = slower * np.exp(teacher.efficiency(ops)) * [roofline_seconds(op, GPU) for op in ops]
    links = [Collective("all_reduce", 1 << size, ranks, ranks) for size in range(12, 28) for ranks in (2, 4)]
    works = (*ops, *ops, *links)
    times = np.concatenate([seconds, 1.5 * seconds, [1.2 * alpha_beta_seconds(work, LINKS) for work in links]])
    software = ("blas 1.0",) * len(ops) + ("other 2.0",) * len(ops) + ("nccl 2.27.3 half",) * len(links)
    count = len(works)
    files = {"a": SourceFile("MIT", "0")}
    return Measurements(works, times, (device,) * count, ("",) * count, software, ("a",) * count, files)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tables")
    _table().to_parquet(folder / "t.parquet")
    command = ["train", str(folder / "t.parquet"), "--out", str(folder / "mine"), "--samples", "30", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return folder / "t.parquet", folder / "mine"


def test_a_table_teaches_and_its_other_shapes_judge(trained: tuple[Path, Path]) -> None:
    """A device at another one's efficiency is learned from thirty products, and no shape of them is judged."""
    table, mine = trained
    done = CliRunner().invoke(app, ["evaluate", str(table), "-p", str(mine), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    products = told["families"]["gemm"]
    count = len({work for work in _table().works if isinstance(work, Op)})
    assert products["rows"] == 2 * (count - 30) and set(products) >= {"mape", "median", "p90"}
    assert told["skipped"]["the predictor was trained on the shape"] > 60
    assert "all_reduce/intra" in told["families"]
    predictor = Predictor.load(mine)
    own = [work for work in _table().works if isinstance(work, Op)][:count]
    off = predictor.kernel.seconds(own, 1) / _table().seconds[:count] - 1
    assert np.abs(off).mean() < 0.03
    assert predictor.manifest["software"]["gemm"] == ["blas 1.0", "other 2.0"]
    assert predictor.kernel.seconds([Op("softmax", (4096, 4096))], 1) > 0  # of which nothing was measured
    assert "other devices" in predictor.kernel.unsupported(Op("softmax", (4096, 4096)))
    correction = predictor.corrections["ops against other devices"]["gemm#0"]
    far = Op("linear", (2**30, 2**30, 2**30), "bf16")
    assert correction.known(AskedOps([own[0], far], {}, np.ones(2))) == pytest.approx([1.0, 0.0], abs=1e-3)


def test_few_rows_of_a_family_are_a_warning() -> None:
    """A table with plenty of products and 3 all-reduces warns of these alone; enough rows warn of nothing."""
    own = own_table(_table(), GPU, fabric="pcie-gen4")
    assert few_rows(own) == []
    some = own.take(np.arange(len(own.ops)), np.arange(3))
    (warning,) = few_rows(some)
    assert warning.startswith("few rows teach all_reduce/intra (3): ")


def test_the_software_to_predict_for_can_be_chosen() -> None:
    first = own_table(_table(), GPU, fabric="pcie-gen4").software["gemm"][0]
    other = own_table(_table(), GPU, software="other", fabric="pcie-gen4").software["gemm"][0]
    assert (first, other) == ("blas 1.0", "other 2.0")
    with pytest.raises(TableError, match=r"--software must match .*blas 1.0"):
        own_table(_table(), GPU, software="triton")


def test_shapes_not_rows_are_held_out() -> None:
    kept, left = own_table(_table(), GPU, fabric="pcie-gen4").split(seed=3)
    assert not set(kept.shapes()) & set(left.shapes())
    assert len(left.ops) > 10 and set(left.ops.variants.tolist()) == {0, 1}


def test_the_device_of_a_table() -> None:
    """Its own name, a preset with the same chip, or a file; never two devices at once."""
    assert find_own_hardware(_table(), "", "") == GPU
    unknown = _table(device="mystery-9000")
    assert find_own_hardware(unknown, "", GPU.name).name == "mystery-9000"
    with pytest.raises(TableError, match=r"mystery-9000.*--hardware FILE.toml"):
        find_own_hardware(unknown, "", "")
    both = Measurements.concat([unknown, _table()])
    with pytest.raises(TableError, match="needs --hardware NAME"):
        find_own_hardware(both, "", "")
    assert find_own_hardware(replace(unknown, device=("",) * len(unknown)), GPU.name, "") == GPU


def test_a_predictor_whose_teacher_changed_is_refused(trained: tuple[Path, Path]) -> None:
    """Its corrections are relative to the teachers that it was trained with."""
    from stepsight.dataset.base.errors import PredictorError
    from stepsight.training.kernels.transferred import Transfer

    transfer = Predictor.load(trained[1]).kernel.transfer
    assert isinstance(transfer, Transfer)
    saved = transfer.to_dict()
    saved["teachers"]["a100-sxm"] = "0"
    with pytest.raises(PredictorError, match="another version of a100-sxm"):
        Transfer.from_dict(saved, GPU, teacher_of)


def test_a_table_that_was_trained_on_whole_is_judged_by_what_was_held_out(tmp_path: Path) -> None:
    """A fifth of the shapes is held out before the fit on all; evaluate says those errors, never errors of the fit."""
    table = _table().take([i for i, work in enumerate(_table().works) if isinstance(work, Collective)])
    table.to_parquet(tmp_path / "links.parquet")
    command = ["train", str(tmp_path / "links.parquet"), "--out", str(tmp_path / "mine"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    held_out = json.loads(done.stdout)["held_out"]
    done = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "links.parquet"), "-p", str(tmp_path / "mine"), "--json"]
    )
    told = json.loads(done.stdout)
    assert told["families"] == held_out and held_out["all_reduce/intra"]["rows"] == len(table) // 5
    assert "held out while it was trained" in told["note"]
