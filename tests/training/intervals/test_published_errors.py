"""Intervals of predictors from public tables: as wide as errors on other sources' published runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.job import Job
from stepsight.training.intervals.published_errors import (
    MIN_ROWS,
    Off,
    Widths,
    class_of,
    published_widths,
)
from stepsight.training.predictor.prediction import ROOFLINE, predict

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml"
JOB = Job.from_file(EXAMPLE)


def offs(score: float, count: int, kind: tuple[str, ...] = class_of(JOB)) -> tuple[Off, ...]:
    return tuple(Off(f"{score}-{index}", kind, score) for index in range(count))


def test_errors_of_the_own_source_do_not_count() -> None:
    widths = Widths({"a": offs(0.1, MIN_ROWS), "b": offs(0.2, MIN_ROWS), "c": offs(0.5, 10 * MIN_ROWS)})
    assert widths.half_width(JOB, 0.0) == 0.5
    assert widths.half_width(JOB, 0.0, without="c") == 0.2


def test_few_runs_of_a_class_leave_it_to_a_coarser_one() -> None:
    """As does a class of which one source alone tells."""
    mixture = ("mixture", *class_of(JOB)[1:])
    few = Widths({"a": offs(0.1, 5), "b": (*offs(0.1, 5), *offs(0.9, 90, mixture))})
    assert few.half_width(JOB, 0.0) == 0.9
    alone = Widths({"a": offs(0.1, 50), "b": offs(0.9, 450, mixture)})
    assert alone.half_width(JOB, 0.0) == 0.9


def test_wider_by_what_lies_outside() -> None:
    widths = Widths({"a": offs(0.1, MIN_ROWS), "b": offs(0.1, MIN_ROWS)})
    assert widths.half_width(JOB, 1.0) == pytest.approx(2 * widths.half_width(JOB, 0.0))


def test_the_preset_is_read_as_it_was_written() -> None:
    """It names its sources and every run by digest, each once."""
    widths = published_widths()
    assert Widths.from_dict(widths.to_dict()) == widths
    assert len(widths.sources) >= 5
    for rows in widths.sources.values():
        assert all(len(row.digest) == 16 and row.score >= 0 for row in rows)


def test_a_shipped_predictor_is_narrower_than_a_roofline() -> None:
    """By default, and whatever source is left out."""
    answer, facts = predict(JOB), predict(JOB, ROOFLINE)
    assert 1.0 < answer.high_s / answer.iteration_time_s < facts.high_s / facts.iteration_time_s
    for name in published_widths().sources:
        low, high = answer.interval(without=name)
        assert low < answer.iteration_time_s < high


def test_more_experts_are_less_certain() -> None:
    """A class of its own: published mixtures were predicted worse than dense models."""
    model = replace(JOB.model, family="llama", experts=8, experts_per_token=2, expert_ffn=4096)
    assert class_of(replace(JOB, model=model))[0] == "mixture" != class_of(JOB)[0]
