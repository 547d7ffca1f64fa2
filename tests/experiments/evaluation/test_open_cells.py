"""Cells that a row leaves open: every job that the row may mean is predicted."""

import math
from typing import Any

import pytest

from stepsight.experiments.evaluation.evaluate import score
from stepsight.experiments.evaluation.row_jobs import PublishedJob, jobs_of
from tests.experiments.evaluation.run_tables import run_row


def _values(jobs: list[PublishedJob], key: str) -> list[Any]:
    return [getattr(one.job.parallel, key, None) or getattr(one.job.batch, key, None) for one in jobs]


def test_a_full_row_means_one_job() -> None:
    (only,) = jobs_of(run_row())
    assert str(only.open) == ""


@pytest.mark.parametrize(
    ("column", "key", "values"),
    [
        ("recompute", "recompute", ["none", "selective", "full"]),
        ("micro_batch", "micro_batch", [1, 2, 4, 8]),
        ("zero_stage", "zero_stage", [None, 1]),
    ],
)
def test_an_open_cell_takes_each_of_its_values(column: str, key: str, values: list[Any]) -> None:
    found = jobs_of(run_row(**{column: ""}))
    assert _values(found, key) == values
    assert column in str(found[0].open)


def test_a_vocabulary_may_be_small_or_large() -> None:
    small, large = jobs_of(run_row(vocab=""))
    assert (small.job.model.vocab, large.job.model.vocab) == (32256, 256000)  # padded to 128 * tp


def test_stages_may_interleave_where_the_framework_usually_does() -> None:
    """Silence about virtual stages is ambiguous for NeMo, and means one chunk for Megatron-LM of 2021."""
    assert _values(jobs_of(run_row(framework="NeMo", vp="")), "virtual_stages") == [1, 4]
    assert _values(jobs_of(run_row(framework="NeMo", vp=2)), "virtual_stages") == [2]
    assert _values(jobs_of(run_row(vp="")), "virtual_stages") == [1]


def test_what_does_not_fit_the_memory_did_not_run() -> None:
    big = {"layers": 48, "hidden": 8192, "ffn": 32768, "heads": 64, "seq_len": 8192}
    found = jobs_of(run_row(**big, recompute="", micro_batch=1, tp=8, pp=2, dp=1, framework="Megatron-LM"))
    assert _values(found, "recompute") == ["full"]


def test_the_interval_holds_every_job_and_the_answer_lies_between() -> None:
    row = run_row(recompute="", framework="Megatron-LM")
    both = score(row, lambda hardware: None)
    ends = [score(run_row(recompute=word), lambda hardware: None) for word in ("none", "selective", "full")]
    assert both.low_s == min(one.low_s for one in ends)
    assert both.high_s == max(one.high_s for one in ends)
    assert math.log(both.predicted_s) == pytest.approx(sum(math.log(one.predicted_s) for one in ends) / 3)
    assert both.open == "recompute (none or selective or full)"
    assert sum(both.breakdown.values()) == pytest.approx(both.predicted_s)
