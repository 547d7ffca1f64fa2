from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.runs.trace import MOST_DRIFT, MOST_PER_EVENT_S, profiling_correction, without_overhead

seconds = st.lists(st.tuples(st.floats(1e-7, 1e-1), st.integers(0, 50)), min_size=1, max_size=50)


@given(seconds, st.floats(0, 1e-4))
def test_overhead_is_taken_off_and_nothing_more(slots: list[tuple[float, int]], per_event: float) -> None:
    """No slot grows or falls under a tenth, and the sum falls by what the events cost, as far as there is so much."""
    raw, events = (np.array(column, dtype=np.float64) for column in zip(*slots, strict=True))
    clean = without_overhead(raw, events, per_event)
    assert (clean <= raw * (1 + 1e-9)).all() and (clean >= 0.1 * raw * (1 - 1e-9)).all()
    has_events = events > 0
    spare = 0.9 * raw[has_events].sum()
    wanted = min(per_event * events.sum(), spare)
    assert raw.sum() - clean.sum() == pytest.approx(wanted, rel=1e-3, abs=1e-9)


def test_without_events_nothing_changes() -> None:
    raw = np.array([1e-3, 2e-3])
    assert np.array_equal(without_overhead(raw, np.zeros(2), 1e-6), raw)
    assert np.array_equal(without_overhead(raw, np.ones(2), 0.0), raw)


def test_a_step_of_many_small_calls_is_corrected_per_call() -> None:
    """8.2 ms with the profiler, 5.3 ms without, 1,900 calls: 1.5 microseconds each and no drift."""
    per_event_s, drift = profiling_correction(5.3e-3, 8.2e-3, 1900, 0.0)
    assert per_event_s == pytest.approx(1.53e-6, rel=0.01)
    assert drift == pytest.approx(1.0)


def test_what_calls_cannot_explain_is_drift() -> None:
    """A long step that was 5 % slower with 1,000 calls: the machine was slower."""
    per_event_s, drift = profiling_correction(1.0, 1.05, 1000, 0.0)
    assert per_event_s == MOST_PER_EVENT_S
    assert drift == pytest.approx(1.0 / 1.046, rel=1e-3)


@given(st.floats(1e-4, 10), st.floats(1e-4, 10), st.integers(0, 10**5), st.floats(0, 1))
def test_corrections_stay_within_physics(iteration: float, profiled: float, events: int, waited: float) -> None:
    per_event_s, drift = profiling_correction(iteration, profiled, events, waited)
    assert 0 <= per_event_s <= MOST_PER_EVENT_S
    assert 1 - MOST_DRIFT - 1e-9 <= drift <= 1 + MOST_DRIFT + 1e-9


def test_a_step_that_only_waits_says_nothing_of_the_profiler() -> None:
    quick, slow = (profiling_correction(time, 0.1, 2000, 1.0) for time in (0.05, 0.15))
    assert quick == slow and quick[1] == 1.0
