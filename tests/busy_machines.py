"""Tests that measure time for real: another process may take the core just then."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec

import pytest

P = ParamSpec("P")
TRIES = 3


def retried(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test again if an assertion fails, up to ``TRIES`` times; skip it if all fail and the machine is busy."""

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                return test(*args, **kwargs)
            except AssertionError as error:
                load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
                if attempt == TRIES and load > cores:
                    pytest.skip(f"{load:.1f} processes want {cores} cores, so times mean nothing: {error!s:.200}")
                if attempt == TRIES:
                    raise

    return tried
