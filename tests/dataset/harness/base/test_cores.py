"""Which cores threads run on, and how soon."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stepsight.dataset.harness.base import cores


def _forbidden(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_where_real_time_is_forbidden_threads_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers: a box still runs there."""
    monkeypatch.setattr(cores, "_real_time", False)
    monkeypatch.setattr(os, "sched_setscheduler", _forbidden)
    monkeypatch.setattr(os, "setpriority", _forbidden)
    before = os.sched_getaffinity(0)
    cores.hurry_communication()
    cores.go_first()
    with cores.any_core():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.sched_getaffinity(0) == before


def test_only_threads_of_collectives_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for the computing thread's lock in real time would keep that thread from running."""
    told = []
    monkeypatch.setattr(cores, "_real_time", True)
    monkeypatch.setattr(os, "sched_setscheduler", lambda _, policy, __: told.append(policy))
    with cores.any_core(messages=True):
        assert told == []
    with cores.any_core():
        assert told == [os.SCHED_RR]
    assert told == [os.SCHED_RR, os.SCHED_OTHER]


def test_threads_made_within_run_anywhere() -> None:
    """And the one that makes them goes back to its core."""
    before = os.sched_getaffinity(0)
    cores.pin(1)
    try:
        with cores.any_core():
            assert os.sched_getaffinity(0) == before
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)
