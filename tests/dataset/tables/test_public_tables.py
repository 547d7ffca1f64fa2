"""Public tables: read whole, with what their makers say of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware import find_hardware
from stepsight.dataset.op import Op
from stepsight.dataset.tables import Measurements, read_table

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("STEPSIGHT_DATA", ROOT.parent / "shared" / "data"))


def public(name: str, place: str) -> Measurements:
    path = DATA / place
    if not path.exists():
        pytest.skip(f"the public table {place} is not under {DATA} (set STEPSIGHT_DATA to the folder of kernels/)")
    return read_table(name, path)


def busiest(table: Measurements) -> float:
    """The largest part of a device's peak FLOP/s that a row implies."""
    most = 0.0
    for work, seconds, device in zip(table.works, table.seconds, table.device, strict=True):
        hardware = find_hardware(device)
        if isinstance(work, Op) and hardware is not None:
            most = max(most, work.flops / seconds / hardware.flops_per_s(work.dtype))
    return most


@pytest.mark.parametrize(
    ("name", "place", "rows", "skipped"),
    [
        ("aiconfigurator", "kernels/aiconfigurator/data/a100_sxm/gemm", 35682, 14427),
        ("aiconfigurator", "kernels/aiconfigurator/data/a100_sxm/attention", 8435, 0),
        ("aiconfigurator", "kernels/aiconfigurator/data/h100_sxm/encoder_attention", 7679, 0),
        ("neusight", "kernels/neusight/train/collect/linear", 25801, 0),
        ("vidur", "kernels/vidur/compute/h100/microsoft", None, None),
        ("simumax", "kernels/simumax/configs", 905, 24),
        ("aicb", "collectives/aicb", 17, 8521),
        ("vtrain", "collectives/vtrain", 14336, 0),
        ("nccl-tests", "collectives/nccl-tests-cluster", 10010, 40),
        ("vidur", "collectives/vidur", 24370, 6),
    ],
)
def test_every_row_is_read_or_counted(name: str, place: str, rows: int | None, skipped: int | None) -> None:
    """And none is faster than its device."""
    table = public(name, place)
    assert rows is None or (len(table), sum(table.skipped.values())) == (rows, skipped)
    assert busiest(table) <= 1.0
    assert {file.licence for file in table.files.values()} <= {"Apache-2.0", "MIT"}


def test_halves_take_as_long_as_twice_as_many_bytes() -> None:
    """Elements to bytes: an all-gather of as many bytes takes as long whatever they stand for."""
    table = public("aiconfigurator", "kernels/aiconfigurator/data/a100_sxm/comm").where(kind="all_gather")
    times = [
        {
            work: seconds
            for work, seconds, of in zip(table.works, table.seconds, table.software, strict=True)
            if dtype in of
        }
        for dtype in ("half", "int8")
    ]
    both = times[0].keys() & times[1].keys()
    ratio = np.array([times[0][work] / times[1][work] for work in both])
    assert len(both) > 30 and np.median(ratio) == pytest.approx(1.0, abs=0.05)


def test_all_gathers_tell_their_output() -> None:
    """80 ranks of H100 on 400 Gbit/s each: bus bandwidth of a gathered 16 GiB is 300 to 330 GB/s, as NVLink carries it."""
    table = public("nccl-tests", "collectives/nccl-tests-cluster")
    rates = [
        work.num_bytes / seconds * (work.group_size - 1) / work.group_size
        for work, seconds in zip(table.works, table.seconds, strict=True)
        if work.kind == "all_gather" and work.num_bytes > 15 * 2**30 and getattr(work, "group_size", 0) == 80
    ]
    assert rates and min(rates) > 300e9 and max(rates) < 330e9
