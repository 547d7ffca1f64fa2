"""What the calls of a host take, learned from rows of a known law."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import read_event_file
from stepsight.dataset.runs.run_manifest import SCHEMA
from stepsight.training.kernels.host_calls import (
    USUAL_LOOPS,
    USUAL_S,
    HostCalls,
    fit_host_calls,
    fit_loops,
    loop_seconds,
    loop_terms,
)
from stepsight.training.measured.imported_ops import HostStep, learn_host_calls
from stepsight.training.measured.measured import calls_alone
from stepsight.training.predictor.model_tables import FILE, load_host_calls, save_host_calls


def _ops(count: int) -> list[Op]:
    random = np.random.default_rng(0)
    dims = np.exp(random.uniform(0, 14, (count, len(USUAL_S) - 1))).astype(int)
    return [Op("fused_loops", tuple(row), "fp32") for row in dims.tolist()]


def test_constants_are_found_again() -> None:
    """Seconds of a machine that is twice as slow are learned from its calls."""
    taught, asked = _ops(200)[:150], _ops(200)[150:]
    seconds = 2 * loop_seconds(USUAL_LOOPS, taught)
    learned = fit_loops(loop_terms(taught), seconds)
    assert np.abs(np.log(loop_seconds(learned, asked) / loop_seconds(USUAL_LOOPS, asked) / 2)).mean() < 0.05


def test_calls_with_a_flag_of_0_teach() -> None:
    """Attention without a mask teaches its family."""
    call, ops = "aten::attend", [Op("attention", (2, 4, 4, 2**k, 2**k, 32, 0), "fp32") for k in range(4, 9)]
    fitted = fit_host_calls([(call, op, 0, 1e-9 * op.flops) for op in ops])
    assert set(fitted.families) == {"attention"}


def test_a_host_takes_its_loops_by_their_own_physics() -> None:
    """Fused loops need no call of their kind in the traces, and a saved host keeps their constants."""
    fitted = fit_host_calls([("aten::add", Op("add", (10**k,), "fp32"), 0, 1e-9 * 10**k) for k in range(3, 8)])
    (op,) = _ops(1)
    host = HostCalls(fitted.everything, fitted.families, fitted.labels, loops=fit_loops(loop_terms([op]), np.ones(1)))
    again = HostCalls.from_dict(host.to_dict(), trees={})
    for each in (host, again):
        assert np.isclose(each.seconds(["cpp_fused_0"], [op], [0])[0], loop_seconds(host.loops, [op])[0])


def test_steps_with_fused_loops_teach_their_constants() -> None:
    """A machine whose fused loops take twice as long is learned from its steps, also for loops that it never ran."""
    taught, (asked,) = _ops(40)[:39], _ops(41)[40:]
    seconds = 2 * loop_seconds(USUAL_LOOPS, taught)
    add = Op("add", (4096,), "fp32")
    ops, calls = (*taught, add), (*(f"cpp_fused_{k}" for k in range(39)), "aten::add")
    phases = np.zeros(40, dtype=np.int64)
    step = HostStep("s", ops, calls, phases, np.append(seconds, 1e-5), float(seconds.sum() + 2e-5))
    host = learn_host_calls([step])
    assert 1.5 < loop_seconds(host.loops, [asked])[0] / loop_seconds(USUAL_LOOPS, [asked])[0] < 2.5


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


def test_calls_measured_alone_bound_what_was_learned(fitted: HostCalls) -> None:
    """A step gives results reused or fresh memory: the time lies between both."""
    asked = (["aten::exp"], [_elementwise(SIZES[3])], [0])
    learned, key = fitted.seconds(*asked)[0], ("elementwise/exp", _elementwise(SIZES[3]))
    for least, most in ((0.5, 2.0), (2.0, 3.0), (0.1, 0.2)):
        alone = replace(fitted, alone={key: (least * learned, most * learned)})
        assert alone.seconds(*asked)[0] == pytest.approx(learned * np.clip(1.0, least, most))
        assert alone.is_known("aten::exp", asked[1][0])
    both = replace(fitted, known={key: 7e-3}, alone={key: (1e-3, 2e-3)})
    assert both.seconds(*asked)[0] == 7e-3  # what was measured within steps counts more


def test_calls_of_an_event_file_have_a_shortest_and_a_longest_time(tmp_path: Path) -> None:
    op = {"kind": "elementwise", "dims": [8], "dtype": "fp32"}
    records = [
        {"op": op | {"call": ["aten::exp"]}, "seconds": 1e-5, "fresh_seconds": 4e-5},
        {"op": op | {"call": ["aten::sin"]}, "seconds": 1e-5},
        {"op": op | {"call": ["aten::cos"]}, "seconds": 3e-5, "fresh_seconds": 2e-5},
        {"op": op, "seconds": 1e-5},
    ]
    path = tmp_path / "ops.json"
    path.write_text(json.dumps({"schema": SCHEMA, "busy": 1, "records": records}))
    found = calls_alone(read_event_file(path))
    assert found == {
        ("elementwise/exp", _elementwise(8)): (1e-5, 4e-5),
        ("elementwise/sin", _elementwise(8)): (1e-5, pytest.approx(1.7e-5)),
        ("elementwise/cos", _elementwise(8)): (3e-5, 3e-5),
    }


def test_saved_calls_come_back(fitted: HostCalls, tmp_path: Path) -> None:
    known = replace(
        fitted, alone={("elementwise/exp", _elementwise(8)): (1e-6, 1e-5)}, gaps_s=(1e-6, 2e-6, 3e-6), step_s=1e-4
    )
    save_host_calls(known, tmp_path)
    back = load_host_calls(tmp_path)
    assert back is not None
    asked = (["aten::exp", "aten::mul"], [_elementwise(8), _elementwise(5000)], [0, 1])
    assert np.allclose(back.seconds(*asked), known.seconds(*asked))
    assert back.gaps_s == known.gaps_s
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"scale": 1.0', '"scale": -1.0'))
    with pytest.raises(PredictorError, match="scale must be > 0"):
        load_host_calls(tmp_path)
