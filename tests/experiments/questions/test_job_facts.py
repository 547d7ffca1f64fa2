"""Fields of a job: their values, and the rules that forbid some."""

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.questions.job_facts import broken_rules, changed, fields_of, value_of

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))
GPT3 = Job.from_file(EXAMPLES[0].parent / "gpt3-175b-1024.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_field_offers_the_jobs_own_value_and_keeps_it_legal(path: Path) -> None:
    job = Job.from_file(path)
    for field in fields_of(job):
        own = value_of(job, field.key)
        assert own in field.values and field.values[field.nearest(own)] == own
        assert changed(job, field.key, own) == job
        assert own not in broken_rules(job, field)


def test_a_broken_rule_is_told_and_others_are_legal() -> None:
    pp = next(field for field in fields_of(GPT3) if field.key == "parallel.pp")
    rules = broken_rules(GPT3, pp)
    assert set(rules) == {128} and "layers" in rules[128]
    for value in set(pp.values) - set(rules):
        assert changed(GPT3, pp.key, value).parallel.pp == value


def test_what_a_value_needs_follows() -> None:
    assert changed(GPT3, "parallel.tp", 4).parallel.dp == 16
    assert changed(GPT3, "parallel.schedule", "zbv").parallel.virtual_stages == 2
    assert changed(GPT3, "cluster.hardware", "h100-sxm-80gb").fabric != GPT3.fabric
    with pytest.raises(JobError):
        changed(GPT3, "parallel.tp", 7)


def test_texts_are_values_of_the_field() -> None:
    fields = {field.key: field for field in fields_of(GPT3)}
    assert fields["parallel.tp"].read("6") == 6 and fields["parallel.sequence_parallel"].read("False") is False
    with pytest.raises(StepsightError, match="must be a whole number"):
        fields["parallel.tp"].read("many")
