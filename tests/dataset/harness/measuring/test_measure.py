"""Timed and profiled steps of one rank, and what the trace says."""

from __future__ import annotations

import gzip
import json
from typing import Any

import harness_jobs as jobs
import pytest
import torch

from stepsight.dataset.harness.measuring.measure import profiled_steps, timed_steps
from stepsight.dataset.harness.models.parallel import Training


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trace")
    training = Training(jobs.job({**jobs.LLAMA, "layers": 1}, micro_batch=4), torch.device("cpu"))
    timed_steps(training, 2)
    seconds, names = profiled_steps(training, 2, folder, rank=0)
    return seconds, {key: json.loads(gzip.decompress((folder / name).read_bytes())) for key, name in names.items()}


def _names(trace: dict[str, Any], start: str) -> list[str]:
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event["name"].startswith(start)]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


def test_each_profiled_step_is_timed_and_traced(profiled: tuple[list[float], dict[str, Any]]) -> None:
    seconds, traces = profiled
    assert len(seconds) == 2
    assert min(seconds) > 0
    segments = _names(traces["kineto"], "stepsight::segment")
    micro_batch = [
        f"stepsight::segment label={w} micro_batch={i} stage=0" for i in (0, 1) for w in ("forward", "backward")
    ]
    assert segments == 2 * ["stepsight::segment label=step", *micro_batch, "stepsight::segment label=optimizer stage=0"]


def test_composite_ops_are_annotated(profiled: tuple[list[float], dict[str, Any]]) -> None:
    found = _names(profiled[1]["kineto"], "stepsight::op")[:10]
    kinds = [name.split()[1].removeprefix("kind=") for name in found]
    backward = ["rms_norm_backward", "swiglu_backward", "rms_norm_backward"]
    forward = ["rms_norm", "rope", "rms_norm", "swiglu", "rms_norm", "cross_entropy"]
    assert kinds == [*forward, "cross_entropy_backward", *backward]
    assert found[1] == f"stepsight::op kind=rope dims={4 * 8 * 6 * 4} dtype=fp32"


def test_execution_trace_joins_kineto_in_the_last_step(profiled: tuple[list[float], dict[str, Any]]) -> None:
    kineto, et = profiled[1]["kineto"], profiled[1]["et"]
    known = {event["args"].get("Record function id") for event in kineto["traceEvents"] if "args" in event}
    attributes = [{a["name"]: a["value"] for a in node.get("attrs", [])} for node in et["nodes"]]
    ids = {a["rf_id"] for a in attributes if a.get("rf_id")}
    assert len(ids & known) > 0.9 * len(ids) > 50


def test_timed_steps_record_losses_that_fall() -> None:
    training = Training(jobs.job(), torch.device("cpu"))
    seconds, losses = timed_steps(training, 3)
    assert len(seconds) == 3
    assert losses[2] < losses[0]
