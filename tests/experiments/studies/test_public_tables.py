"""Studies on public tables: a made-up GPU, a made-up site, and a device that runs at another device's efficiency."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.studies import public_tables
from stepsight.training.collectives.between_nodes import UNFITTED, BetweenNodes
from stepsight.training.fitting.own_table import held_out
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.from_tables import OpRows

GPU, L40S = find_hardware("a100-sxm-80gb"), find_hardware("l40s-pcie-48gb")
assert GPU is not None and L40S is not None
SIZES = [(m, n, k) for m in (256, 512, 1024, 2048) for n in (512, 1024, 4096) for k in (512, 2048, 8192)]
OPS = tuple(Op("linear", size) for size in SIZES)
ROWS = OpRows(
    OPS + OPS,
    np.array([factor * roofline_seconds(op, GPU) for factor in (1.5, 1.6) for op in OPS]),
    np.repeat([0, 1], len(OPS)),
)
LINKS = public_tables.SITES["cluster01"]
WORKS = [Collective("all_reduce", 1 << power, 8 * nodes, 8) for power in range(20, 30) for nodes in (2, 4, 16)]
TRUTH = BetweenNodes({}, {}, {}).seconds(WORKS, LINKS)


def test_what_is_held_out_is_held_out_whole() -> None:
    groups = list("aabbccddeeff")
    held = held_out(groups, seed=0, folds=5)
    assert {sum(held[i : i + 2]) for i in range(0, 12, 2)} == {0, 2} and held.sum() == 2
    assert (held_out(groups, seed=0, folds=5) == held).all()


def test_errors_are_of_shapes_that_were_not_fitted() -> None:
    random, unseen = public_tables.kernel_figures("toy", ROWS, GPU)
    assert (random["split"], unseen["split"]) == ("random", "unseen n, k")
    assert random["rows"] == 2 * (len(OPS) // 5) and unseen["rows"] == 2 * 4
    for figure in (random, unseen):
        assert figure["mape"] < 8 < figure["roofline_mape"] and figure["median"] <= figure["p90"]
    others = ROWS.take(np.flatnonzero(ROWS.variants == 1))
    assert public_tables.kernel_figures("toy", others, GPU)[0]["own_mape"] is None  # software that nobody ran


def test_json_is_strict_and_missing_data_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert public_tables.KERNELS.main(["--data", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
    monkeypatch.setattr(public_tables, "read_recipe", lambda recipe, data: (ROWS, {}))
    assert public_tables.KERNELS.main(["--data", str(tmp_path), "--only", "a100-sxm", "--json"]) == 0
    assert [row["ops"] for row in json.loads(capsys.readouterr().out)["figures"]] == ["gemm", "gemm"]


def test_a_small_site_is_judged_by_its_larger_half() -> None:
    small = [replace(work, group_size=min(work.group_size, 32)) for work in WORKS]
    assert public_tables.small_groups(WORKS).sum() == 20 and public_tables.small_groups(small).sum() == 10


def test_what_is_fitted_is_not_judged() -> None:
    """The columns of a site that behaves as NCCL's constants say."""
    figures = public_tables.collective_figures("site", WORKS, TRUTH, LINKS, Predictor.load("h100-sxm"), UNFITTED)
    whole = figures[-1]
    assert (whole["rows"], whole["calibrated_rows"]) == (30, 10)
    assert whole["start"] == pytest.approx(0, abs=1e-9)
    assert max(whole["calibrated"], whole["in_turn"]) < 1 and sum(figure["rows"] for figure in figures[:-1]) == 30


LOG = """#  Rank  0 Group  0 Pid 1 on host0 device  0 [0x07] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid 2 on host1 device  0 [0x07] NVIDIA H100 80GB HBM3
"""
ROW = "{0:12d} {1:12d} float sum -1 {2:.2f} {3:.2f} {3:.2f} 0 {2:.2f} {3:.2f} {3:.2f} 0\n"


def test_logs_are_sites_in_the_folder_of_their_fabric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "logs" / "dgx-h100" / "mine"
    site.mkdir(parents=True)
    rows = [
        ROW.format(size, size // 4, 50 + size / 4e4, size / (50 + size / 4e4) / 1e3)
        for size in (2**p for p in range(10, 30))
    ]
    (site / "all_reduce_perf.log").write_text(LOG + "".join(rows))
    assert public_tables.COLLECTIVES.main(["--logs", str(tmp_path / "logs"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["figures"][-1]
    assert (whole["site"], whole["rows"], whole["calibrated_rows"]) == ("mine", 20, 0)
    assert whole["in_turn"] < 0.5 * whole["shipped"]
