"""Durations from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from stepsight import predict
from stepsight.cli import app
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, Fabric, Hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.durations.latency_model import LATENCIES, GivenLatency, named_latency

GPU, LINKS = HARDWARE["a100-sxm-80gb"], FABRICS["dgx-a100"]
KNOWN, UNKNOWN = Op("linear", (512, 512, 512)), Op("gelu", (4096,))
JOB = Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml"


class _Slow:
    """Twice the roofline, of products alone."""

    def __init__(self, hardware: Hardware, fabric: Fabric) -> None:
        self.hardware = hardware

    def op_seconds(self, ops: list[Op]) -> np.ndarray:
        return np.array([2 * roofline_seconds(o, self.hardware) if o.family == "gemm" else np.nan for o in ops])


def test_facts_answer_for_what_it_does_not_know() -> None:
    latency = GivenLatency(_Slow(GPU, LINKS), GPU, LINKS)
    seconds = latency.op_seconds([KNOWN, UNKNOWN])
    assert seconds == pytest.approx([2 * roofline_seconds(KNOWN, GPU), roofline_seconds(UNKNOWN, GPU)])


@pytest.mark.parametrize("answer", [[1.0], [0.0, 1.0], [np.inf, 1.0], "no numbers"])
def test_answers_that_are_none_are_refused(answer: Any) -> None:
    class Wrong:
        def op_seconds(self, ops: list[Op]) -> Any:
            return answer

    with pytest.raises(PredictorError, match="op_seconds of latency mine"):
        GivenLatency(Wrong(), GPU, LINKS, "mine").op_seconds([KNOWN, UNKNOWN])


def test_by_name_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes both; a job takes longer by it than by facts, with a wide interval."""
    with LATENCIES.registered("slow", _Slow):
        slow = predict(JOB, latency="slow")
    assert slow.iteration_time_s > 1.3 * predict(JOB, "roofline").iteration_time_s
    assert "latency slow" in slow.source and slow.high_s > 2 * slow.iteration_time_s
    (tmp_path / "half_fast.py").write_text(
        "class Half:\n    def op_seconds(self, ops):\n        return [float('nan')] * len(ops)\n"
        "def make(hardware, fabric):\n    return Half()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, ["predict", str(JOB), "--latency", "half_fast:make", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["iteration_time_s"] == pytest.approx(predict(JOB, "roofline").iteration_time_s)


def test_searches_and_sweeps_take_it(tmp_path: Path) -> None:
    """The best strategy that they report has the time that a prediction by the same durations has."""
    named = ["--latency", "tests.simulator.durations.test_given_latency:_Slow", "--json"]
    out = tmp_path / "best.toml"
    again = CliRunner().invoke(app, ["search", str(JOB), "--trials", "3", "--out", str(out), *named])
    best = json.loads(again.stdout)["best"]
    assert best["iteration_time_s"] == pytest.approx(predict(out, "latency:" + named[1]).iteration_time_s)
    swept = CliRunner().invoke(app, ["sweep", str(JOB), "--vary", "cluster.nodes=128", *named])
    point = json.loads(swept.stdout)["points"][0]
    assert point["iteration_time_s"] == pytest.approx(predict(JOB, latency=named[1]).iteration_time_s)
    refused = CliRunner().invoke(app, ["search", str(JOB), *named, "-p", "roofline"])
    assert "leave one out" in str(refused.exception)


def test_what_cannot_be_found_is_named() -> None:
    with pytest.raises(
        PredictorError, match="module:function that can be imported: no module 'nowhere_at_all' in the current folder"
    ):
        named_latency("nowhere_at_all:make", GPU, LINKS)
    with pytest.raises(PredictorError, match=r"latency must be (one of .*or )?module:function, got 'abacus'"):
        named_latency("abacus", GPU, LINKS)
    with pytest.raises(PredictorError, match="must take 2"):
        named_latency("math:floor", GPU, LINKS)
    for name in (":", "math:", ":floor", "math:floor:pow"):
        with pytest.raises(PredictorError, match=f"'{name}' must be module:function"):
            named_latency(name, GPU, LINKS)
