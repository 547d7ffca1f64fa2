"""Costs of the host of torch's pipeline runtime are found again in recorded steps."""

from __future__ import annotations

import numpy as np
import pytest

from stepsight.dataset.job.job import Job
from stepsight.simulator.clock.track import find_track, run_track
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.training.measured.runtime_costs import KINDS, fit_host

HOST_ACTION_S, HOST_MESSAGE_S = 1e-3, 5e-4
JOB = Job.from_dict(
    {
        "model": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 64},
        "parallel": {"pp": 4, "schedule": "zb-h1"},
        "batch": {"micro_batch": 1, "global_batch": 32, "precision": "fp32"},
        "cluster": {"hardware": "local-cpu", "devices_per_node": 4, "fabric": "loopback"},
    }
)


def test_host_times_come_from_gaps_without_a_wait() -> None:
    """A step of known costs gives them back; too few records give none."""
    track = find_track("zb-h1", 4, JOB.num_micro_batches, 1, runtime="torch")
    segments = np.arange(track.num_actions, dtype=np.int32)
    seconds = np.full(track.num_actions, 0.05).reshape(-1, 1, 1)
    messages = np.full(track.num_messages, 1e-4)
    found = run_track(track, segments, seconds, messages, HOST_ACTION_S, HOST_MESSAGE_S)
    labels = {name: label for label, name in KINDS.items()}
    spans = [
        [
            (labels[KIND_NAMES[track.kind[at]]], int(track.part[at]), int(track.micro_batch[at]),
             float(found.start[at, 0]), float(found.finish[at, 0]))
            for at in np.flatnonzero(track.stage == stage).tolist()
        ]
        for stage in range(4)
    ]  # fmt: skip
    assert fit_host([(JOB, {"spans": spans})]) == pytest.approx((HOST_ACTION_S, HOST_MESSAGE_S), rel=0.2)
    assert fit_host([]) == (0.0, 0.0)
