"""Public tables: read whole, with what their makers say of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Collective, Op
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
    halves, whole_bytes = (
        table.take(np.array([dtype in software for software in table.software])) for dtype in ("half", "int8")
    )
    as_bytes = dict(zip(whole_bytes.works, whole_bytes.seconds, strict=True))
    pairs = [(s, as_bytes[work]) for work, s in zip(halves.works, halves.seconds, strict=True) if work in as_bytes]
    assert len(pairs) > 30 and np.median([one / other for one, other in pairs]) == pytest.approx(1.0, abs=0.05)


def test_all_gathers_tell_their_output() -> None:
    """Over 80 ranks of H100, 400 Gbit/s each, the bus bandwidth of a gathered 16 GiB is 300 to 330 GB/s."""
    table = public("nccl-tests", "collectives/nccl-tests-cluster").where(kind="all_gather")
    rates = [
        work.num_bytes / seconds * 79 / 80
        for work, seconds in zip(table.works, table.seconds, strict=True)
        if isinstance(work, Collective) and work.group_size == 80 and work.num_bytes > 15 * 2**30
    ]
    assert rates and min(rates) > 300e9 and max(rates) < 330e9
