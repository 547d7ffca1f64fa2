"""Plans are checked whole, before anything starts."""

from __future__ import annotations

from typing import Any

import harness_jobs as jobs
import pytest

from stepsight.dataset.harness.errors import HarnessError
from stepsight.dataset.harness.plan import check_plan, num_micro_batches, world_sizes
from stepsight.dataset.job import Job

EVENTS = {
    "name": "e",
    "world_size": 2,
    "seconds": 1,
    "ops": [{"kind": "add", "dims": [8], "dtype": "fp32"}],
    "collectives": [{"kind": "all_reduce", "num_bytes": 8, "group_size": 2, "ranks_per_node": 2}],
}


def test_options_are_filled_in_and_the_plan_is_left_alone() -> None:
    plan = {"schema": 1, "runs": [{"name": "a", "role": "train", "job": jobs.job()}], "events": [EVENTS]}
    checked = check_plan(plan)
    assert checked["runs"][0]["rounds"] == 3
    assert "rounds" not in plan["runs"][0]
    assert check_plan(checked) == checked
    assert world_sizes(checked) == [1, 2]


def test_a_jobs_dictionary_is_a_valid_job() -> None:
    """The harness knows no ``Job``, but takes what one writes."""
    job = Job.from_dict(jobs.job(dp=2))
    check_plan(jobs.plan([jobs.run("a", job.to_dict())]))
    assert num_micro_batches(job.to_dict()) == job.num_micro_batches


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"zero_stage": 1}, r"zero_stage 0 \(DDP\) and 3 \(FSDP2\), got 1"),
        ({"recompute": "selective"}, "recompute none and full, got 'selective'"),
        ({"virtual_stages": 2}, "virtual_stages = 1, got 2"),
        ({"tp": 3}, "tp must divide heads, got 4 % 3"),
        ({"dp": 3}, r"micro_batch \* dp must divide global_batch, got 8 % \(2 \* 3\)"),
        ({"pp": 8}, "as many micro-batches as stages, got 4 < 8"),
    ],
)
def test_what_the_harness_cannot_run_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(HarnessError, match=text):
        check_plan(jobs.plan([jobs.run("a", jobs.job(**changes))]))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ([], "schema = 1, got 'list'"),
        ({"schema": 2}, "schema = 1, got 2"),
        ({"schema": 1, "run": []}, "got also run"),
        (jobs.plan([jobs.run("../a", jobs.job())]), "name must be letters"),
        (jobs.plan([jobs.run("a", jobs.job()), jobs.run("a", jobs.job())]), "unique, got 'a' twice"),
        (jobs.plan([jobs.run("a", jobs.job(), warmup=1)]), "warmup must be a whole number >= 2, got 1"),
        (jobs.plan([{"name": "a", "job": jobs.job()}]), "role must be a string, got None"),
        (jobs.plan([jobs.run("a", {"model": {}})]), "a job needs model.family"),
        (jobs.plan([], [{**EVENTS, "world_size": 1}]), "group_size must be at most world_size, got 2 > 1"),
        (jobs.plan([], [{**EVENTS, "seconds": 0}]), "seconds must be > 0, got 0"),
    ],
)
def test_broken_plan_is_refused_with_rule_and_values(plan: Any, text: str) -> None:
    with pytest.raises(HarnessError, match=text):
        check_plan(plan)
