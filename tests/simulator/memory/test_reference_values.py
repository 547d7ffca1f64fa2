"""Estimates stay as they are on record, byte for byte."""

import json

import pytest

from tests.simulator.memory.reference_values import JOBS, RECORD, values

KNOWN = json.loads(RECORD.read_text("utf-8"))


@pytest.mark.parametrize("name", JOBS)
def test_bytes_are_as_on_record(name: str) -> None:
    """States per element, every distinct part and every stage; ``reference_values`` says when to record anew."""
    found = values(JOBS[name])
    for table in KNOWN[name]:
        assert found[table] == KNOWN[name][table], f"{table} of {name}"


def test_jobs_on_record_are_those_that_are_listed() -> None:
    assert list(KNOWN) == list(JOBS)
