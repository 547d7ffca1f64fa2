"""What the calls of a host take, learned from rows of a known law."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.errors import PredictorError
from stepsight.dataset.op import Op
from stepsight.training.kernels.host_calls import HostCalls, fit_host_calls
from stepsight.training.measured.host_costs import slowdown_of, with_alone
from stepsight.training.predictor.saved_host_calls import FILE, load_host_calls, save_host_calls

SIZES = [2**power for power in range(10, 18)]


def _elementwise(size: int) -> Op:
    return Op("elementwise", (size,), "fp32")


def _seconds(call: str, size: int) -> float:
    """A slow and a fast call of one kind."""
    return 4e-6 + size * (4e-9 if call == "aten::exp" else 4e-10)


@pytest.fixture(scope="module")
def fitted() -> HostCalls:
    rows = [
        (call, _elementwise(size), 0, _seconds(call, size)) for call in ("aten::exp", "aten::mul") for size in SIZES
    ]
    return fit_host_calls(rows)


@pytest.mark.parametrize("call", ["aten::exp", "aten::mul"])
def test_calls_of_one_kind_are_told_apart_by_their_names(call: str, fitted: HostCalls) -> None:
    size = 3 * 2**14  # between those that were seen
    found = fitted.seconds([call], [_elementwise(size)], [0])[0]
    assert found == pytest.approx(_seconds(call, size), rel=0.25)


def test_a_call_that_was_never_seen_is_as_its_family(fitted: HostCalls) -> None:
    """One shape of a slow call does not send others of that call away from what the family says."""
    fast, slow, other = (
        fitted.seconds([call], [_elementwise(2**16)], [0])[0] for call in ("aten::mul", "aten::exp", "aten::sin")
    )
    assert fast < other < slow


def test_a_known_call_takes_what_was_measured(fitted: HostCalls) -> None:
    op = _elementwise(999)
    known = replace(fitted, known={("elementwise/exp", op): 5e-3}, scale=1.1)
    assert known.seconds(["aten::exp"], [op], [0])[0] == pytest.approx(5.5e-3)
    assert known.is_known("aten::exp", op)
    assert not known.is_known("aten::mul", op)


def test_calls_measured_alone_are_slowed_as_those_measured_both_ways() -> None:
    inside = {("conv", _elementwise(size)): 1.2e-6 * size for size in SIZES}
    alone = {("conv", _elementwise(size)): 1e-6 * size for size in [*SIZES, 7]}
    assert slowdown_of(inside, alone) == pytest.approx(1.2)
    assert with_alone(inside, alone)["conv", _elementwise(7)] == pytest.approx(1.2 * 7e-6)
    assert slowdown_of({}, alone) == pytest.approx(1.07)


def test_saved_calls_come_back(fitted: HostCalls, tmp_path: Path) -> None:
    known = replace(fitted, known={("elementwise/exp", _elementwise(8)): 1e-5}, gaps_s=(1e-6, 2e-6, 3e-6), step_s=1e-4)
    save_host_calls(known, tmp_path)
    back = load_host_calls(tmp_path)
    assert back is not None
    asked = (["aten::exp", "aten::mul"], [_elementwise(8), _elementwise(5000)], [0, 1])
    assert np.allclose(back.seconds(*asked), known.seconds(*asked))
    assert back.gaps_s == known.gaps_s
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"scale": 1.0', '"scale": -1.0'))
    with pytest.raises(PredictorError, match="scale must be > 0"):
        load_host_calls(tmp_path)
